// Sleeping on a 32-bit word until another thread of this process changes it (futex(2)).
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace logitless {

static_assert(sizeof(std::atomic<std::uint32_t>) == 4 &&
              std::atomic<std::uint32_t>::is_always_lock_free);

// Sleeps while the word is `value`. Returns true if futex_wake ended it; spurious returns are
// possible.
inline bool futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value) {
  return syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0) == 0;
}

// Wakes up to `count` threads that sleep on the word; returns their number.
inline int futex_wake(std::atomic<std::uint32_t>& word, int count) {
  const long woken = syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
  return woken > 0 ? static_cast<int>(woken) : 0;
}

}  // namespace logitless
