// The data of a run, and the model for its vocabulary.
#pragma once

#include <optional>

#include "train/data/dataset.h"
#include "train/model/model.h"
#include "train/run/options.h"
#include "train/tokenizer/tokenizer.h"

namespace logitless::train {

struct RunData {
  std::optional<Tokenizer> tokenizer;  // for text
  ModelPtr model;
  Dataset train, valid;
};

// Reads the data and makes the model. Throws InvalidArgument naming the option at fault.
// `check_tokens`: check all tokens of --data and --val, which one rank of a run does for all.
RunData read_data(const RunOptions& options, const Print& print, bool check_tokens = true);

}  // namespace logitless::train
