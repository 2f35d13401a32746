// A page to read a run by.
#pragma once

#include <string>

#include "train/run_record.h"

namespace logitless::train {

// One whole page of HTML that needs nothing else: what was trained, loss and validation, rate and
// norm, speed, memory over a step, what loops and heads saved, the far field.
std::string run_page(const RunRecord& record);

}  // namespace logitless::train
