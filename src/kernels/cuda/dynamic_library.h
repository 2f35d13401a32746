// Libraries that are found at run time.
#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <cstring>
#include <initializer_list>
#include <string>

#include "core/check.h"

namespace logitless::cuda {

class DynamicLibrary {
 public:
  // The first of `names` that the loader finds.
  DynamicLibrary(const char* title, std::initializer_list<const char*> names) : title_(title) {
    for (const char* name : names) {
      library_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (library_ != nullptr) return;
      missing_ += concat(missing_.empty() ? "" : " or ", name);
    }
    missing_ = concat(title, " (", missing_, ") is not found by the loader");
  }
  template <typename F>
  void find(const char* name, F& function) {
    if (library_ == nullptr) return;
    void* const found = dlsym(library_, name);
    if (found == nullptr && missing_.empty()) missing_ = concat(title_, " has no ", name);
    std::memcpy(&function, &found, sizeof(found));
  }
  // Empty, or what there is not.
  const std::string& missing() const { return missing_; }

 private:
  const char* title_;
  void* library_ = nullptr;  // never closed: its threads may outlive main
  std::string missing_;
};

// A handle for each device, of a thread; never destroyed, since at exit the driver may be gone
// before.
class DeviceHandles {
 public:
  using Create = int (*)(void**);
  // The current device's. Throws Unsupported with what is `missing`, DeviceError.
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
