#include "core/parallel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "logitless/context.h"

#ifdef LOGITLESS_USE_OPENMP
#include <omp.h>
#endif

namespace logitless {
namespace {

// Keeps the exception of the lowest task.
class FirstError {
 public:
  void keep(std::int64_t task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (task < task_) {
      task_ = task;
      error_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::int64_t task_ = std::numeric_limits<std::int64_t>::max();
  std::exception_ptr error_;
};

void work(std::atomic<std::int64_t>& next, std::int64_t tasks, int thread,
          const TaskFunction& function, FirstError& error) {
  for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
    try {
      function(task, thread);
    } catch (...) {
      error.keep(task);
    }
  }
}

}  // namespace

void parallel_for(int threads, std::int64_t tasks, TaskFunction function) {
  const int team =
      static_cast<int>(std::clamp<std::int64_t>(threads, 1, std::max<std::int64_t>(tasks, 1)));
  std::atomic<std::int64_t> next{0};
  FirstError error;
#ifdef LOGITLESS_USE_OPENMP
  // omp_in_parallel: a caller's own region has its threads already; nested teams would
  // oversubscribe.
  if (team > 1 && !omp_in_parallel()) {
#pragma omp parallel num_threads(team)
    work(next, tasks, omp_get_thread_num(), function, error);
    error.rethrow();
    return;
  }
#else
  if (team > 1) {
    std::vector<std::jthread> others;
    others.reserve(static_cast<std::size_t>(team - 1));
    for (int thread = 1; thread < team; ++thread) {
      others.emplace_back([&, thread] { work(next, tasks, thread, function, error); });
    }
    work(next, tasks, 0, function, error);
    others.clear();
    error.rethrow();
    return;
  }
#endif
  work(next, tasks, 0, function, error);
  error.rethrow();
}

int default_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const long wanted = std::strtol(text, nullptr, 10);
    if (wanted > 0) return static_cast<int>(std::min<long>(wanted, kMostThreads));
  }
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace logitless
