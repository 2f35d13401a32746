// Lowers a graph with bound sizes to a Program.
#pragma once

#include <cstdint>
#include <vector>

#include "compiler/plan/lowered_bodies.h"
#include "compiler/plan/program.h"
#include "compiler/target/target.h"

namespace logitless::ir {

enum class InstructionOrder : std::uint8_t {
  for_memory,  // the order of order_for_memory()
  given,       // the order of the nodes
};

// Lowers a graph to instructions in order, with memory planned. `added`: by output, whether it is
// added to the caller's memory; empty: none is. `bodies`: cache of loops lowered for the same
// target, which other graphs share.
//
// Throws Unsupported with the operation and dtype if the target has no kernel.
Program lower(const Graph& graph, const Target& target, const std::vector<bool>& added = {},
              InstructionOrder order = InstructionOrder::for_memory,
              LoweredBodies* bodies = nullptr);

// Lowers without offsets (give_offsets() of arena.h), for searches that discard most programs.
// arena_bytes is 0.
Program lower_without_offsets(const Graph& graph, const Target& target,
                              const std::vector<bool>& added, InstructionOrder order,
                              LoweredBodies* bodies);

}  // namespace logitless::ir
