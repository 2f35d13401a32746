// All SIMD targets of the CPU kernels: Highway compiles this file once for each.
#undef HWY_DISABLED_TARGETS
// Disabled targets are never better than the others; SVE cannot have arrays of vectors.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/simd_kernels.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
#include "kernels/cpu/far/backward-inl.h"
#include "kernels/cpu/far/forward-inl.h"
#include "kernels/cpu/far/order-inl.h"
#include "kernels/cpu/far/points-inl.h"
#include "kernels/cpu/head/bf16_engine-inl.h"
#include "kernels/cpu/head/chunk-inl.h"
#include "kernels/cpu/head/simd_f32-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

template <class Engine>
std::size_t ScratchBytes(const HeadShape& shape, const HeadFeatures& features,
                         const ChunkSizes& sizes) {
  return make_layout(Engine::kTraits, shape, features, sizes).total;
}

template <class Engine>
HeadKernel KernelOf() {
  return {"",
          nullptr,
          nullptr,
          0.0,
          ScratchBytes<Engine>,
          stored_element_bytes,
          RunForward<Engine>,
          RunBackward<Engine>,
          FarMemory<Engine>::kBlock,
          FarDtype<Engine>(),
          RunFarPrepare<Engine>,
          RunFarEstimate<Engine>,
          RunFarForward<Engine>,
          RunFarBackward<Engine>,
          RunFarKeys<Engine>,
          RunFarMove<Engine>};
}

HeadKernel KernelF32() { return KernelOf<EngineF32>(); }
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3
HeadKernel KernelAmx() { return KernelOf<EngineBf16<HardwareTiles>>(); }
HeadKernel KernelDot() { return KernelOf<EngineBf16<DotTiles>>(); }
#endif
#if HWY_TARGET == HWY_STATIC_TARGET
HeadKernel KernelAmxEmulated() { return KernelOf<EngineBf16<EmulatedTiles>>(); }
#endif

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "hwy/targets.h"
#include "kernels/cpu/register_cpu.h"
#include "kernels/cpu_facts.h"

namespace logitless::cpu {
namespace {

#if HWY_ARCH_X86
Support avx2_runnable() { return cpu_facts().avx2; }
Support avx512_runnable() { return cpu_facts().avx512; }
Support dot_runnable() {
  const Support reason = avx512_runnable();
  return reason.empty() ? cpu_facts().avx512_bf16 : reason;
}
Support amx_runnable() {
  const Support reason = avx512_runnable();
  return reason.empty() ? cpu_facts().amx_bf16 : reason;
}
#endif
// The portable target has no requirements.
Support always_runnable() { return {}; }

Support supports_any(const HeadShape&, const HeadFeatures&) { return {}; }

Support supports_bf16(const HeadShape& shape, const HeadFeatures&) {
  if (shape.dtype == DType::bf16) return {};
  return std::string("multiplies bf16 alone, hidden and weight are ") +
         std::string(name_of(shape.dtype));
}

HeadKernel row(HeadKernel kernel, std::string_view name, Support (*runnable)(),
               double flops_per_second,
               Support (*supports)(const HeadShape&, const HeadFeatures&) = supports_any) {
  kernel.name = name;
  kernel.runnable = runnable;
  kernel.supports = supports;
  kernel.flops_per_second = flops_per_second;
  return kernel;
}

}  // namespace

std::vector<HeadKernel> simd_kernels([[maybe_unused]] bool dot_product_is_fast) {
  std::vector<HeadKernel> rows;
#if HWY_TARGETS & HWY_AVX3
  rows.push_back(row(N_AVX3::KernelAmx(), "amx_bf16", amx_runnable, 1300e9, supports_bf16));
  const HeadKernel dot =
      row(N_AVX3::KernelDot(), "avx512_bf16", dot_runnable, 100e9, supports_bf16);
  const HeadKernel wide = row(N_AVX3::KernelF32(), "avx512", avx512_runnable, 110e9);
  // On Intel's cores it has half the throughput of `avx512` (docs/develop/benchmarks.md), since
  // vdpbf16ps occupies its unit four times as long as a multiply-add. On AMD's it takes as long as
  // one, for twice the multiply-adds.
  rows.push_back(dot_product_is_fast ? dot : wide);
  rows.push_back(dot_product_is_fast ? wide : dot);
#endif
#if HWY_TARGETS & HWY_AVX2
  rows.push_back(row(N_AVX2::KernelF32(), "avx2", avx2_runnable, 70e9));
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

HeadKernel emulated_amx_kernel() {
  return row(HWY_STATIC_DISPATCH(KernelAmxEmulated)(), "amx_bf16_emulated", always_runnable, 0.5e9,
             supports_bf16);
}

}  // namespace logitless::cpu
#endif  // HWY_ONCE
