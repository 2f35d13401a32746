// Recognises gelu and its derivative in a graph by their values, however they are written.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Returns whether `top` is gelu(x) in the tanh form, x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715
// x^3))). It must be computed from x and constants by elementwise functions, without rounding to
// less than x's dtype. It must agree to 1e-10 at points in all parts of gelu. The erf form differs
// by 1e-4 there.
bool is_gelu(const Graph& graph, Value top, Value x);

// Returns likewise whether `top` is dy times the derivative of that gelu at x.
bool is_gelu_gradient(const Graph& graph, Value top, Value dy, Value x);

}  // namespace logitless::ir
