// Epilogues on one block of logits, z [kVocabTile entries][panel tokens], between the GEMMs. Tokens
// lie along the SIMD lanes, so every reduction over the vocabulary is vertical.
#if defined(LOGITLESS_SOFTMAX_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOGITLESS_SOFTMAX_INL_H
#undef LOGITLESS_SOFTMAX_INL_H
#else
#define LOGITLESS_SOFTMAX_INL_H
#endif

#include <cmath>
#include <cstdint>

#include "kernels/cpu/simd_math-inl.h"
#include "kernels/cpu_head.h"
#include "math/lse_state.h"

HWY_BEFORE_NAMESPACE();
namespace logitless::cpu::HWY_NAMESPACE {

// Parameters that turn x . w into z, for one vocabulary tile.
struct LogitTransform {
  float scale = 1.0f;
  float cap = 0.0f;
  const float* bias = nullptr;           // from the tile's first entry on, or null
  const float* logit_weights = nullptr;  // logit weights, likewise
};

// Running per-token state of one segment and panel.
struct PanelState {
  float* exponent;
  float* sum;
  float* best = nullptr;        // with argmax
  float* best_index = nullptr;  // an int32 in a float's bits
  double* entropy = nullptr;    // sum_j x log2 x, x = 2^(z log2e - exponent)
  double* weighted = nullptr;
  ExactSum* wide = nullptr;  // for a vocabulary-parallel head
  float* base = nullptr;     // with tile masses: their reference; -inf until a tile has mass
};

// Code of a tile's mass sum_j exp(z_ij) (times the softcap's slope) in 16 bits: its log2 relative
// to a base of the row, in steps of 1/256, so within 2^(1/512). 0: no mass, or under 2^-127 of the
// base. kMassTop: at least the largest mass.
inline constexpr float kMassSteps = 256.0f;
inline constexpr std::int32_t kMassBase = 32768;
inline constexpr std::int32_t kMassTop = 65535;
// Relative error of a mass: 2^(1/512) - 1 plus that of Log2.
inline constexpr float kMassError = 1.5e-3f;

inline void ResetState(const PanelState& state, std::int64_t tokens) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    state.exponent[t] = 0.0f;
    state.sum[t] = 0.0f;
    if (state.best != nullptr) {
      state.best[t] = -INFINITY;
      state.best_index[t] = 0.0f;
    }
    if (state.entropy != nullptr) state.entropy[t] = 0.0;
    if (state.weighted != nullptr) state.weighted[t] = 0.0;
    if (state.wide != nullptr) state.wide[t] = ExactSum();
    if (state.base != nullptr) state.base[t] = -INFINITY;
  }
}

// z = softcap(scale * (z + bias)) in place.
template <int kPanel>
HWY_INLINE void TransformBlock(const LogitTransform& f, std::int64_t vocab_count,
                               float* HWY_RESTRICT z) {
  if (f.scale == 1.0f && f.cap == 0.0f && f.bias == nullptr) return;
  const D d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const V scale = hn::Set(d, f.scale);
  const V cap = hn::Set(d, f.cap);
  const V inverse = hn::Set(d, f.cap == 0.0f ? 0.0f : 1.0f / f.cap);
  for (std::int64_t r = 0; r < vocab_count; ++r) {
    const V shift = hn::Set(d, f.bias == nullptr ? 0.0f : f.bias[r] * f.scale);
    for (std::int64_t t = 0; t < kPanel; t += lanes) {
      float* at = z + r * kPanel + t;
      V u = hn::MulAdd(hn::Load(d, at), scale, shift);
      if (f.cap != 0.0f) u = hn::Mul(cap, Tanh(hn::Mul(u, inverse)));
      hn::Store(u, d, at);
    }
  }
}

// Slope of the softcap, 1 - (z / c)^2, at the capped z.
HWY_INLINE V CapSlope(V z, V inverse) {
  const D d;
  const V r = hn::Mul(z, inverse);
  const V one = hn::Set(d, 1.0f);
  return hn::Mul(hn::Sub(one, r), hn::Add(one, r));
}

template <class Bf16, typename T>
HWY_INLINE void StoreElement(V v, T* to) {
  if constexpr (sizeof(T) == 2) {
    Bf16::Store(v, to);
  } else {
    hn::Store(v, D(), to);
  }
}
HWY_INLINE V LoadElement(const std::uint16_t* from) { return LoadBf16(from); }
HWY_INLINE V LoadElement(const float* from) { return hn::Load(D(), from); }

