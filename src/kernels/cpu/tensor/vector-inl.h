// Functions, conversions and reductions of contiguous vectors, compiled once per Highway target.
#if defined(LOGITLESS_TENSOR_VECTOR_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_TENSOR_VECTOR_INL_H
#undef LOGITLESS_TENSOR_VECTOR_INL_H
#else
#define LOGITLESS_TENSOR_VECTOR_INL_H
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "core/half.h"
#include "kernels/cpu/simd_math-inl.h"
#include "kernels/cpu/tensor/wide_functions-inl.h"
#include "kernels/cpu_tensor.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

// Loads and stores of a dtype's elements as floats: vectors of any tag, and single elements.
struct SourceF32 {
  using T = float;
  static HWY_INLINE float One(T x) { return x; }
  template <class DF>
  static HWY_INLINE hn::Vec<DF> Load(DF d, const T* from) {
    return hn::LoadU(d, from);
  }
  static HWY_INLINE T From(float x) { return x; }
  static HWY_INLINE void Store(V v, T* to) { hn::StoreU(v, D(), to); }
  static HWY_INLINE V Round(V v) { return v; }
};

struct SourceBf16 {
  using T = std::uint16_t;
  static HWY_INLINE float One(T x) { return bf16_to_float(x); }
  template <class DF>
  static HWY_INLINE hn::Vec<DF> Load(DF d, const T* from) {
    const hn::Rebind<std::uint32_t, DF> du;
    const hn::Rebind<std::uint16_t, DF> du16;
    return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(du16, from))));
  }
  static HWY_INLINE T From(float x) { return float_to_bf16(x); }
  static HWY_INLINE void Store(V v, T* to) { StoreBf16(v, to); }
  static HWY_INLINE V Round(V v) { return hn::BitCast(D(), hn::ShiftLeft<16>(Bf16Bits(v))); }
};

struct SourceF16 {
  using T = std::uint16_t;
  static HWY_INLINE float One(T x) { return f16_to_float(x); }
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2  // with F16C
  template <class DF>
  static HWY_INLINE hn::Vec<DF> Load(DF d, const T* from) {
    const hn::Rebind<hwy::float16_t, DF> dh;
    const hn::Rebind<std::uint16_t, DF> du16;
    return hn::PromoteTo(d, hn::BitCast(dh, hn::LoadU(du16, from)));
  }
  static HWY_INLINE void Store(V v, T* to) {
    const hn::Rebind<hwy::float16_t, D> dh;
    const DU16 du16;
    hn::StoreU(hn::BitCast(du16, hn::DemoteTo(dh, v)), du16, to);
  }
#else
  template <class DF>
  static HWY_INLINE hn::Vec<DF> Load(DF d, const T* from) {
    HWY_ALIGN float x[hn::MaxLanes(DF())];
    for (std::size_t i = 0; i < hn::Lanes(d); ++i) x[i] = One(from[i]);
    return hn::Load(d, x);
  }
  static HWY_INLINE void Store(V v, T* to) {
    HWY_ALIGN float x[kMaxLanes];
    hn::Store(v, D(), x);
    for (std::size_t i = 0; i < hn::Lanes(D()); ++i) to[i] = From(x[i]);
  }
#endif
  static HWY_INLINE T From(float x) { return float_to_f16(x); }
  static HWY_INLINE V Round(V v) {
    T bits[kMaxLanes];
    Store(v, bits);
    return Load(D(), bits);
  }
};

template <class F>
HWY_INLINE void with_source(DType dtype, F&& f) {
  if (dtype == DType::bf16) return f.template operator()<SourceBf16>();
  if (dtype == DType::f16) return f.template operator()<SourceF16>();
  return f.template operator()<SourceF32>();
}

inline void ToF32(DType dtype, const void* from, float* to, std::int64_t n) {
  with_source(dtype, [&]<class Source>() {
    const auto* x = static_cast<const typename Source::T*>(from);
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(D()));
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes) hn::StoreU(Source::Load(D(), x + i), D(), to + i);
    for (; i < n; ++i) to[i] = Source::One(x[i]);
  });
}

