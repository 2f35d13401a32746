// Graphs of a program's launches. Each launch costs the host some 10 us, and a small program has
// dozens: runs that repeat their addresses, as training steps do, become one launch of a graph.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "kernels/device/head.h"

namespace logitless::ir {

class Replays {
 public:
  using Enqueue = std::function<void(cuda::Stream)>;

  // launches: kernels of a run, about. Programs of few launches, or of thousands, are not replayed.
  explicit Replays(std::size_t launches);

  // Enqueues a run whose memory is at these addresses, by enqueue(stream) or by a graph that was
  // made of it. The third run with the same addresses makes their graph, of which there are few.
  // While the stream is captured, and where the driver makes no graph, runs are enqueued.
  // Thread-safe.
  void run(std::span<const void* const> parameters, std::span<void* const> results,
           const void* arena, cuda::Stream stream, const Enqueue& enqueue);

 private:
  struct Seen {
    std::vector<const void*> addresses;
    int runs = 0;
    std::shared_ptr<void> graph;  // null: none yet
  };

  const bool enqueues_;
  std::mutex mutex_;
  std::vector<Seen> seen_;  // least recently used first; those with a graph stay
  std::shared_ptr<void> stream_;
  std::size_t graphs_ = 0;
  bool off_ = false;

  void* graph_of(std::vector<const void*> addresses, const Enqueue& enqueue);
  std::shared_ptr<void> captured(const Enqueue& enqueue);
};

}  // namespace logitless::ir
