#include "compiler/exec/cuda/replays.h"

#include <algorithm>

#include "kernels/device/stream.h"
#include "logitless/error.h"

namespace logitless::ir {
namespace {

constexpr std::size_t kFewLaunches = 8, kMostLaunches = 2048;  // a graph holds each launch
constexpr std::size_t kMostGraphs = 4;
constexpr std::size_t kMostSeen = 16;
constexpr int kRunsBefore = 2;  // of the same addresses, before a graph is made

}  // namespace

Replays::Replays(std::size_t launches)
    : enqueues_(launches < kFewLaunches || launches > kMostLaunches) {}

void Replays::run(std::span<const void* const> parameters, std::span<void* const> results,
                  const void* arena, cuda::Stream stream, const Enqueue& enqueue) {
  if (!enqueues_ && !cuda::is_captured(stream)) {
    std::vector<const void*> addresses(parameters.begin(), parameters.end());
    addresses.insert(addresses.end(), results.begin(), results.end());
    addresses.push_back(arena);
    // A graph is launched by one thread at a time.
    const std::lock_guard lock(mutex_);
    if (void* const graph = graph_of(std::move(addresses), enqueue); graph != nullptr)
      return cuda::launch_graph(graph, stream);
  }
  enqueue(stream);
}

// Returns the graph of these addresses, or null where there is none yet.
void* Replays::graph_of(std::vector<const void*> addresses, const Enqueue& enqueue) {
  const auto at = std::find_if(seen_.begin(), seen_.end(),
                               [&](const Seen& s) { return s.addresses == addresses; });
  if (at == seen_.end()) {
    if (seen_.size() == kMostSeen) {
      const auto oldest = std::find_if(seen_.begin(), seen_.end(),
                                       [](const Seen& s) { return s.graph == nullptr; });
      seen_.erase(oldest);
    }
    seen_.push_back({std::move(addresses), 1, nullptr});
    return nullptr;
  }
  if (at->graph != nullptr) return at->graph.get();
  std::rotate(at, at + 1, seen_.end());
  Seen& own = seen_.back();
  if (++own.runs <= kRunsBefore || graphs_ == kMostGraphs || off_) return nullptr;
  own.graph = captured(enqueue);
  if (own.graph != nullptr) ++graphs_;
  return own.graph.get();
}

// Returns the graph of a run, or null where the driver makes none; then none is tried again.
std::shared_ptr<void> Replays::captured(const Enqueue& enqueue) {
  // A thread's first call of cuBLAS allocates, and another thread may capture a graph of its own.
  const cuda::BesideCapture allowed;
  try {
    if (stream_ == nullptr) stream_ = cuda::make_stream();
    cuda::begin_capture(stream_.get());
    try {
      enqueue(stream_.get());
    } catch (...) {
      cuda::abandon_capture(stream_.get());
      throw;
    }
    return cuda::end_capture(stream_.get());
  } catch (const DeviceError&) {
    cuda::abandon_capture(stream_.get());  // and clears the driver's error, which launches report
    off_ = true;
    return nullptr;
  }
}

}  // namespace logitless::ir
