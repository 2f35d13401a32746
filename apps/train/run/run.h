// A training run from options to results: data, steps, validation, checkpoints, sample.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "train/run/options.h"
#include "train/run/trainer.h"
#include "train/tokenizer/tokenizer.h"

namespace logitless::train {

class ProcessRank;

struct RunReport {
  std::string type;  // type of the model
  ModelSizes model;
  std::int64_t parameters = 0;
  std::int64_t train_tokens = 0, valid_tokens = 0;  // sizes of the data
  std::int64_t first_step = 0;                      // steps before this run
  std::vector<StepResult> steps;                    // steps of this run
  // Seconds from the start of each step to its result; on a GPU, to that of the step before it.
  std::vector<double> seconds;
  struct Validation {
    std::int64_t step = 0;
    double loss = 0.0;
  };
  std::vector<Validation> validations;
  double tokens_per_second = 0.0;  // throughput of the steps
  double compile_seconds = 0.0;
  DeviceKind device = DeviceKind::cpu;
  std::string device_name;  // name of the GPU
  std::string cpu_reason;   // why an existing GPU is not used; else empty
  int threads = 0;          // threads of a rank
  int ranks = 1;
  TrainMemory memory;
  std::string explain;  // the compiler's report on the step's program
  // Report of the far field, including the checkpoint's steps; none without a far field. None as
  // well where every step is dense, for the reason in `far_refusal`.
  std::optional<FarFieldReport> far_field;
  std::string far_refusal;
  int signal = 0;            // the signal that stopped it before its last step, or 0
  std::string save_failure;  // why --save lacks the last step; else empty
  std::string prompt, sample;
};

// Runs the training. SIGINT and SIGTERM stop it after the current step: --save is written, --export
// and the sample are not. Throws InvalidArgument, with the option at fault where it is known, and
// Trainer's exceptions. A run that diverges leaves the files as they were. When writing a
// checkpoint fails, the error is reported, the old file stays and the run continues.
//
// `process`: this process as a rank of a launched run, inside its run(); options.ranks then counts
// processes. Rank 0 alone calls `print` and writes files. Null: ranks, if there are several, are
// threads.
RunReport run_training(const RunOptions& options, const Print& print,
                       ProcessRank* process = nullptr);

}  // namespace logitless::train
