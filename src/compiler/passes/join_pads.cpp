#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "compiler/analysis/values.h"
#include "compiler/ir/build.h"
#include "compiler/ir/typing.h"
#include "compiler/passes/passes.h"

namespace logitless::ir {
namespace {

// The content of [begin, end) of the axis: a value that is converted to each of `casts` in turn.
struct Part {
  Value value;
  std::vector<DType> casts;
  Dim begin, end;
};

// A sum: rest + (zeros, except for disjoint parts in order along `axis`).
struct Sum {
  Value rest;  // invalid: none
  int axis = -1;
  std::vector<Part> parts;
};

// Returns the one axis that a pad extends.
std::optional<int> padded_axis(const Node& pad) {
  std::optional<int> axis;
  for (std::size_t d = 0; d < pad.attributes->begin.size(); ++d) {
    if (pad.attributes->begin[d] == Dim(0) && pad.attributes->end[d] == Dim(0)) continue;
    if (axis) return std::nullopt;
    axis = static_cast<int>(d);
  }
  return axis;
}

bool is_zero(const Node& node) {
  return node.op == Op::constant && node.attributes->number == 0.0 &&
         !std::signbit(node.attributes->number);
}

// Returns whether a ends before or where b begins, for any sizes.
bool is_before(const Part& a, const Part& b) {
  const Dim gap = b.begin - a.end;
  return gap.is_constant() && gap.value() >= 0;
}

// Returns all parts in order, or nothing if two of them may overlap.
std::optional<std::vector<Part>> joined(std::vector<Part> parts, const std::vector<Part>& more) {
  for (const Part& part : more) {
    std::size_t at = 0;
    while (at < parts.size() && is_before(parts[at], part)) ++at;
    for (std::size_t i = at; i < parts.size(); ++i) {
      if (!is_before(part, parts[i])) return std::nullopt;
    }
    parts.insert(parts.begin() + static_cast<std::ptrdiff_t>(at), part);
  }
  return parts;
}

class Joiner {
 public:
  explicit Joiner(const Graph& graph)
      : g_(graph),
        uses_(static_cast<std::size_t>(graph.size()), 0),
        to_(uses_.size(), -1),
        seen_(zero_sign_is_seen(graph)),
        no_negative_zero_(has_no_negative_zero(graph)) {
    for (const Node& n : g_.nodes()) {
      for (const Value v : n.operands) ++uses_[static_cast<std::size_t>(v.node)];
    }
    for (const Output& o : g_.outputs()) ++uses_[static_cast<std::size_t>(o.value.node)];
  }

  Graph run() && {
    for (int id = 0; id < g_.size(); ++id) sums_.push_back(sum_of(id));
    const std::vector<bool> read = what_is_read();
    out_.name = g_.name;
    for (int id = 0; id < g_.size(); ++id) {
      if (read[static_cast<std::size_t>(id)])
        to_[static_cast<std::size_t>(id)] = is_joined(id) ? join(id) : copy(id);
    }
    for (const Output& o : g_.outputs()) out_.add_output(o.name, written(o.value));
    return std::move(out_);
  }

 private:
  const Graph& g_;
  std::vector<int> uses_;  // as an operand and as an output
  std::vector<int> to_;    // by node of g_: the new node
  const std::vector<bool> seen_, no_negative_zero_;
  std::vector<Sum> sums_;  // by node: the sum that is its first result
  Graph out_;

  // --- analysis

  // Returns an operand as a sum, if the only reader may take it apart.
  Sum operand(Value v) const {
    const auto at = static_cast<std::size_t>(v.node);
    return uses_[at] == 1 && !sums_[at].parts.empty() ? sums_[at] : Sum{v, -1, {}};
  }

  Sum sum_of(int id) const {
    const Node& n = g_.node(id);
    std::optional<Sum> sum;
    if (n.op == Op::pad) sum = sum_of_pad(n);
    if (n.op == Op::concat) sum = sum_of_concat(n);
    if (n.op == Op::cast) sum = sum_of_cast(n);
    if (is_map(n, Function::add)) sum = sum_of_add(n);
    return sum ? *sum : Sum{{id, 0}, -1, {}};
  }

  std::optional<Sum> sum_of_pad(const Node& n) const {
    const std::optional<int> axis = padded_axis(n);
    if (!axis) return std::nullopt;
    const auto d = static_cast<std::size_t>(*axis);
    const Dim low = n.attributes->begin[d];
    Sum inner = operand(n.operands[0]);
    if (inner.rest.valid() || inner.axis != *axis)
      return Sum{{}, *axis, {{n.operands[0], {}, low, low + g_.type(n.operands[0]).shape[d]}}};
    for (Part& part : inner.parts) {
      part.begin += low;
      part.end += low;
    }
    return inner;
  }

  // A concat of one value with zeros is the gradient of a part of a split, such as one of two
  // halves.
  std::optional<Sum> sum_of_concat(const Node& n) const {
    const auto d = static_cast<std::size_t>(n.attributes->axis);
    Sum sum{{}, n.attributes->axis, {}};
    Dim at(0);
    for (const Value v : n.operands) {
      const Dim end = at + g_.type(v).shape[d];
      if (!is_zero(g_.node(v.node))) sum.parts.push_back({v, {}, at, end});
      at = end;
    }
    if (sum.parts.size() != 1 || n.operands.size() == 1) return std::nullopt;
    return sum;
  }

