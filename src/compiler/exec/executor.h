// Runs a Program on the CPU.
#pragma once

#include <cstddef>
#include <span>

#include "compiler/plan/program.h"
#include "logitless/far_field.h"

namespace logitless::ir {

// parameters and results in the order of the program; arena of arena_bytes, aligned to 64.
// Allocates nothing but, with `far`, what far_plan() takes and orders. Tasks are the program's own,
// so results do not depend on `threads`. `far`, or null, decides what far_head() does; throws where
// there is none.
void execute(const Program& program, std::span<const void* const> parameters,
             std::span<void* const> results, std::byte* arena, int threads, FarFieldHead* far);

// The one head of the program that may take the far field. Throws Unsupported, saying why there is
// none.
const HeadRun& far_head(const Program& program);
// The plan of its audited steps under `far`.
LossPlan far_plan(const Program& program, const FarFieldHead& far);

// pointwise.cpp
using Table = std::byte* const*;  // a pointer for each buffer
void run_pointwise(const Pointwise& loop, Table table, int threads);
// head.cpp
void run_head(const HeadRun& head, Table table, FarFieldHead* far);

}  // namespace logitless::ir
