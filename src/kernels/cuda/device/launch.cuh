// Facts of the current device that launches depend on, and limits of kernels.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>
#include <vector>

#include "kernels/cuda/device/error.cuh"
#include "kernels/device/head.h"

namespace logitless::cuda {

// An attribute of the current device, queried once for each device.
template <cudaDeviceAttr kAttribute>
int device_attribute() {
  constexpr int kDevices = 64;
  static std::array<std::atomic<int>, kDevices> known{};
  const int device = current_device();
  int value = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (value != 0) return value;
  require_cuda(cudaDeviceGetAttribute(&value, kAttribute, device), "attribute of a device");
  if (device < kDevices) known[device].store(value, std::memory_order_relaxed);
  return value;
}
// SMs of the current device.
inline int processor_count() { return device_attribute<cudaDevAttrMultiProcessorCount>(); }
// Bytes of its L2 cache.
inline int cache_bytes() { return device_attribute<cudaDevAttrL2CacheSize>(); }
// Most bytes of shared memory that a thread block can have.
inline int most_shared_bytes() {
  return device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>();
}

// Raises a kernel's limit of dynamic shared memory, always to the same value for one kernel. Sets
// it once for each thread and device.
template <typename Kernel>
void allow_shared(Kernel kernel, int bytes) {
  thread_local std::vector<std::pair<const void*, int>> allowed;
  const std::pair key(reinterpret_cast<const void*>(kernel), current_device());
  if (std::find(allowed.begin(), allowed.end(), key) != allowed.end()) return;
  require_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "shared memory of a kernel");
  allowed.push_back(key);
}

}  // namespace logitless::cuda
