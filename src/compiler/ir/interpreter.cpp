#include "compiler/ir/interpreter.h"

#include "compiler/ir/evaluation.h"
#include "compiler/ops/op.h"
#include "core/check.h"

namespace logitless::ir {
namespace oracle {

Index sizes(const Type& type) {
  Index shape;
  for (const Dim& dim : type.shape) shape.push_back(dim.value());
  return shape;
}
std::int64_t count(const Index& shape) {
  std::int64_t n = 1;
  for (const std::int64_t s : shape) n *= s;
  return n;
}
Tensor tensor_of(const Type& type, double fill) {
  Tensor t{sizes(type), {}};
  t.data.assign(static_cast<std::size_t>(count(t.shape)), fill);
  return t;
}

namespace {

std::uint64_t bits_of(double x) {
  const bool inside = x >= -0x1p63 && x < 0x1p63;
  return inside ? static_cast<std::uint64_t>(static_cast<std::int64_t>(x)) : std::uint64_t{1} << 63;
}
double number_of(DType dtype, std::uint64_t bits) {
  return dtype == DType::i32 ? static_cast<double>(static_cast<std::int32_t>(bits))
                             : static_cast<double>(static_cast<std::int64_t>(bits));
}

}  // namespace

double wrapped(DType dtype, double x) { return number_of(dtype, bits_of(x)); }

double evaluate_integers(Function function, DType dtype, double a, double b, double c) {
  const std::uint64_t x = bits_of(a), y = bits_of(b);
  switch (function) {
    case Function::neg:
      return number_of(dtype, -x);
    case Function::abs:
      return number_of(dtype, a < 0.0 ? -x : x);
    case Function::add:
      return number_of(dtype, x + y);
    case Function::sub:
      return number_of(dtype, x - y);
    case Function::mul:
      return number_of(dtype, x * y);
    default:
      return evaluate(function, a, b, c);
  }
}

namespace {

double log_add(double a, double b) {
  const double top = std::max(a, b);
  if (std::isnan(a) || std::isnan(b)) return a + b;
  if (std::isinf(top)) return top;
  return top + std::log(std::exp(a - top) + std::exp(b - top));
}

}  // namespace

double merged(Reduce kind, double a, double b) {
  switch (kind) {
    case Reduce::sum:
      return a + b;
    case Reduce::max:
      return evaluate(Function::max, a, b, 0.0);
    case Reduce::product:
      return a * b;
    default:
      return log_add(a, b);
  }
}
double start(Reduce kind) {
  if (kind == Reduce::sum) return 0.0;
  return kind == Reduce::product ? 1.0 : -std::numeric_limits<double>::infinity();
}

}  // namespace oracle

std::vector<Tensor> evaluate_graph(const Graph& graph,
                                   const std::function<Tensor(const Node&)>& parameter,
                                   const ExternValue& externs) {
  std::vector<std::vector<Tensor>> values(static_cast<std::size_t>(graph.size()));
  const auto value = [&](Value v) -> const Tensor& {
    return values[static_cast<std::size_t>(v.node)][static_cast<std::size_t>(v.index)];
  };
  for (int id = 0; id < graph.size(); ++id) {
    const Node& n = graph.node(id);
    std::vector<Tensor>& results = values[static_cast<std::size_t>(id)];
    if (const auto evaluate = row_of(n.op).evaluate) {
      Evaluation e{graph, n, {}, externs};
      for (const Value v : n.operands) e.operands.push_back(&value(v));
      results = evaluate(e);
    } else {
      check(n.op == Op::parameter, "the interpreter has no ", name_of(n.op));
      results = {parameter(n)};
    }
  }
  std::vector<Tensor> outputs;
  for (const Output& output : graph.outputs()) outputs.push_back(value(output.value));
  return outputs;
}

Tensors interpret(const Graph& graph, const Tensors& parameters, const ExternValue& externs) {
  require(graph.symbols().empty(), "interpret: the size ",
          graph.symbols().empty() ? "" : graph.symbols()[0], " is not bound");
  const auto parameter = [&](const Node& n) {
    const auto found = parameters.find(n.attributes->name);
    require(found != parameters.end(), "interpret: parameter '", n.attributes->name,
            "' is missing");
    const Tensor& given = found->second;
    require(given.shape == oracle::sizes(n.results[0]) &&
                static_cast<std::int64_t>(given.data.size()) == oracle::count(given.shape),
            "interpret: parameter '", n.attributes->name, "' is not ", text_of(n.results[0]));
    return given;
  };
  std::vector<Tensor> outputs = evaluate_graph(graph, parameter, externs);
  Tensors results;
  for (std::size_t i = 0; i < outputs.size(); ++i)
    results[graph.outputs()[i].name] = std::move(outputs[i]);
  return results;
}

}  // namespace logitless::ir