// Encodes log2 masses relative to `base`; 0 for -inf and NaN.
HWY_INLINE hn::Vec<DI> MassCode(V log2_mass, V base) {
  const D d;
  const DI di;
  const V steps = hn::MulAdd(hn::Sub(log2_mass, base), hn::Set(d, kMassSteps),
                             hn::Set(d, static_cast<float>(kMassBase)));
  const V clamped = hn::Min(hn::Max(steps, hn::Zero(d)), hn::Set(d, static_cast<float>(kMassTop)));
  return hn::IfThenElse(hn::RebindMask(di, hn::IsNaN(log2_mass)), hn::Zero(di),
                        hn::NearestInt(clamped));
}

// Stores the mass codes of one tile, with `k` and `sum` of AbsorbBlock, to code [kPanel].
HWY_INLINE void StoreMass(V k, V sum, std::int64_t t, const PanelState& state,
                          std::uint16_t* HWY_RESTRICT code) {
  const D d;
  const DU16 du16;
  const V old = hn::LoadU(d, state.base + t);
  const auto nothing = hn::Eq(sum, hn::Zero(d));
  const auto first = hn::Eq(old, hn::Set(d, -INFINITY));
  const V base = hn::IfThenElse(hn::AndNot(nothing, first), k, old);
  hn::StoreU(base, d, state.base + t);
  const V log2_mass = hn::IfThenElse(nothing, hn::Set(d, -INFINITY), hn::Add(k, Log2(sum)));
  hn::StoreU(hn::DemoteTo(du16, MassCode(log2_mass, base)), du16, code + t);
}

// Decodes log2 masses; -inf for 0.
HWY_INLINE V LoadMass(const std::uint16_t* HWY_RESTRICT code, V base) {
  const D d;
  const DI di;
  const auto bits = hn::BitCast(di, hn::PromoteTo(DU(), hn::LoadU(DU16(), code)));
  const V steps = hn::ConvertTo(d, hn::Sub(bits, hn::Set(di, kMassBase)));
  const V value = hn::MulAdd(steps, hn::Set(d, 1.0f / kMassSteps), base);
  return hn::IfThenElse(hn::RebindMask(d, hn::Eq(bits, hn::Zero(di))), hn::Set(d, -INFINITY),
                        value);
}

// Optional parts of AbsorbBlock, for the tokens of the lanes from t on.
template <int kPanel>
HWY_INLINE void AbsorbBest(std::int64_t vocab_begin, std::int64_t vocab_count,
                           const float* HWY_RESTRICT z, std::int64_t t, const PanelState& state) {
  const D d;
  const DI di;
  V best = hn::LoadU(d, state.best + t);
  auto index = hn::BitCast(di, hn::LoadU(d, state.best_index + t));
  for (std::int64_t r = 0; r < vocab_count; ++r) {
    const V x = hn::Load(d, z + r * kPanel + t);
    const auto better = hn::Gt(x, best);
    best = hn::IfThenElse(better, x, best);
    index = hn::IfThenElse(hn::RebindMask(di, better),
                           hn::Set(di, static_cast<std::int32_t>(vocab_begin + r)), index);
  }
  hn::StoreU(best, d, state.best + t);
  hn::StoreU(hn::BitCast(d, index), d, state.best_index + t);
}

// One side of a merge of entropies: its exponent minus the common one, its sum of exponentials, and
// 2^shift.
struct EntropyPart {
  V shift, sum, scale;
};

