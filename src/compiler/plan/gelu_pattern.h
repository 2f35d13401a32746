// gelu and its derivative in a graph, in whatever form they are written: found by their values.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Whether `top` is gelu(x) by tanh, x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))): computed by
// elementwise functions of x and constants alone, nothing rounded to less than x's dtype, and equal
// to it to 1e-10 at points of all its parts. gelu by erf differs by 1e-4 there.
bool is_gelu(const Graph& graph, Value top, Value x);

// Whether it is dy times the derivative of that at x, in the same sense.
bool is_gelu_gradient(const Graph& graph, Value top, Value dy, Value x);

}  // namespace logitless::ir
