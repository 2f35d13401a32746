#include "compiler/ir/build.h"

#include <algorithm>

namespace logitless::ir {

Value constant(Graph& g, double number, Type type) {
  Attributes a;
  a.number = number;
  a.type = std::move(type);
  return g.add(Op::constant, {}, std::move(a));
}

Value iota(Graph& g, Type type, int axis) {
  Attributes a;
  a.axis = axis;
  a.type = std::move(type);
  return g.add(Op::iota, {}, std::move(a));
}

Value map(Graph& g, Function function, std::vector<Value> operands, std::string hint) {
  Attributes a;
  a.function = function;
  return g.add(Op::map, std::move(operands), std::move(a), std::move(hint));
}

Value cast(Graph& g, Value x, DType dtype) {
  if (g.type(x).dtype == dtype) return x;
  Attributes a;
  a.type.dtype = dtype;
  return g.add(Op::cast, {x}, std::move(a));
}

Value reshape(Graph& g, Value x, Shape shape) {
  if (g.type(x).shape == shape) return x;
  Attributes a;
  a.type.shape = std::move(shape);
  return g.add(Op::reshape, {x}, std::move(a));
}

Value transpose(Graph& g, Value x, std::vector<int> dims) {
  if (is_identity(dims)) return x;
  Attributes a;
  a.dims = std::move(dims);
  return g.add(Op::transpose, {x}, std::move(a));
}

Value broadcast(Graph& g, Value x, Shape shape, std::vector<int> dims) {
  if (g.type(x).shape == shape && is_identity(dims)) return x;
  Attributes a;
  a.type.shape = std::move(shape);
  a.dims = std::move(dims);
  return g.add(Op::broadcast, {x}, std::move(a));
}

Value reduce(Graph& g, Reduce kind, Value x, std::vector<int> dims, DType dtype) {
  if (dims.empty()) return x;
  Attributes a;
  a.reduce = kind;
  a.dims = std::move(dims);
  a.type.dtype = dtype;
  return g.add(Op::reduce, {x}, std::move(a));
}

Value slice(Graph& g, Value x, Shape begin, Shape end) {
  if (end == g.type(x).shape &&
      std::all_of(begin.begin(), begin.end(), [](const Dim& d) { return d == Dim(0); }))
    return x;
  Attributes a;
  a.begin = std::move(begin);
  a.end = std::move(end);
  return g.add(Op::slice, {x}, std::move(a));
}

Value pad(Graph& g, Value x, Shape low, Shape high) {
  Attributes a;
  a.begin = std::move(low);
  a.end = std::move(high);
  return g.add(Op::pad, {x}, std::move(a));
}

std::vector<int> other_dims(int rank, const std::vector<int>& dims) {
  std::vector<int> others;
  for (int d = 0; d < rank; ++d) {
    if (std::find(dims.begin(), dims.end(), d) == dims.end()) others.push_back(d);
  }
  return others;
}

bool is_identity(const std::vector<int>& dims) {
  for (std::size_t i = 0; i < dims.size(); ++i) {
    if (dims[i] != static_cast<int>(i)) return false;
  }
  return true;
}

std::optional<double> number_of(const Graph& graph, Value v) {
  while (graph.node(v).op == Op::broadcast) v = graph.node(v).operands[0];
  const Node& n = graph.node(v);
  if (n.op != Op::constant || !n.attributes->begin.empty()) return std::nullopt;
  return n.attributes->number;
}

}  // namespace logitless::ir
