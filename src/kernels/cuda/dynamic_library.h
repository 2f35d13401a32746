// Shared libraries that are loaded at run time, and their handles.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

#include "core/check.h"
#include "kernels/cuda/found_library.h"

namespace logitless::cuda {

// Handles that no thread uses, by device. A thread's handles outlive it: cuBLAS keeps memory of the
// GPU for each, and destroying one waits for the GPU.
class HandlePool {
 public:
  // Returns a handle of the device, or null.
  void* take(std::size_t device) {
    const std::lock_guard lock(mutex_);
    std::vector<void*>& of_device = free_[device];
    if (of_device.empty()) return nullptr;
    void* const handle = of_device.back();
    of_device.pop_back();
    return handle;
  }
  void give(std::size_t device, void* handle) {
    const std::lock_guard lock(mutex_);
    free_[device].push_back(handle);
  }
  static constexpr std::size_t kDevices = 64;

 private:
  std::mutex mutex_;
  std::array<std::vector<void*>, kDevices> free_;
};

// Library handles of one thread, one for each device. They are never destroyed, since at exit the
// driver may already be gone; a thread that ends leaves them to others.
class DeviceHandles {
 public:
  using Create = int (*)(void**);
  // The pool outlives the thread. Null: nobody takes the handles of a thread that has ended.
  explicit DeviceHandles(HandlePool* pool) : pool_(pool) {}
  DeviceHandles(const DeviceHandles&) = delete;
  DeviceHandles& operator=(const DeviceHandles&) = delete;
  ~DeviceHandles() {
    for (std::size_t device = 0; pool_ != nullptr && device < handles_.size(); ++device)
      if (handles_[device] != nullptr) pool_->give(device, handles_[device]);
  }
  // Returns the current device's handle. Throws Unsupported with `missing`, or DeviceError.
  void* get(const char* title, const std::string& missing, Create create) {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device < 0 ||
        static_cast<std::size_t>(device) >= HandlePool::kDevices)
      throw DeviceError(concat(title, ": no current device"));
    void*& made = handles_[static_cast<std::size_t>(device)];
    if (made != nullptr) return made;
    if (!missing.empty()) throw Unsupported(missing);
    if (pool_ != nullptr) made = pool_->take(static_cast<std::size_t>(device));
    if (made != nullptr) return made;
    const int status = create(&made);
    if (status != 0) throw DeviceError(concat(title, ": status ", status, " for a handle"));
    return made;
  }

 private:
  HandlePool* pool_;
  std::array<void*, HandlePool::kDevices> handles_{};
};

}  // namespace logitless::cuda
