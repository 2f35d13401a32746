// Converts CUDA error codes to exceptions.
#pragma once

#include <cuda_runtime.h>

#include "core/check.h"

namespace logitless::cuda {

inline void require_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) [[unlikely]]
    throw DeviceError(concat(what, ": ", cudaGetErrorString(error)));
}

}  // namespace logitless::cuda
