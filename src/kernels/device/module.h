// Generated kernels: compiled by NVRTC (loaded at run time) when a program is prepared, cached on
// disk, loaded into the current device and launched. It includes no CUDA headers; a build without
// CUDA compiles text as well, and throws the reason in the other calls.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "kernels/device/head.h"
#include "logitless/dtype.h"

namespace logitless::cuda {

// Compiles CUDA C++ text without includes to a cubin for `compute_capability` (90 means sm_90a,
// or sm_90 where instruction_capability lowers it). Needs no GPU. Throws Unsupported, naming the
// package, where there is no NVRTC. Throws InternalError with the compiler's log when the text does
// not compile.
std::string compile_cuda(std::string_view source, int compute_capability);

// Returns the cubin from the cache, or compiles it. The cache is $LOGITLESS_CACHE, or
// $XDG_CACHE_HOME/logitless/cubin, or ~/.cache/logitless/cubin; LOGITLESS_CACHE="" disables it.
// File names are a hash of source, architecture, NVRTC's version and flags. Files hold their length
// and a checksum: a damaged or foreign file is replaced. A folder that cannot be written is no
// error.
std::string cached_cubin(std::string_view source, int compute_capability);

struct LaunchShape {
  std::array<unsigned, 3> grid = {1, 1, 1};
  unsigned block = 1;
  unsigned shared_bytes = 0;
  // No more blocks than SMs, in pairs: the kernel takes any even number up to grid[0].
  bool persistent = false;
};

// A matrix in memory, whose rows are contiguous and a multiple of 16 bytes apart, as a kernel loads
// or stores it by TMA: in boxes of box_rows rows x 128 bytes with 128-byte swizzle.
struct MatrixShape {
  std::int64_t rows = 0, columns = 0, row_stride = 0;  // in elements
  int box_rows = 0;
  DType dtype = DType::bf16;  // f32, or bf16 for all types of 16 bits
};
// A CUtensorMap.
struct alignas(64) MatrixMap {
  std::array<std::uint64_t, 16> opaque;
};
// Returns the map of a matrix at an address that is a multiple of 16. Throws DeviceError.
MatrixMap map_of(const void* data, const MatrixShape& shape);

// A cubin loaded into the current device.
class Module {
 public:
  Module() = default;
  explicit Module(std::string_view cubin);  // throws DeviceError
  // Returns a kernel by its extern "C" name, for launch() with that much dynamic shared memory;
  // valid as long as the module.
  void* kernel(const std::string& name, unsigned shared_bytes = 0) const;

 private:
  std::shared_ptr<void> library_;
};

// Loads all of the library's kernels into the current device: some milliseconds, once. Otherwise
// CUDA loads a kernel at its first launch. That may wait for the GPU, while other threads of the
// process can neither launch nor copy. Ranks that are threads of one process would then deadlock in
// their exchanges. Does nothing with a driver before CUDA 12.4. Throws DeviceError.
void load_kernels();

// `arguments`: addresses of the kernel's arguments. Enqueues; may be captured. Throws DeviceError.
void launch(void* kernel, const LaunchShape& shape, std::span<void* const> arguments,
            Stream stream);

}  // namespace logitless::cuda
