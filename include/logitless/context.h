// The context of all work: device, threads, instruction set, memory meter, trace.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "logitless/export.h"
#include "logitless/gpu_card.h"
#include "logitless/memory.h"

namespace logitless {

// cuda: an NVIDIA GPU of compute capability 7.5 or more, in a build with CUDA. docs/reference/
// support.md lists its kernels by dtype and compute capability; "cublas" loads libcublas.
enum class DeviceKind : std::uint8_t { cpu = 0, cuda = 1 };

// Properties of a device that planning needs. A plain value: plans for a machine can be made on
// another.
struct DeviceLimits {
  DeviceKind kind = DeviceKind::cpu;
  int threads = 0;  // of the CPU; 0: the default of a Context
  // The one kernel to use (see kernel_names), or empty: the best that accepts the problem, on a GPU
  // among those of LOGITLESS_GPU_KERNELS.
  std::string kernel = {};
  int compute_capability = 90;  // of a GPU: 10 * major + minor
  // Rates of a GPU. By default those of the usual card of the compute capability: an H200 for 90,
  // an A100 for 80, an RTX 3090 for 86, an RTX 4090 for 89, a B200 for 100 and an RTX 5090 for 120.
  GpuCard card = {};

  bool operator==(const DeviceLimits&) const = default;
};

// Returns the names of all built-in kernels, best first, the float64 reference last. `runnable`
// selects those that this machine can run. On x86: "amx_bf16", "avx512", "avx512_bf16" (before
// avx512 on AMD), "avx2", "scalar", "amx_bf16_emulated" (for tests), "reference".
LOGITLESS_API std::vector<std::string> kernel_names(bool runnable = true);

// Returns the names of all GPU head kernels, best first, such as "hopper", "sm80" and "cublas"
// (docs/use/gpu.md). A plan says why one does not take a head.
LOGITLESS_API std::vector<std::string> gpu_kernel_names();

inline constexpr int kMostThreads = 1024;

struct ContextOptions {
  // Threads of parallel regions, at most kMostThreads. 0 takes OMP_NUM_THREADS (at most
  // kMostThreads), or else all cores that the process may use (default_threads() of parallel.h).
  int threads = 0;
  // Use only this kernel (see kernel_names()). Empty: LOGITLESS_CPU, or else the best one for each
  // problem. Compiled programs take the instruction set of LOGITLESS_CPU for their other kernels.
  // On a GPU an empty name considers the kernels of LOGITLESS_GPU_KERNELS, such as "sm80,cublas",
  // in this order; all if it is unset. Kernels beside the head follow it in the same way.
  std::string kernel = {};
  DeviceKind device = DeviceKind::cpu;
  int device_index = 0;  // CUDA index of the GPU; it must be the thread's current one
  // cudaStream_t that all work is enqueued on; null: the default stream. Calls return before the
  // work is done, and neither wait nor allocate.
  void* stream = nullptr;
  // Called with one line of text at each decision (kernel chosen, plan chosen). The library never
  // prints.
  std::function<void(std::string_view)> trace = {};
};

// Not shared between threads that call at the same time; make one for each. Throws InvalidArgument
// on a kernel that is unknown or cannot run here, a thread count out of range, or a
// stream without a GPU. Throws Unsupported when the GPU is missing or the build has no CUDA.
class LOGITLESS_API Context {
 public:
  Context() : Context(ContextOptions{}) {}
  explicit Context(ContextOptions options);

  const DeviceLimits& device() const { return device_; }
  int threads() const { return device_.threads; }
  void* stream() const { return stream_; }
  // Returns this context on another stream of its GPU, without a call of the driver. Throws
  // InvalidArgument for a CPU context.
  Context on(void* stream) const;
  MemoryMeter& memory() const { return *memory_; }
  void trace(std::string_view line) const {
    if (trace_) trace_(line);
  }

 private:
  DeviceLimits device_;
  void* stream_ = nullptr;
  std::shared_ptr<MemoryMeter> memory_;
  std::function<void(std::string_view)> trace_;
};

}  // namespace logitless
