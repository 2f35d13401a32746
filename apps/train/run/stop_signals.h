// SIGINT and SIGTERM as requests to stop at the end of the current step.
#pragma once

#include <signal.h>

namespace logitless::train {

// While an object exists, the first of these signals is recorded and reported on standard error;
// the second ends the process as by default. An ignored signal stays ignored. A process has at most
// one object.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // Returns the recorded signal, or 0.
  int caught() const;

 private:
  struct sigaction old_[2] = {};
};

// Returns "SIGINT" or "SIGTERM".
const char* name_of_signal(int signal);

}  // namespace logitless::train
