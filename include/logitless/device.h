// Memory, streams and captured graphs of a GPU, for callers of programs that are compiled for one
// (compiler.h).
//
// All belong to the device of their context, which must be the thread's current one, and must not
// outlive the context. They move and do not copy. Constructors throw InvalidArgument when the
// context is the CPU's. Everything throws DeviceError, also for the first error of earlier work on
// the device. Not shared between threads at the same time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "logitless/context.h"
#include "logitless/export.h"

namespace logitless {

// Returns "" if a Context of the GPU of this index is possible, else the reason: no such GPU, one
// too old, or a build without CUDA.
LOGITLESS_API std::string gpu_missing(int index = 0);

// Makes the GPU of this index the thread's current one, for contexts and all classes below. Throws
// Unsupported in a build without CUDA, DeviceError when there is no such GPU.
LOGITLESS_API void use_gpu(int index);

// A GPU's name and memory, from the driver: free memory is what no process has allocated.
struct DeviceStatus {
  std::string name;
  std::size_t free_bytes = 0, total_bytes = 0;
};
LOGITLESS_API DeviceStatus device_status(const Context& context);

// Device memory, aligned to 256 bytes, uninitialised, counted by the context's meter. The
// destructor waits for the device.
class LOGITLESS_API DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(const Context& context, std::size_t bytes);
  void* data() const { return memory_.get(); }
  std::size_t bytes() const { return bytes_; }
  // Returns a pointer to byte `offset`.
  template <typename T>
  T* as(std::size_t offset = 0) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(data()) + offset);
  }

 private:
  std::shared_ptr<void> memory_;
  std::size_t bytes_ = 0;
};

// Pinned host memory, uninitialised: copies between it and the device do not wait.
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
  // Waits until the device has passed the last recorded point; returns at once if there is none.
  void wait() const;
  // Returns whether wait() would return at once.
  bool passed() const;

 private:
  friend class DeviceStream;
  std::shared_ptr<void> event_;
};

// Captured work of a stream, launched by one call.
class LOGITLESS_API DeviceGraph {
 public:
  DeviceGraph() = default;

 private:
  friend class DeviceStream;
  std::shared_ptr<void> graph_;
};

// A stream that does not wait for the default one. Calls enqueue and return, except wait(). The
// destructor does not wait.
class LOGITLESS_API DeviceStream {
 public:
  // urgent: its kernels are started before those of other streams.
  explicit DeviceStream(const Context& context, bool urgent = false);
  // Returns the cudaStream_t.
  void* handle() const { return stream_.get(); }

  // Copies between device and host memory, or inside device memory. With pageable host memory the
  // call may wait.
  void copy(void* to, const void* from, std::size_t bytes) const;
  void fill(void* to, int byte, std::size_t bytes) const;
  // Computes `sums[i] = slices[0][i] + slices[1][i] + ...` in this order, in device memory.
  // `slices` is f32 [ranks, count], `sums` f32 [count], without overlap.
  void add_slices(const float* slices, int ranks, std::int64_t count, float* sums) const;
  // Records the event; in a captured graph each launch records it.
  void record(DeviceEvent& event) const;
  // Makes all later work of this stream wait for the last recorded point of the event, on any
  // stream of the device. Not while a graph is captured.
  void follow(const DeviceEvent& event) const;
  void wait() const;

  // Captures the work that `enqueue` gives this stream, without running it. Copies and runs inside
  // use the present addresses at every launch. Exceptions of `enqueue` pass through. Takes device
  // memory for the graph, of the order of a KiB for each kernel.
  DeviceGraph capture(const std::function<void()>& enqueue) const;
  void launch(const DeviceGraph& graph) const;

 private:
  std::shared_ptr<void> stream_;
};

}  // namespace logitless
