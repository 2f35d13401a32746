// Elementwise values of several readers that stand where a program needs the most memory: made
// again by each reader, where that is worth its time.
#pragma once

#include <functional>
#include <vector>

#include "compiler/ir/graph.h"
#include "compiler/plan/program.h"
#include "compiler/target/target.h"

namespace logitless::ir {

// The program that `lower` makes of the graph with none of these values made again, or with those
// of a few rounds, each round those at the peak of the program before: the erf of a gelu, which the
// activation and its gradient read. Results have the same bits.
Program making_again(const Graph& graph, const Target& target,
                     const std::function<Program(const std::vector<int>& again)>& lower);

}  // namespace logitless::ir
