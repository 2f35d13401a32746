// The threads of parallel_for (logitless/parallel.h).
//
// A region is one loop. Its caller publishes it in one atomic, `state_`, and works on it. Helpers
// enter by taking a slot of `state_` while the region is open. A thread that finds no task left
// closes the region. The caller then waits only for helpers that have entered: a helper that was
// scheduled too late finds the region closed. Tasks are claimed one by one, so a thread that loses
// its core delays one task.
//
// A waiting thread first spins for fractions of a millisecond, then sleeps in a futex. It does not
// spin if that has not paid lately or the machine is busy (Spinner).
#pragma once

#include <atomic>
#include <cstdint>

#include "logitless/parallel.h"

namespace logitless {

struct Region;

class ThreadPool {
 public:
  // Starts helper `index`, which calls serve(); returns false when the system provides no thread.
  using Start = bool (*)(ThreadPool& pool, int index);

  static constexpr int kMostThreads = 1024;  // of a region, including its caller

  // `cores` is the number of threads at work at once; 0: the cores that the caller of a region may
  // use.
  explicit ThreadPool(int cores = 0, Start start = start_thread) : cores_(cores), start_(start) {}
  // Ends the helpers. No region may be running.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The process's own pool, which is never destroyed: helpers may outlive main().
  static ThreadPool& process();

  // Runs parallel_for on this pool.
  void run(int threads, std::int64_t tasks, const TaskFunction& function);

  // Starts a named thread that blocks the signals that other threads can handle.
  static bool start_thread(ThreadPool& pool, int index);
  void serve();

  int helpers() const { return helpers_.load(std::memory_order_relaxed); }

 private:
  bool try_open(Region& region, int team);
  void close();
  void wake(int places);
  void grow(int helpers);
  bool enter();
  void leave();
  void sleep();
  static void after_fork_in_child();

  const int cores_;
  const Start start_;

  // Helpers spin on this atomic, which is alone in its cache line.
  alignas(64) std::atomic<std::uint32_t> state_{0};
  Region* region_ = nullptr;                // the open region; read by helpers that have entered
  std::atomic<std::uint32_t> finished_{0};  // futex of the waiting caller

  alignas(64) std::atomic<bool> led_{false};  // a caller has a region open or is closing it
  std::atomic<int> helpers_{0};
  std::atomic<int> asleep_{0};
  std::atomic<int> live_{0};
  std::atomic<bool> ending_{false};
  std::atomic<bool> forked_{false};  // in a child: the helpers are gone
  int refusals_ = 0;                 // regions until another attempt to start a refused thread
};

}  // namespace logitless
