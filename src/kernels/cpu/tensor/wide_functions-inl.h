// Functions of f32 vectors that are computed in f64, compiled once per Highway target. Results are
// within 1e-8 of the rounded ones. Polynomials are Chebyshev fits.
#if defined(LOGITLESS_TENSOR_WIDE_FUNCTIONS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_TENSOR_WIDE_FUNCTIONS_INL_H
#undef LOGITLESS_TENSOR_WIDE_FUNCTIONS_INL_H
#else
#define LOGITLESS_TENSOR_WIDE_FUNCTIONS_INL_H
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

using Wide = hn::ScalableTag<double>;
using WideBits = hn::Rebind<std::uint64_t, Wide>;
using WideV = hn::Vec<Wide>;

// Returns c[0] x^(n - 1) + ... + c[n - 1].
template <class... Rest>
HWY_INLINE WideV Polynomial(WideV x, double first, Rest... rest) {
  WideV y = hn::Set(Wide(), first);
  ((y = hn::MulAdd(y, x, hn::Set(Wide(), rest))), ...);
  return y;
}

// Adding it to a whole number puts that into the lowest bits.
constexpr double kWholeBits = 0x1.8p52;

// 2^x for |x| <= 1000.
HWY_INLINE WideV WideExp2(WideV x) {
  const Wide d;
  const WideBits bits;
  const WideV n = hn::Round(x);
  const WideV y = Polynomial(hn::Sub(x, n), 0.00015461444698569129, 0.0013400428177615838,
                             0.0096180566785246381, 0.055503272266703021, 0.24022650922288758,
                             0.6931472067028326, 1.0);
  const auto whole = hn::BitCast(bits, hn::Add(n, hn::Set(d, kWholeBits)));
  return hn::BitCast(d, hn::Add(hn::BitCast(bits, y), hn::ShiftLeft<52>(whole)));
}

// log2(x) for a normal x > 0: x = 2^e m, sqrt(1/2) <= m < sqrt(2), by s = (m - 1) / (m + 1).
HWY_INLINE WideV WideLog2(WideV x) {
  const Wide d;
  const WideBits bits;
  constexpr std::uint64_t kRoot = 0x3FE6A09E667F3BCD, kBias = 1024;  // sqrt(1/2)
  const auto moved = hn::Sub(hn::BitCast(bits, x), hn::Set(bits, kRoot));
  const auto exponent = hn::ShiftRight<52>(hn::Add(moved, hn::Set(bits, kBias << 52)));
  const WideV e =
      hn::Sub(hn::BitCast(d, hn::Or(exponent, hn::Set(bits, std::uint64_t{0x433} << 52))),
              hn::Set(d, 0x1p52 + static_cast<double>(kBias)));
  const auto fraction = hn::And(moved, hn::Set(bits, (std::uint64_t{1} << 52) - 1));
  const WideV m = hn::BitCast(d, hn::Add(fraction, hn::Set(bits, kRoot)));
  const WideV one = hn::Set(d, 1.0), s = hn::Div(hn::Sub(m, one), hn::Add(m, one));
  const WideV p =
      Polynomial(hn::Mul(s, s), 0.28290661659068111, 0.31990537392276171, 0.41220925678615497,
                 0.57707794235945908, 0.96179669411321272, 2.8853900817778502);
  return hn::MulAdd(s, p, e);
}

