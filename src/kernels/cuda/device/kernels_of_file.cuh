// Registers the kernels of the .cu file that includes it with load_kernels() (device/module.h).
#pragma once

namespace logitless::cuda {

// `kernel`: any kernel of the file; all are in one module.
class KernelsOfFile {
 public:
  explicit KernelsOfFile(const void* kernel);
};

namespace {

__global__ void marks_this_file() {}
const KernelsOfFile kernels_of_this_file(reinterpret_cast<const void*>(&marks_this_file));

}  // namespace
}  // namespace logitless::cuda
