// Deterministic parallel loops on the threads of the library. The caller fixes the tasks; threads
// only decide who runs them.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include "logitless/export.h"

namespace logitless {

// Borrowed callable void(std::int64_t task, int thread). It does not allocate and is valid during
// the call it is passed to.
class TaskFunction {
 public:
  template <typename F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, TaskFunction>)
      TaskFunction(F&& function)  // NOLINT: implicit on purpose
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(function)))),
        call_([](void* object, std::int64_t task, int thread) {
          (*static_cast<std::remove_reference_t<F>*>(object))(task, thread);
        }) {}
  void operator()(std::int64_t task, int thread) const { call_(object_, task, thread); }

 private:
  void* object_;
  void (*call_)(void*, std::int64_t, int);
};

// Runs function(task, thread) once for each task in [0, tasks), on up to `threads` threads,
// numbered from 0; the caller is 0. Returns when all are done. A task's result must not depend on
// the thread. The first exception, in task order, is rethrown.
//
// The process has one pool of threads, started when first needed. At most as many threads run as
// the caller may use cores, whatever `threads` says. Fewer run where the system starts no more, or
// another caller has them. A loop never waits for a free thread, only for tasks that one has begun.
// A loop inside a task runs on the task's thread, as thread 0. A child of fork() has its own pool;
// it cannot continue a loop that it was forked inside of.
LOGITLESS_API void parallel_for(int threads, std::int64_t tasks, TaskFunction function);

// Returns OMP_NUM_THREADS if set (the first number of a list), else the number of cores that this
// process may use: its affinity mask, within the CPU quota of its control groups.
LOGITLESS_API int default_threads();

// Runs function(first, last) for ranges of `grain` items of [0, count); the last may be shorter.
// The ranges do not depend on the threads.
template <typename F>
void parallel_ranges(int threads, std::int64_t count, std::int64_t grain, F&& function) {
  const std::int64_t tasks = count / grain + (count % grain != 0 ? 1 : 0);
  parallel_for(threads, tasks, [&](std::int64_t task, int) {
    function(task * grain, task == tasks - 1 ? count : (task + 1) * grain);
  });
}

}  // namespace logitless
