#include "compiler/ir/graph.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <set>
#include <utility>

#include "compiler/ops/op.h"
#include "core/check.h"

namespace logitless::ir {

std::string text_of(const Type& type) {
  return std::string(name_of(type.dtype)) + logitless::text_of(type.shape);
}

std::string_view title_of(const Node& n) {
  return n.op == Op::map ? info_of(n.attributes->function).name : name_of(n.op);
}

namespace {

// Returns "exp f32[4, N]", or with a name "NAME (exp) f32[4, N]".
std::string title_and_type(const Node& n, const std::string& name) {
  return name.empty() ? concat(title_of(n), " ", text_of(n.results[0]))
                      : concat(name, " (", title_of(n), ") ", text_of(n.results[0]));
}

}  // namespace

std::string description_of(const Node& n) {
  const std::string& location = n.attributes->location;
  return title_and_type(n, n.op == Op::parameter ? n.attributes->name : n.name) +
         (location.empty() ? "" : ", " + location);
}

std::string kind_of(const Node& n) {
  const std::size_t dot = n.name.rfind('.');
  std::string name;
  for (std::size_t i = 0; i < n.name.size(); ++i) {
    const bool digit = std::isdigit(static_cast<unsigned char>(n.name[i])) != 0;
    if (!digit || dot == std::string::npos || i > dot) name += n.name[i];
  }
  return title_and_type(n, name);
}

std::string_view name_of(Reduce kind) {
  constexpr std::array<std::string_view, 5> kNames = {"sum", "max", "lse", "argmax", "product"};
  return kNames[static_cast<std::size_t>(kind)];
}

namespace {

// Checks that the text form can express the name.
void check_name(std::string_view what, std::string_view text) {
  const bool ok = !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.';
  });
  require(ok, what, ": the name '", text, "' is not of letters, digits, _ and .");
}
void check_location(std::string_view op, std::string_view text) {
  const bool ok = std::all_of(text.begin(), text.end(), [](char c) {
    return static_cast<unsigned char>(c) >= ' ' && c != '"' && c != '\x7f';
  });
  require(ok, op, ": the location holds a quote or a control character");
}

}  // namespace

Value Graph::add(Op op, std::vector<Value> operands, Attributes attributes, std::string hint) {
  std::vector<const Type*> types;
  for (const Value v : operands) {
    check(v.node >= 0 && v.node < size() && v.index >= 0 &&
              v.index < static_cast<int>(node(v).results.size()),
          name_of(op), ": an operand is no value of this graph");
    types.push_back(&type(v));
  }
  // Sums keep the operand's dtype unless another one is requested.
  const bool summing = row_of(op).sums;
  check_location(name_of(op), attributes.location);
  if (op != Op::parameter && hint.empty()) hint = origin_name_;
  if (op != Op::parameter && attributes.location.empty()) attributes.location = origin_location_;
  if (summing && attributes.type.dtype == DType::i8 && !types.empty())
    attributes.type.dtype = types.back()->dtype;
  if (op == Op::parameter && !attributes.name.empty()) check_name("parameter", attributes.name);
  if (op == Op::parameter)
    require(find_parameter(attributes.name) < 0, "parameter: there are two of the name '",
            attributes.name, "'");
  std::vector<Type> results = infer_types(op, types, attributes);
  for (const Type& result : results) {
    const bool ok = std::all_of(result.shape.begin(), result.shape.end(), [](const Dim& dim) {
      return !dim.is_constant() || dim.value() >= 0;
    });
    if (!ok) throw InvalidArgument(concat(name_of(op), ": the result is ", text_of(result)));
  }
  // The attribute always holds the full type, so that printing and comparing need no special cases.
  if (!summing && results.size() == 1) attributes.type = results[0];
  nodes_.push_back(
      {op, std::move(operands), std::move(attributes), std::move(results), std::move(hint)});
  return {size() - 1, 0};
}

