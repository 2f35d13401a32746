// Chooses how much to recompute by matrix products for a budget, measured by the memory plan
// itself.
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
  double seconds = 0.0;        // predicted time of a run
  int values = 0;              // results of matrix products and the like that are recomputed
  std::int64_t given_up = 0;   // bytes that were live at the peak and no longer are
  double multiply_adds = 0.0;  // beyond those of the graph
};

// Cache of choices. Graphs that differ only in the workspace of their heads share it.
struct RecomputeCuts {
  std::optional<RecomputeCurve> curve;  // of a graph that still exists
  std::map<std::pair<double, double>, std::optional<RecomputeCurve::Point>> between;  // by weights
};

// Returns the choice of least work (passes/recompute_segments.h) whose memory is at most
// request.budget. Returns nothing if there is none or if it takes `seconds` or more. `program` is
// the graph lowered.
//
// A larger budget never gets more work: the search is a bisection whose midpoints do not depend on
// the budget (recompute_within.cpp). It lowers about log2 of the number of choices. `cuts` caches
// choices of earlier graphs.
std::optional<RecomputeChoice> recompute_within(
    const Graph& graph, const Program& program, const ChunkRequest& request,
    double seconds = std::numeric_limits<double>::infinity(), RecomputeCuts* cuts = nullptr);

// Returns the choice of the least memory, whatever the budget; nothing if `program` takes no more.
std::optional<RecomputeChoice> least_recomputed(const Graph& graph, const Program& program,
                                                const ChunkRequest& request);

// Returns sample choices, from the one that keeps the most to the one that keeps the least.
std::vector<RecomputeChoice> sample_recomputed(const Graph& graph, const Program& program,
                                               const ChunkRequest& request);

// Returns the bytes that the budget bounds: values, and with them the scratch of kernels if the
// request says so.
inline std::int64_t bytes_of(const Program& program, const ChunkRequest& request) {
  return request.with_scratch ? program.arena_bytes : program.value_bytes;
}

}  // namespace logitless::ir
