#include "cli/convert.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <numbers>

#include "logitless/error.h"
#include "logitless/parallel.h"

namespace logitless::cli {
namespace {

float bf16_value(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

std::uint16_t to_bf16(float value) {
  if (std::isnan(value)) return 0x7fc0;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float f16_value(std::uint16_t bits) {
  const float sign = (bits & 0x8000) != 0 ? -1.0f : 1.0f;
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
}

std::uint16_t to_f16(float value) {
  if (std::isnan(value)) return 0x7e00;
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return static_cast<std::uint16_t>(sign | 0x7c00);
  // Spacing is 2^-24 below 2^-14, and 2^(e - 10) above; a fraction that rounds up to 2048 carries
  // into the exponent.
  const int e = magnitude < 0x1p-14f ? -15 : std::ilogb(magnitude);
  const int fraction =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, e == -15 ? 24 : 10 - e)));
  const int bits = e == -15 ? fraction : ((e + 15) << 10) + fraction - 1024;
  return static_cast<std::uint16_t>(sign | bits);
}

// A table of all 65536 values, so that decoding is a look-up.
using HalfValues = std::array<float, 65536>;
template <float (*kDecode)(std::uint16_t)>
const HalfValues& half_values() {
  static const HalfValues values = [] {
    HalfValues made;
    for (std::size_t i = 0; i < made.size(); ++i) made[i] = kDecode(static_cast<std::uint16_t>(i));
    return made;
  }();
  return values;
}

template <typename T>
T load(const void* data, std::int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * static_cast<std::int64_t>(sizeof(T)),
              sizeof(T));
  return value;
}

// Sets to[i] = value(i) for all i, rounded.
template <typename F>
void fill(const TensorView& to, F value) {
  const std::int64_t count = to.numel();
  const auto each = [&](auto&& set) {
    constexpr std::int64_t kGrain = 1 << 14;
    parallel_ranges(default_threads(), count, kGrain, [&](std::int64_t i, std::int64_t last) {
      for (; i < last; ++i) set(i);
    });
  };
  switch (to.dtype()) {
    case DType::f32: {
      auto* out = static_cast<float*>(to.data());
      each([&](std::int64_t i) { out[i] = value(i); });
      return;
    }
    case DType::bf16:
    case DType::f16: {
      auto* out = static_cast<std::uint16_t*>(to.data());
      const bool bf16 = to.dtype() == DType::bf16;
      each([&](std::int64_t i) { out[i] = bf16 ? to_bf16(value(i)) : to_f16(value(i)); });
      return;
    }
    default:
      throw InternalError("cli: fill of an integer tensor");
  }
}

// Returns a hash of the counter: 64 random bits.
std::uint64_t mixed(std::uint64_t seed, std::uint64_t counter) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15u + counter;
  for (const std::uint64_t factor : {0xbf58476d1ce4e5b9u, 0x94d049bb133111ebu}) {
    x = (x ^ x >> 30) * factor;
    x ^= x >> 27;
  }
  return x ^ x >> 31;
}

}  // namespace

OwnedTensor make_tensor(DType dtype, std::span<const std::int64_t> shape) {
  OwnedTensor out;
  const TensorView sized(nullptr, dtype, shape);
  out.memory = Buffer(static_cast<std::size_t>(sized.bytes()));
  out.view = TensorView(out.memory.data(), dtype, shape);
  return out;
}

namespace {

OwnedTensor like(const ConstTensorView& view, DType dtype) {
  std::array<std::int64_t, kMaxRank> shape{};
  for (int d = 0; d < view.rank(); ++d) shape[static_cast<std::size_t>(d)] = view.size(d);
  return make_tensor(dtype, std::span(shape.data(), static_cast<std::size_t>(view.rank())));
}

}  // namespace

OwnedTensor convert(const ConstTensorView& from, DType to) {
  OwnedTensor out = like(from, to);
  const void* data = from.data();
  if (from.dtype() == to) {
    if (from.bytes() > 0)
      std::memcpy(out.view.data(), data, static_cast<std::size_t>(from.bytes()));
    return out;
  }
  switch (from.dtype()) {
    case DType::f32:
      fill(out.view, [=](std::int64_t i) { return load<float>(data, i); });
      return out;
    case DType::f64:
      fill(out.view, [=](std::int64_t i) { return static_cast<float>(load<double>(data, i)); });
      return out;
    case DType::bf16: {
      const HalfValues& values = half_values<bf16_value>();
      fill(out.view, [=, &values](std::int64_t i) { return values[load<std::uint16_t>(data, i)]; });
      return out;
    }
    case DType::f16: {
      const HalfValues& values = half_values<f16_value>();
      fill(out.view, [=, &values](std::int64_t i) { return values[load<std::uint16_t>(data, i)]; });
      return out;
    }
    default:
      throw InvalidArgument(describe(from) + " cannot be converted to " + std::string(name_of(to)));
  }
}

OwnedTensor dequantise(const ConstTensorView& q, const ConstTensorView& scale, DType to) {
  if (q.dtype() != DType::i8 || q.rank() != 2)
    throw InvalidArgument("expected i8[V, D] before *, got " + describe(q));
  if (scale.dtype() != DType::f32 || scale.rank() != 1 || scale.size(0) != q.size(0)) {
    throw InvalidArgument("expected f32[" + std::to_string(q.size(0)) + "] after *, got " +
                          describe(scale));
  }
  OwnedTensor out = like(q, to);
  const std::int64_t dim = q.size(1);
  const auto* values = static_cast<const std::int8_t*>(q.data());
  const void* scales = scale.data();
  fill(out.view, [=](std::int64_t i) {
    return static_cast<float>(values[i]) * load<float>(scales, i / dim);
  });
  return out;
}

OwnedTensor random_normal(DType dtype, std::span<const std::int64_t> shape, double deviation,
                          std::uint64_t seed) {
  OwnedTensor out = make_tensor(dtype, shape);
  fill(out.view, [=](std::int64_t i) {
    // Box-Muller: a pair of uniform numbers, u in (0, 1], from one hashed integer.
    const std::uint64_t bits = mixed(seed, static_cast<std::uint64_t>(i));
    const float u = static_cast<float>((bits >> 40) + 1) * 0x1p-24f;
    const float v = static_cast<float>(bits & 0xffffff) * 0x1p-24f;
    return static_cast<float>(deviation) * std::sqrt(-2.0f * std::log(u)) *
           std::cos(2.0f * std::numbers::pi_v<float> * v);
  });
  return out;
}

OwnedTensor random_targets(std::int64_t count, std::int64_t limit, std::uint64_t seed) {
  const std::int64_t shape[] = {count};
  OwnedTensor out = make_tensor(DType::i32, shape);
  auto* targets = static_cast<std::int32_t*>(out.view.data());
  for (std::int64_t i = 0; i < count; ++i) {
    targets[i] = static_cast<std::int32_t>(mixed(seed, static_cast<std::uint64_t>(i)) %
                                           static_cast<std::uint64_t>(limit));
  }
  return out;
}

}  // namespace logitless::cli