Value Graph::copy(const Graph& from, int id, std::vector<Value> operands) {
  const Node& n = from.node(id);
  // Parameter names are unique in a graph: checked when a parameter is made, not in each copy.
  bool same = n.op == Op::parameter || (origin_name_.empty() && origin_location_.empty());
  for (std::size_t i = 0; i < operands.size() && same; ++i) {
    const Value v = operands[i];
    check(v.node >= 0 && v.node < size() && v.index < static_cast<int>(node(v).results.size()),
          name_of(n.op), ": an operand is no value of this graph");
    const Type &now = type(v), &then = from.type(n.operands[i]);
    same = &now == &then || now == then;
  }
  if (!same) return add(n.op, std::move(operands), n.attributes, n.name);
  Node made{n.op, std::move(operands), n.attributes, n.results,
            n.name};  // `from` may be this graph
  nodes_.push_back(std::move(made));
  return {size() - 1, 0};
}

Graph Graph::kept(const std::vector<bool>& keep, const std::vector<int>& instead) && {
  std::vector<int> to(nodes_.size(), -1);
  const auto replace = [&](Value& v) {
    v.node = to[static_cast<std::size_t>(instead[static_cast<std::size_t>(v.node)])];
    check(v.node >= 0, "kept: a value is read that is not kept");
  };
  std::size_t count = 0;
  for (std::size_t id = 0; id < nodes_.size(); ++id) {
    if (!keep[id]) continue;
    for (Value& v : nodes_[id].operands) replace(v);
    to[id] = static_cast<int>(count);
    if (count != id) nodes_[count] = std::move(nodes_[id]);
    ++count;
  }
  nodes_.erase(nodes_.begin() + static_cast<std::ptrdiff_t>(count), nodes_.end());
  for (Output& output : outputs_) replace(output.value);
  return std::move(*this);
}

bool computes_alike(const Node& a, const Node& b) {
  const Attributes &x = a.attributes, &y = b.attributes;
  const auto bits = [](double number) { return std::bit_cast<std::uint64_t>(number); };
  if (a.op == Op::loop || a.op == Op::head || a.op == Op::fused_dot) return &a == &b;
  if (a.op != b.op || a.operands.size() != b.operands.size()) return false;
  if (a.attributes.is(b.attributes) && a.results.is(b.results)) return true;
  return x.function == y.function && x.reduce == y.reduce && bits(x.number) == bits(y.number) &&
         x.reverse == y.reverse && x.scores == y.scores && x.call == y.call && x.axis == y.axis &&
         x.dims == y.dims && x.batch_a == y.batch_a && x.batch_b == y.batch_b &&
         x.contract_a == y.contract_a && x.contract_b == y.contract_b && x.begin == y.begin &&
         x.end == y.end && x.type == y.type && a.results == b.results;
}

Origin::Origin(Graph& graph, std::string name, std::string location) : graph_(graph) {
  if (!name.empty()) check_name("Origin", name);
  name_ = std::exchange(graph.origin_name_, std::move(name));
  location_ = std::exchange(graph.origin_location_, std::move(location));
}
Origin::Origin(Graph& graph, const Node& node, std::string_view prefix)
    : Origin(graph, node.name.empty() ? std::string() : concat(prefix, node.name),
             node.attributes->location) {}
Origin::~Origin() {
  graph_.origin_name_ = std::move(name_);
  graph_.origin_location_ = std::move(location_);
}

void Graph::add_output(std::string output, Value value) {
  require(!output.empty(), "a result has no name");
  check_name("result", output);
  require(std::isdigit(static_cast<unsigned char>(output[0])) == 0 && output[0] != '.',
          "result: the name '", output, "' begins with a digit or a dot");
  for (const Output& other : outputs_)
    require(other.name != output, "there are two results of the name '", output, "'");
  check(value.node >= 0 && value.node < size(), "result '", output, "' is no value of this graph");
  outputs_.push_back({std::move(output), value});
}

std::vector<int> Graph::parameters() const {
  std::vector<int> ids;
  for (int id = 0; id < size(); ++id) {
    if (node(id).op == Op::parameter) ids.push_back(id);
  }
  return ids;
}

int Graph::find_parameter(std::string_view parameter) const {
  for (int id = 0; id < size(); ++id) {
    if (node(id).op == Op::parameter && node(id).attributes->name == parameter) return id;
  }
  return -1;
}

Lists<int> Graph::users() const {
  std::vector<int> last(nodes_.size());
  return Lists<int>::grouped(nodes_.size(), [&](auto&& put) {
    std::fill(last.begin(), last.end(), -1);
    for (int id = 0; id < size(); ++id) {
      for (const Value v : node(id).operands) {
        const auto read = static_cast<std::size_t>(v.node);
        if (std::exchange(last[read], id) != id) put(read, id);
      }
    }
  });
}

