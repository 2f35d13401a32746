// The interpreter's interface for operations, and helpers for row-major tensors of doubles. The
// executor shares none of this arithmetic: the two must agree independently.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "compiler/ir/interpreter.h"

namespace logitless::ir {

struct Evaluation {
  const Graph& graph;
  const Node& node;
  std::vector<const Tensor*> operands;
  const ExternValue& externs;
  const Tensor& in(std::size_t i) const { return *operands[i]; }
};

namespace oracle {

using Index = std::vector<std::int64_t>;

Index sizes(const Type& type);
std::int64_t count(const Index& shape);
Tensor tensor_of(const Type& type, double fill = 0.0);

inline std::size_t offset(const Index& shape, const Index& at) {
  std::int64_t flat = 0;
  for (std::size_t d = 0; d < shape.size(); ++d) flat = flat * shape[d] + at[d];
  return static_cast<std::size_t>(flat);
}
inline double& at(Tensor& t, const Index& index) { return t.data[offset(t.shape, index)]; }
inline double at(const Tensor& t, const Index& index) { return t.data[offset(t.shape, index)]; }

// Calls visit(index) for each index of the shape, in row-major order.
template <typename F>
void each(const Index& shape, F&& visit) {
  Index at(shape.size(), 0);
  for (std::int64_t n = count(shape), i = 0; i < n; ++i) {
    visit(at);
    for (std::size_t d = shape.size(); d-- > 0 && ++at[d] == shape[d];) at[d] = 0;
  }
}
// Returns a node's only result, with element(index) at each index.
template <typename F>
std::vector<Tensor> filled(const Evaluation& e, F&& element) {
  Tensor out = tensor_of(e.node.results[0]);
  std::size_t i = 0;
  each(out.shape, [&](const Index& at) { out.data[i++] = element(at); });
  return {std::move(out)};
}

inline Index permuted(const Index& at, const std::vector<int>& dims) {
  Index result;
  for (const int d : dims) result.push_back(at[static_cast<std::size_t>(d)]);
  return result;
}

// Wraps an integer to i32 or i64. An i64 beyond 2^53 is rounded to a double afterwards; a number
// outside of i64 becomes -2^63.
double wrapped(DType dtype, double x);
// Evaluates a function of integers modulo 2^32 or 2^64.
double evaluate_integers(Function function, DType dtype, double a, double b, double c);

// Merges two parts of a reduction; start() is the reduction of no elements.
double merged(Reduce kind, double a, double b);
double start(Reduce kind);

}  // namespace oracle
}  // namespace logitless::ir
