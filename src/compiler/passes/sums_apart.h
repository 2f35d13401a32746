// sums-apart: separates large sums over the chunks of a region, with copies of the big values.
//
// Example: logits [N, V] that are cut along N. The gradient of a 16-bit weight [V, D] is a sum over
// chunks in fp32, twice the weight's size, however small the chunks are. If the logits are
// recomputed from the saved row statistics, the gradient can be cut along V and is no sum. Then the
// chunks alone determine the memory, for one more matrix product.
#pragma once

#include <cstdint>
#include <optional>

#include "compiler/analysis/region.h"
#include "compiler/ir/graph.h"

namespace logitless::ir {

struct SumsApart {
  Graph graph;
  Region region;           // the given region in `graph`, without the sums
  std::int64_t bytes = 0;  // of the sums, in fp32
  Region copies;           // the sums and the copies they need, cut otherwise; one phase
};

// Returns nothing if the region has several phases, or no 16-bit result that is a sum of `least`
// bytes in fp32. The same holds if no cut of the copies makes all sums parts of results. Expects
// bound sizes; keeps results and their types.
std::optional<SumsApart> sums_apart(const Graph& graph, const Region& region, std::int64_t least);

}  // namespace logitless::ir
