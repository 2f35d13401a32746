// The files that a run writes.
#pragma once

#include "train/run_options.h"

namespace logitless::train {

// What would go wrong after hours, before the first step: where --save, --export, --log and --cache
// cannot be written, options that a checkpoint cannot hold, and files that would replace what the
// run reads, or each other. Throws InvalidArgument naming the option.
void check_files(const RunOptions& options);

}  // namespace logitless::train