// x^y with C's special cases.
HWY_INLINE WideV WidePow(WideV x, WideV y) {
  const Wide d;
  const WideV zero = hn::Zero(d), one = hn::Set(d, 1.0), most = hn::Set(d, 1000.0);
  const WideV infinity = hn::Set(d, std::numeric_limits<double>::infinity());
  const WideV nan = hn::Set(d, std::numeric_limits<double>::quiet_NaN());
  const WideV size = hn::Abs(x);
  const auto at_end = hn::Or(hn::Eq(size, zero), hn::Eq(size, infinity));
  const WideV exponent = hn::Mul(y, WideLog2(hn::IfThenElse(at_end, one, size)));
  WideV power = WideExp2(hn::Max(hn::Min(exponent, most), hn::Neg(most)));
  const auto usual =
      hn::And(hn::And(hn::Gt(x, zero), hn::Lt(x, infinity)), hn::Lt(hn::Abs(y), infinity));
  if (hn::AllTrue(d, usual)) return power;
  const auto grows = hn::Xor(hn::Lt(y, zero), hn::Eq(size, infinity));
  power = hn::IfThenElse(at_end, hn::IfThenElseZero(grows, infinity), power);
  power = hn::IfThenElse(hn::Eq(size, one), one, power);
  // Beyond 2^53, and for infinities, all exponents are even.
  const WideV half = hn::Mul(y, hn::Set(d, 0.5));
  const auto fractional = hn::Ne(hn::Round(y), y);
  const auto odd = hn::AndNot(fractional, hn::Ne(hn::Round(half), half));
  power = hn::IfThenElse(odd, hn::CopySign(power, x), power);
  const auto negative = hn::And(hn::Lt(x, zero), hn::Ne(size, infinity));
  const auto undefined = hn::Or(hn::And(negative, fractional), hn::Or(hn::IsNaN(x), hn::IsNaN(y)));
  power = hn::IfThenElse(undefined, nan, power);
  return hn::IfThenElse(hn::Or(hn::Eq(y, zero), hn::Eq(x, one)), one, power);
}

// The sine of x + quarters pi / 2, for |x| <= kMostAngle.
constexpr double kMostAngle = 1e5;
HWY_INLINE WideV WideSin(WideV x, std::uint64_t quarters) {
  const Wide d;
  const WideBits bits;
  const WideV k = hn::Round(hn::Mul(x, hn::Set(d, 0.63661977236758134)));
  // pi / 2 in two parts: k times the first, of 33 bits, is exact.
  const WideV near = hn::NegMulAdd(k, hn::Set(d, 0x1.921fb544p0), x);
  const WideV r = hn::NegMulAdd(k, hn::Set(d, 6.0771005065061922e-11), near);
  const WideV r2 = hn::Mul(r, r);
  const WideV sine =
      hn::Mul(r, Polynomial(r2, 2.7173380557468287e-6, -0.00019839201388559692,
                            0.008333328779736227, -0.16666666631563163, 0.99999999999566876));
  const WideV cosine = Polynomial(r2, 2.4379747535470241e-5, -0.0013886617095704496,
                                  0.041666616662651893, -0.49999999614550281, 0.999999999952442);
  const auto turned =
      hn::Add(hn::BitCast(bits, hn::Add(k, hn::Set(d, kWholeBits))), hn::Set(bits, quarters));
  const auto is_odd = hn::Eq(hn::And(turned, hn::Set(bits, 1)), hn::Set(bits, 1));
  const WideV y = hn::IfThenElse(hn::RebindMask(d, is_odd), cosine, sine);
  const auto sign = hn::ShiftLeft<62>(hn::And(turned, hn::Set(bits, 2)));
  return hn::BitCast(d, hn::Xor(hn::BitCast(bits, y), sign));
}

// Returns WideSin, and f of elements that are beyond kMostAngle or NaN.
template <class F>
HWY_INLINE WideV SinOrEach(WideV x, std::uint64_t quarters, const F& f) {
  const Wide d;
  const auto inside = hn::Le(hn::Abs(x), hn::Set(d, kMostAngle));
  const WideV y = WideSin(hn::IfThenElseZero(inside, x), quarters);
  if (hn::AllTrue(d, inside)) return y;
  HWY_ALIGN double from[hn::MaxLanes(Wide())];
  HWY_ALIGN double to[hn::MaxLanes(Wide())];
  hn::Store(x, d, from);
  hn::Store(y, d, to);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) {
    if (!(std::abs(from[i]) <= kMostAngle)) to[i] = f(from[i]);
  }
  return hn::Load(d, to);
}

// Returns the arctangent: an angle of 0, pi / 4 or pi / 2 and the rest.
HWY_INLINE WideV WideAtan(WideV x) {
  const Wide d;
  const WideV one = hn::Set(d, 1.0), a = hn::Abs(x);
  const auto middle = hn::Gt(a, hn::Set(d, 0.41421356237309503));
  const auto far = hn::Gt(a, hn::Set(d, 2.4142135623730949));
  const WideV above =
      hn::IfThenElse(far, hn::Set(d, -1.0), hn::IfThenElse(middle, hn::Sub(a, one), a));
  const WideV below = hn::IfThenElse(far, a, hn::IfThenElse(middle, hn::Add(a, one), one));
  const WideV angle = hn::IfThenElse(far, hn::Set(d, 1.5707963267948966),
                                     hn::IfThenElseZero(middle, hn::Set(d, 0.78539816339744828)));
  const WideV z = hn::Div(above, below);
  const WideV p = Polynomial(hn::Mul(z, z), 0.047029785942189459, -0.084541226051814138,
                             0.11040124194899133, -0.14281559378657045, 0.19999882798604635,
                             -0.33333332083877395, 0.99999999997811509);
  return hn::CopySign(hn::MulAdd(z, p, angle), x);
}

