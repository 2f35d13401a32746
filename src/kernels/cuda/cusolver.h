// cuSOLVER, loaded at run time.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/device/head.h"

namespace logitless::cuda {

// Returns why cuSOLVER cannot be used, or empty.
const std::string& cusolver_missing();

// Workspace bytes of symmetric_eigen. Makes this thread's handle for the current device. Throws
// DeviceError.
std::size_t eigen_workspace_bytes(std::int64_t dim);
// Replaces a symmetric matrix [dim, dim] f32 by its eigenvectors, one a row, and writes its
// eigenvalues to values [dim], ascending. Workspace: eigen_workspace_bytes(dim), aligned to 256. It
// begins with an int that is 0 if the solver converged. Enqueues. Throws DeviceError.
void symmetric_eigen(float* matrix, std::int64_t dim, float* values, void* workspace,
                     Stream stream);

}  // namespace logitless::cuda