inline void FromF32(DType dtype, const float* from, void* to, std::int64_t n) {
  with_source(dtype, [&]<class Source>() {
    auto* y = static_cast<typename Source::T*>(to);
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(D()));
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes) Source::Store(hn::LoadU(D(), from + i), y + i);
    for (; i < n; ++i) y[i] = Source::From(from[i]);
  });
}

// FromF32 followed by ToF32.
inline void RoundF32(DType dtype, const float* from, float* to, std::int64_t n) {
  with_source(dtype, [&]<class Source>() {
    const auto lanes = static_cast<std::int64_t>(hn::Lanes(D()));
    std::int64_t i = 0;
    for (; i + lanes <= n; i += lanes)
      hn::StoreU(Source::Round(hn::LoadU(D(), from + i)), D(), to + i);
    for (; i < n; ++i) to[i] = Source::One(Source::From(from[i]));
  });
}

// x 2^n for integral n in [-252, 254], in two factors: 2^128 alone is infinite.
HWY_INLINE V ScaleByPowerOfTwo(V x, V n) {
  const D d;
  const DI di;
  const auto whole = hn::ConvertTo(di, n);
  const auto half = hn::ShiftRight<1>(whole);
  const auto bias = hn::Set(di, 127);
  const V first = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const V second = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(whole, half), bias)));
  return hn::Mul(hn::Mul(x, first), second);
}

// e^x = 2^n (1 + q), q = e^r - 1 for |r| <= ln(2) / 2. x in [-110, 90], beyond it saturates;
// callers handle NaN. Polynomials here and below are minimax fits of the relative error.
struct ExpParts {
  V n, q;
};
HWY_INLINE ExpParts SplitExp(V x) {
  const D d;
  x = hn::Min(hn::Max(x, hn::Set(d, -110.0f)), hn::Set(d, 90.0f));
  const V n = hn::Round(hn::Mul(x, hn::Set(d, kLog2EFloat)));
  V r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);   // 9 bits: n times it is exact
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);  // the rest of ln(2)
  V p = hn::Set(d, 1.99149843e-4f);
  p = hn::MulAdd(p, r, hn::Set(d, 1.39420095e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 8.33327137e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.16663438e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.66666672e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  return {n, hn::MulAdd(hn::Mul(r, r), p, r)};
}

HWY_INLINE V Exp(V x) {
  const D d;
  const ExpParts e = SplitExp(x);
  const V y = ScaleByPowerOfTwo(hn::Add(hn::Set(d, 1.0f), e.q), e.n);
  return hn::IfThenElse(hn::IsNaN(x), x, y);
}

HWY_INLINE V Expm1(V x) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  const ExpParts e = SplitExp(hn::Min(x, hn::Set(d, 80.0f)));
  const V scale = ScaleByPowerOfTwo(one, e.n);
  const V near = hn::MulAdd(scale, e.q, hn::Sub(scale, one));
  const V y = hn::IfThenElse(hn::Gt(x, hn::Set(d, 80.0f)), Exp(x), near);
  return hn::IfThenElse(hn::Or(hn::IsNaN(x), hn::Eq(x, hn::Zero(d))), x, y);  // -0 too
}

