// Functions that run one instruction each on the CPU.
#pragma once

#include "compiler/exec/backend.h"
#include "compiler/exec/frame.h"
#include "logitless/far_field.h"

namespace logitless::ir {

// `observer` may be null.
void run_program(const Frame& frame, int threads, const HeadUnder& under, Observer* observer);
// pointwise.cpp
void run_pointwise(const Pointwise& loop, const Frame& frame, int threads);
// order.cpp
void run_scan(const Scan& scan, const Frame& frame, int threads);
void run_sort(const Sort& sort, const Frame& frame, int threads);
// random.cpp. A function of n integer keys and counters, in double; `out` may alias one of them.
using RandomFunction = void (*)(const double* key0, const double* key1, const double* counter,
                                double* out, std::int64_t n);
RandomFunction random_function(Function function);

}  // namespace logitless::ir
