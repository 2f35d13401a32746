// Recomputes elementwise values with several readers if they are live at the peak and it is worth
// the time.
#pragma once

#include <functional>
#include <vector>

#include "compiler/ir/graph.h"
#include "compiler/plan/program.h"
#include "compiler/target/target.h"

namespace logitless::ir {

// Returns the program that `lower` makes without recomputed values, or with those of a few rounds.
// Each round adds the values at the peak of the previous program. An example is the erf of a gelu,
// which the activation and its gradient read. Results have the same bits.
Program recomputing(const Graph& graph, const Target& target,
                    const std::function<Program(const std::vector<int>& again)>& lower);

}  // namespace logitless::ir
