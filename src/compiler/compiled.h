// The state of a compiled program: the program itself and the data of its reports.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "compiler/choose_chunks.h"
#include "compiler/exec/backend.h"
#include "compiler/ir/text.h"
#include "compiler/plan/program.h"
#include "logitless/compiler.h"
#include "logitless/head_over_ranks.h"

namespace logitless {

struct CompiledProgram::State {
  struct PassTime {
    std::string name;
    double seconds = 0.0;
    int nodes = 0;
  };
  ir::Graph graph;            // after the last pass
  ir::Graph unchunked_graph;  // the graph of `unchunked`
  ir::Program program, unchunked;
  std::shared_ptr<const ir::Backend> backend;  // runs the program
  DeviceLimits device;
  std::vector<Tensor> parameters, results;
  std::vector<ir::ChunkedRegion> regions;
  std::vector<std::string> refusals;
  std::vector<PlanPoint> plans;
  std::string search;  // how plans were searched for and the bound of the search; empty: no search
  std::vector<PassTime> passes;
  // Returns the bytes of a program that the budget bounds.
  std::int64_t bounded_bytes(const ir::Program& p) const {
    return budget_with_scratch ? p.arena_bytes : p.value_bytes;
  }
  std::int64_t budget = 0;
  bool budget_with_scratch = false;
  double predicted_seconds = 0.0, unchunked_seconds = 0.0;  // predicted for one run
  double seconds = 0.0;                                     // spent compiling
  int threads = 1;
  ir::RecomputedValues recomputed;
  std::string extern_name;  // name of an operation that the caller runs; empty: none
};

class PreparedProgram::State {
 public:
  std::shared_ptr<const CompiledProgram::State> program;
  std::unique_ptr<const ir::Prepared> prepared;
};

// Checks the arguments of a PreparedProgram's calls.
void check_device_pointers(const CompiledProgram::State& state,
                           std::span<const void* const> parameters, std::span<void* const> results,
                           void* arena);

struct CompilerAccess {
  static const CompiledProgram::State& state(const CompiledProgram& program) {
    return *program.state_;
  }
  static HeadOverRanks::State& state(HeadOverRanks& head) { return *head.state_; }
  static CompiledProgram make(std::shared_ptr<const CompiledProgram::State> state) {
    CompiledProgram program;
    program.state_ = std::move(state);
    return program;
  }
  static PreparedProgram make(std::shared_ptr<const PreparedProgram::State> state) {
    PreparedProgram program;
    program.state_ = std::move(state);
    return program;
  }
};

}  // namespace logitless
