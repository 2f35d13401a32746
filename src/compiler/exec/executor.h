// Runs a Program on the CPU.
#pragma once

#include <cstddef>
#include <span>

#include "compiler/plan/program.h"

namespace logitless::ir {

// parameters and results in the order of the program; arena of arena_bytes, aligned to 64.
// Allocates nothing. Tasks are the program's own, so results do not depend on `threads`.
void execute(const Program& program, std::span<const void* const> parameters,
             std::span<void* const> results, std::byte* arena, int threads);

// pointwise.cpp
using Table = std::byte* const*;  // a pointer for each buffer
void run_pointwise(const Pointwise& loop, Table table, int threads);
// head.cpp
void run_head(const HeadRun& head, Table table);

}  // namespace logitless::ir