// x = 2^e (1 + f), sqrt(1/2) <= 1 + f < sqrt(2): log x = e ln(2) + f - f^2 / 2 + f^3 p(f).
HWY_INLINE V Log(V x) {
  const D d;
  const DI di;
  const DU du;
  const auto tiny = hn::Lt(x, hn::Set(d, std::numeric_limits<float>::min()));  // subnormal
  const V scaled = hn::IfThenElse(tiny, hn::Mul(x, hn::Set(d, 0x1p24f)), x);
  const auto bits = hn::BitCast(du, scaled);
  const auto moved = hn::Sub(bits, hn::Set(du, 0x3f3504f3u));  // sqrt(1/2)
  const auto exponent = hn::ShiftRight<23>(hn::BitCast(di, moved));
  const auto mantissa = hn::Add(hn::And(moved, hn::Set(du, 0x007fffffu)), hn::Set(du, 0x3f3504f3u));
  const V f = hn::Sub(hn::BitCast(d, mantissa), hn::Set(d, 1.0f));
  const V e = hn::Sub(hn::ConvertTo(d, exponent), hn::IfThenElseZero(tiny, hn::Set(d, 24.0f)));
  V p = hn::Set(d, 6.91558421e-2f);
  p = hn::MulAdd(p, f, hn::Set(d, -1.17888108e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.18723124e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, -1.23844929e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.42187804e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, -1.66692451e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.00022191e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, -2.49999866e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 3.33333105e-1f));
  const V f2 = hn::Mul(f, f);
  V y = hn::MulAdd(e, hn::Set(d, -2.12194440e-4f), hn::Mul(hn::Mul(f2, f), p));
  y = hn::Add(hn::NegMulAdd(hn::Set(d, 0.5f), f2, y), f);
  y = hn::MulAdd(e, hn::Set(d, 0.693359375f), y);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const V infinity = hn::Set(d, kInfinity);
  y = hn::IfThenElse(hn::Eq(x, infinity), infinity, y);
  y = hn::IfThenElse(hn::Eq(x, hn::Zero(d)), hn::Set(d, -kInfinity), y);
  const V nan = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
  return hn::IfThenElse(hn::Ge(x, hn::Zero(d)), y, nan);  // also for NaN
}

// log(u) for the float u nearest to 1 + x, times x / (u - 1) to correct for the rounding of u.
HWY_INLINE V Log1p(V x) {
  const D d;
  const V u = hn::Add(hn::Set(d, 1.0f), x);
  const V moved = hn::Sub(u, hn::Set(d, 1.0f));
  const V y = hn::Mul(Log(u), hn::Div(x, moved));
  const V infinity = hn::Set(d, std::numeric_limits<float>::infinity());
  const auto itself = hn::Or(hn::Eq(moved, hn::Zero(d)), hn::Eq(x, infinity));
  return hn::IfThenElse(itself, x, y);
}

// x + x p(x^2) near 0, 1 - exp(-|x| q(|x|)) up to 4, and 1 beyond.
HWY_INLINE V Erf(V x) {
  const D d;
  const V a = hn::Abs(x);
  const V s = hn::Mul(x, x);
  V p = hn::Set(d, -6.09035837e-4f);
  p = hn::MulAdd(p, s, hn::Set(d, 5.01196273e-3f));
  p = hn::MulAdd(p, s, hn::Set(d, -2.67789084e-2f));
  p = hn::MulAdd(p, s, hn::Set(d, 1.12821408e-1f));
  p = hn::MulAdd(p, s, hn::Set(d, -3.76125246e-1f));
  p = hn::MulAdd(p, s, hn::Set(d, 1.28379151e-1f));
  const V near = hn::MulAdd(p, x, x);
  const V t = hn::Min(a, hn::Set(d, 4.0f));
  V q = hn::Set(d, 1.04330156e-5f);
  q = hn::MulAdd(q, t, hn::Set(d, -3.14857141e-4f));
  q = hn::MulAdd(q, t, hn::Set(d, 3.61033808e-3f));
  q = hn::MulAdd(q, t, hn::Set(d, -2.36945581e-2f));
  q = hn::MulAdd(q, t, hn::Set(d, 1.06159039e-1f));
  q = hn::MulAdd(q, t, hn::Set(d, 6.35198057e-1f));
  q = hn::MulAdd(q, t, hn::Set(d, 1.12863708f));
  const V far = hn::Sub(hn::Set(d, 1.0f), Exp(hn::Neg(hn::Mul(t, q))));
  const V y = hn::IfThenElse(hn::Lt(a, hn::Set(d, 0.9f)), near, hn::CopySign(far, x));
  return hn::IfThenElse(hn::IsNaN(x), x, y);
}

HWY_INLINE V Sigmoid(V x) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  return hn::Div(one, hn::Add(one, Exp(hn::Neg(x))));
}

HWY_INLINE V MaxNan(V a, V b) {
  return hn::IfThenElse(hn::IsNaN(a), a, hn::IfThenElse(hn::IsNaN(b), b, hn::Max(a, b)));
}
HWY_INLINE V MinNan(V a, V b) {
  return hn::IfThenElse(hn::IsNaN(a), a, hn::IfThenElse(hn::IsNaN(b), b, hn::Min(a, b)));
}

