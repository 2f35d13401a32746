#include <algorithm>
#include <map>

#include "compiler/analysis/same_dims.h"
#include "compiler/analysis/split.h"
#include "compiler/ir/build.h"
#include "compiler/passes/passes.h"

namespace logitless::ir {
namespace {

struct Range {
  std::int64_t begin = 0, end = 0;
  bool empty() const { return begin >= end; }
  auto operator<=>(const Range&) const = default;
};
using Box = std::vector<Range>;

Range both(const Range& a, const Range& b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}
// Intersects the ranges; returns `all` if the intersection is empty, which is rare and correct.
Range within(const Range& all, const Range& part) {
  const Range r = both(all, part);
  return r.empty() ? all : r;
}
Range hull(const Range& a, const Range& b) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  return {std::min(a.begin, b.begin), std::max(a.end, b.end)};
}
Range moved(const Range& r, std::int64_t by) { return {r.begin + by, r.end + by}; }

Box whole(const Type& type) {
  Box box;
  for (const std::int64_t s : sizes_of(type)) box.push_back({0, s});
  return box;
}
bool is_empty(const Box& box) {
  return std::any_of(box.begin(), box.end(), [](const Range& r) { return r.empty(); });
}

std::size_t at(int d) { return static_cast<std::size_t>(d); }

// Returns whether the operation can compute a part of its result.
bool has_parts(const Node& n) {
  switch (n.op) {
    case Op::map:
    case Op::cast:
    case Op::stop_gradient:
    case Op::broadcast:
    case Op::transpose:
    case Op::reshape:
    case Op::slice:
    case Op::pad:
    case Op::dot:
    case Op::pick:
    case Op::constant:
      return true;
    case Op::reduce:
      return n.attributes->reduce != Reduce::argmax;
    default:
      return false;
  }
}

// Returns whether zeros in an operand give zeros in the result, whatever the other operands. Covers
// operations in the gradient of a pad.
bool keeps_zeros(const Node& n) {
  switch (n.op) {
    case Op::cast:
    case Op::broadcast:
    case Op::transpose:
    case Op::reshape:
    case Op::slice:
    case Op::pad:
    case Op::dot:
      return true;
    case Op::reduce:
      return n.attributes->reduce == Reduce::sum;
    case Op::map:
      return n.attributes->function == Function::neg;
    default:
      return false;
  }
}

// Zeros in both operands give zeros in the result.
bool is_sum(const Node& n) {
  return n.op == Op::map && n.operands.size() == 2 && n.operands[0].index == 0 &&
         n.operands[1].index == 0 &&
         (n.attributes->function == Function::add || n.attributes->function == Function::sub);
}

class Narrower {
 public:
  explicit Narrower(const Graph& graph) : g_(graph), same_(boxes()), nonzero_(same_), read_(same_) {
    for (int id = 0; id < g_.size(); ++id) dims_.push_back(same_dims(g_, id));
    for (int id = 0; id < g_.size(); ++id) find_nonzero(id);
    find_read();
  }

  Graph run() && {
    if (!any()) return g_;
    out_.name = g_.name;
    for (int id = 0; id < g_.size(); ++id) write(id);
    for (const Output& o : g_.outputs())
      out_.add_output(o.name, part(o.value, whole(g_.type(o.value))));
    return eliminate_common(std::move(out_));
  }

 private:
  const Graph& g_;
  const std::vector<Box> same_;  // by node: the full box of its first result
  std::vector<Box> nonzero_, read_;
  std::vector<std::vector<SameDim>> dims_;
  Graph out_;
  std::map<Value, Value> made_;
  std::map<std::pair<Value, Box>, Value> parts_;

  std::vector<Box> boxes() const {
    std::vector<Box> list;
    for (const Node& n : g_.nodes()) list.push_back(whole(n.results[0]));
    return list;
  }
  Box box_of(Value v) const { return v.index == 0 ? read_[at(v.node)] : whole(g_.type(v)); }

  // --- analysis