template <int kPanel>
HWY_INLINE void AbsorbEntropy(std::int64_t vocab_count, const float* HWY_RESTRICT z, std::int64_t t,
                              V k, const EntropyPart& old_part, const EntropyPart& new_part,
                              const PanelState& state) {
  const D d;
  V sum = hn::Zero(d);
  for (std::int64_t r = 0; r < vocab_count; ++r) {
    const V bits = Log2OfExp(hn::Load(d, z + r * kPanel + t), k);
    const V e = Exp2(bits);
    // A masked entry is 0 * -inf.
    sum = hn::Add(sum, hn::IfThenZeroElse(hn::Eq(e, hn::Zero(d)), hn::Mul(e, bits)));
  }
  HWY_ALIGN float own[kMaxLanes];
  HWY_ALIGN float numbers[6][kMaxLanes];
  hn::Store(sum, d, own);
  int at = 0;
  for (const EntropyPart* part : {&old_part, &new_part}) {
    for (const V v : {part->shift, part->sum, part->scale}) hn::Store(v, d, numbers[at++]);
  }
  // An empty side has scale 0, and its other values are arbitrary.
  const auto scaled = [&](double entropy, int side, std::size_t i) {
    const float scale = numbers[side + 2][i];
    if (scale == 0.0f) return 0.0;
    return entropy_against(0.0, numbers[side][i], numbers[side + 1][i], entropy) * scale;
  };
  for (std::size_t i = 0; i < hn::Lanes(d); ++i)
    state.entropy[t + i] = scaled(state.entropy[t + i], 0, i) + scaled(own[i], 3, i);
}

template <int kPanel>
HWY_INLINE void AbsorbWeighted(const LogitTransform& f, std::int64_t vocab_count,
                               const float* HWY_RESTRICT z, std::int64_t t,
                               const PanelState& state) {
  const D d;
  HWY_ALIGN float part[kMaxLanes];
  HWY_ALIGN float base[kMaxLanes];
  // Logits with a large common offset are summed relative to a multiple of 64 within their range,
  // so that fp32 keeps their differences.
  V least = hn::Load(d, z + t), most = least;
  for (std::int64_t r = 1; r < vocab_count; ++r) {
    const V x = hn::Load(d, z + r * kPanel + t);
    least = hn::Min(least, x);
    most = hn::Max(most, x);
  }
  const V common = hn::Add(hn::Max(least, hn::Zero(d)), hn::Min(most, hn::Zero(d)));
  const V offset = hn::Mul(hn::Trunc(hn::Mul(common, hn::Set(d, 1.0f / 64.0f))), hn::Set(d, 64.0f));
  const V finite = hn::IfThenElseZero(hn::Lt(hn::Abs(offset), hn::Set(d, 0x1p30f)), offset);
  V zw = hn::Zero(d);
  double total = f.logit_weights == nullptr ? static_cast<double>(vocab_count) : 0.0;
  for (std::int64_t r = 0; r < vocab_count; ++r) {
    const V x = hn::Sub(hn::Load(d, z + r * kPanel + t), finite);
    zw = f.logit_weights == nullptr ? hn::Add(zw, x)
                                    : hn::MulAdd(hn::Set(d, f.logit_weights[r]), x, zw);
    if (f.logit_weights != nullptr) total += static_cast<double>(f.logit_weights[r]);
  }
  hn::Store(zw, d, part);
  hn::Store(finite, d, base);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i)
    state.weighted[t + i] += static_cast<double>(part[i]) + static_cast<double>(base[i]) * total;
}

HWY_INLINE void AbsorbExact(V k, V sum, ExactSum* HWY_RESTRICT wide) {
  const D d;
  HWY_ALIGN float exponents[kMaxLanes];
  HWY_ALIGN float sums[kMaxLanes];
  hn::Store(k, d, exponents);
  hn::Store(sum, d, sums);
  for (std::size_t i = 0; i < hn::Lanes(d); ++i) wide[i].add(sums[i], exponents[i]);
}

// Returns the sum of exponentials of tokens with a logit of +inf: infinite, or NaN with a NaN among
// the logits.
template <int kPanel>
HWY_NOINLINE V InfiniteUnlessNaN(std::int64_t vocab_count, const float* HWY_RESTRICT z) {
  const D d;
  V sum = hn::Set(d, INFINITY);
  for (std::int64_t r = 0; r < vocab_count; ++r) {
    const V x = hn::Load(d, z + r * kPanel);
    sum = hn::IfThenElse(hn::IsNaN(x), x, sum);
  }
  return sum;
}