// Applies f to vectors. The tail, short of a vector, uses a mask, or copies padded with 1.
template <int kInputs, class F>
HWY_INLINE void Map(const float* a, const float* b, const float* c, float* out, std::int64_t n,
                    const F& f) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto apply = [&](const float* x, const float* y, const float* z) HWY_ATTR {
    if constexpr (kInputs == 1) return f(hn::LoadU(d, x));
    if constexpr (kInputs == 2) return f(hn::LoadU(d, x), hn::LoadU(d, y));
    if constexpr (kInputs == 3) return f(hn::LoadU(d, x), hn::LoadU(d, y), hn::LoadU(d, z));
  };
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) hn::StoreU(apply(a + i, b + i, c + i), d, out + i);
  if (i == n) return;
#if HWY_MEM_OPS_MIGHT_FAULT
  HWY_ALIGN float part[3][kMaxLanes];
  std::fill(&part[0][0], &part[0][0] + 3 * kMaxLanes, 1.0f);
  std::copy(a + i, a + n, part[0]);
  if constexpr (kInputs > 1) std::copy(b + i, b + n, part[1]);
  if constexpr (kInputs > 2) std::copy(c + i, c + n, part[2]);
  hn::StoreU(apply(part[0], part[1], part[2]), d, part[0]);
  std::copy(part[0], part[0] + (n - i), out + i);
#else
  const auto rest = hn::FirstN(d, static_cast<std::size_t>(n - i));
  const auto load = [&](const float* x) HWY_ATTR { return hn::MaskedLoad(rest, d, x + i); };
  V made;
  if constexpr (kInputs == 1) made = f(load(a));
  if constexpr (kInputs == 2) made = f(load(a), load(b));
  if constexpr (kInputs == 3) made = f(load(a), load(b), load(c));
  hn::BlendedStore(made, rest, d, out + i);
#endif
}

#define LOGITLESS_UNARY(Name, expression)                                                     \
  void Name##Vector(const float* a, const float*, const float*, float* out, std::int64_t n) { \
    Map<1>(a, nullptr, nullptr, out, n, [](V x) HWY_ATTR {                                    \
      [[maybe_unused]] const D d;                                                             \
      return expression;                                                                      \
    });                                                                                       \
  }
#define LOGITLESS_BINARY(Name, expression)                                                      \
  void Name##Vector(const float* a, const float* b, const float*, float* out, std::int64_t n) { \
    Map<2>(a, b, nullptr, out, n, [](V x, V y) HWY_ATTR {                                       \
      [[maybe_unused]] const D d;                                                               \
      return expression;                                                                        \
    });                                                                                         \
  }
#define LOGITLESS_MASK(mask) hn::IfThenElseZero(mask, hn::Set(d, 1.0f))
LOGITLESS_UNARY(Neg, hn::Neg(x))
LOGITLESS_UNARY(Abs, hn::Abs(x))
LOGITLESS_UNARY(Exp, Exp(x))
LOGITLESS_UNARY(Log, Log(x))
LOGITLESS_UNARY(Log1p, Log1p(x))
LOGITLESS_UNARY(Expm1, Expm1(x))
LOGITLESS_UNARY(Sqrt, hn::Sqrt(x))
LOGITLESS_UNARY(Rsqrt, hn::Div(hn::Set(d, 1.0f), hn::Sqrt(x)))
LOGITLESS_UNARY(Tanh, hn::IfThenElse(hn::IsNaN(x), x, Tanh(x)))
LOGITLESS_UNARY(Erf, Erf(x))
LOGITLESS_UNARY(Sigmoid, Sigmoid(x))
LOGITLESS_UNARY(Floor, hn::Floor(x))
LOGITLESS_UNARY(Sign, hn::IfThenElse(hn::Or(hn::IsNaN(x), hn::Eq(x, hn::Zero(d))), x,
                                     hn::CopySign(hn::Set(d, 1.0f), x)))
