// cuSOLVER, found at run time.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/device_head.h"

namespace logitless::cuda {

// Empty, or why cuSOLVER cannot be used.
const std::string& cusolver_missing();

// Bytes that symmetric_eigen works in. Makes this thread's handle for the current device. Throws
// DeviceError.
std::size_t eigen_workspace_bytes(std::int64_t dim);
// matrix [dim, dim] f32, symmetric, becomes its eigenvectors, one a row, and values [dim] its
// eigenvalues, ascending. Workspace: eigen_workspace_bytes(dim), aligned to 256; it begins with an
// int that is 0 where it converged. Enqueues. Throws DeviceError.
void symmetric_eigen(float* matrix, std::int64_t dim, float* values, void* workspace,
                     Stream stream);

}  // namespace logitless::cuda
