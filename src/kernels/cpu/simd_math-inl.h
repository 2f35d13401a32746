// Elementary functions and 16-bit conversions on vectors of floats, once per Highway target.
#if defined(LOGITLESS_SIMD_MATH_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_SIMD_MATH_INL_H
#undef LOGITLESS_SIMD_MATH_INL_H
#else
#define LOGITLESS_SIMD_MATH_INL_H
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "math/lse_state.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using DI = hn::Rebind<std::int32_t, D>;
using DU = hn::Rebind<std::uint32_t, D>;
using DU16 = hn::Rebind<std::uint16_t, D>;
using V = hn::Vec<D>;

inline constexpr float kLog2EFloat = static_cast<float>(kLog2E);
inline constexpr std::size_t kMaxLanes = hn::MaxLanes(D());

// 2^t for t <= 128; relative error under 3e-7, 0 for t < -126, NaN for NaN. The polynomials are
// minimax fits of the relative error: degree 5 on [0, 1) for AVX-512, which splits and scales in
// one instruction each, 6 on [-1/2, 1/2] elsewhere.
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
HWY_INLINE V Exp2(V t) {
  constexpr int kFloor = 0x9;  // round down, raise nothing
  const D d;
  const V f{_mm512_reduce_ps(t.raw, kFloor)};
  V p = hn::Set(d, 1.877576695e-03f);
  p = hn::MulAdd(p, f, hn::Set(d, 8.989340626e-03f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.582631752e-02f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.401536107e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.931530833e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, 9.999999404e-01f));
  // Scales by 2^floor(t). The comparison "not less than -126" is also true for NaN.
  const __mmask16 keep = _mm512_cmp_ps_mask(t.raw, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return V{_mm512_maskz_scalef_ps(keep, p.raw, t.raw)};
}
#else
HWY_INLINE V Exp2(V t) {
  const D d;
  const DI di;
  const V low = hn::Set(d, -126.0f);
  const auto tiny = hn::Lt(t, low);
  // IfThenElse instead of Max, so that NaN passes.
  const V x = hn::IfThenElse(tiny, low, t);
  const V n = hn::Round(x);
  const V f = hn::Sub(x, n);
  V p = hn::Set(d, 1.534581164e-4f);
  p = hn::MulAdd(p, f, hn::Set(d, 1.339993121e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 9.618488958e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.550328777e-2f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.402264689e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.931472057e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const auto exponent = hn::ShiftLeft<23>(hn::ConvertTo(di, n));
  const V r = hn::BitCast(d, hn::Add(hn::BitCast(di, p), exponent));
  // A NaN converts to a meaningless integer, so the NaN itself is returned.
  return hn::IfThenElse(hn::IsNaN(t), t, hn::IfThenZeroElse(tiny, r));
}
#endif

// log2 of exp(x) 2^-k with a single rounding (FMA): x log2(e) may be large although the result is
// small.
HWY_INLINE V Log2OfExp(V x, V k) {
  const D d;
#if HWY_NATIVE_FMA
  return hn::MulSub(x, hn::Set(d, kLog2EFloat), k);
#else
  HWY_ALIGN float of[kMaxLanes];
  HWY_ALIGN float less[kMaxLanes];
  hn::Store(x, d, of);
  hn::Store(k, d, less);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) {
    of[i] = static_cast<float>(static_cast<double>(of[i]) * kLog2E - static_cast<double>(less[i]));
  }
  return hn::Load(d, of);
#endif
}

// log2 of a positive normal number, to 2e-5 (a least-squares fit at Chebyshev nodes).
HWY_INLINE V Log2(V x) {
  const D d;
  const DI di;
  const auto bits = hn::BitCast(di, x);
  const auto exponent = hn::Sub(hn::ShiftRight<23>(bits), hn::Set(di, 127));
  const auto mantissa = hn::Or(hn::And(bits, hn::Set(di, 0x7fffff)), hn::Set(di, 0x3f800000));
  const V f = hn::Sub(hn::BitCast(d, mantissa), hn::Set(d, 1.0f));
  V p = hn::Set(d, 4.39286278e-2f);
  p = hn::MulAdd(p, f, hn::Set(d, -1.89832447e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 4.11561482e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, -7.07253434e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.44159208f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.439093e-5f));
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Add(p, hn::ConvertTo(d, exponent)));
}

// 2^n for integral n, exact; 0 below -126.
HWY_INLINE V PowerOfTwo(V n) {
  const D d;
  const DI di;
  const auto tiny = hn::Lt(n, hn::Set(d, -126.0f));
  const auto bits = hn::ShiftLeft<23>(
      hn::Add(hn::ConvertTo(di, hn::IfThenElse(tiny, hn::Zero(d), n)), hn::Set(di, 127)));
  return hn::IfThenElse(hn::IsNaN(n), n, hn::IfThenZeroElse(tiny, hn::BitCast(d, bits)));
}

// tanh with a relative error under 3e-7: an odd polynomial near 0 (Cephes' tanhf), 1 - 2 / (e^2|x|
// + 1) elsewhere.
HWY_INLINE V Tanh(V x) {
  const D d;
  const V a = hn::Abs(x);
  const V z = hn::Mul(x, x);
  V p = hn::Set(d, -5.70498872745e-3f);
  p = hn::MulAdd(p, z, hn::Set(d, 2.06390887954e-2f));
  p = hn::MulAdd(p, z, hn::Set(d, -5.37397155531e-2f));
  p = hn::MulAdd(p, z, hn::Set(d, 1.33314422036e-1f));
  p = hn::MulAdd(p, z, hn::Set(d, -3.33332819422e-1f));
  const V small = hn::MulAdd(hn::Mul(p, z), x, x);
  const V far = hn::IfThenElse(hn::Gt(a, hn::Set(d, 10.0f)), hn::Set(d, 10.0f), a);
  const V e = Exp2(hn::Mul(far, hn::Set(d, 2.0f * kLog2EFloat)));
  const V one = hn::Set(d, 1.0f);
  const V large = hn::CopySign(hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(e, one))), x);
  return hn::IfThenElse(hn::Lt(a, hn::Set(d, 0.625f)), small, large);
}

