// The threads of parallel_for (logitless/parallel.h).
//
// A region is one loop. Its caller publishes it in one word, `state_`, and works on it; helpers
// enter by taking a place in the word while the region is open. Whoever finds no task left closes
// it, and the caller then waits for helpers that have entered, and for no others: one that the
// system did not run in time finds the region closed. Tasks are claimed one by one, so a thread
// that loses its core holds up one task.
//
// A thread that waits first spins, for fractions of a millisecond, unless that has not paid
// lately or the machine is busy (Spinner), and then sleeps in a futex.
#pragma once

#include <atomic>
#include <cstdint>

#include "logitless/parallel.h"

namespace logitless {

struct Region;

class ThreadPool {
 public:
  // Starts helper `index`, which calls serve(); false when the system gives no thread.
  using Start = bool (*)(ThreadPool& pool, int index);

  static constexpr int kMostThreads = 1024;  // of a region, its caller included

  // cores: threads at work at once; 0: the cores that the caller of a region may use.
  explicit ThreadPool(int cores = 0, Start start = start_thread) : cores_(cores), start_(start) {}
  // Ends the helpers. No region may be running.
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The process's own, which is never destroyed: helpers may outlive main().
  static ThreadPool& process();

  // parallel_for on this pool.
  void run(int threads, std::int64_t tasks, const TaskFunction& function);

  // A named thread with the signals that other threads can take blocked.
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

  // What helpers spin on, alone in its cache line.
  alignas(64) std::atomic<std::uint32_t> state_{0};
  Region* region_ = nullptr;                // of the open region; read by those who have entered
  std::atomic<std::uint32_t> finished_{0};  // counts what the waiting caller sleeps on

  alignas(64) std::atomic<bool> led_{false};  // a caller has a region open or is closing it
  std::atomic<int> helpers_{0};
  std::atomic<int> asleep_{0};
  std::atomic<int> live_{0};
  std::atomic<bool> ending_{false};
  std::atomic<bool> forked_{false};  // in a child: the helpers are gone
  int refusals_ = 0;                 // regions until a refused thread is asked for again
};

}  // namespace logitless
