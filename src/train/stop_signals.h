// SIGINT and SIGTERM as a wish to stop at the next step's end.
#pragma once

#include <signal.h>

namespace logitless::train {

// While one lives, the first of these signals is kept and said on standard error; the second ends
// the process as if nobody had listened. A signal that was ignored stays ignored. One at a time in
// a process.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The signal, or 0.
  int caught() const;

 private:
  struct sigaction old_[2] = {};
};

// "SIGINT", "SIGTERM".
const char* name_of_signal(int signal);

}  // namespace logitless::train
