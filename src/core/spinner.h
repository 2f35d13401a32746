// Waiting that spins for as long as that is likely to pay, before it sleeps.
#pragma once

#include <sys/resource.h>
#include <time.h>

#include <chrono>

namespace logitless {

inline void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Spinner of one thread. Sleeping and waking costs some 10 us on an idle machine, and 50 in a
// virtual one whose idle cores halt. Spinning costs the core's time. On a busy machine that comes
// out of this process's share, and even from the thread that is waited for.
class Spinner {
 public:
  // Spins until ready() or the time limit; returns whether ready() held.
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

  // Called around a sleep. Waits that are always longer than kMost disable spinning, and the first
  // short one enables it again.
  void falls_asleep() { asleep_ = Clock::now(); }
  void wakes() {
    const Clock::duration slept = Clock::now() - asleep_;
    slept_ += slept;
    if (misses_ >= kMisses && slept < kMost) misses_ = 0;
  }

 private:
  using Clock = std::chrono::steady_clock;
  // The serial parts between the parallel loops of a training step take up to some 300 us.
  static constexpr std::chrono::microseconds kMost{500};
  static constexpr int kPauses = 8;  // between readings of the clock: 0.3 us or less
  static constexpr int kMisses = 8;
  static constexpr std::chrono::milliseconds kLookEvery{1}, kWindow{20}, kContest{50};
  static constexpr int kPreemptions = 2, kLostShare = 8;

  // Detects competition for the cores: other processes had an eighth of the time in which this
  // thread wanted one. The kernel's own threads preempt as often, but only for microseconds. A
  // thread that waits for something else is not preempted.
  void look(Clock::time_point now) {
    looked_ = now;
    rusage usage;
    timespec used;
    if (getrusage(RUSAGE_THREAD, &usage) != 0 || clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used) != 0)
      return;
    const Clock::duration ran =
        std::chrono::seconds(used.tv_sec) + std::chrono::nanoseconds(used.tv_nsec);
    const Clock::duration wanted = now - since_ - slept_;
    if (usage.ru_nivcsw - preempted_ >= kPreemptions &&
        wanted - (ran - ran_) > wanted / kLostShare) {
      contested_until_ = now + kContest;
    } else if (now - since_ < kWindow) {
      return;
    }
    since_ = now;
    slept_ = {};
    ran_ = ran;
    preempted_ = usage.ru_nivcsw;
  }

  int misses_ = 0;
  Clock::time_point looked_, contested_until_, asleep_;
  // Measurements of the current window.
  Clock::time_point since_;
  Clock::duration slept_{}, ran_{};
  long preempted_ = 0;
};

}  // namespace logitless
