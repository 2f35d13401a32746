// Turns regions into loops, one for each phase, and takes operations out of a region before.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "compiler/analysis/region.h"
#include "compiler/ir/graph.h"

namespace logitless::ir {

// A region, and the most elements of its axis in a chunk.
struct LoopCut {
  Region region;
  std::int64_t chunk = 1;
  std::string group = {};  // of its loops; empty: the common one
};

// Moves the nodes of the region into the bodies of loops over chunks of at most `chunk` elements.
// Results that later phases read are stored if they are small and recomputed if they are big. Sums
// over the chunks are fp32 (f64 for f64). Sizes in the body contain the loop's symbol, so the graph
// does not grow with the number of chunks. Expects bound sizes; keeps results and their types.
Graph form_loops(const Graph& graph, const Region& region, std::int64_t chunk);

// Forms loops of several disjoint regions at once. The loops belong to `group`: their symbols are
// "group", "group_1", "group_2" and so on. Loops that compute the same from other inputs, like
// those of a network's layers, share one body.
//
// Returns nothing if loops of two regions would wait for each other. The same holds if phases that
// recompute each other would make the program many times as long.
std::optional<Graph> form_loops(const Graph& graph, std::span<const LoopCut> cuts,
                                const std::string& group);

// group_of() returns the group of a loop's symbol, new_group() a group without loops in the graph.
std::string group_of(const std::string& symbol);
std::string new_group(const Graph& graph);

// Sets the chunks of a group's loops to `chunk` elements.
Graph resize_loops(const Graph& graph, const std::string& group, std::int64_t chunk);

// --- products-after: takes out the matrix products that contract big 16-bit values
//
// Example: logits [N, V] that are cut along N, and their gradient in 16 bits, which two products
// contract: with the weight, and with the hidden state. The loop then stores the gradient, a value
// of [N, V] in 16 bits, and the products run once, after the loop. No logit is computed twice. The
// gradient of the weight is no sum over chunks, which would be [V, D] in fp32 and be read and
// written in each chunk.
//
// Returns the region without these products and without its nodes that read them. Returns nothing
// if there are none, if the region has several phases, or if a big value depends on one of them.
std::optional<Region> products_after(const Graph& graph, const Region& region);

// --- sums-apart: separates large sums over the chunks of a region, with copies of the big values
//
// Example: logits [N, V] that are cut along N. The gradient of a 16-bit weight [V, D] is a sum over
// chunks in fp32, twice the weight's size, however small the chunks are. If the logits are
// recomputed from the saved row statistics, the gradient can be cut along V and is no sum. Then the
// chunks alone determine the memory, for one more matrix product.
struct SumsApart {
  Graph graph;
  Region region;           // the given region in `graph`, without the sums
  std::int64_t bytes = 0;  // of the sums, in fp32
  Region copies;           // the sums and the copies they need, cut otherwise; one phase
};

// Returns nothing if the region has no 16-bit result that is a sum of `least` bytes in fp32. The
// same holds if one of its loops waits for such a sum, or if no cut of copies makes all sums
// parts of results. Expects bound sizes; keeps results and their types.
std::optional<SumsApart> sums_apart(const Graph& graph, const Region& region, std::int64_t least);

// The 16-bit results of a region that are sums over its chunks, of a size or more in fp32.
struct LargeSums {
  std::vector<int> nodes;
  std::int64_t bytes = 0;  // of all in fp32
};
// Returns nothing if there are none of `least` bytes, or if one of the region's loops waits for
// one.
std::optional<LargeSums> large_sums(const Graph& graph, const Region& region, std::int64_t least);

// --- sums-in-parts: divides large sums over the chunks of a region among several loops
//
//   dot(g, h): bf16[V, D]  ->  concat(dot(g, h[:, :D/2]), dot(g, h[:, D/2:]))
//
// Each part has a loop of its own, a further phase of the region, which recomputes the big values.
// One part of the fp32 sums is in memory at a time. It is for gradients that need whole rows, as of
// a cumulative sum along the vocabulary: there sums-apart has no cut.
struct SumsInParts {
  Graph graph;
  Region region;
  std::int64_t bytes = 0;  // of one part of the sums, in fp32
};

// Returns nothing if the region has no 16-bit result that is a sum of `least` bytes in fp32. The
// same holds if one is no matrix product with a dimension that `parts` divides, or if a loop waits
// for it. Expects bound sizes; keeps results and their types.
std::optional<SumsInParts> sums_in_parts(const Graph& graph, const Region& region, int parts,
                                         std::int64_t least);

}  // namespace logitless::ir
