// Shared libraries that are loaded at run time, and their handles.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <string>

#include "core/check.h"
#include "kernels/cuda/found_library.h"

namespace logitless::cuda {

// Library handles of one thread, one for each device. They are never destroyed, since at exit the
// driver may already be gone.
class DeviceHandles {
 public:
  using Create = int (*)(void**);
  // Returns the current device's handle. Throws Unsupported with `missing`, or DeviceError.
  void* get(const char* title, const std::string& missing, Create create) {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= kDevices)
      throw DeviceError(concat(title, ": no current device"));
    void*& made = handles_[static_cast<std::size_t>(device)];
    if (made != nullptr) return made;
    if (!missing.empty()) throw Unsupported(missing);
    const int status = create(&made);
    if (status != 0) throw DeviceError(concat(title, ": status ", status, " for a handle"));
    return made;
  }

 private:
  static constexpr int kDevices = 64;
  std::array<void*, kDevices> handles_{};
};

}  // namespace logitless::cuda
