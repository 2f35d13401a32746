// Machine code loaded into the current device.
#include "kernels/device/module.h"

#include <cuda_runtime_api.h>

#include "core/check.h"

namespace logitless::cuda {
namespace {

void require_cuda(cudaError_t status, const char* what, const std::string& of = {}) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw DeviceError(concat(what, of.empty() ? "" : " ", of, ": ", cudaGetErrorString(status)));
}

}  // namespace

Module::Module(std::string_view cubin) {
  cudaLibrary_t library = nullptr;
  require_cuda(
      cudaLibraryLoadData(&library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
      "cudaLibraryLoadData");
  library_ = std::shared_ptr<void>(
      library, [](void* loaded) { cudaLibraryUnload(static_cast<cudaLibrary_t>(loaded)); });
}

void* Module::kernel(const std::string& name) const {
  cudaKernel_t kernel = nullptr;
  require_cuda(
      cudaLibraryGetKernel(&kernel, static_cast<cudaLibrary_t>(library_.get()), name.c_str()),
      "cudaLibraryGetKernel", name);
  // The first query loads the code: do it here, not in a launch, which may be captured.
  cudaFuncAttributes attributes;
  require_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes", name);
  return kernel;
}

void launch(void* kernel, const LaunchShape& shape, std::span<void* const> arguments,
            Stream stream) {
  // The runtime's parameter type is not const, but it only reads the array.
  require_cuda(cudaLaunchKernel(kernel, dim3(shape.grid[0], shape.grid[1], shape.grid[2]),
                                dim3(shape.block), const_cast<void**>(arguments.data()),
                                shape.shared_bytes, static_cast<cudaStream_t>(stream)),
               "cudaLaunchKernel");
}

}  // namespace logitless::cuda
