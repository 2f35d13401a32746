#include "kernels/cuda/head/kernels.h"

#include "core/check.h"
#include "kernels/cuda/cublas.h"

namespace logitless::cuda {

namespace {

// Rates of an H200 at its sustained clock.
DeviceRates hopper_rates(DType) {
  return {.forward_flops = 695e12,
          .gemm_flops = 690e12,
          .logit_seconds = 0.3e-12,
          .bytes_per_second = 7.6e12,
          .sum_seconds = 1.9e-12,
          .chunk_seconds = 100e-6,
          .block_seconds = 90e-6};
}
DeviceRates cublas_rates(DType dtype) {
  const bool wide = dtype == DType::f32;
  const double flops = wide ? 45e12 : 600e12;
  return {.forward_flops = flops,
          .gemm_flops = flops,
          .logit_seconds = 0.0,
          .bytes_per_second = wide ? 3.0e12 : 3.5e12,
          .sum_seconds = 0.0,
          .chunk_seconds = 150e-6,
          .block_seconds = 0.0};
}

}  // namespace

std::span<const DeviceKernel> device_kernels() {
  static constexpr FarForward kHopperFar = {.begin = hopper_begin_forward,
                                            .target_logits = hopper_local_target_logits,
                                            .all_tiles = hopper_forward_tiles,
                                            .selected_tiles = hopper_forward_saved};
  static constexpr DeviceKernel kKernels[] = {
      {.name = "hopper",
       .keeps_logits = false,
       .splits_sums = true,
       .takes_ranges = true,
       .least_capability = 90,
       .most_capability = 90,
       .rates = hopper_rates,
       .unsupported = hopper_unsupported,
       .workspace_bytes = hopper_workspace_bytes,
       .forward = hopper_forward,
       .target_logits = hopper_target_logits,
       .far = &kHopperFar,
       .gradient_block = hopper_gradient_block,
       .block_unscale = nullptr,
       .gradient_gemms = hopper_gradient_gemms,
       .gemms_bytes = hopper_gemms_bytes,
       .prepare = nullptr},
      {.name = "cublas",
       .keeps_logits = true,
       .splits_sums = false,
       .takes_ranges = false,
       .least_capability = 80,
       .most_capability = 999,
       .rates = cublas_rates,
       .unsupported = cublas_unsupported,
       .workspace_bytes = cublas_workspace_bytes,
       .forward = cublas_forward,
       .target_logits = nullptr,
       .far = nullptr,
       .gradient_block = cublas_gradient_block,
       .block_unscale = cublas_block_unscale,
       .gradient_gemms = cublas_gradient_gemms,
       .gemms_bytes = nullptr,
       .prepare = cublas_prepare},
  };
  return kKernels;
}

const DeviceKernel& find_device_kernel(std::string_view name) {
  std::string names;
  for (const DeviceKernel& kernel : device_kernels()) {
    if (name == kernel.name) return kernel;
    names += concat(names.empty() ? "" : ", ", kernel.name);
  }
  throw InvalidArgument(concat("kernel: '", name, "' does not run on a GPU; there are ", names));
}

}  // namespace logitless::cuda
