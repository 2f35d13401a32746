// Everything that happens to a graph between bind() and the program that runs.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "compiler/choose_chunks.h"
#include "compiler/ir/graph.h"
#include "compiler/plan/program.h"
#include "compiler/target/target.h"

namespace logitless::ir {

// What passes read and write.
struct Compilation {
  const Target& target;
  // As CompileOptions has them.
  std::int64_t budget = 0, chunks = 0;
  bool chunk = true, head_engine = true;
  bool budget_with_scratch = false, explore = false;
  std::vector<bool> added = {};  // by output: added to what is there; empty: none

  Graph graph = {};
  Graph written = {};          // as it was before values were computed again
  Graph unchunked_graph = {};  // without loops and heads
  Program unchunked = {};      // of that graph
  Program program = {};        // what runs
  std::vector<ChunkedRegion> regions = {};
  std::vector<std::string> refusals = {};
  std::vector<PlanPoint> plans = {};
  std::string search = {};
  RecomputedValues recomputed = {};
  LoweredBodies bodies = {};  // of loops, of all plans
};

// A step: results, parameters and their order stay.
struct Pass {
  std::string_view name;
  void (*run)(Compilation&);
  bool (*when)(const Compilation&) = nullptr;  // null: always
};
std::span<const Pass> pipeline();

// Runs the passes whose time has come, verifies the graph after each, and tells `after` of it: the
// pass and its seconds.
void run_pipeline(Compilation& compilation,
                  const std::function<void(const Pass&, double seconds)>& after);

}  // namespace logitless::ir