LOGITLESS_UNARY(LogicalNot, LOGITLESS_MASK(hn::Eq(x, hn::Zero(d))))
LOGITLESS_BINARY(Add, hn::Add(x, y))
LOGITLESS_BINARY(Sub, hn::Sub(x, y))
LOGITLESS_BINARY(Mul, hn::Mul(x, y))
LOGITLESS_BINARY(Div, hn::Div(x, y))
LOGITLESS_BINARY(Max, MaxNan(x, y))
LOGITLESS_BINARY(Min, MinNan(x, y))
LOGITLESS_BINARY(Eq, LOGITLESS_MASK(hn::Eq(x, y)))
LOGITLESS_BINARY(Ne, hn::IfThenZeroElse(hn::Eq(x, y), hn::Set(d, 1.0f)))
LOGITLESS_BINARY(Lt, LOGITLESS_MASK(hn::Lt(x, y)))
LOGITLESS_BINARY(Le, LOGITLESS_MASK(hn::Le(x, y)))
LOGITLESS_BINARY(Gt, LOGITLESS_MASK(hn::Gt(x, y)))
LOGITLESS_BINARY(Ge, LOGITLESS_MASK(hn::Ge(x, y)))
LOGITLESS_BINARY(LogicalAnd,
                 hn::IfThenZeroElse(hn::Or(hn::Eq(x, hn::Zero(d)), hn::Eq(y, hn::Zero(d))),
                                    hn::Set(d, 1.0f)))
LOGITLESS_BINARY(LogicalOr,
                 hn::IfThenZeroElse(hn::And(hn::Eq(x, hn::Zero(d)), hn::Eq(y, hn::Zero(d))),
                                    hn::Set(d, 1.0f)))
#undef LOGITLESS_MASK
#undef LOGITLESS_BINARY
#undef LOGITLESS_UNARY

void SelectVector(const float* a, const float* b, const float* c, float* out, std::int64_t n) {
  Map<3>(a, b, c, out, n,
         [](V x, V y, V z) HWY_ATTR { return hn::IfThenElse(hn::Eq(x, hn::Zero(D())), z, y); });
}

// Returns null for functions computed with <cmath>.
inline VectorFunction FunctionOf(VectorOp op) {
  switch (op) {
#define LOGITLESS_CASE(name, Name) \
  case VectorOp::name:             \
    return Name##Vector;
    LOGITLESS_CASE(neg, Neg)
    LOGITLESS_CASE(abs, Abs)
    LOGITLESS_CASE(exp, Exp)
    LOGITLESS_CASE(log, Log)
    LOGITLESS_CASE(log1p, Log1p)
    LOGITLESS_CASE(expm1, Expm1)
    LOGITLESS_CASE(sqrt, Sqrt)
    LOGITLESS_CASE(rsqrt, Rsqrt)
    LOGITLESS_CASE(tanh, Tanh)
    LOGITLESS_CASE(erf, Erf)
    LOGITLESS_CASE(erfc, Erfc)
    LOGITLESS_CASE(sin, Sin)
    LOGITLESS_CASE(cos, Cos)
    LOGITLESS_CASE(atan, Atan)
    LOGITLESS_CASE(pow, Pow)
    LOGITLESS_CASE(sigmoid, Sigmoid)
    LOGITLESS_CASE(floor, Floor)
    LOGITLESS_CASE(sign, Sign)
    LOGITLESS_CASE(add, Add)
    LOGITLESS_CASE(sub, Sub)
    LOGITLESS_CASE(mul, Mul)
    LOGITLESS_CASE(div, Div)
    LOGITLESS_CASE(max, Max)
    LOGITLESS_CASE(min, Min)
    LOGITLESS_CASE(eq, Eq)
    LOGITLESS_CASE(ne, Ne)
    LOGITLESS_CASE(lt, Lt)
    LOGITLESS_CASE(le, Le)
    LOGITLESS_CASE(gt, Gt)
    LOGITLESS_CASE(ge, Ge)
    LOGITLESS_CASE(logical_and, LogicalAnd)
    LOGITLESS_CASE(logical_or, LogicalOr)
    LOGITLESS_CASE(logical_not, LogicalNot)
    LOGITLESS_CASE(select, Select)
#undef LOGITLESS_CASE
    case VectorOp::lgamma:
    case VectorOp::digamma:
    case VectorOp::trigamma:
      return nullptr;
  }
  return nullptr;
}

