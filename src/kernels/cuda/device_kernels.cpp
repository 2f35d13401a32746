#include "kernels/cuda/device_kernels.h"

#include "core/check.h"
#include "kernels/cuda/cublas.h"

namespace logitless::cuda {

std::span<const DeviceKernel> device_kernels() {
  static constexpr DeviceKernel kKernels[] = {
      {"hopper", false, true, true, 90, 90, forward_unsupported, forward_workspace_bytes, forward,
       gradient_block, nullptr, gradient_products, products_bytes, nullptr},
      {"cublas", true, false, false, 80, 999, cublas_unsupported, cublas_workspace_bytes,
       cublas_forward, cublas_gradient_block, cublas_block_unscale, cublas_gradient_products,
       nullptr, cublas_prepare},
  };
  return kKernels;
}

const DeviceKernel& find_device_kernel(std::string_view name) {
  std::string names;
  for (const DeviceKernel& kernel : device_kernels()) {
    if (name == kernel.name) return kernel;
    names += concat(names.empty() ? "" : ", ", kernel.name);
  }
  throw InvalidArgument(concat("kernel: '", name, "' does not run on a GPU; there are ",
                               names.empty() ? "none in a build without CUDA" : names));
}

}  // namespace logitless::cuda
