// Streams, events, captured graphs and pinned memory.
#include "kernels/device/stream.h"

#include "kernels/cuda/device/error.cuh"

namespace logitless::cuda {
namespace {

cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }

}  // namespace

bool is_captured(Stream stream) {
  cudaStreamCaptureStatus status;
  const cudaError_t asked = cudaStreamIsCapturing(stream_of(stream), &status);
  if (asked == cudaErrorStreamCaptureImplicit) {  // the default stream, beside another's capture
    cudaGetLastError();
    return true;
  }
  require_cuda(asked, "stream");
  return status != cudaStreamCaptureStatusNone;
}

std::string device_name(int index) {
  cudaDeviceProp properties;
  require_cuda(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  return properties.name;
}

void set_current_device(int index) { require_cuda(cudaSetDevice(index), "cudaSetDevice"); }

MemorySizes memory_sizes() {
  MemorySizes sizes;
  require_cuda(cudaMemGetInfo(&sizes.free, &sizes.total), "cudaMemGetInfo");
  return sizes;
}

std::shared_ptr<void> make_stream(bool urgent) {
  int least = 0, greatest = 0;
  require_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream");
  cudaStream_t stream;
  require_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, urgent ? greatest : 0),
               "stream");
  return {stream, [](void* held) { cudaStreamDestroy(stream_of(held)); }};
}

std::shared_ptr<void> make_event() {
  cudaEvent_t event;
  require_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
  return {event, [](void* held) { cudaEventDestroy(event_of(held)); }};
}

std::shared_ptr<void> make_timed_event() {
  cudaEvent_t event;
  require_cuda(cudaEventCreate(&event), "event");
  return {event, [](void* held) { cudaEventDestroy(event_of(held)); }};
}
void record_event_of_graph(void* event, Stream stream) {
  const unsigned flags = is_captured(stream) ? cudaEventRecordExternal : cudaEventRecordDefault;
  require_cuda(cudaEventRecordWithFlags(event_of(event), stream_of(stream), flags), "event");
}
double seconds_between(void* from, void* to) {
  float milliseconds = 0.0f;
  require_cuda(cudaEventElapsedTime(&milliseconds, event_of(from), event_of(to)), "event");
  return milliseconds * 1e-3;
}

std::shared_ptr<void> make_pinned(std::size_t bytes) {
  void* data = nullptr;
  if (bytes == 0) return {};
  if (cudaMallocHost(&data, bytes) != cudaSuccess) {
    cudaGetLastError();
    throw DeviceError(concat("out of page-locked memory: ", bytes, " bytes were asked for"));
  }
  return {data, [](void* held) { cudaFreeHost(held); }};
}

BesideCapture::BesideCapture() {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  require_cuda(cudaThreadExchangeStreamCaptureMode(&mode), "the mode of captures");
  before_ = mode;
}
BesideCapture::~BesideCapture() {
  auto mode = static_cast<cudaStreamCaptureMode>(before_);
  cudaThreadExchangeStreamCaptureMode(&mode);
}

bool stream_ready(Stream stream) {
  const cudaError_t state = cudaStreamQuery(stream_of(stream));
  if (state == cudaErrorNotReady) {
    cudaGetLastError();  // clears the status, which is no error
    return false;
  }
  require_cuda(state, "CUDA stream");
  return true;
}

void record_event(void* event, Stream stream) {
  require_cuda(cudaEventRecord(event_of(event), stream_of(stream)), "event");
}
void stream_wait(Stream stream, void* event) {
  require_cuda(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0), "event");
}
void record_event_if_running(void* event, Stream stream) {
  if (!is_captured(stream)) record_event(event, stream);
}
void stream_wait_if_running(Stream stream, void* event) {
  if (!is_captured(stream)) stream_wait(stream, event);
}
void wait_event(void* event) { require_cuda(cudaEventSynchronize(event_of(event)), "CUDA stream"); }
bool event_passed(void* event) {
  const cudaError_t state = cudaEventQuery(event_of(event));
  if (state == cudaErrorNotReady) {
    cudaGetLastError();  // clears the status, which is no error
    return false;
  }
  require_cuda(state, "CUDA stream");
  return true;
}

void copy_async(void* to, const void* from, std::size_t bytes, Stream stream) {
  require_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)), "copy");
}

void copy_rows_async(const RowsTo& to, const RowsFrom& from, std::size_t row_bytes,
                     std::size_t rows, Stream stream) {
  if (rows == 0 || row_bytes == 0) return;
  require_cuda(cudaMemcpy2DAsync(to.data, to.stride, from.data, from.stride, row_bytes, rows,
                                 cudaMemcpyDefault, stream_of(stream)),
               "copy of rows");
}

void begin_capture(Stream stream) {
  require_cuda(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal),
               "capture of a graph");
}

std::shared_ptr<void> end_capture(Stream stream) {
  cudaGraph_t captured;
  require_cuda(cudaStreamEndCapture(stream_of(stream), &captured), "capture of a graph");
  cudaGraphExec_t ready;
  const cudaError_t made = cudaGraphInstantiate(&ready, captured, 0);
  cudaGraphDestroy(captured);
  require_cuda(made, "graph");
  std::shared_ptr<void> graph(
      ready, [](void* held) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(held)); });
  // Uploads the graph now, so that its device memory is not allocated at the first launch.
  require_cuda(cudaGraphUpload(ready, stream_of(stream)), "graph");
  return graph;
}

void abandon_capture(Stream stream) noexcept {
  cudaGraph_t captured = nullptr;
  if (cudaStreamEndCapture(stream_of(stream), &captured) == cudaSuccess && captured != nullptr)
    cudaGraphDestroy(captured);
  cudaGetLastError();
}

void launch_graph(void* graph, Stream stream) {
  require_cuda(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream_of(stream)), "graph");
}

}  // namespace logitless::cuda
