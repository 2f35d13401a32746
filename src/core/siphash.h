// SipHash-2-4 of 128 bits (Aumasson and Bernstein): a keyed hash that cannot be computed without
// the key.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace logitless {

inline constexpr std::size_t kSipHashKey = 16;  // bytes

class SipHash {
 public:
  // `key` has kSipHashKey bytes.
  explicit SipHash(std::string_view key) {
    const std::uint64_t k0 = word(key, 8), k1 = word(key.substr(8), 8);
    state_ = {k0 ^ 0x736f6d6570736575u, k1 ^ 0x646f72616e646f6du ^ 0xee, k0 ^ 0x6c7967656e657261u,
              k1 ^ 0x7465646279746573u};
  }

  std::array<std::uint64_t, 2> of(std::string_view bytes) && {
    const std::uint64_t length = bytes.size();
    for (; bytes.size() >= 8; bytes.remove_prefix(8)) take(word(bytes, 8));
    take(word(bytes, bytes.size()) | length << 56);
    return {finish(2, 0xee), finish(1, 0xdd)};
  }

 private:
  // Reads little-endian on any machine.
  static std::uint64_t word(std::string_view bytes, std::size_t count) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < count; ++i)
      value |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
    return value;
  }
  void take(std::uint64_t value) {
    state_[3] ^= value;
    rounds(2);
    state_[0] ^= value;
  }
  std::uint64_t finish(std::size_t which, std::uint64_t constant) {
    state_[which] ^= constant;
    rounds(4);
    return state_[0] ^ state_[1] ^ state_[2] ^ state_[3];
  }
  void rounds(int count) {
    auto& [a, b, c, d] = state_;
    for (int i = 0; i < count; ++i) {
      a += b, b = std::rotl(b, 13) ^ a, a = std::rotl(a, 32);
      c += d, d = std::rotl(d, 16) ^ c;
      a += d, d = std::rotl(d, 21) ^ a;
      c += b, b = std::rotl(b, 17) ^ c, c = std::rotl(c, 32);
    }
  }

  std::array<std::uint64_t, 4> state_;
};

// Returns 32 hexadecimal digits, in the order of the hash's bytes.
inline std::string siphash(std::string_view key, std::string_view bytes) {
  std::string text;
  for (const std::uint64_t word : SipHash(key).of(bytes)) {
    for (unsigned shift = 0; shift < 64; shift += 8) {
      text += "0123456789abcdef"[word >> (shift + 4) & 15u];
      text += "0123456789abcdef"[word >> shift & 15u];
    }
  }
  return text;
}

}  // namespace logitless