// 1 - erf(x) = exp(-x^2) t p(t) with t = 3 / (3 + x) for x >= 0. The result underflows beyond 10.5.
HWY_INLINE WideV WideErfc(WideV x) {
  const Wide d;
  const WideV three = hn::Set(d, 3.0), a = hn::Min(hn::Abs(x), hn::Set(d, 10.5));
  const WideV t = hn::Div(three, hn::Add(three, a));
  const WideV p =
      Polynomial(t, 0.056857660611230077, -0.29828227703554597, 0.5500125243700977,
                 -0.46004046468523696, 0.41904337765889646, -0.010175824633192965,
                 0.1949709897344871, 0.1708237888916586, 0.18875817556401708, 0.18803205115442035);
  const WideV tail = WideExp2(hn::Mul(hn::Mul(a, a), hn::Set(d, -1.4426950408889634)));
  const WideV y = hn::Mul(hn::Mul(tail, t), p);
  const WideV whole = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Sub(hn::Set(d, 2.0), y), y);
  return hn::IfThenElse(hn::IsNaN(x), x, whole);
}

// Applies f to vectors of f64. The tail, short of a vector, uses copies padded with 1.
template <int kInputs, class F>
HWY_INLINE void MapWide(const float* a, const float* b, float* out, std::int64_t n, const F& f) {
  const Wide d;
  const hn::Rebind<float, Wide> narrow;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto apply = [&](const float* x, const float* y, float* to) HWY_ATTR {
    const WideV first = hn::PromoteTo(d, hn::LoadU(narrow, x));
    WideV made;
    if constexpr (kInputs == 1) made = f(first);
    if constexpr (kInputs == 2) made = f(first, hn::PromoteTo(d, hn::LoadU(narrow, y)));
    hn::StoreU(hn::DemoteTo(narrow, made), narrow, to);
  };
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) apply(a + i, b + i, out + i);
  if (i == n) return;
  HWY_ALIGN float part[2][hn::MaxLanes(Wide())];
  std::fill(&part[0][0], &part[0][0] + 2 * hn::MaxLanes(Wide()), 1.0f);
  std::copy(a + i, a + n, part[0]);
  if constexpr (kInputs > 1) std::copy(b + i, b + n, part[1]);
  apply(part[0], part[1], part[0]);
  std::copy(part[0], part[0] + (n - i), out + i);
}

inline void PowVector(const float* a, const float* b, const float*, float* out, std::int64_t n) {
  MapWide<2>(a, b, out, n, [](WideV x, WideV y) HWY_ATTR { return WidePow(x, y); });
}
inline void SinVector(const float* a, const float*, const float*, float* out, std::int64_t n) {
  MapWide<1>(a, nullptr, out, n, [](WideV x) HWY_ATTR {
    const WideV y = SinOrEach(x, 0, [](double each) { return std::sin(each); });
    return hn::IfThenElse(hn::Eq(x, hn::Zero(Wide())), x, y);  // -0 too
  });
}
inline void CosVector(const float* a, const float*, const float*, float* out, std::int64_t n) {
  MapWide<1>(a, nullptr, out, n, [](WideV x) HWY_ATTR {
    return SinOrEach(x, 1, [](double each) { return std::cos(each); });
  });
}
inline void AtanVector(const float* a, const float*, const float*, float* out, std::int64_t n) {
  MapWide<1>(a, nullptr, out, n, [](WideV x) HWY_ATTR { return WideAtan(x); });
}
inline void ErfcVector(const float* a, const float*, const float*, float* out, std::int64_t n) {
  MapWide<1>(a, nullptr, out, n, [](WideV x) HWY_ATTR { return WideErfc(x); });
}

}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
