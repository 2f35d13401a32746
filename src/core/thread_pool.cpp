#include "core/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>

#include "core/cores.h"
#include "core/futex.h"
#include "core/spinner.h"

namespace logitless {

// A parallel loop, on its caller's stack. Helpers access it between enter() and leave().
struct Region {
  Region(std::int64_t count, const TaskFunction& body) : tasks(count), function(body) {}

  // Runs one task; false when none is left.
  bool step(int thread) {
    const std::int64_t task = next.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks) return false;
    try {
      function(task, thread);
    } catch (...) {
      keep(task);
    }
    return true;
  }
  std::int64_t left() const { return tasks - next.load(std::memory_order_relaxed); }
  void rethrow() const {
    if (error) std::rethrow_exception(error);
  }

  const std::int64_t tasks;
  const TaskFunction& function;

 private:
  // Keeps the exception of the lowest task.
  void keep(std::int64_t task) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (task < failed) {
      failed = task;
      error = std::current_exception();
    }
  }

  std::mutex mutex;
  std::int64_t failed = std::numeric_limits<std::int64_t>::max();
  std::exception_ptr error;
  alignas(64) std::atomic<std::int64_t> next{0};
};

namespace {

// Bits of state_: open | waiting (the caller sleeps on finished_) | free slots | helpers inside.
constexpr std::uint32_t kOpen = 1u << 31, kWaiting = 1u << 30;
constexpr std::uint32_t kPlace = 1u << 15, kInside = 1;
constexpr std::uint32_t places(std::uint32_t state) { return state / kPlace & 0x7fff; }
constexpr std::uint32_t inside(std::uint32_t state) { return state & 0x7fff; }
constexpr bool can_enter(std::uint32_t state) { return (state & kOpen) != 0 && places(state) > 0; }
static_assert(ThreadPool::kMostThreads < 0x7fff);

thread_local bool t_in_region = false;
thread_local Spinner t_spinner;

// Caches the thread's affinity: reading it each time would cost as much as a small region.
int cores_of_this_thread() {
  constexpr int kRegions = 512;
  thread_local int cores = 0, regions = 0;
  if (regions-- <= 0) {
    cores = available_cores();
    regions = kRegions;
  }
  return cores;
}

std::atomic<ThreadPool*> process_pool{nullptr};

}  // namespace

ThreadPool& ThreadPool::process() {
  ThreadPool* pool = process_pool.load(std::memory_order_acquire);
  if (pool != nullptr) return *pool;
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, after_fork_in_child); });
  auto* fresh = new ThreadPool;
  if (process_pool.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *pool;
}

// Only the forking thread survives in the child. The old pool is left unchanged, its helper count
// included. An exception is a caller that forked inside its region and would wait for helpers.
void ThreadPool::after_fork_in_child() {
  ThreadPool* pool = process_pool.exchange(nullptr);
  if (pool == nullptr) return;
  pool->forked_.store(inside(pool->state_.load()) != 0);
  pool->state_.store(0);
}

ThreadPool::~ThreadPool() {
  ending_.store(true);
  state_.fetch_xor(kWaiting);  // any change prevents a helper from starting to sleep
  while (live_.load() > 0) {
    futex_wake(state_, kMostThreads);
    pause_core();
  }
}

void ThreadPool::run(int threads, std::int64_t tasks, const TaskFunction& function) {
  Region region(tasks, function);
  const auto most = static_cast<int>(
      std::clamp<std::int64_t>(std::min(tasks, std::int64_t{threads}), 1, kMostThreads));
  if (most == 1 || t_in_region) {
    while (region.step(0)) {
    }
    return region.rethrow();
  }

  const int team = std::min(most, cores_ > 0 ? cores_ : cores_of_this_thread());
  t_in_region = true;
  bool opened = false;
  // If another caller holds the pool, this one begins alone and retries after each task.
  do {
    opened = opened || try_open(region, team);
  } while (region.step(0));
  t_in_region = false;
  if (opened) close();
  region.rethrow();
}

bool ThreadPool::try_open(Region& region, int team) {
  const auto wanted = static_cast<int>(std::min<std::int64_t>(team, region.left())) - 1;
  if (wanted <= 0 || led_.load(std::memory_order_relaxed)) return false;
  if (led_.exchange(true, std::memory_order_acquire)) return false;
  grow(wanted);
  const int count = std::min(wanted, helpers());
  region_ = &region;
  state_.store(kOpen | static_cast<std::uint32_t>(count) * kPlace, std::memory_order_seq_cst);
  wake(count);
  return true;
}

