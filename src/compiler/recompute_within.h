// How much is computed again by products for a budget: decided by the memory plan itself.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "compiler/choose_chunks.h"
#include "compiler/ir/graph.h"
#include "compiler/passes/recompute_segments.h"
#include "compiler/plan/program.h"

namespace logitless::ir {

struct RecomputeChoice {
  Graph graph;
  Program program;
  double seconds = 0.0;        // predicted, of a run
  int values = 0;              // results of products and the like that are made once more
  std::int64_t given_up = 0;   // bytes that lived over the peak and no longer do
  double multiply_adds = 0.0;  // more than the graph's
};

// Choices that were asked for: graphs that differ in their heads' workspace have the same ones.
struct RecomputeCuts {
  std::optional<RecomputeCurve> curve;  // of a graph that still exists
  std::map<std::pair<double, double>, std::optional<RecomputeCurve::Point>> between;  // by weights
};

// Of the choices of passes/recompute_segments.h the one of the least work whose memory is at most
// request.budget; none where there is none, or it takes `seconds` or more. `program` is the graph
// lowered. A larger budget never gets more work: both ask the same choices in the same order
// (recompute_within.cpp). Lowers about as many choices as the logarithm of their number. `cuts`: of
// graphs asked about before.
std::optional<RecomputeChoice> recompute_within(
    const Graph& graph, const Program& program, const ChunkRequest& request,
    double seconds = std::numeric_limits<double>::infinity(), RecomputeCuts* cuts = nullptr);

// The one of the least memory found, whatever the budget; none where that is not less than that of
// `program`.
std::optional<RecomputeChoice> least_recomputed(const Graph& graph, const Program& program,
                                                const ChunkRequest& request);

// Some of the choices, from more that is kept to less.
std::vector<RecomputeChoice> sample_recomputed(const Graph& graph, const Program& program,
                                               const ChunkRequest& request);

// What a request counts of a program: its values, with the scratch of kernels where it asks so.
inline std::int64_t bytes_of(const Program& program, const ChunkRequest& request) {
  return request.with_scratch ? program.arena_bytes : program.value_bytes;
}

}  // namespace logitless::ir
