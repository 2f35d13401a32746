#include "compiler/passes/narrow_operands.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "compiler/ir/build.h"
#include "compiler/passes/passes.h"
#include "compiler/passes/rewriter.h"

namespace logitless::ir {
namespace {

// A 16-bit value and the exact factor that its widened copy is multiplied with.
struct Narrow {
  Value value;
  double factor = 1.0;
};

// The largest power of 2 in bf16.
constexpr double kMostFactor = 0x1p127;

bool doubles(double factor) {
  int exponent = 0;
  return std::isfinite(factor) && std::abs(std::frexp(factor, &exponent)) == 0.5 && exponent >= 1;
}

std::optional<Narrow> narrow_of(const Graph& g, Value v) {
  const Node& n = g.node(v);
  if (n.op == Op::cast && size_of(g.type(n.operands[0]).dtype) == 2)
    return Narrow{n.operands[0], 1.0};
  if (!is_map(n, Function::mul)) return std::nullopt;
  for (const std::size_t i : {std::size_t{0}, std::size_t{1}}) {
    const std::optional<double> factor = number_of(g, n.operands[i]);
    std::optional<Narrow> other = factor ? narrow_of(g, n.operands[1 - i]) : std::nullopt;
    if (!other || g.type(other->value).dtype != DType::bf16 || !doubles(*factor)) continue;
    other->factor *= *factor;
    if (std::abs(other->factor) > kMostFactor) return std::nullopt;
    return other;
  }
  return std::nullopt;
}

}  // namespace

Graph narrow_operands(const Graph& graph) {
  Rewriter to(graph);
  const auto written = [&](const Narrow& n) {
    const Value x = to(n.value);
    if (n.factor == 1.0) return x;
    return map(to.out, Function::mul, {x, constant(to.out, n.factor, to.out.type(x))});
  };
  return eliminate_dead(to.run([&](int id) -> Value {
    const Node& n = graph.node(id);
    if (n.op != Op::dot || n.results[0].dtype != DType::f32) return {};
    const std::optional<Narrow> a = narrow_of(graph, n.operands[0]),
                                b = narrow_of(graph, n.operands[1]);
    if (!a || !b || graph.type(a->value).dtype != graph.type(b->value).dtype) return {};
    Attributes attributes = n.attributes;
    attributes.type.dtype = DType::f32;
    const Value x = written(*a), y = written(*b);
    return to.out.add(Op::dot, {x, y}, std::move(attributes), n.name);
  }));
}

}  // namespace logitless::ir
