// Waiting without giving the core away, for as long as that is likely to pay.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <chrono>

namespace logitless {

inline void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// One of each thread. To sleep and be woken costs some 10 us on an idle machine, and 50 in a
// virtual one whose idle cores halt; to spin costs the core's time, which on a busy machine is
// taken off this process's share, and off the very thread that is waited for.
class Spinner {
 public:
  // Spins until ready() or the time is up; whether ready() was seen.
  template <typename Ready>
  bool wait(Ready&& ready) {
    if (ready()) return true;
    if (misses_ >= kMisses) return false;
    const Clock::time_point start = Clock::now();
    if (start - looked_ > kLookEvery) look(start);
    if (start < idle_from_) return false;
    for (Clock::time_point now = start; now - start < kMost; now = Clock::now()) {
      for (int i = 0; i < kPauses; ++i) {
        pause_core();
        if (ready()) {
          misses_ = 0;
          return true;
        }
      }
    }
    ++misses_;
    return false;
  }

  // The thread has slept from `start` until woken: spinning would have paid if that was short.
  // Gaps that are always long stop the spinning, and the first short one brings it back.
  void slept() {
    if (misses_ >= kMisses && Clock::now() - asleep_ < kMost + kWake) misses_ = 0;
  }
  void sleeps() {
    if (misses_ >= kMisses) asleep_ = Clock::now();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kMost{60}, kWake{40};
  static constexpr std::chrono::microseconds kLookEvery{1000}, kBusy{20000};
  static constexpr int kPauses = 8;  // between looks at the clock: 0.3 us or less
  static constexpr int kMisses = 8;

  // Was this thread's core taken from it since the last look? Then others want the cores.
  void look(Clock::time_point now) {
    looked_ = now;
    rusage usage;
    if (getrusage(RUSAGE_THREAD, &usage) != 0) return;
    if (usage.ru_nivcsw != preempted_) idle_from_ = now + kBusy;
    preempted_ = usage.ru_nivcsw;
  }

  int misses_ = 0;
  long preempted_ = 0;
  Clock::time_point looked_, idle_from_, asleep_;
};

}  // namespace logitless
