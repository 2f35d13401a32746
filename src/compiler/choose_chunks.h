// Which regions become loops, along what, in how many chunks: decided by the memory plan itself.
#pragma once

#include <string>
#include <vector>

#include "compiler/ir/graph.h"
#include "compiler/plan/program.h"
#include "compiler/target/target.h"

namespace logitless::ir {

struct ChunkRequest {
  const Target& target;
  std::int64_t budget = 0;       // bytes of the arena; 0: chunk while nothing is computed twice
  std::int64_t chunks = 0;       // of every loop; 0: chosen
  std::vector<bool> added = {};  // as lower() takes it
};

struct ChunkedRegion {
  std::string seed;  // the big value it was grown around
  std::string cut;   // "dimension 0"
  std::int64_t extent = 0, chunk = 0;
  int phases = 1;
  bool unit_tangents = false;
  std::int64_t before = 0, after = 0;  // bytes of the arena
  double extra_work = 0.0;             // multiply-adds more, as a fraction of all
  std::vector<std::string> boundaries;
};

struct ChunkChoice {
  Graph graph;
  Program program;
  std::vector<ChunkedRegion> regions;
  std::vector<std::string> refusals;  // big values at the peak that no loop was made of, and why
};

// Expects bound sizes. Never a higher peak than without loops.
ChunkChoice choose_chunks(const Graph& graph, const ChunkRequest& request);

}  // namespace logitless::ir
