// What a run trains on, and the model that goes with its words.
#pragma once

#include <optional>

#include "train/dataset.h"
#include "train/model.h"
#include "train/run_options.h"
#include "train/tokenizer.h"

namespace logitless::train {

struct RunData {
  std::optional<Tokenizer> tokenizer;  // of text
  ModelPtr model;
  Dataset train, valid;
};

// Throws InvalidArgument naming the option at fault. `check_tokens`: all tokens of --data and --val
// are looked at, which one rank of a run does for all.
RunData read_data(const RunOptions& options, const Say& say, bool check_tokens = true);

}  // namespace logitless::train
