// How one operation runs chunk by chunk: relations between cuts of its result and of its operands.
// Sizes are bound.
#pragma once

#include <optional>
#include <vector>

#include "compiler/ir/few.h"
#include "compiler/ir/graph.h"

namespace logitless::ir {

// The cut of a value along the loop's axis. Dimensions [dim, dim + count), flattened in row-major
// order, hold `factor` elements for each element of the axis. Always normalized to the fewest
// dimensions, so count is 1 if a chunk is a slice of one dimension.
struct Split {
  int dim = 0;
  int count = 1;
  std::int64_t factor = 1;
  auto operator<=>(const Split&) const = default;
};
std::string text_of(const Split& split);
Split normalized(const std::vector<std::int64_t>& shape, Split split);

// The part of an operand that a chunk of a node reads.
struct Need {
  bool whole = true;
  Split split;
  auto operator<=>(const Need&) const = default;
};

using Needs = Few<Need, 3>;

// How a node runs on one chunk.
struct Chunked {
  enum class Kind : std::uint8_t {
    split,
    sum,
    max,
    lse
  };  // all but split are merged over the chunks
  Kind kind = Kind::split;
  Few<Split, 2> results;  // kind split: of each result
  Needs needs;            // of each operand
  // Indices into the cut dimension count from the chunk's first element. Concerns iota, and the
  // index operands of pick, take and scatter_add.
  bool shifted = false;
  bool operator==(const Chunked&) const = default;
};

std::vector<std::int64_t> sizes_of(const Type& type);

// Returns how the node runs if result 0 is cut so; nothing if it cannot.
std::optional<Chunked> chunked_by_result(const Graph& graph, int node, const Split& result);
// Returns how the node runs if operand i is cut so.
std::optional<Chunked> chunked_by_operand(const Graph& graph, int node, std::size_t i,
                                          const Split& operand);

}  // namespace logitless::ir