// bf16 bits of each lane in the low half of a 32-bit lane, rounded to nearest even; NaN stays NaN.
HWY_INLINE hn::Vec<DU> Bf16Bits(V v) {
  const DU du;
  const auto bits = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu))));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), hn::Set(du, 0x7fc0u), rounded);
}

HWY_INLINE void StoreBf16(V v, std::uint16_t* HWY_RESTRICT to) {
  const DI di;
  const DU16 du16;
  hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di, Bf16Bits(v))), du16, to);
}

// Conversion of fp32 to bf16: by integer arithmetic on any target, or with AVX-512 bf16
// instructions.
struct PortableBf16 {
  static HWY_INLINE void Store(V v, std::uint16_t* HWY_RESTRICT to) { StoreBf16(v, to); }
  // Packs each lane: bf16 of `even` in the low half, of `odd` in the high half.
  static HWY_INLINE hn::Vec<DU> Pair(V even, V odd) {
    return hn::Or(Bf16Bits(even), hn::ShiftLeft<16>(Bf16Bits(odd)));
  }
};

#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
// Only for processors with avx512_bf16, which the AVX3 target does not imply: hence inline assembly
// instead of intrinsics.
struct HardwareBf16 {
  static HWY_INLINE void Store(V v, std::uint16_t* HWY_RESTRICT to) {
    __m256i bits;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(bits) : "v"(v.raw));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
  }
  static HWY_INLINE hn::Vec<DU> Pair(V even, V odd) {
    __m512i both;  // 16 of even, then 16 of odd
    __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(even.raw), "v"(odd.raw));
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return hn::Vec<DU>{_mm512_permutexvar_epi16(order, both)};
  }
};
#endif

HWY_INLINE V LoadBf16(const std::uint16_t* HWY_RESTRICT from) {
  const D d;
  const DU du;
  const DU16 du16;
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(du16, from))));
}

// Vector versions of core/half.h, bit for bit.
HWY_INLINE V LoadF16(const std::uint16_t* HWY_RESTRICT from) {
  const D d;
  const DU du;
  const DU16 du16;
  const auto bits = hn::PromoteTo(du, hn::LoadU(du16, from));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000u)));
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffu));
  const auto scaled =
      hn::BitCast(du, hn::Mul(hn::BitCast(d, hn::ShiftLeft<13>(magnitude)), hn::Set(d, 0x1p112f)));
  const auto special = hn::Or(hn::ShiftLeft<13>(magnitude), hn::Set(du, 0x7f800000u));
  const auto is_special = hn::Gt(magnitude, hn::Set(du, 0x7bffu));
  return hn::BitCast(d, hn::Or(sign, hn::IfThenElse(is_special, special, scaled)));
}

// to[j] += factor * from[j].
HWY_INLINE void AddScaled(const float* HWY_RESTRICT from, std::int64_t count, float factor,
                          float* HWY_RESTRICT to) {
  const D d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const V f = hn::Set(d, factor);
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes)
    hn::StoreU(hn::MulAdd(f, hn::LoadU(d, from + i), hn::LoadU(d, to + i)), d, to + i);
  for (; i < count; ++i) to[i] = __builtin_fmaf(factor, from[i], to[i]);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
