// Streams, events, captured graphs, and memory of the host that a GPU reads and writes by itself.
// No CUDA headers here: a build without CUDA answers every call with the reason.
//
// Handles are of the thread's current device, and go with the last copy of the pointer. All throw
// DeviceError.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "kernels/device_head.h"

namespace logitless::cuda {

std::string device_name(int index);

// Bytes of the current device, as its driver has them.
struct MemorySizes {
  std::size_t free = 0, total = 0;
};
MemorySizes memory_sizes();

// get() is the Stream, which does not wait for the default one.
std::shared_ptr<void> make_stream();
std::shared_ptr<void> make_event();
// Page-locked memory of the host.
std::shared_ptr<void> make_pinned(std::size_t bytes);

void record_event(void* event, Stream stream);
// The host waits for what the stream had before the event was recorded; not at all where it never
// was.
void wait_event(void* event);
// Enqueues; one side may be pinned memory.
void copy_async(void* to, const void* from, std::size_t bytes, Stream stream);

// What the thread enqueues on the stream from here on is kept and not run, until end_capture()
// makes it a graph that is ready to launch, or abandon_capture() forgets it.
void begin_capture(Stream stream);
std::shared_ptr<void> end_capture(Stream stream);
void abandon_capture(Stream stream) noexcept;
void launch_graph(void* graph, Stream stream);

}  // namespace logitless::cuda
