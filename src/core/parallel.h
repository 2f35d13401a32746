// Deterministic parallel loops: tasks are fixed by the caller, threads only decide who runs them.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

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
// more than tasks, numbered from 0. Returns when all are done. A task's result must not depend on
// the thread. The first exception, in task order, is thrown again.
void parallel_for(int threads, std::int64_t tasks, TaskFunction function);

// OMP_NUM_THREADS if set, else the cores of this process's affinity mask.
int default_threads();

}  // namespace logitless
