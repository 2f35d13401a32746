#include <array>
#include <cmath>
#include <map>
#include <numbers>

#include "compiler/ops/op.h"
#include "compiler/plan/epilogues.h"

namespace logitless::ir {
namespace {

constexpr std::size_t kPoints = 20;
using Samples = std::array<double, kPoints>;

// Points in both tails, where gelu is 0 and x, in the bend, and around 0.
constexpr Samples kX = {-40.0, -9.75, -5.25,  -3.5,   -2.75, -1.875, -1.25, -0.75, -0.3125, -0.01,
                        0.0,   0.02,  0.4375, 0.8125, 1.5,   2.25,   3.125, 4.75,  8.5,     31.0};
constexpr Samples kDy = {0.7, -1.3, 2.1,  0.35, -0.9, 1.7,  -2.3, 0.6,  1.1, -0.45,
                         1.9, -0.8, 0.55, -1.6, 0.95, -0.2, 1.45, -1.1, 2.6, -0.65};

constexpr double kCube = 0.044715;
const double kScale = std::sqrt(2.0 * std::numbers::inv_pi);

double gelu(double x) { return 0.5 * x * (1.0 + std::tanh(kScale * (x + kCube * x * x * x))); }
double gelu_derivative(double x) {
  const double t = std::tanh(kScale * (x + kCube * x * x * x));
  return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * kScale * (1.0 + 3.0 * kCube * x * x);
}

// Analytic functions: two compositions of these that agree at the points are one function.
bool is_smooth(Function function) {
  switch (function) {
    case Function::neg:
    case Function::add:
    case Function::sub:
    case Function::mul:
    case Function::div:
    case Function::exp:
    case Function::tanh:
    case Function::sigmoid:
    case Function::pow:
      return true;
    default:
      return false;
  }
}

// Evaluates elementwise nodes at the points.
class Evaluator {
 public:
  Evaluator(const Graph& graph, DType least) : g_(graph), least_(size_of(least)) {}

  void give(Value v, const Samples& samples) { known_[v] = samples; }

  // Returns null if the value depends on anything else or has too many nodes.
  const Samples* at(Value v) {
    const auto found = known_.find(v);
    if (found != known_.end()) return &found->second;
    constexpr std::size_t kMostNodes = 64;
    if (known_.size() == kMostNodes || v.index != 0) return nullptr;
    const Node& n = g_.node(v);
    Samples out{};
    if (n.op == Op::constant) {
      out.fill(n.attributes->number * (n.attributes->begin.empty()
                                           ? 1.0
                                           : static_cast<double>(n.attributes->begin[0].value())));
    } else if (n.op == Op::broadcast || n.op == Op::cast) {
      if (n.op == Op::broadcast && g_.node(n.operands[0]).op != Op::constant) return nullptr;
      if (!is_float(n) || size_of(n.results[0].dtype) < least_) return nullptr;
      const Samples* const from = at(n.operands[0]);
      if (from == nullptr) return nullptr;
      out = *from;
    } else if (n.op == Op::map && is_smooth(n.attributes->function)) {
      std::array<const Samples*, 3> in{};
      for (std::size_t i = 0; i < n.operands.size(); ++i) {
        in[i] = at(n.operands[i]);
        if (in[i] == nullptr) return nullptr;
      }
      const auto operand = [&](std::size_t i, std::size_t p) {
        return in[i] != nullptr ? (*in[i])[p] : 0.0;
      };
      for (std::size_t p = 0; p < kPoints; ++p)
        out[p] = evaluate(n.attributes->function, operand(0, p), operand(1, p), operand(2, p));
    } else {
      return nullptr;
    }
    return &(known_[v] = out);
  }

 private:
  const Graph& g_;
  const std::size_t least_;
  std::map<Value, Samples> known_;

  static bool is_float(const Node& n) {
    const DType dtype = n.results[0].dtype;
    return dtype == DType::f32 || dtype == DType::f64 || dtype == DType::bf16 ||
           dtype == DType::f16;
  }
};

template <typename Wanted>
bool equals(const Samples* found, Wanted&& wanted) {
  constexpr double kTolerance = 1e-10;
  if (found == nullptr) return false;
  for (std::size_t p = 0; p < kPoints; ++p) {
    const double value = wanted(p);
    // Fails for NaN, too.
    if (!(std::abs((*found)[p] - value) <= kTolerance * (1.0 + std::abs(value)))) return false;
  }
  return true;
}

}  // namespace

bool is_gelu(const Graph& graph, Value top, Value x) {
  Evaluator evaluator(graph, graph.type(x).dtype);
  evaluator.give(x, kX);
  return equals(evaluator.at(top), [](std::size_t p) { return gelu(kX[p]); });
}

bool is_gelu_gradient(const Graph& graph, Value top, Value dy, Value x) {
  Evaluator evaluator(graph, graph.type(x).dtype);
  evaluator.give(x, kX);
  evaluator.give(dy, kDy);
  return equals(evaluator.at(top), [](std::size_t p) { return kDy[p] * gelu_derivative(kX[p]); });
}

}  // namespace logitless::ir
