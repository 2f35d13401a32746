// A weight-gathered call on a GPU (head/schedule/weight_gathered.h). All local tokens are one
// chunk, and everything is enqueued. If nothing else travels with the rows, one kernel call takes
// those of all ranks, with a table of their ids.
//
// Exchanges run on the communication stream: the next slice arrives, and the sums of the last one
// are sent, while the current one is computed. With several slices, both are double-buffered, so
// that the backward finds the last two.
#pragma once

#include "head/cuda/run.h"

namespace logitless::cuda {

void run_weight_gathered(const Run& run, const ChunkFunction& set_coefficients);

}  // namespace logitless::cuda
