// Deterministic parallel loops on the threads of the library: tasks are fixed by the caller,
// threads only decide who runs them.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include "logitless/export.h"

namespace logitless {

// Borrowed callable void(std::int64_t task, int thread): no allocation, valid for the call it is
// passed to.
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

// Runs function(task, thread) once for each task in [0, tasks), on up to `threads` threads, and no
// more than tasks, numbered from 0, the caller being 0. Returns when all are done. A task's result
// must not depend on the thread. The first exception, in task order, is thrown again.
//
// The threads are one pool of the process, started when first needed. There are never more of them
// at work than cores that the caller may use, whatever `threads` says, and fewer where the system
// starts no more, or another caller has them: a loop never waits for a thread, only for tasks that
// one has begun. A loop inside a task runs on the task's thread, with thread 0. A child of fork()
// has a pool of its own; it cannot go on with a loop that it was forked inside of.
LOGITLESS_API void parallel_for(int threads, std::int64_t tasks, TaskFunction function);

// OMP_NUM_THREADS if set (of a list, its first number), else the cores that this process may use:
// its affinity mask, within the CPU quota of its control groups.
LOGITLESS_API int default_threads();

// Runs function(first, last) for the stretches of `grain` items that [0, count) is cut into; the
// last one may be shorter. Whatever the threads, the stretches are the same.
template <typename F>
void parallel_ranges(int threads, std::int64_t count, std::int64_t grain, F&& function) {
  const std::int64_t tasks = count / grain + (count % grain != 0 ? 1 : 0);
  parallel_for(threads, tasks, [&](std::int64_t task, int) {
    function(task * grain, task == tasks - 1 ? count : (task + 1) * grain);
  });
}

}  // namespace logitless
