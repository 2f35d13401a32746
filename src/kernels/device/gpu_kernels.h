// The GPU head kernels that this process considers, and the instructions that it uses beside them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace logitless::cuda {

struct DeviceKernel;

// Returns the kernels of a list "sm80,cublas", in its order; all of the table, best first, for "".
// Throws InvalidArgument naming `source` and the kernels of the table on anything else.
std::vector<const DeviceKernel*> parse_gpu_kernels(std::string_view source, std::string_view list);

// Returns the kernels of LOGITLESS_GPU_KERNELS, the only ones that are chosen automatically.
std::vector<const DeviceKernel*> gpu_kernels();
// Returns the one kernel that the caller names, whatever the variable says, or those of
// gpu_kernels().
std::vector<const DeviceKernel*> wanted_gpu_kernels(std::string_view wanted);
// Returns why `kernel` is not among gpu_kernels(), or empty.
std::string gpu_kernel_refusal(const DeviceKernel& kernel);

// Compute capability of the instructions that every choice by capability may use on a GPU:
// - its own if `kernels` has one for this capability alone, or the table has none
// - 80 otherwise, as for an Ampere GPU
int instruction_capability(const std::vector<const DeviceKernel*>& kernels, int compute_capability);
// Returns it for LOGITLESS_GPU_KERNELS at the first call. It then stays, since scratch sizes depend
// on it.
int instruction_capability(int compute_capability);

}  // namespace logitless::cuda
