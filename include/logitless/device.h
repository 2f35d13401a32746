// Memory, streams and captured graphs of a GPU, for callers of programs that are compiled for one
// (compiler.h).
//
// All belong to the device of the context they were made with, which must be the thread's current
// one, and must not outlive the context. They move and do not copy. Constructors throw
// InvalidArgument when the context is the CPU's, and DeviceError; everything else DeviceError, with
// the first error of what ran on the device before, too. Not shared between threads at the same
// time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "logitless/context.h"
#include "logitless/export.h"

namespace logitless {

// Empty, or why there is no Context of the GPU of this index: none there, one too old, or a build
// without CUDA.
LOGITLESS_API std::string gpu_missing(int index = 0);

// Makes the GPU of this index the thread's current one, which contexts and all below are made for.
// Throws Unsupported in a build without CUDA, DeviceError when there is none of this index.
LOGITLESS_API void use_gpu(int index);

// A GPU's name, and its bytes as its driver has them: free is what no process has taken.
struct DeviceStatus {
  std::string name;
  std::size_t free_bytes = 0, total_bytes = 0;
};
LOGITLESS_API DeviceStatus device_status(const Context& context);

// Memory of the device, aligned to 256 bytes, uninitialised, counted by the context's meter. The
// destructor waits for the device.
class LOGITLESS_API DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(const Context& context, std::size_t bytes);
  void* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }
  // From byte `offset` on.
  template <typename T>
  T* as(std::size_t offset = 0) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(data()) + offset);
  }

 private:
  std::shared_ptr<void> memory_;
  std::size_t bytes_ = 0;
};

// Memory of the host that cannot be paged out, uninitialised: copies between it and the device do
// not wait.
class LOGITLESS_API PinnedBuffer {
 public:
  PinnedBuffer() = default;
  PinnedBuffer(const Context& context, std::size_t bytes);
  void* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }
  template <typename T>
  T* as(std::size_t offset = 0) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(data()) + offset);
  }

 private:
  std::shared_ptr<void> memory_;
  std::size_t bytes_ = 0;
};

// A point of a stream.
class LOGITLESS_API DeviceEvent {
 public:
  explicit DeviceEvent(const Context& context);
  // Waits until the device is past the point where it was recorded last; not at all where it never
  // was.
  void wait() const;
  // Whether wait() would return at once.
  bool passed() const;

 private:
  friend class DeviceStream;
  std::shared_ptr<void> event_;
};

// What a stream was told, to be told again in one call.
class LOGITLESS_API DeviceGraph {
 public:
  DeviceGraph() = default;

 private:
  friend class DeviceStream;
  std::shared_ptr<void> graph_;
};

// An order of work of its own: it does not wait for the default stream's. Calls enqueue and return,
// but for wait(). The destructor does not wait.
class LOGITLESS_API DeviceStream {
 public:
  // urgent: its kernels are started before those of other streams.
  explicit DeviceStream(const Context& context, bool urgent = false);
  // The cudaStream_t.
  void* handle() const { return stream_.get(); }

  // Between the device's memory and the host's, or inside the device's. The host's may be pageable
  // memory; then the call may wait.
  void copy(void* to, const void* from, std::size_t bytes) const;
  void fill(void* to, int byte, std::size_t bytes) const;
  // sums[i] = pieces[0][i] + pieces[1][i] + ..., in this order:
  //   pieces  f32 [ranks, count]   sums  f32 [count], elsewhere; both in the device's memory
  void add_pieces(const float* pieces, int ranks, std::int64_t count, float* sums) const;
  // While a graph is captured: each launch of it records the event.
  void record(DeviceEvent& event) const;
  // What is enqueued from here on comes after the point where the event was recorded last, on any
  // stream of the device. Not while a graph is captured.
  void follow(const DeviceEvent& event) const;
  void wait() const;

  // What `enqueue` tells this stream, not run yet. Copies and runs inside read and write the
  // addresses of now, whenever the graph is launched. What `enqueue` throws comes through.
  // Takes memory of the device for the graph's own, of the order of a KiB for each kernel.
  DeviceGraph capture(const std::function<void()>& enqueue) const;
  void launch(const DeviceGraph& graph) const;

 private:
  std::shared_ptr<void> stream_;
};

}  // namespace logitless