  void find_nonzero(int id) {
    const Node& n = g_.node(id);
    if (is_sum(n)) {
      const Box &a = nonzero_[at(n.operands[0].node)], &b = nonzero_[at(n.operands[1].node)];
      for (std::size_t d = 0; d < a.size(); ++d) nonzero_[at(id)][d] = hull(a[d], b[d]);
    }
    if (n.results.size() != 1 || !keeps_zeros(n) || n.operands[0].index != 0) return;
    Box& box = nonzero_[at(id)];
    for (const SameDim& d : dims_[at(id)]) {
      if (n.operands[d.operand].index != 0) continue;
      box[at(d.to)] = both(box[at(d.to)], nonzero_[at(n.operands[d.operand].node)][at(d.from)]);
    }
    const Box& from = nonzero_[at(n.operands[0].node)];
    for (std::size_t i = 0; (n.op == Op::pad || n.op == Op::slice) && i < box.size(); ++i) {
      const std::int64_t first = n.attributes->begin[i].value();
      box[i] = both(box[i], moved(from[i], n.op == Op::pad ? first : -first));
    }
  }

  // Returns the box of operand i that is read to compute `box` of a node.
  Box needed(int id, std::size_t i, const Box& box) const {
    const Node& n = g_.node(id);
    const Value v = n.operands[i];
    Box need = whole(g_.type(v));
    for (const SameDim& d : dims_[at(id)]) {
      if (d.operand == i) need[at(d.from)] = box[at(d.to)];
    }
    if (n.op == Op::slice || n.op == Op::pad) {
      for (std::size_t d = 0; d < need.size(); ++d) {
        const std::int64_t first = n.attributes->begin[d].value();
        need[d] = both(need[d], moved(box[d], n.op == Op::slice ? first : -first));
      }
    }
    if (is_reduce(n, Reduce::sum) && v.index == 0) {
      for (const int d : n.attributes->dims)
        need[at(d)] = within(need[at(d)], nonzero_[at(v.node)][at(d)]);
    }
    if (n.op == Op::dot) {
      for (const auto& [a, b] : summed_dims(n)) {
        const Range r = both(nonzero(n.operands[0], a), nonzero(n.operands[1], b));
        const int d = i == 0 ? a : b;
        need[at(d)] = within(need[at(d)], r);
      }
    }
    return need;
  }
  Range nonzero(Value v, int d) const {
    return v.index == 0 ? nonzero_[at(v.node)][at(d)] : whole(g_.type(v))[at(d)];
  }

  void find_read() {
    for (Box& box : read_) {
      for (Range& r : box) r = {0, 0};
    }
    const auto reads = [&](Value v, const Box& need) {
      Box& box = read_[at(v.node)];
      if (v.index != 0 || !has_parts(g_.node(v)) || g_.node(v).results.size() > 1) {
        box = same_[at(v.node)];
        return;
      }
      for (std::size_t d = 0; d < box.size(); ++d)
        box[d] = hull(box[d], both(need[d], nonzero_[at(v.node)][d]));
    };
    for (const Output& o : g_.outputs()) reads(o.value, whole(g_.type(o.value)));
    for (int id = g_.size() - 1; id >= 0; --id) {
      const Node& n = g_.node(id);
      Box& box = read_[at(id)];
      // A box that is empty or without readers is rare and stays full.
      if (!has_parts(n) || is_empty(box)) box = same_[at(id)];
      if (n.op == Op::reshape) widen_reshape(id);
      for (std::size_t i = 0; i < n.operands.size(); ++i) {
        reads(n.operands[i], needed(id, i, box));
      }
    }
  }
  // A reshape computes parts only along dimensions that it preserves.
  void widen_reshape(int id) {
    Box& box = read_[at(id)];
    const Box& all = same_[at(id)];
    std::vector<bool> stays(box.size());
    for (const SameDim& d : dims_[at(id)]) stays[at(d.to)] = true;
    for (std::size_t d = 0; d < box.size(); ++d) {
      if (!stays[d]) box[d] = all[d];
    }
  }

