// How one operation runs chunk by chunk: the relations between a cut of its result and cuts of its
// operands. Sizes are bound.
#pragma once

#include <optional>
#include <vector>

#include "compiler/ir/few.h"
#include "compiler/ir/graph.h"

namespace logitless::ir {

// A value cut along the loop's axis. Dimensions [dim, dim + count) together, in row-major order,
// hold `factor` elements for each one of the axis. Always normalized: the fewest dimensions, so
// that count is 1 wherever a chunk is a slice of one dimension.
struct Split {
  int dim = 0;
  int count = 1;
  std::int64_t factor = 1;
  auto operator<=>(const Split&) const = default;
};
std::string text_of(const Split& split);
Split normalized(const std::vector<std::int64_t>& shape, Split split);

// What a chunk of a node reads of one operand.
struct Need {
  bool whole = true;
  Split split;
  auto operator<=>(const Need&) const = default;
};

using Needs = Few<Need, 3>;

// A node run on one chunk.
struct Chunked {
  enum class Kind : std::uint8_t {
    split,
    sum,
    max,
    lse
  };  // all but split: to be merged over chunks
  Kind kind = Kind::split;
  Few<Split, 2> results;  // kind split: of each result
  Needs needs;            // of each operand
  // Indices into the cut dimension count from the chunk's first element: of iota, of the index
  // operands of pick, take and scatter_add.
  bool shifted = false;
  bool operator==(const Chunked&) const = default;
};

std::vector<std::int64_t> sizes_of(const Type& type);

// The node, when result 0 is to be cut so; nothing when it cannot.
std::optional<Chunked> chunked_by_result(const Graph& graph, int node, const Split& result);
// The node, when operand i comes cut so.
std::optional<Chunked> chunked_by_operand(const Graph& graph, int node, std::size_t i,
                                          const Split& operand);

}  // namespace logitless::ir
