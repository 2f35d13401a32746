// Driver functions looked up at run time, so that linking and starting need no driver.
#pragma once

#include <cuda_runtime_api.h>

#include <bit>

#include "kernels/cuda/device/error.cuh"

namespace logitless::cuda {

// Returns the function as of this CUDA version (12000: 12.0). Throws DeviceError where the driver
// has none of that name.
template <typename Function>
Function driver_function(const char* name, unsigned version = 12000) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  require_cuda(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result),
               name);
  if (result != cudaDriverEntryPointSuccess) throw DeviceError(concat("the driver has no ", name));
  return std::bit_cast<Function>(found);
}

}  // namespace logitless::cuda
