// One instruction each.
#pragma once

#include "compiler/exec/backend.h"
#include "compiler/exec/frame.h"
#include "logitless/far_field.h"

namespace logitless::ir {

// observer: or null.
void run_program(const Frame& frame, int threads, FarFieldHead* far, Observer* observer);
// pointwise.cpp
void run_pointwise(const Pointwise& loop, const Frame& frame, int threads);
// head.cpp
void run_head(const HeadRun& head, const Frame& frame, FarFieldHead* far);
LossPlan audited_plan(const Program& program, const FarFieldHead& far);

}  // namespace logitless::ir
