// A run's log, read back (run_log.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "json/json.h"

namespace logitless::train {

struct RunRecord {
  struct Far {  // since the head was made
    std::int64_t steps = 0, dense_steps = 0, repeated_steps = 0, orders = 0;
    double mean_kept = 0.0;
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
  std::vector<Json> headers;  // of the run, then of each time it was resumed
  std::vector<Step> steps;    // ascending
  std::vector<Validation> validations;
  std::vector<End> ends;
  bool torn = false;  // the last line is not whole: the run is writing it, or was killed
};

// `run`: a log, or the checkpoint that it lies beside. Throws InvalidArgument "FILE:LINE: ..." of a
// line that is no line of a log, but for one at the end that is not whole.
RunRecord read_run(const std::string& run);

// The log that `run` means.
std::string log_file(const std::string& run);

}  // namespace logitless::train
