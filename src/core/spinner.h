// Waiting without giving the core away, for as long as that is likely to pay.
#pragma once

#include <sys/resource.h>

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
    if (start < contested_until_) return false;
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

  // Around a sleep. Waits that are always longer than kMost end the spinning, and the first short
  // one brings it back.
  void falls_asleep() {
    if (misses_ >= kMisses) asleep_ = Clock::now();
  }
  void wakes() {
    if (misses_ >= kMisses && Clock::now() - asleep_ < kMost) misses_ = 0;
  }

 private:
  using Clock = std::chrono::steady_clock;
  // Between the parallel loops of a step of training lie single-threaded ones of up to 260 us.
  static constexpr std::chrono::microseconds kMost{300};
  static constexpr int kPauses = 8;  // between looks at the clock: 0.3 us or less
  static constexpr int kMisses = 8;
  // The kernel's own threads take a core a few times a second; another process, each few ms.
  static constexpr std::chrono::milliseconds kLookEvery{1}, kContest{50};
  static constexpr int kPreemptions = 2;

  // Was the core taken from this thread of late? Then others want the cores.
  void look(Clock::time_point now) {
    looked_ = now;
    rusage usage;
    if (getrusage(RUSAGE_THREAD, &usage) != 0) return;
    if (usage.ru_nivcsw - preempted_ >= kPreemptions) {
      contested_until_ = now + kContest;
    } else if (now - since_ < kContest) {
      return;
    }
    since_ = now;
    preempted_ = usage.ru_nivcsw;
  }

  int misses_ = 0;
  long preempted_ = 0;  // preemptions until since_
  Clock::time_point since_, looked_, contested_until_, asleep_;
};

}  // namespace logitless
