// A weight-gathered call on a CPU (head/schedule/weight_gathered.h).
#pragma once

#include "head/cpu/run.h"

namespace logitless::cpu {

// all_valid: the valid tokens of all ranks.
void run_weight_gathered(const Run& run, std::int64_t all_valid, TokenFunction function);

}  // namespace logitless::cpu
