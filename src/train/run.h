// A training run from options to results: data, steps, validation, checkpoints, words.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "train/run_options.h"
#include "train/tokenizer.h"
#include "train/trainer.h"

namespace logitless::train {

class ProcessRank;

struct RunReport {
  std::string type;  // of the model
  ModelSizes model;
  std::int64_t parameters = 0;
  std::int64_t train_tokens = 0, valid_tokens = 0;  // there are
  std::int64_t first_step = 0;                      // done before this run
  std::vector<StepResult> steps;                    // of this run
  // From asking for each step to being done with it; on a GPU, with the step before it.
  std::vector<double> seconds;
  struct Validation {
    std::int64_t step = 0;
    double loss = 0.0;
  };
  std::vector<Validation> validations;
  double tokens_per_second = 0.0;  // of the steps
  double compile_seconds = 0.0;
  DeviceKind device = DeviceKind::cpu;
  std::string device_name;  // of a GPU
  std::string cpu_reason;   // why not the GPU that is there; empty where there is none
  int threads = 0;          // of a rank
  int ranks = 1;
  TrainMemory memory;
  std::string explain;  // the compiler's report of a step
  // Of the run's far field, a checkpoint's steps included; none without, or where every step is
  // dense, for the reason given.
  std::optional<FarFieldReport> far_field;
  std::string far_refusal;
  int signal = 0;            // that stopped it before its last step, or 0
  std::string save_failure;  // why --save lacks the last step; empty where it has it
  std::string prompt, sample;
  std::string gap;  // between the two: " " where they are numbers
};

// SIGINT and SIGTERM stop it after the step that runs: --save is written, --export and the sample
// are not. Throws InvalidArgument naming the option at fault where it can be told, and what Trainer
// throws; a run that diverges leaves the files as they were. A checkpoint that the disk refuses is
// said and leaves the old file; the run goes on.
//
// `process`: this one as a rank of a launched run, inside of its run(); options.ranks are processes
// then. The first of them alone calls `say` and writes files. Null: the ranks, if there are more
// than one, are threads.
RunReport run_training(const RunOptions& options, const Say& say, ProcessRank* process = nullptr);

}  // namespace logitless::train
