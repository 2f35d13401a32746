// The steps of a run.
#pragma once

#include "train/run.h"
#include "train/run_log.h"

namespace logitless::train {

// Steps, with a line now and then, validations and checkpoints, until all are done or a signal asks
// for an end. Of several ranks all run it, those that are not the first of their process without
// `listens`; they end together.
void run_steps(const RunOptions& options, bool listens, Trainer& trainer, RunReport& report,
               RunLog& log, const Say& say);

}  // namespace logitless::train
