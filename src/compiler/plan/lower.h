// A graph of bound sizes becomes a Program.
#pragma once

#include <cstdint>
#include <vector>

#include "compiler/plan/lowered_bodies.h"
#include "compiler/plan/program.h"
#include "compiler/target/target.h"

namespace logitless::ir {

enum class InstructionOrder : std::uint8_t {
  for_memory,  // that of plan/order_for_memory.h
  given,       // that of the nodes
};

// Instructions in order, memory planned. `added`: by the graph's outputs, whether
// one is added to what the caller's memory holds; empty: none is. Throws Unsupported naming an
// operation and dtype that no kernel of the target takes. `bodies`: of loops lowered before for the
// same target, where other graphs share them.
Program lower(const Graph& graph, const Target& target, const std::vector<bool>& added = {},
              InstructionOrder order = InstructionOrder::for_memory,
              LoweredBodies* bodies = nullptr);

// The same until give_offsets() (arena.h): for those who make many and keep few. Its arena_bytes
// are 0.
Program lower_without_offsets(const Graph& graph, const Target& target,
                              const std::vector<bool>& added, InstructionOrder order,
                              LoweredBodies* bodies);

}  // namespace logitless::ir