  bool any() const {
    for (int id = 0; id < g_.size(); ++id) {
      const Node& n = g_.node(id);
      // Views, constants and pads gain nothing.
      if (read_[at(id)] != same_[at(id)] && n.op != Op::pad && n.op != Op::constant) return true;
    }
    return false;
  }

  // --- writing

  // Returns a box of the value: the computed part, with zeros around it.
  Value part(Value v, const Box& box) {
    const Box have = box_of(v);
    const Value made = made_.at(v);
    if (box == have) return made;
    const auto [found, is_new] = parts_.emplace(std::pair(v, box), Value{});
    if (!is_new) return found->second;
    Shape begin, end, low, high;
    bool cuts = false, pads = false;
    for (std::size_t d = 0; d < box.size(); ++d) {
      Range inner = both(have[d], box[d]);
      if (inner.empty()) inner = {have[d].begin, have[d].begin};
      begin.emplace_back(inner.begin - have[d].begin);
      end.emplace_back(inner.end - have[d].begin);
      // A box that lies before what is computed is zeros alone.
      const std::int64_t zeros = (box[d].end - box[d].begin) - (inner.end - inner.begin);
      const std::int64_t before = std::clamp<std::int64_t>(inner.begin - box[d].begin, 0, zeros);
      low.emplace_back(before);
      high.emplace_back(zeros - before);
      cuts = cuts || inner != have[d];
      pads = pads || low.back() != Dim(0) || high.back() != Dim(0);
    }
    Value x = made;
    if (cuts) x = slice(out_, x, std::move(begin), std::move(end));
    if (pads) x = pad(out_, x, std::move(low), std::move(high));
    return found->second = x;
  }

  static Shape shape_of(const Box& box) {
    Shape shape;
    for (const Range& r : box) shape.emplace_back(r.end - r.begin);
    return shape;
  }

  void write(int id) {
    const Node& n = g_.node(id);
    const Box& box = read_[at(id)];
    std::vector<Value> operands;
    if (box == same_[at(id)] && n.op != Op::dot && n.op != Op::reduce && n.op != Op::slice) {
      for (const Value v : n.operands) operands.push_back(part(v, whole(g_.type(v))));
    } else {
      for (std::size_t i = 0; i < n.operands.size(); ++i) {
        operands.push_back(part(n.operands[i], needed(id, i, box)));
      }
    }
    const bool partial = box != same_[at(id)];
    Value made;
    if (n.op == Op::slice || (partial && n.op == Op::pad)) {
      made = operands[0];  // the part of the operand
      if (out_.node(made).name.empty()) out_.set_hint(made.node, n.name);
    } else if (partial && (n.op == Op::broadcast || n.op == Op::reshape || n.op == Op::constant)) {
      Attributes a = n.attributes;
      a.type.shape = shape_of(box);
      made = out_.add(n.op, std::move(operands), std::move(a), n.name);
    } else {
      made = out_.copy(g_, id, std::move(operands));
    }
    for (std::size_t r = 0; r < n.results.size(); ++r)
      made_[{id, static_cast<std::int32_t>(r)}] = {made.node,
                                                   made.index + static_cast<std::int32_t>(r)};
  }
};

}  // namespace

Graph narrow(const Graph& graph) {
  // Graphs with empty values stay as they are.
  for (const Node& n : graph.nodes()) {
    if (elements_of(n.results[0]) == 0) return graph;
  }
  return Narrower(graph).run();
}

Graph narrow_products(const Graph& graph) {
  Graph narrowed = narrow(graph);
  const bool any = std::any_of(graph.nodes().begin(), graph.nodes().end(),
                               [](const Node& n) { return n.op == Op::slice || n.op == Op::pad; });
  const Value product = largest_product(graph);
  if (!any || !product.valid()) return narrowed;
  const std::optional<Graph> refined = refine_axes(graph, product);
  if (!refined) return narrowed;
  Graph other = narrow(*refined);
  return product_work(other) < product_work(narrowed) ? other : narrowed;
}

}  // namespace logitless::ir
