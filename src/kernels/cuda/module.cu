// Machine code loaded into the current device.
#include <cuda_runtime_api.h>

#include <bit>

#include "core/check.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/tensor_map.cuh"
#include "kernels/device/module.h"

namespace logitless::cuda {
namespace {

void require(cudaError_t status, const char* what, const std::string& of = {}) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw DeviceError(concat(what, of.empty() ? "" : " ", of, ": ", cudaGetErrorString(status)));
}

}  // namespace

Module::Module(std::string_view cubin) {
  cudaLibrary_t library = nullptr;
  require(cudaLibraryLoadData(&library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
          "cudaLibraryLoadData");
  library_ = std::shared_ptr<void>(
      library, [](void* loaded) { cudaLibraryUnload(static_cast<cudaLibrary_t>(loaded)); });
}

void* Module::kernel(const std::string& name, unsigned shared_bytes) const {
  cudaKernel_t kernel = nullptr;
  require(cudaLibraryGetKernel(&kernel, static_cast<cudaLibrary_t>(library_.get()), name.c_str()),
          "cudaLibraryGetKernel", name);
  // The first query loads the code: do it here, not in a launch, which may be captured.
  cudaFuncAttributes attributes;
  require(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes", name);
  if (shared_bytes > 0)
    require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_bytes)),
            "shared memory of kernel", name);
  return kernel;
}

MatrixMap map_of(const void* data, const MatrixShape& shape) {
  return std::bit_cast<MatrixMap>(
      matrix_map(data, shape.dtype, shape.rows, shape.columns, shape.row_stride, shape.box_rows));
}

void launch(void* kernel, const LaunchShape& shape, std::span<void* const> arguments,
            Stream stream) {
  unsigned blocks = shape.grid[0];
  if (shape.persistent) blocks = std::min(blocks, static_cast<unsigned>(processor_count()) / 2 * 2);
  // The runtime's parameter type is not const, but it only reads the array.
  require(cudaLaunchKernel(kernel, dim3(blocks, shape.grid[1], shape.grid[2]), dim3(shape.block),
                           const_cast<void**>(arguments.data()), shape.shared_bytes,
                           static_cast<cudaStream_t>(stream)),
          "cudaLaunchKernel");
}

}  // namespace logitless::cuda
