// Wide sums over the chunks of a region, made of copies of its big values.
//
// The gradient by a 16-bit weight [V, D] of logits [N, V] that are cut along N takes fp32 sums of
// twice its size, however small the chunks. Made of the logits computed once more, with the rows'
// statistics of the first time, it can be cut along V, and is no sum then: for those products again
// the chunks alone decide the memory.
#pragma once

#include <cstdint>
#include <optional>

#include "compiler/analysis/region.h"
#include "compiler/ir/graph.h"

namespace logitless::ir {

struct SumsApart {
  Graph graph;
  Region region;           // the given one in `graph`, without the sums
  std::int64_t bytes = 0;  // of the sums, in fp32
  Region copies;  // what the sums are made of there, and they themselves, cut otherwise; one phase
};

// Nothing where the region has several phases, where no 16-bit result of it is a sum that takes
// `least` bytes in fp32, or where the copies cannot be cut so that all of those are parts of their
// results. Expects bound sizes; keeps results and their types.
std::optional<SumsApart> sums_apart(const Graph& graph, const Region& region, std::int64_t least);

}  // namespace logitless::ir
