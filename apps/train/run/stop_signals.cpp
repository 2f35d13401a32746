#include "train/run/stop_signals.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>

namespace logitless::train {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM};

std::atomic<int> caught_signal{0};
static_assert(std::atomic<int>::is_always_lock_free, "a handler may touch nothing that locks");

// Handles a signal; calls only async-signal-safe functions.
void on_signal(int signal) {
  int none = 0;
  if (caught_signal.compare_exchange_strong(none, signal)) {
    constexpr char kText[] = "stopping after this step; again to stop at once\n";
    const int code = errno;
    static_cast<void>(!::write(STDERR_FILENO, kText, sizeof(kText) - 1));
    errno = code;
    return;
  }
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  ::sigaction(signal, &action, nullptr);
  ::raise(signal);  // delivered when this handler returns
}

}  // namespace

StopSignals::StopSignals() {
  caught_signal = 0;
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  for (int i = 0; i < 2; ++i) {
    ::sigaction(kSignals[i], nullptr, &old_[i]);
    if (old_[i].sa_handler != SIG_IGN) ::sigaction(kSignals[i], &action, nullptr);
  }
}

StopSignals::~StopSignals() {
  for (int i = 0; i < 2; ++i) ::sigaction(kSignals[i], &old_[i], nullptr);
}

int StopSignals::caught() const { return caught_signal; }

const char* name_of_signal(int signal) { return signal == SIGINT ? "SIGINT" : "SIGTERM"; }

}  // namespace logitless::train
