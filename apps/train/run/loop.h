// The training loop of a run.
#pragma once

#include "train/run/log.h"
#include "train/run/run.h"

namespace logitless::train {

// Runs steps, with progress lines, validations and checkpoints, until all are done or a signal asks
// for an end. Collective over ranks, which end together; of each process one rank `listens` for
// signals.
void run_steps(const RunOptions& options, bool listens, Trainer& trainer, RunReport& report,
               RunLog& log, const Print& print);

}  // namespace logitless::train
