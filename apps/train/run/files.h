// Checks of the files that a run writes.
#pragma once

#include "train/run/options.h"

namespace logitless::train {

// Checks before the first step that --save, --export, --log and --cache can be written, and that a
// checkpoint can hold the options. Refuses files that would replace the run's inputs or each other.
// Throws InvalidArgument naming the option.
void check_files(const RunOptions& options);

}  // namespace logitless::train
