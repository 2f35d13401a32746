// Reads the log of a run (log.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "json/json.h"

namespace logitless::train {

struct RunRecord {
  struct Far {  // counts since the head was created
    std::int64_t steps = 0, dense_steps = 0, repeated_steps = 0, orders = 0;
    double mean_selected = 0.0;
    std::optional<double> last_error = {};  // none before the first audit
  };
  struct Step {
    std::int64_t step = 0, tokens = 0;
    double loss = 0.0, rate = 0.0, norm = 0.0, seconds = 0.0, tokens_per_second = 0.0;
    std::optional<Far> far = {};
  };
  struct Validation {
    std::int64_t step = 0;
    double loss = 0.0, seconds = 0.0;
  };
  struct End {
    std::int64_t step = 0;
    std::string reason;
  };
  std::string path;
  std::vector<Json> headers;  // of the run, then of each resumption
  std::vector<Step> steps;    // ascending
  std::vector<Validation> validations;
  std::vector<End> ends;
  bool torn = false;  // the last line is incomplete: the run is writing it, or was killed
};

// Reads a run from its log, or from the checkpoint next to the log. Throws InvalidArgument
// "FILE:LINE: ..." on a malformed line, except an incomplete last one.
RunRecord read_run(const std::string& run);

// Returns the path of the log for `run`, a log or a checkpoint.
std::string log_file(const std::string& run);

}  // namespace logitless::train