  std::optional<Sum> sum_of_cast(const Node& n) const {
    Sum inner = operand(n.operands[0]);
    if (inner.rest.valid() || !is_float(n.results[0].dtype)) return std::nullopt;
    for (Part& part : inner.parts) part.casts.push_back(n.results[0].dtype);
    return inner;
  }

  // Zeros are added to at most one rest, so that no other sum changes its order.
  std::optional<Sum> sum_of_add(const Node& n) const {
    Sum a = operand(n.operands[0]);
    const Sum b = operand(n.operands[1]);
    if (a.rest.valid() && b.rest.valid()) return std::nullopt;
    if (!a.parts.empty() && !b.parts.empty() && a.axis != b.axis) return std::nullopt;
    std::optional<std::vector<Part>> parts = joined(std::move(a.parts), b.parts);
    if (!parts) return std::nullopt;
    return Sum{a.rest.valid() ? a.rest : b.rest, std::max(a.axis, b.axis), std::move(*parts)};
  }

  // Returns whether the node is rewritten: it has several parts, or one that was padded or cast
  // before.
  bool is_joined(int id) const {
    const Node& n = g_.node(id);
    const std::vector<Part>& parts = sums_[static_cast<std::size_t>(id)].parts;
    if (n.op == Op::pad && parts.size() == 1) return parts[0].value != n.operands[0];
    return (n.op == Op::pad || is_map(n, Function::add)) && parts.size() > 1;
  }

  std::vector<bool> what_is_read() const {
    std::vector<bool> read(uses_.size());
    const auto mark = [&](Value v) { read[static_cast<std::size_t>(v.node)] = true; };
    for (const int id : g_.parameters()) mark({id, 0});
    for (const Output& o : g_.outputs()) mark(o.value);
    for (int id = g_.size() - 1; id >= 0; --id) {
      if (!read[static_cast<std::size_t>(id)]) continue;
      if (is_joined(id)) {
        const Sum& sum = sums_[static_cast<std::size_t>(id)];
        if (sum.rest.valid()) mark(sum.rest);
        for (const Part& part : sum.parts) mark(part.value);
      } else {
        for (const Value v : g_.node(id).operands) mark(v);
      }
    }
    return read;
  }

  // --- writing

  Value written(Value v) const { return {to_[static_cast<std::size_t>(v.node)], v.index}; }

  int copy(int id) {
    const Node& n = g_.node(id);
    std::vector<Value> operands;
    for (const Value v : n.operands) operands.push_back(written(v));
    if (n.op != Op::loop) return out_.copy(g_, id, std::move(operands)).node;
    Attributes a = n.attributes;
    auto loop = std::make_shared<Loop>(*a.loop);
    loop->body = join_pads(loop->body);
    a.loop = std::move(loop);
    return out_.add(n.op, std::move(operands), std::move(a), n.name).node;
  }

  // Returns a part with the zeros between it and its neighbours.
  Value padded(const Part& part, bool sees_sign, int axis, const Dim& low, const Dim& high) {
    Value v = written(part.value);
    for (const DType dtype : part.casts) v = cast(out_, v, dtype);
    if (sees_sign && !no_negative_zero_[static_cast<std::size_t>(part.value.node)])
      v = map(out_, Function::add, {v, constant(out_, 0.0, out_.type(v))});
    if (low == Dim(0) && high == Dim(0)) return v;
    Shape before(out_.type(v).shape.size(), Dim(0)), after = before;
    before[static_cast<std::size_t>(axis)] = low;
    after[static_cast<std::size_t>(axis)] = high;
    return pad(out_, v, std::move(before), std::move(after));
  }

  int join(int id) {
    const Node& n = g_.node(id);
    const Origin origin(out_, {}, n.attributes->location);
    const Sum& sum = sums_[static_cast<std::size_t>(id)];
    // A single pad adds nothing to its operand.
    const bool sees_sign = seen_[static_cast<std::size_t>(id)] && sum.parts.size() > 1;
    const Dim size = n.results[0].shape[static_cast<std::size_t>(sum.axis)];
    std::vector<Value> parts;
    for (std::size_t i = 0; i < sum.parts.size(); ++i) {
      const Part& part = sum.parts[i];
      const Dim next = i + 1 < sum.parts.size() ? sum.parts[i + 1].begin : size;
      parts.push_back(
          padded(part, sees_sign, sum.axis, i == 0 ? part.begin : Dim(0), next - part.end));
    }
    Value v = parts[0];
    if (parts.size() > 1) {
      Attributes a;
      a.axis = sum.axis;
      v = out_.add(Op::concat, std::move(parts), std::move(a));
    }
    if (sum.rest.valid()) v = map(out_, Function::add, {written(sum.rest), v});
    if (!n.name.empty()) out_.set_hint(v.node, n.name);
    return v.node;
  }
};

}  // namespace

Graph join_pads(const Graph& graph) { return Joiner(graph).run(); }

}  // namespace logitless::ir
