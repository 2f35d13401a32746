// 64-bit hashing and counter-based random numbers. Values depend on the arguments alone: random
// numbers need no state, and threads draw them in any order.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <string>
#include <string_view>

namespace logitless::train {

// A bijection of 64-bit words that spreads every input bit over all output bits.
inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) { return mix(mix(a) ^ b); }

// Returns a uniform random number in [0, 1).
inline double uniform(std::uint64_t seed, std::uint64_t index) {
  return static_cast<double>(mix(seed, index) >> 11) * 0x1p-53;
}

// Returns a normal random number of mean 0 and variance 1.
inline float normal(std::uint64_t seed, std::uint64_t index) {
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform(seed, 2 * index)));
  const double angle = 2.0 * std::numbers::pi * uniform(seed, 2 * index + 1);
  return static_cast<float>(radius * std::cos(angle));
}

inline std::uint64_t hash_bytes(std::string_view bytes, std::uint64_t seed = 0) {
  std::uint64_t hash = mix(seed, bytes.size());
  std::size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    std::uint64_t word = 0;
    for (int b = 0; b < 8; ++b) {
      word |= std::uint64_t{static_cast<unsigned char>(bytes[i + b])} << (8 * b);
    }
    hash = mix(hash ^ word);
  }
  std::uint64_t tail = 0;
  for (int b = 0; i + b < bytes.size(); ++b) {
    tail |= std::uint64_t{static_cast<unsigned char>(bytes[i + b])} << (8 * b);
  }
  return mix(hash ^ tail);
}

// Returns `value` as 16 hexadecimal digits.
inline std::string hex(std::uint64_t value) {
  std::string text(16, '0');
  for (int i = 15; i >= 0; --i, value >>= 4) text[i] = "0123456789abcdef"[value & 15u];
  return text;
}

}  // namespace logitless::train
