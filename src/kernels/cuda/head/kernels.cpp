// The table of head kernels. Functions that enqueue work are declared here alone, since only the
// table names them.
#include "core/check.h"
#include "kernels/cuda/cublas.h"
#include "kernels/cuda/head/sample_sizes.h"
#include "kernels/cuda/head/sizes.h"
#include "kernels/cuda/head/tile_kernel.h"
#include "kernels/device/kernel.h"

namespace logitless::cuda {

// forward_sm90.cu
std::string hopper_call_unsupported(const ForwardCall& call);
void hopper_forward(const ForwardCall& call);
void hopper_target_logits(const ForwardCall& call, float* logits);
void hopper_store(const ForwardCall&, const float* logit_bias, float* results, float* tile_tops);
void hopper_begin_forward(const ForwardCall& call);
void hopper_forward_tiles(const ForwardCall& call);
void hopper_forward_selected(const ForwardCall& call);
// stored_tiles_sm90.cu
void hopper_forward_stored(const ForwardCall& call);
// gradient_sm90.cu
void hopper_gradient_block(const BlockCall& call);
void hopper_gradient_gemms(const GradientGemmsCall& call);
// forward_sm80.cu
void sm80_forward(const ForwardCall& call);
void sm80_target_logits(const ForwardCall& call, float* logits);
void sm80_begin_forward(const ForwardCall& call);
void sm80_forward_tiles(const ForwardCall& call);
void sm80_forward_selected(const ForwardCall& call);
void sm80_store(const ForwardCall&, const float* logit_bias, float* results, float* tile_tops);
void sm80_gradient_block(const BlockCall& call);
// stored_tiles_sm80.cu
void sm80_forward_stored(const ForwardCall& call);
// forward_sm86.cu
void sm86_forward(const ForwardCall& call);
void sm86_target_logits(const ForwardCall& call, float* logits);
void sm86_begin_forward(const ForwardCall& call);
void sm86_forward_tiles(const ForwardCall& call);
void sm86_forward_selected(const ForwardCall& call);
void sm86_store(const ForwardCall&, const float* logit_bias, float* results, float* tile_tops);
void sm86_gradient_block(const BlockCall& call);
// gradient_listed_sm80.cu
void sm80_gradient_gemms(const GradientGemmsCall& call);
// cublas_kernel.cu
void cublas_forward(const ForwardCall& call);
void cublas_store(const ForwardCall&, const float* logit_bias, float* results, float* tile_tops);
void cublas_forward_stored(const ForwardCall& call);
void cublas_gradient_block(const BlockCall& call);
// gradient_sm80.cu
void cublas_gradient_gemms(const GradientGemmsCall& call);

namespace {

// A function that enqueues work; null in a build without CUDA.
#ifdef LOGITLESS_HAS_CUDA
template <auto function>
constexpr auto kLaunch = function;
#else
template <auto function>
constexpr decltype(function) kLaunch = nullptr;
#endif

// Rates of an H200 at its sustained clock. A round of d_weight has 66 clusters, 256 x 256 each.
DeviceRates hopper_rates(DType) {
  return {.forward_flops = 695e12,
          .gemm_flops = 690e12,
          .logit_seconds = 0.3e-12,
          .bytes_per_second = 7.6e12,
          .sum_seconds = 1.9e-12,
          .chunk_seconds = 100e-6,
          .block_seconds = 90e-6,
          .round_flops = 2.0 * 66 * 256 * 256};
}
// Fitted to twenty plans of two heads on an H200, with errors below 10 %.
constexpr FarRates kHopperFarRates = {.gemm_fraction = 0.605,
                                      .chunk_seconds = 220e-6,
                                      .block_seconds = 21e-6,
                                      .tile_seconds = 7.8e-11,
                                      .bytes_per_second = 6.6e12,
                                      .selected_groups = 2.6};
// Rates of an H200, fitted to the plans of three heads (docs/develop/benchmarks.md).
DeviceRates sm80_rates(DType) {
  return {.forward_flops = 450e12,
          .gemm_flops = 660e12,
          .logit_seconds = 0.8e-12,
          .bytes_per_second = 7.6e12,
          .sum_seconds = 1.9e-12,
          .chunk_seconds = 150e-6,
          .block_seconds = 90e-6,
          .round_flops = 0.0,
          .by_mma_sync = true};
}
DeviceRates cublas_rates(DType dtype) {
  const bool wide = dtype == DType::f32;
  const double flops = wide ? 45e12 : 600e12;
  return {.forward_flops = flops,
          .gemm_flops = flops,
          .logit_seconds = 0.0,
          .logit_bytes = 8.0,
          .bytes_per_second = wide ? 3.0e12 : 3.5e12,
          .sum_seconds = 0.0,
          .chunk_seconds = 150e-6,
          .block_seconds = 50e-6,
          .round_flops = 0.0};
}

constexpr FarForward kHopperFar = {.rates = kHopperFarRates,
                                   .head_unsupported = hopper_unsupported,
                                   .unsupported = kLaunch<hopper_call_unsupported>,
                                   .begin = kLaunch<hopper_begin_forward>,
                                   .target_logits = kLaunch<local_target_logits>,
                                   .all_tiles = kLaunch<hopper_forward_tiles>,
                                   .selected_tiles = kLaunch<hopper_forward_selected>};

// Hopper's, but for the products of selected tiles: mma.sync has two thirds of the throughput.
constexpr FarRates sm80_far_rates() {
  FarRates rates = kHopperFarRates;
  rates.gemm_fraction = 0.5;
  return rates;
}
constexpr FarForward far_of_sm80(void (*begin)(const ForwardCall&),
                                 void (*all_tiles)(const ForwardCall&),
                                 void (*selected_tiles)(const ForwardCall&)) {
  return {.rates = sm80_far_rates(),
          .head_unsupported = sm80_far_unsupported,
          .unsupported = sm80_far_call_unsupported,
          .begin = begin,
          .target_logits = kLaunch<local_target_logits>,
          .all_tiles = all_tiles,
          .selected_tiles = selected_tiles};
}
constexpr FarForward kSm80Far = far_of_sm80(
    kLaunch<sm80_begin_forward>, kLaunch<sm80_forward_tiles>, kLaunch<sm80_forward_selected>);
constexpr FarForward kSm86Far = far_of_sm80(
    kLaunch<sm86_begin_forward>, kLaunch<sm86_forward_tiles>, kLaunch<sm86_forward_selected>);

constexpr StoredForward stored_by_tiles(decltype(StoredForward::store) store,
                                        void (*forward)(const ForwardCall&)) {
  return {.unit_tokens = [](const ForwardShape&) { return kBlockPadding; },
          .store = store,
          .forward = forward};
}
constexpr StoredForward kHopperStored =
    stored_by_tiles(kLaunch<hopper_store>, kLaunch<hopper_forward_stored>);
constexpr StoredForward kSm80Stored =
    stored_by_tiles(kLaunch<sm80_store>, kLaunch<sm80_forward_stored>);
constexpr StoredForward kSm86Stored =
    stored_by_tiles(kLaunch<sm86_store>, kLaunch<sm80_forward_stored>);
constexpr StoredForward kCublasStored = {.unit_tokens = cublas_unit_tokens,
                                         .store = kLaunch<cublas_store>,
                                         .forward = kLaunch<cublas_forward_stored>};

// Three products for one, and the splitting of operands beside them.
DeviceRates bf16x3_rates(DType dtype) {
  DeviceRates rates = cublas_rates(dtype);
  rates.forward_flops = rates.gemm_flops = 170e12;
  rates.weight_bytes = 10.0;  // fp32 is read, three bf16 are written
  return rates;
}

// Compute capability 8.0 and later. Two kernels differ in the shared memory of their pipelines.
constexpr DeviceKernel tiles_of_sm80(const char* name, int shared_kib,
                                     void (*forward)(const ForwardCall&),
                                     void (*target_logits)(const ForwardCall&, float*),
                                     void (*gradient_block)(const BlockCall&),
                                     const FarForward* far, const StoredForward& stored) {
  return {.name = name,
          .copies_hidden = false,
          .splits_sums = true,
          .skips_ignored = true,
          .gemms_skip = GemmsSkip::beyond_expected,
          .takes_ranges = true,
          .takes_shards = true,
          .least_capability = 80,
          .most_capability = 999,
          .shared_kib = shared_kib,
          .tile_tokens = 256,
          .tile_vocab = 256,
          .rates = sm80_rates,
          .unsupported = sm80_unsupported,
          .workspace_bytes = sm80_workspace_bytes,
          .gemms_bytes = cublas_gemms_bytes,
          .missing = kLaunch<cublas_missing>,
          .prepare = kLaunch<cublas_prepare>,
          .forward = forward,
          .target_logits = target_logits,
          .far = far,
          .gradient_block = gradient_block,
          .gradient_gemms = kLaunch<sm80_gradient_gemms>,
          .stored = &stored};
}

constexpr DeviceKernel kHopper = {.name = "hopper",
                                  .copies_hidden = false,
                                  .splits_sums = true,
                                  .skips_ignored = true,
                                  .gemms_skip = GemmsSkip::ignored,
                                  .takes_ranges = true,
                                  .takes_shards = true,
                                  .least_capability = 90,
                                  .most_capability = 90,
                                  .shared_kib = 227,
                                  .tile_tokens = 256,
                                  .tile_vocab = 256,
                                  .rates = hopper_rates,
                                  .unsupported = hopper_unsupported,
                                  .workspace_bytes = hopper_workspace_bytes,
                                  .gemms_bytes = hopper_gemms_bytes,
                                  .missing = nullptr,
                                  .prepare = nullptr,
                                  .forward = kLaunch<hopper_forward>,
                                  .target_logits = kLaunch<hopper_target_logits>,
                                  .far = &kHopperFar,
                                  .gradient_block = kLaunch<hopper_gradient_block>,
                                  .gradient_gemms = kLaunch<hopper_gradient_gemms>,
                                  .stored = &kHopperStored};

// Far-field plans of f16 take sm80.
constexpr DeviceKernel hopper_f16() {
  DeviceKernel kernel = kHopper;
  kernel.name = "hopper_f16";
  kernel.unsupported = hopper_f16_unsupported;
  kernel.far = nullptr;
  return kernel;
}

constexpr DeviceKernel kCublas = {.name = "cublas",
                                  .copies_hidden = true,
                                  .splits_sums = true,
                                  .skips_ignored = false,
                                  .gemms_skip = GemmsSkip::nothing,
                                  .takes_ranges = false,
                                  .takes_shards = false,
                                  .least_capability = 75,
                                  .most_capability = 999,
                                  .shared_kib = 0,
                                  .tile_tokens = 256,
                                  .tile_vocab = 256,
                                  .rates = cublas_rates,
                                  .unsupported = cublas_unsupported,
                                  .workspace_bytes = cublas_workspace_bytes,
                                  .gemms_bytes = cublas_gemms_bytes,
                                  .missing = kLaunch<cublas_missing>,
                                  .prepare = kLaunch<cublas_prepare>,
                                  .forward = kLaunch<cublas_forward>,
                                  .target_logits = nullptr,
                                  .far = nullptr,
                                  .gradient_block = kLaunch<cublas_gradient_block>,
                                  .gradient_gemms = kLaunch<cublas_gradient_gemms>,
                                  .stored = &kCublasStored};

constexpr DeviceKernel cublas_bf16x3() {
  DeviceKernel kernel = kCublas;
  kernel.name = "cublas_bf16x3";
  kernel.least_capability = 80;
  kernel.rates = bf16x3_rates;
  kernel.unsupported = bf16x3_unsupported;
  kernel.workspace_bytes = bf16x3_workspace_bytes;
  kernel.gemms_bytes = bf16x3_gemms_bytes;
  kernel.stored = nullptr;
  return kernel;
}

constexpr DeviceKernel kKernels[] = {
    kHopper,
    hopper_f16(),
    tiles_of_sm80("sm80", 163, kLaunch<sm80_forward>, kLaunch<sm80_target_logits>,
                  kLaunch<sm80_gradient_block>, &kSm80Far, kSm80Stored),
    tiles_of_sm80("sm86", 99, kLaunch<sm86_forward>, kLaunch<sm86_target_logits>,
                  kLaunch<sm86_gradient_block>, &kSm86Far, kSm86Stored),
    kCublas,
    cublas_bf16x3(),
};

// Most shared memory of a thread block, KiB.
int shared_kib_of(int capability) {
  switch (capability) {
    case 75:
      return 64;
    case 80:
    case 87:
      return 163;
    case 86:
    case 89:
    case 120:
    case 121:
      return 99;
    default:
      return 227;
  }
}

std::string version_text(int capability) { return concat(capability / 10, ".", capability % 10); }

}  // namespace

std::span<const DeviceKernel> device_kernels() { return kKernels; }

const DeviceKernel& find_device_kernel(std::string_view name) {
  std::string names;
  for (const DeviceKernel& kernel : device_kernels()) {
    if (name == kernel.name) return kernel;
    names += concat(names.empty() ? "" : ", ", kernel.name);
  }
  throw InvalidArgument(concat("kernel: '", name, "' does not run on a GPU; there are ", names));
}

std::string capability_refusal(const DeviceKernel& kernel, int compute_capability) {
  if (compute_capability >= kernel.least_capability &&
      compute_capability <= kernel.most_capability) {
    const int there = shared_kib_of(compute_capability);
    return there >= kernel.shared_kib
               ? ""
               : concat("needs ", kernel.shared_kib,
                        " KiB of shared memory for a thread block, the GPU has ", there);
  }
  return concat("runs on compute capability ", version_text(kernel.least_capability),
                kernel.most_capability > 990 ? " and up"
                : kernel.most_capability == kernel.least_capability
                    ? " alone"
                    : concat(" to ", version_text(kernel.most_capability)),
                ", the GPU has ", version_text(compute_capability));
}

}  // namespace logitless::cuda