// Four accumulators, then their lanes in order, then the tail.
template <class Combine>
HWY_INLINE float Reduce(const float* x, std::int64_t n, float empty, const Combine& combine) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V acc[4] = {hn::Set(d, empty), hn::Set(d, empty), hn::Set(d, empty), hn::Set(d, empty)};
  std::int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) acc[j] = combine(acc[j], hn::LoadU(d, x + i + j * lanes));
  }
  for (; i + lanes <= n; i += lanes) acc[0] = combine(acc[0], hn::LoadU(d, x + i));
  if (i < n) {
    HWY_ALIGN float part[kMaxLanes];
    std::fill(part, part + kMaxLanes, empty);
    std::copy(x + i, x + n, part);
    acc[1] = combine(acc[1], hn::Load(d, part));
  }
  HWY_ALIGN float last[kMaxLanes];
  hn::Store(combine(combine(acc[0], acc[1]), combine(acc[2], acc[3])), d, last);
  V sum = hn::Set(d, last[0]);
  for (std::int64_t j = 1; j < lanes; ++j) sum = combine(sum, hn::Set(d, last[j]));
  return hn::GetLane(sum);
}

inline float RowSum(const float* x, std::int64_t n) {
  if (n < static_cast<std::int64_t>(hn::Lanes(D()))) {  // same result as Reduce
    float sum = 0.0f;
    for (std::int64_t i = 0; i < n; ++i) sum += x[i];
    return sum;
  }
  return Reduce(x, n, 0.0f, [](V a, V b) HWY_ATTR { return hn::Add(a, b); });
}
inline float RowMax(const float* x, std::int64_t n) {
  return Reduce(x, n, -std::numeric_limits<float>::infinity(),
                [](V a, V b) HWY_ATTR { return MaxNan(a, b); });
}

// Four independent sums, which hide the latency of the multiply-add.
inline float Dot(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, std::int64_t n) {
  const D d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V sum[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  std::int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    for (std::int64_t s = 0; s < 4; ++s) {
      sum[s] = hn::MulAdd(hn::LoadU(d, a + i + s * lanes), hn::LoadU(d, b + i + s * lanes), sum[s]);
    }
  }
  for (; i + lanes <= n; i += lanes)
    sum[0] = hn::MulAdd(hn::LoadU(d, a + i), hn::LoadU(d, b + i), sum[0]);
  float total =
      hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]))));
  for (; i < n; ++i) total = __builtin_fmaf(a[i], b[i], total);
  return total;
}
inline void AddScaledTo(const float* x, float factor, float* y, std::int64_t n) {
  AddScaled(x, n, factor, y);
}

inline LseState RowLse(const float* x, std::int64_t n) {
  const float top = RowMax(x, n);
  if (top == -std::numeric_limits<float>::infinity()) return {};
  // Stays infinite or NaN in any merge.
  if (!(std::abs(top) < std::numeric_limits<float>::infinity()))
    return {std::numeric_limits<float>::max(), top};
  // fp32 is so coarse here that the sum equals its largest term.
  if (std::abs(top) * kLog2EFloat >= kMostExponent) return {top * kLog2EFloat, 1.0f};
  const float exponent = std::floor(top * kLog2EFloat);
  const D d;
  const V shift = hn::Set(d, exponent);
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V acc[2] = {hn::Zero(d), hn::Zero(d)};
  // The power is rounded once, where it is small, whatever x and the exponent have in common.
  const auto power = [&](V v) HWY_ATTR { return Exp2(Log2OfExp(v, shift)); };
  std::int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    acc[0] = hn::Add(acc[0], power(hn::LoadU(d, x + i)));
    acc[1] = hn::Add(acc[1], power(hn::LoadU(d, x + i + lanes)));
  }
  HWY_ALIGN float part[2 * kMaxLanes];
  std::fill(part, part + 2 * kMaxLanes, -std::numeric_limits<float>::infinity());
  std::copy(x + i, x + n, part);
  acc[0] = hn::Add(acc[0], power(hn::Load(d, part)));
  acc[1] = hn::Add(acc[1], power(hn::Load(d, part + lanes)));
  hn::Store(hn::Add(acc[0], acc[1]), d, part);
  float total = part[0];
  for (std::int64_t j = 1; j < lanes; ++j) total += part[j];
  return {exponent, total};
}

