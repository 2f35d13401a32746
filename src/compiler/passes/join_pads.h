// join-pads: pad(a) + pad(b)  ->  concat(a, b)
//
// Several slices of one value give it a gradient that is a sum of pads. Pads along one axis with
// disjoint parts become one value that is written once. Parts of a longer sum are joined if each is
// added to the same rest. The pass looks through casts of pads and pads of pads. Holes between
// parts stay zero: they are padding of the part before. Sums with other readers and pads that
// overlap stay.
//
// Keeps every bit of the graph's meaning (ir/interpreter.h). Adding 0 changes only -0, which
// becomes 0. So a part that may contain -0 is written as x + 0 if the sign can reach a result or a
// quotient. Removes nodes without readers; keeps parameters, results and their order.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

Graph join_pads(const Graph& graph);

}  // namespace logitless::ir
