// A page that shows a run.
#pragma once

#include <string>

#include "train/run/record.h"

namespace logitless::train {

// Returns a self-contained page of HTML. It shows the model, the curves of the run, throughput,
// memory over a step, the memory saved by loops and heads, and the far field.
std::string run_page(const RunRecord& record);

}  // namespace logitless::train