// Adds the block to the running state, as an online softmax. With `mass` it also stores the codes
// of the block's masses. With Stored it saves 2^(z log2e - k) (times the softcap's slope) in stored
// [kVocabTile][kPanel], and k, integral, in stored_exponent [kPanel].
template <int kPanel, class Bf16, typename Stored>
HWY_INLINE void AbsorbBlock(const LogitTransform& f, std::int64_t vocab_begin,
                            std::int64_t vocab_count, const float* HWY_RESTRICT z,
                            const PanelState& state, Stored* HWY_RESTRICT stored,
                            float* HWY_RESTRICT stored_exponent, std::uint16_t* HWY_RESTRICT mass) {
  const D d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const V log2e = hn::Set(d, kLog2EFloat);
  const V lowest = hn::Set(d, -INFINITY);
  const V inverse = hn::Set(d, f.cap == 0.0f ? 0.0f : 1.0f / f.cap);
  for (std::int64_t t = 0; t < kPanel; t += lanes) {
    V top = lowest;
    for (std::int64_t r = 0; r < vocab_count; ++r)
      top = hn::Max(top, hn::Load(d, z + r * kPanel + t));
    // The exponent is integral, so that rescaling is exact, and exponentials are at most 1 up to
    // rounding. Beyond the bounds a logit may be far from its own ceiling. Below them the entries
    // are masked. Above them the token becomes NaN, since a sum without them would look valid. With
    // a logit of +inf only its state is another one, below.
    const V ceiling = hn::Max(hn::Ceil(hn::Mul(top, log2e)), hn::Set(d, kLeastExponent));
    const V bounded =
        hn::IfThenElse(hn::Gt(ceiling, hn::Set(d, kMostExponent)), hn::NaN(d), ceiling);
    const V k = hn::IfThenElse(hn::Gt(top, lowest), bounded, hn::Zero(d));
    V sum = hn::Zero(d);
    if (stored != nullptr) {
      for (std::int64_t r = 0; r < vocab_count; ++r) {
        const V x = hn::Load(d, z + r * kPanel + t);
        V e = Exp2(Log2OfExp(x, k));
        sum = hn::Add(sum, e);
        if (f.cap != 0.0f) e = hn::Mul(e, CapSlope(x, inverse));
        StoreElement<Bf16>(e, stored + r * kPanel + t);
      }
      // A tile without mass must not scale: its exponent may be above the row's.
      hn::StoreU(hn::IfThenElse(hn::Eq(sum, hn::Zero(d)), lowest, k), d, stored_exponent + t);
    } else {
      for (std::int64_t r = 0; r < vocab_count; ++r) {
        sum = hn::Add(sum, Exp2(Log2OfExp(hn::Load(d, z + r * kPanel + t), k)));
      }
    }
    if (mass != nullptr) {
      V slope_sum = sum;
      if (f.cap != 0.0f) {
        slope_sum = hn::Zero(d);
        for (std::int64_t r = 0; r < vocab_count; ++r) {
          const V x = hn::Load(d, z + r * kPanel + t);
          slope_sum = hn::MulAdd(Exp2(Log2OfExp(x, k)), CapSlope(x, inverse), slope_sum);
        }
      }
      StoreMass(k, slope_sum, t, state, mass);
    }

    const auto infinite = hn::Eq(top, hn::Set(d, INFINITY));
    V own_k = k;
    if (HWY_UNLIKELY(!hn::AllFalse(d, infinite))) {
      own_k = hn::IfThenElse(infinite, hn::Set(d, kMostExponent), k);
      sum = hn::IfThenElse(infinite, InfiniteUnlessNaN<kPanel>(vocab_count, z + t), sum);
    }
    const V old_k = hn::LoadU(d, state.exponent + t);
    const V old_sum = hn::LoadU(d, state.sum + t);
    const auto none = hn::Eq(old_sum, hn::Zero(d));
    const auto nothing = hn::Eq(sum, hn::Zero(d));
    const V high =
        hn::IfThenElse(none, own_k, hn::IfThenElse(nothing, old_k, hn::Max(old_k, own_k)));
    const V old_factor = PowerOfTwo(hn::Sub(old_k, high));
    const V new_factor = PowerOfTwo(hn::Sub(own_k, high));
    // The factors of empty sides are arbitrary: mask them.
    const V old_part = hn::IfThenZeroElse(none, hn::Mul(old_sum, old_factor));
    const V new_part = hn::IfThenZeroElse(nothing, hn::Mul(sum, new_factor));
    hn::StoreU(high, d, state.exponent + t);
    hn::StoreU(hn::Add(old_part, new_part), d, state.sum + t);

    if (state.wide != nullptr) AbsorbExact(own_k, sum, state.wide + t);
    if (state.best != nullptr) AbsorbBest<kPanel>(vocab_begin, vocab_count, z, t, state);
    if (state.entropy != nullptr) {
      AbsorbEntropy<kPanel>(vocab_count, z, t, k,
                            {hn::Sub(old_k, high), old_sum, hn::IfThenZeroElse(none, old_factor)},
                            {hn::Sub(own_k, high), sum, hn::IfThenZeroElse(nothing, new_factor)},
                            state);
    }
    if (state.weighted != nullptr) AbsorbWeighted<kPanel>(f, vocab_count, z, t, state);
  }
}

