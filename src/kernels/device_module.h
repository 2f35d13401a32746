// Kernels that are generated when a program is prepared: compiled by NVRTC, which is found at run
// time, kept in a cache on disk, loaded into the current device, launched. No CUDA headers here: a
// build without CUDA compiles text as any other, and answers the rest with the reason.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "kernels/device_head.h"

namespace logitless::cuda {

// Machine code (a cubin) of CUDA C++ text that includes no header, for `compute_capability` (90
// means sm_90a). Needs no GPU. Throws Unsupported, naming the package, where there is no NVRTC;
// InternalError with the compiler's log when the text does not compile.
std::string compile_cuda(std::string_view source, int compute_capability);

// The same from the cache: $LOGITLESS_CACHE, or $XDG_CACHE_HOME/logitless/cubin, or
// ~/.cache/logitless/cubin; "" as LOGITLESS_CACHE: none. Files are named by a hash of source,
// architecture, NVRTC's version and flags, and hold their length and a checksum: a file that is
// damaged or another's is compiled over. A folder that cannot be written is no error.
std::string cached_cubin(std::string_view source, int compute_capability);

struct LaunchShape {
  std::array<unsigned, 3> grid = {1, 1, 1};
  unsigned block = 1;
  unsigned shared_bytes = 0;
};

// A cubin in the current device.
class Module {
 public:
  Module() = default;
  explicit Module(std::string_view cubin);  // throws DeviceError
  // A kernel by its name (extern "C"), for launch(); lives as long as the module.
  void* kernel(const std::string& name) const;

 private:
  std::shared_ptr<void> library_;
};

// The library's own kernels, all of them, into the current device: some milliseconds, once. CUDA
// loads a kernel when it is first launched, and may wait for what runs on the GPU meanwhile, while
// other threads of the process launch and copy nothing. Ranks that are threads of one process would
// wait for one another's exchanges then. Of a driver before CUDA 12.4 it does nothing. Throws
// DeviceError.
void load_kernels();

// `arguments`: the address of each of the kernel's. Enqueues; may be captured. Throws DeviceError.
void launch(void* kernel, const LaunchShape& shape, std::span<void* const> arguments,
            Stream stream);

}  // namespace logitless::cuda