std::vector<std::string> Graph::symbols() const {
  std::set<std::string> names;
  const auto add = [&](const Shape& shape) {
    for (const Dim& dim : shape) {
      for (std::string& s : dim.symbols()) names.insert(std::move(s));
    }
  };
  for (const Node& n : nodes_) {
    for (const Type& t : n.results) add(t.shape);
    add(n.attributes->begin);
    add(n.attributes->end);
    if (n.op != Op::loop) continue;
    for (std::string& s : n.attributes->loop->body.symbols()) {
      if (s != n.attributes->loop->symbol) names.insert(std::move(s));
    }
  }
  return {names.begin(), names.end()};
}

std::int64_t elements_of(const Type& type) {
  std::int64_t count = 1;
  for (const Dim& dim : type.shape) {
    if (!dim.is_constant() || __builtin_mul_overflow(count, dim.value(), &count))
      return product(type.shape).value();  // overflow throws
  }
  return count;
}
std::int64_t bytes_of(const Type& type) {
  return elements_of(type) * static_cast<std::int64_t>(size_of(type.dtype));
}

void verify(const Graph& graph) {
  std::set<std::string> parameters;
  for (int id = 0; id < graph.size(); ++id) {
    const Node& n = graph.node(id);
    std::vector<const Type*> types;
    for (const Value v : n.operands) {
      check(v.node >= 0 && v.node < id && v.index >= 0 &&
                v.index < static_cast<int>(graph.node(v).results.size()),
            "node ", id, " (", name_of(n.op), ") reads a value that is not before it");
      types.push_back(&graph.type(v));
    }
    std::vector<Type> results;
    try {
      results = infer_types(n.op, types, n.attributes);
    } catch (const InvalidArgument& error) {
      throw InternalError(concat("node ", id, ": ", error.what()));
    }
    check(results == *n.results, "node ", id, " (", name_of(n.op),
          ") has other types than its rule gives");
    if (n.op == Op::parameter)
      check(parameters.insert(n.attributes->name).second, "two parameters '", n.attributes->name,
            "'");
    if (n.op == Op::loop) verify(n.attributes->loop->body);
  }
  std::set<std::string> outputs;
  for (const Output& output : graph.outputs()) {
    const Value v = output.value;
    check(v.node >= 0 && v.node < graph.size() && v.index >= 0 &&
              v.index < static_cast<int>(graph.node(v).results.size()),
          "result '", output.name, "' is nothing");
    check(outputs.insert(output.name).second, "two results '", output.name, "'");
  }
}

Graph bind(const Graph& graph, const Bindings& bindings) {
  Graph result;
  result.name = graph.name;
  const auto bind_shape = [&](const Shape& shape) {
    Shape bound;
    for (const Dim& dim : shape) {
      bound.push_back(dim.bind(bindings));
      require(!bound.back().is_constant() || bound.back().value() >= 0, "the size ", dim.text(),
              " becomes ", bound.back().text());
    }
    return bound;
  };
  std::map<const Loop*, std::shared_ptr<const Loop>> bound_loops;  // equal bodies are shared
  for (const Node& n : graph.nodes()) {
    Attributes attributes = n.attributes;
    attributes.type.shape = bind_shape(attributes.type.shape);
    attributes.begin = bind_shape(attributes.begin);
    attributes.end = bind_shape(attributes.end);
    if (n.op == Op::constant && !attributes.begin.empty() && attributes.begin[0].is_constant()) {
      attributes.number *= static_cast<double>(attributes.begin[0].value());
      attributes.begin.clear();
    }
    if (n.op == Op::loop) {
      std::shared_ptr<const Loop>& bound = bound_loops[n.attributes->loop.get()];
      if (bound == nullptr) {
        auto loop = std::make_shared<Loop>(*n.attributes->loop);
        Bindings outer = bindings;
        outer.erase(loop->symbol);
        loop->body = ir::bind(loop->body, outer);
        bound = std::move(loop);
      }
      attributes.loop = bound;
    }
    result.add(n.op, n.operands, std::move(attributes), n.name);
  }
  for (const Output& output : graph.outputs()) result.add_output(output.name, output.value);
  return result;
}

}  // namespace logitless::ir
