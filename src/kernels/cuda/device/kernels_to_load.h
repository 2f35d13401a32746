// Kernels that load_kernels() loads (device/module.h).
#pragma once

namespace logitless::cuda {

class KernelsOfFile {
 public:
  // `kernel`: any kernel of a file; all are in one module. `wanted` says whether the current device
  // runs them; null: it does.
  explicit KernelsOfFile(const void* kernel, bool (*wanted)() = nullptr);
};

}  // namespace logitless::cuda
