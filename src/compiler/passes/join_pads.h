// pad(a) + pad(b)  ->  concat(a, b)
//
// What slices of one value give its gradient: each padded with zeros, then added up. Pads along one
// axis whose parts lie apart become one value that is written once. Parts of a longer sum are
// joined where each is added to the same rest; casts of pads and pads of pads are looked into;
// holes between parts stay zeros, the padding of the part before them. Sums that something else
// reads, and pads that overlap, stay.
//
// Keeps every bit of the graph's meaning (ir/interpreter.h). x + 0 is x but for -0, of which it
// makes 0: a part that may hold -0 is written as x + 0 where the sign can reach a result or a
// quotient. Drops what nothing reads any more; keeps parameters, results and their order.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

Graph join_pads(const Graph& graph);

}  // namespace logitless::ir