// Gradient coefficients of one panel; see BackwardChunk.
struct PanelCoefficients {
  const float* exponent;
  const float* alpha;
  const float* beta = nullptr;
  const float* gamma = nullptr;
};

// z [entries][kPanel] -> da in place. Masked entries (e = 0) have no alpha part.
template <int kPanel>
HWY_INLINE void GradientFromLogits(const LogitTransform& f, const PanelCoefficients& c,
                                   std::int64_t vocab_count, float* HWY_RESTRICT z) {
  const D d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const V inverse = hn::Set(d, f.cap == 0.0f ? 0.0f : 1.0f / f.cap);
  for (std::int64_t t = 0; t < kPanel; t += lanes) {
    const V exponent = hn::LoadU(d, c.exponent + t);
    const V alpha = hn::LoadU(d, c.alpha + t);
    const V beta = c.beta != nullptr ? hn::LoadU(d, c.beta + t) : hn::Zero(d);
    const V gamma = c.gamma != nullptr ? hn::LoadU(d, c.gamma + t) : hn::Zero(d);
    for (std::int64_t r = 0; r < vocab_count; ++r) {
      float* at = z + r * kPanel + t;
      const V x = hn::Load(d, at);
      const V bits = Log2OfExp(x, exponent);
      const V e = Exp2(bits);
      V g;
      if (c.beta != nullptr) {
        g = hn::IfThenZeroElse(hn::Eq(e, hn::Zero(d)), hn::Mul(e, hn::MulAdd(beta, bits, alpha)));
      } else {
        g = hn::Mul(e, alpha);
      }
      if (c.gamma != nullptr)
        g = hn::MulAdd(gamma, hn::Set(d, f.logit_weights == nullptr ? 1.0f : f.logit_weights[r]),
                       g);
      if (f.cap != 0.0f) g = hn::Mul(g, CapSlope(x, inverse));
      hn::Store(g, d, at);
    }
  }
}

// The same from exponentials that AbsorbBlock saved.
template <int kPanel, typename Stored>
HWY_INLINE void GradientFromStored(const LogitTransform& f, const PanelCoefficients& c,
                                   std::int64_t vocab_count, const Stored* HWY_RESTRICT stored,
                                   const float* HWY_RESTRICT stored_exponent,
                                   float* HWY_RESTRICT g) {
  const D d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t t = 0; t < kPanel; t += lanes) {
    const V shift = hn::Sub(hn::LoadU(d, stored_exponent + t), hn::LoadU(d, c.exponent + t));
    const V factor = hn::Mul(hn::LoadU(d, c.alpha + t), PowerOfTwo(shift));
    const V gamma = c.gamma != nullptr ? hn::LoadU(d, c.gamma + t) : hn::Zero(d);
    for (std::int64_t r = 0; r < vocab_count; ++r) {
      V v = hn::Mul(factor, LoadElement(stored + r * kPanel + t));
      if (c.gamma != nullptr)
        v = hn::MulAdd(gamma, hn::Set(d, f.logit_weights == nullptr ? 1.0f : f.logit_weights[r]),
                       v);
      hn::Store(v, d, g + r * kPanel + t);
    }
  }
}

// sums[r] += sum over the panel's tokens of g[r], lane by lane first, then across lanes.
template <int kPanel>
HWY_INLINE void SumTokens(std::int64_t vocab_count, const float* HWY_RESTRICT g,
                          float* HWY_RESTRICT sums) {
  const D d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t r = 0; r < vocab_count; ++r) {
    V sum = hn::Load(d, g + r * kPanel);
    for (std::int64_t t = lanes; t < kPanel; t += lanes)
      sum = hn::Add(sum, hn::Load(d, g + r * kPanel + t));
    sums[r] += hn::GetLane(hn::SumOfLanes(d, sum));
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace logitless::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