// Wakes as many helpers as there are free slots, except those awake that will notice by themselves.
// A helper counts itself asleep before its last look at the state, so one of the two always notices
// the other.
void ThreadPool::wake(int count) {
  const int asleep = asleep_.load(std::memory_order_seq_cst);
  const int wanted = std::min(asleep, count - (helpers() - asleep));
  if (wanted > 0) asleep_.fetch_sub(futex_wake(state_, wanted), std::memory_order_relaxed);
}

void ThreadPool::grow(int wanted) {
  constexpr int kRegions = 1000;
  if (helpers() >= wanted || (refusals_ > 0 && refusals_-- > 0)) return;
  while (helpers() < wanted) {
    live_.fetch_add(1);
    if (!start_(*this, helpers() + 1)) {
      live_.fetch_sub(1);
      refusals_ = kRegions;
      return;
    }
    helpers_.fetch_add(1, std::memory_order_relaxed);
  }
}

void ThreadPool::close() {
  std::uint32_t state = state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  if (inside(state) != 0) {
    const auto empty = [&] { return inside(state_.load(std::memory_order_acquire)) == 0; };
    if (!t_spinner.wait(empty)) {
      t_spinner.falls_asleep();
      while (true) {
        const std::uint32_t finished = finished_.load(std::memory_order_acquire);
        state = state_.fetch_or(kWaiting, std::memory_order_acq_rel);
        if (inside(state) == 0) break;
        futex_wait(finished_, finished);
      }
      t_spinner.wakes();
    }
  }
  const bool forked = forked_.load(std::memory_order_relaxed);
  led_.store(false, std::memory_order_release);
  if (forked) {
    throw std::runtime_error(
        "parallel_for: this process was forked inside a loop, and its threads stayed behind");
  }
}

void ThreadPool::serve() {
  t_in_region = true;  // nested loops run on this thread
  const auto called = [this] {
    return can_enter(state_.load(std::memory_order_relaxed)) ||
           ending_.load(std::memory_order_relaxed);
  };
  while (!ending_.load(std::memory_order_acquire)) {
    if (enter()) continue;
    if (t_spinner.wait(called)) continue;
    t_spinner.falls_asleep();
    sleep();
    t_spinner.wakes();
  }
  live_.fetch_sub(1);
}

// Takes a slot in the open region and works in it; returns false if there is none.
bool ThreadPool::enter() {
  std::uint32_t state = state_.load(std::memory_order_relaxed);
  do {
    if (!can_enter(state)) return false;
  } while (!state_.compare_exchange_weak(state, state - kPlace + kInside, std::memory_order_acq_rel,
                                         std::memory_order_relaxed));
  Region& region = *region_;
  const auto thread = static_cast<int>(places(state));  // the caller is 0
  while (region.step(thread)) {
  }
  leave();
  return true;
}

// Closes the region, whose tasks are all claimed, and wakes a sleeping caller.
void ThreadPool::leave() {
  std::uint32_t state = state_.load(std::memory_order_relaxed), left = 0;
  do {
    left = (state & ~kOpen) - kInside;
  } while (!state_.compare_exchange_weak(state, left, std::memory_order_acq_rel,
                                         std::memory_order_relaxed));
  // The region may be destroyed after this point, and another one opened.
  if ((left & kWaiting) != 0 && inside(left) == 0) {
    finished_.fetch_add(1, std::memory_order_release);
    futex_wake(finished_, 1);
  }
}

void ThreadPool::sleep() {
  asleep_.fetch_add(1, std::memory_order_seq_cst);
  const std::uint32_t state = state_.load(std::memory_order_seq_cst);
  const bool woken = !can_enter(state) && !ending_.load() && futex_wait(state_, state);
  // wake() subtracts the helpers that it wakes
  if (!woken) asleep_.fetch_sub(1, std::memory_order_relaxed);
}

bool ThreadPool::start_thread(ThreadPool& pool, int index) {
  struct Birth {
    ThreadPool* pool;
    int index;
  };
  std::unique_ptr<Birth> birth(new (std::nothrow) Birth{&pool, index});
  pthread_attr_t attributes;
  if (birth == nullptr || pthread_attr_init(&attributes) != 0) return false;
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  // Signals of faults stay unblocked, for the handlers that report them.
  sigset_t signals, before;
  sigfillset(&signals);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) {
    sigdelset(&signals, fault);
  }
  pthread_sigmask(SIG_SETMASK, &signals, &before);
  pthread_t thread;
  const int status = pthread_create(
      &thread, &attributes,
      [](void* given) -> void* {
        const std::unique_ptr<Birth> born(static_cast<Birth*>(given));
        char name[16];  // the longest name in Linux
        std::snprintf(name, sizeof(name), "logitless-%d", born->index);
        pthread_setname_np(pthread_self(), name);
        born->pool->serve();
        return nullptr;
      },
      birth.get());
  if (status == 0) (void)birth.release();  // owned by the thread
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  return status == 0;
}

}  // namespace logitless
