// Registers the kernels of the .cu file that includes it with load_kernels() (device/module.h).
#pragma once

#include "kernels/cuda/device/kernels_to_load.h"

namespace logitless::cuda {
namespace {

__global__ void marks_this_file() {}
const KernelsOfFile kernels_of_this_file(reinterpret_cast<const void*>(&marks_this_file));

}  // namespace
}  // namespace logitless::cuda
