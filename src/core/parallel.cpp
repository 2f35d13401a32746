#include "core/parallel.h"

#include <algorithm>
#include <cstdlib>

#include "core/cores.h"
#include "core/thread_pool.h"
#include "logitless/context.h"

namespace logitless {

void parallel_for(int threads, std::int64_t tasks, TaskFunction function) {
  ThreadPool::process().run(threads, tasks, function);
}

int default_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const long wanted = std::strtol(text, nullptr, 10);
    if (wanted > 0) return static_cast<int>(std::min<long>(wanted, kMostThreads));
  }
  return available_cores();
}

}  // namespace logitless
