// The passes between bind() and the program that runs.
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

// The state that passes read and write.
struct Compilation {
  const Target& target;
  // Options as in CompileOptions.
  std::int64_t budget = 0, chunks = 0;
  bool chunk = true, head_engine = true;
  bool budget_with_scratch = false, explore = false, externs = false;
  std::vector<bool> added = {};  // by output: added to existing values; empty: none

  Graph graph = {};
  Graph written = {};          // the graph before log-sum-exps were split, which heads are found in
  Graph unchunked_graph = {};  // without loops and heads
  Program unchunked = {};      // program of that graph
  Program program = {};        // the program that runs
  std::vector<ChunkedRegion> regions = {};
  std::vector<std::string> refusals = {};
  std::vector<PlanPoint> plans = {};
  std::string search = {};
  RecomputedValues recomputed = {};
  LoweredBodies bodies = {};  // of the loops of all plans
};

// One pass: results, parameters and their order stay.
struct Pass {
  std::string_view name;
  void (*run)(Compilation&);
  bool (*when)(const Compilation&) = nullptr;  // null: always
};
std::span<const Pass> pipeline();

// Runs the passes whose condition holds and verifies the graph after each. Calls `after` with the
// pass and its seconds.
void run_pipeline(Compilation& compilation,
                  const std::function<void(const Pass&, double seconds)>& after);

}  // namespace logitless::ir
