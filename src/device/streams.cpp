#include "core/check.h"
#include "kernels/device/shard.h"
#include "kernels/device/stream.h"
#include "logitless/device.h"

namespace logitless {
namespace {

void require_gpu(const Context& context, const char* what) {
  require(context.device().kind == DeviceKind::cuda, what, ": context: of the CPU");
}

}  // namespace

std::string gpu_missing(int index) { return cuda::device_missing(index); }

void use_gpu(int index) { cuda::set_current_device(index); }

DeviceStatus device_status(const Context& context) {
  require_gpu(context, "device_status");
  const cuda::MemorySizes memory = cuda::memory_sizes();
  return {cuda::device_name(cuda::current_device()), memory.free, memory.total};
}

DeviceBuffer::DeviceBuffer(const Context& context, std::size_t bytes) : bytes_(bytes) {
  require_gpu(context, "DeviceBuffer");
  auto memory = std::make_unique<cuda::DeviceMemory>(bytes);
  void* const data = memory->data();
  MemoryMeter* const meter = &context.memory();
  meter->add(bytes);
  memory_ = std::shared_ptr<void>(data, [meter, bytes, held = std::shared_ptr(std::move(memory))](
                                            void*) { meter->remove(bytes); });
}

PinnedBuffer::PinnedBuffer(const Context& context, std::size_t bytes) : bytes_(bytes) {
  require_gpu(context, "PinnedBuffer");
  memory_ = cuda::make_pinned(bytes);
}

DeviceEvent::DeviceEvent(const Context& context) {
  require_gpu(context, "DeviceEvent");
  event_ = cuda::make_event();
}
void DeviceEvent::wait() const { cuda::wait_event(event_.get()); }
bool DeviceEvent::passed() const { return cuda::event_passed(event_.get()); }

DeviceStream::DeviceStream(const Context& context, bool urgent) {
  require_gpu(context, "DeviceStream");
  stream_ = cuda::make_stream(urgent);
}
void DeviceStream::copy(void* to, const void* from, std::size_t bytes) const {
  if (bytes > 0) cuda::copy_async(to, from, bytes, handle());
}
void DeviceStream::fill(void* to, int byte, std::size_t bytes) const {
  if (bytes > 0) cuda::fill_device(to, byte, bytes, handle());
}
void DeviceStream::add_slices(const float* slices, int ranks, std::int64_t count,
                              float* sums) const {
  if (count > 0) cuda::add_slices(slices, ranks, count, sums, handle());
}
void DeviceStream::record(DeviceEvent& event) const {
  cuda::record_event_of_graph(event.event_.get(), handle());
}
void DeviceStream::follow(const DeviceEvent& event) const {
  cuda::stream_wait(handle(), event.event_.get());
}
void DeviceStream::wait() const { cuda::synchronize(handle()); }

DeviceGraph DeviceStream::capture(const std::function<void()>& enqueue) const {
  cuda::begin_capture(handle());
  try {
    enqueue();
  } catch (...) {
    cuda::abandon_capture(handle());
    throw;
  }
  DeviceGraph graph;
  graph.graph_ = cuda::end_capture(handle());
  return graph;
}
void DeviceStream::launch(const DeviceGraph& graph) const {
  require(graph.graph_ != nullptr, "launch: graph: is empty");
  cuda::launch_graph(graph.graph_.get(), handle());
}

}  // namespace logitless
