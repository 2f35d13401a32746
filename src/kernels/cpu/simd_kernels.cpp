// All SIMD targets of the CPU kernels: Highway compiles this file once for each.
#undef HWY_DISABLED_TARGETS
// Targets nobody would choose beside those kept; SVE has no arrays of vectors.
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/simd_kernels.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
#include "kernels/cpu/chunk-inl.h"
#include "kernels/cpu/simd_f32-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

inline std::size_t ScratchF32(const HeadShape& shape, const HeadFeatures& features, const ChunkSizes& sizes) {
  return make_layout(EngineF32::kTraits, shape, features, sizes).total;
}

HeadKernel KernelF32() {
  return {"", nullptr, nullptr, 0.0, ScratchF32, stored_element_bytes, RunForward<EngineF32>, RunBackward<EngineF32>};
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "hwy/targets.h"
#include "kernels/cpu/register_cpu.h"

namespace logitless::cpu {
namespace {

template <std::int64_t kTarget>
Support target_runnable() {
  if ((hwy::SupportedTargets() & kTarget) != 0) return {};
  return std::string("the processor has no ") + hwy::TargetName(kTarget);
}
// The portable target needs nothing.
Support always_runnable() { return {}; }

Support supports_any(const HeadShape&, const HeadFeatures&) { return {}; }

HeadKernel row(HeadKernel kernel, std::string_view name, Support (*runnable)(), double flops_per_second) {
  kernel.name = name;
  kernel.runnable = runnable;
  kernel.supports = supports_any;
  kernel.flops_per_second = flops_per_second;
  return kernel;
}

}  // namespace

std::vector<HeadKernel> simd_kernels() {
  std::vector<HeadKernel> rows;
#if HWY_TARGETS & HWY_AVX3
  rows.push_back(row(N_AVX3::KernelF32(), "avx512", target_runnable<HWY_AVX3>, 110e9));
#endif
#if HWY_TARGETS & HWY_AVX2
  rows.push_back(row(N_AVX2::KernelF32(), "avx2", target_runnable<HWY_AVX2>, 70e9));
#endif
#if HWY_TARGETS & HWY_NEON
  rows.push_back(row(N_NEON::KernelF32(), "neon", always_runnable, 30e9));
#endif
#if HWY_TARGETS & HWY_EMU128
  rows.push_back(row(N_EMU128::KernelF32(), "scalar", always_runnable, 3e9));
#elif HWY_TARGETS & HWY_SCALAR
  rows.push_back(row(N_SCALAR::KernelF32(), "scalar", always_runnable, 2e9));
#endif
  return rows;
}

}  // namespace logitless::cpu
#endif  // HWY_ONCE
