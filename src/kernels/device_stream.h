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
// Makes it the thread's current one.
void set_current_device(int index);

// Bytes of the current device, as its driver has them.
struct MemorySizes {
  std::size_t free = 0, total = 0;
};
MemorySizes memory_sizes();

// get() is the Stream, which does not wait for the default one. Thread blocks of an urgent one come
// before those of others that wait for the processors, too.
std::shared_ptr<void> make_stream(bool urgent = false);
std::shared_ptr<void> make_event();
// One that can be read by seconds_between().
std::shared_ptr<void> make_timed_event();
// While the stream is captured: a part of the graph, each launch of which records it for others.
void record_event_of_graph(void* event, Stream stream);
// Both have happened.
double seconds_between(void* from, void* to);
// Page-locked memory of the host.
std::shared_ptr<void> make_pinned(std::size_t bytes);

// Whether the stream has nothing left to do.
bool stream_ready(Stream stream);
// While it lives the thread may allocate and wait though it captures a graph: on other streams.
class BesideCapture {
 public:
  BesideCapture();
  ~BesideCapture();
  BesideCapture(const BesideCapture&) = delete;
  BesideCapture& operator=(const BesideCapture&) = delete;

 private:
  int before_ = 0;
};
void record_event(void* event, Stream stream);
// What the stream is told from here on waits for what the event was recorded after.
void stream_wait(Stream stream, void* event);
// The same, and nothing while the stream is captured.
void record_event_if_running(void* event, Stream stream);
void stream_wait_if_running(Stream stream, void* event);
// The host waits for what the stream had before the event was recorded; not at all where it never
// was.
void wait_event(void* event);
// Whether wait_event() would return at once.
bool event_passed(void* event);
// Enqueues; one side may be pinned memory.
void copy_async(void* to, const void* from, std::size_t bytes, Stream stream);
struct RowsTo {
  void* data;
  std::size_t stride;  // bytes from row to row
};
struct RowsFrom {
  const void* data;
  std::size_t stride;
};
// The same of rows of so many bytes.
void copy_rows_async(const RowsTo& to, const RowsFrom& from, std::size_t row_bytes,
                     std::size_t rows, Stream stream);

// What the thread enqueues on the stream from here on is kept and not run, until end_capture()
// makes it a graph that is ready to launch, or abandon_capture() forgets it.
void begin_capture(Stream stream);
std::shared_ptr<void> end_capture(Stream stream);
void abandon_capture(Stream stream) noexcept;
void launch_graph(void* graph, Stream stream);

}  // namespace logitless::cuda
