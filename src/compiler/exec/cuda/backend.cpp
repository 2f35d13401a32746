#include "compiler/exec/cuda/backend.h"

#include "compiler/exec/cuda/replays.h"
#include "compiler/exec/cuda/steps.h"
#include "compiler/exec/head.h"
#include "compiler/exec/head_over_ranks.h"
#include "core/check.h"
#include "kernels/device/stream.h"

namespace logitless::ir {
namespace {

// Returns about as many as a run launches kernels: one for each instruction.
std::size_t launches_of(const Program& program) {
  std::size_t count = 0;
  for (const Instruction& i : program.instructions) {
    const auto* loop = std::get_if<LoopRun>(&i.what);
    const auto rounds =
        loop == nullptr ? 1
                        : static_cast<std::size_t>((loop->extent + loop->chunk - 1) / loop->chunk);
    count += loop == nullptr ? 1 : rounds * launches_of(*loop->body);
  }
  return count;
}

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

// Runs once to warm up, then once with a captured graph that records an event after each
// instruction. Then times `repeat` runs of that graph. Waits.
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

class PreparedSteps final : public Prepared {
 public:
  PreparedSteps(const Program& program, const Context& context)
      : program_(program),
        context_(context),
        steps_(program, buffer_alignments(program), set_),
        replays_(launches_of(program)) {
    set_.load(context.device().compute_capability);
    steps_.bind(set_);
  }
  void run(std::span<const void* const> parameters, std::span<void* const> results,
           std::byte* arena, void* stream, const HeadUnder& under, Observer* observer) const final {
    if (under.far != nullptr) far_head(program_);
    if (under.ranks != nullptr) require_head(*under.ranks, program_);
    const Frame frame{program_, arena, parameters, results};
    if (under.far != nullptr)
      return steps_.enqueue(frame, context_of(*under.far, DeviceKind::cuda), observer, under);
    if (under.ranks != nullptr || under.skipped || observer != nullptr)
      return steps_.enqueue(frame, context_.on(stream), observer, under);
    replays_.run(parameters, results, arena, stream,
                 [&](cuda::Stream on) { steps_.enqueue(frame, context_.on(on), nullptr, {}); });
  }
  Timed time(std::span<const void* const> parameters, std::span<void* const> results,
             std::byte* arena, int repeat) const final {
    return time_steps(steps_, {program_, arena, parameters, results}, context_, repeat);
  }

 private:
  const Program& program_;
  const Context context_;
  KernelSet set_;
  Steps steps_;
  mutable Replays replays_;
};

}  // namespace

void CudaBackend::run(const Program&, std::span<const void* const>, std::span<void* const>,
                      std::byte*, const HeadUnder&, Observer*) const {
  throw InvalidArgument(
      "run: the program was compiled for a GPU; prepare() it in a context of one, and run that");
}

std::unique_ptr<const Prepared> CudaBackend::prepare(const Program& program,
                                                     const Context& context) const {
  const DeviceLimits& device = context.device();
  require(device.kind == DeviceKind::cuda,
          "prepare: context: of the CPU; the program was compiled for a GPU");
  require(device.compute_capability == compute_capability_,
          "prepare: context: of a GPU of compute capability ", device.compute_capability,
          "; the program was compiled for ", compute_capability_);
  return std::make_unique<const PreparedSteps>(program, context);
}

}  // namespace logitless::ir
