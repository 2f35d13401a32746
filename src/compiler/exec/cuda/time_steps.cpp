#include "compiler/exec/cuda/time_steps.h"

#include "kernels/device/stream.h"

namespace logitless::ir {
namespace {

// Records an event before the first instruction and after each one.
class EventClock final : public Observer {
 public:
  explicit EventClock(void* stream) : stream_(stream) {}
  void start() { record(); }
  void after(const Instruction& instruction) final {
    timed.instructions.push_back(&instruction);
    timed.seconds.push_back(0.0);
    record();
  }
  // Adds up the seconds between the events, all of which must have completed.
  void read() {
    for (std::size_t i = 0; i < timed.seconds.size(); ++i)
      timed.seconds[i] += cuda::seconds_between(events_[i].get(), events_[i + 1].get());
  }
  Timed timed;

 private:
  void record() {
    events_.push_back(cuda::make_timed_event());
    cuda::record_event_of_graph(events_.back().get(), stream_);
  }
  void* stream_;
  std::vector<std::shared_ptr<void>> events_;
};

}  // namespace

Timed time_steps(const Steps& steps, const Frame& frame, const Context& context, int repeat) {
  const std::shared_ptr<void> stream = cuda::make_stream();
  const Context on_stream = context.on(stream.get());
  steps.enqueue(frame, on_stream);
  EventClock clock(stream.get());
  // Captures a graph, so that the device never waits for the host.
  cuda::begin_capture(stream.get());
  try {
    clock.start();
    steps.enqueue(frame, on_stream, &clock);
  } catch (...) {
    cuda::abandon_capture(stream.get());
    throw;
  }
  const std::shared_ptr<void> graph = cuda::end_capture(stream.get());
  cuda::launch_graph(graph.get(), stream.get());
  for (int r = 0; r < repeat; ++r) {
    cuda::launch_graph(graph.get(), stream.get());
    cuda::synchronize(stream.get());
    clock.read();
  }
  return std::move(clock.timed);
}

}  // namespace logitless::ir
