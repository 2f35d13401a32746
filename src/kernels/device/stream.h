// Streams, events, captured graphs, and pinned host memory that a GPU accesses directly. It
// includes no CUDA headers; in a build without CUDA every call throws the reason.
//
// Handles belong to the thread's current device, and are destroyed with the last copy of the
// pointer. All functions throw DeviceError.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "kernels/device/head.h"

namespace logitless::cuda {

std::string device_name(int index);
// Makes a device the thread's current one.
void set_current_device(int index);

// Bytes of the current device, as the driver reports them.
struct MemorySizes {
  std::size_t free = 0, total = 0;
};
MemorySizes memory_sizes();

// Makes a stream that does not synchronise with the default one; get() is the Stream. Thread blocks
// of an urgent stream are scheduled before waiting ones of other streams.
std::shared_ptr<void> make_stream(bool urgent = false);
std::shared_ptr<void> make_event();
// Makes an event for seconds_between().
std::shared_ptr<void> make_timed_event();
// Records an event during stream capture as a node of the graph, so that each launch records it for
// other streams.
void record_event_of_graph(void* event, Stream stream);
// Seconds between two timed events, which have both happened.
double seconds_between(void* from, void* to);
// Page-locked host memory.
std::shared_ptr<void> make_pinned(std::size_t bytes);

// Returns true if the stream has no work left.
bool stream_ready(Stream stream);
// Lets the thread allocate and synchronise on other streams while it captures a graph.
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
// Work enqueued on the stream from here on waits for the event.
void stream_wait(Stream stream, void* event);
// The same, but no effect while the stream is captured.
void record_event_if_running(void* event, Stream stream);
void stream_wait_if_running(Stream stream, void* event);
// Makes the host wait for the work before the event; returns at once if it was never recorded.
void wait_event(void* event);
// Returns true if wait_event() would return at once.
bool event_passed(void* event);
// Enqueues a copy; one side may be pinned host memory.
void copy_async(void* to, const void* from, std::size_t bytes, Stream stream);
// Enqueues a copy of 64 bytes that the host may overwrite at once; a captured graph repeats it.
// `to` is aligned to 16.
void put_values(void* to, const void* values, Stream stream);
struct RowsTo {
  void* data;
  std::size_t stride;  // bytes from row to row
};
struct RowsFrom {
  const void* data;
  std::size_t stride;
};
// Enqueues a copy of rows of row_bytes each.
void copy_rows_async(const RowsTo& to, const RowsFrom& from, std::size_t row_bytes,
                     std::size_t rows, Stream stream);

// Returns whether the stream's work is captured. Of the default stream also while another stream's
// is, if that forbids work on it.
bool is_captured(Stream stream);
// Captures the thread's work on the stream from here on instead of running it. end_capture() turns
// it into a graph that is ready to launch, abandon_capture() discards it.
void begin_capture(Stream stream);
std::shared_ptr<void> end_capture(Stream stream);
void abandon_capture(Stream stream) noexcept;
void launch_graph(void* graph, Stream stream);

}  // namespace logitless::cuda