// Writes 1 where test(a, b) holds, else 0. T: float or double.
template <class T, class Test>
HWY_INLINE void CompareIntegers(const std::int64_t* HWY_RESTRICT a,
                                const std::int64_t* HWY_RESTRICT b, T* HWY_RESTRICT out,
                                std::int64_t n, Test test) {
  const hn::ScalableTag<std::int64_t> d;
  const hn::ScalableTag<double> wide;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto truth = [&](const std::int64_t* x, const std::int64_t* y) HWY_ATTR {
    const auto holds = test(hn::LoadU(d, x), hn::LoadU(d, y));
    return hn::IfThenElseZero(hn::RebindMask(wide, holds), hn::Set(wide, 1.0));
  };
  const auto store = [&](auto v, T* to) HWY_ATTR {
    if constexpr (sizeof(T) == sizeof(double)) {
      hn::StoreU(v, wide, to);
    } else {
      const hn::Rebind<float, decltype(wide)> narrow;
      hn::StoreU(hn::DemoteTo(narrow, v), narrow, to);
    }
  };
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) store(truth(a + i, b + i), out + i);
  if (i == n) return;
  HWY_ALIGN std::int64_t x[hn::MaxLanes(d)] = {}, y[hn::MaxLanes(d)] = {};
  HWY_ALIGN T last[hn::MaxLanes(d)];
  std::copy(a + i, a + n, x);
  std::copy(b + i, b + n, y);
  store(truth(x, y), last);
  std::copy(last, last + (n - i), out + i);
}
template <class T>
inline void CompareI64(VectorOp op, const std::int64_t* a, const std::int64_t* b, T* out,
                       std::int64_t n) {
  const auto equal = [](auto x, auto y) HWY_ATTR { return hn::Eq(x, y); };
  const auto less = [](auto x, auto y) HWY_ATTR { return hn::Lt(x, y); };
  const auto apart = [](auto x, auto y) HWY_ATTR { return hn::Ne(x, y); };
  const auto at_least = [](auto x, auto y) HWY_ATTR { return hn::Not(hn::Lt(x, y)); };
  switch (op) {
    case VectorOp::eq:
      return CompareIntegers(a, b, out, n, equal);
    case VectorOp::ne:
      return CompareIntegers(a, b, out, n, apart);
    case VectorOp::lt:
      return CompareIntegers(a, b, out, n, less);
    case VectorOp::le:
      return CompareIntegers(b, a, out, n, at_least);
    case VectorOp::gt:
      return CompareIntegers(b, a, out, n, less);
    default:
      return CompareIntegers(a, b, out, n, at_least);
  }
}
inline void CompareI64ToF32(VectorOp op, const std::int64_t* a, const std::int64_t* b, float* out,
                            std::int64_t n) {
  CompareI64(op, a, b, out, n);
}
inline void CompareI64ToF64(VectorOp op, const std::int64_t* a, const std::int64_t* b, double* out,
                            std::int64_t n) {
  CompareI64(op, a, b, out, n);
}

inline void AddTo(const float* x, float* y, std::int64_t n) { AddVector(x, y, nullptr, y, n); }
inline void MaxTo(const float* x, float* y, std::int64_t n) { MaxVector(x, y, nullptr, y, n); }
inline void AddExponentials(const float* x, float* top, float* sum, std::int64_t n) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  const auto next = [&](V t, V v) HWY_ATTR { return hn::IfThenElse(hn::Gt(v, t), v, t); };
  Map<3>(x, top, sum, sum, n, [&](V v, V t, V s) HWY_ATTR {
    const V most = next(t, v);  // a NaN is never the maximum
    const V a = hn::IfThenElse(hn::Eq(t, most), one, Exp(hn::Sub(t, most)));
    const V b = hn::IfThenElse(hn::Eq(v, most), one, Exp(hn::Sub(v, most)));
    return hn::MulAdd(s, a, b);
  });
  Map<2>(x, top, nullptr, top, n, [&](V v, V t) HWY_ATTR { return next(t, v); });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
