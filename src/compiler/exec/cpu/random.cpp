// Threefry-2x32 with 20 rounds, in blocks that compilers vectorise.
#include <algorithm>
#include <array>
#include <cstdint>

#include "compiler/exec/cpu/run.h"

namespace logitless::ir {
namespace {

constexpr std::int64_t kBlock = 64;
using Words = std::array<std::uint32_t, kBlock>;

struct Block {
  Words key0, key1, x, y;
};

std::uint64_t whole(double number) {
  return static_cast<std::uint64_t>(static_cast<std::int64_t>(number));
}

template <int kBy>
void mix(Block& b) {
  for (std::size_t i = 0; i < kBlock; ++i) {
    b.x[i] += b.y[i];
    b.y[i] = (b.y[i] << kBy | b.y[i] >> (32 - kBy)) ^ b.x[i];
  }
}
// Computes four rounds and adds the next part of the key. The third key word of 32 bits is the
// exclusive or of the others and a constant.
template <int kA, int kB, int kC, int kD>
void four_rounds(Block& b, int group) {
  mix<kA>(b);
  mix<kB>(b);
  mix<kC>(b);
  mix<kD>(b);
  const int first = (group + 1) % 3, second = (group + 2) % 3;
  for (std::size_t i = 0; i < kBlock; ++i) {
    const std::uint32_t third = b.key0[i] ^ b.key1[i] ^ 0x1BD11BDAu;
    b.x[i] += first == 0 ? b.key0[i] : first == 1 ? b.key1[i] : third;
    b.y[i] += (second == 0   ? b.key0[i]
               : second == 1 ? b.key1[i]
                             : third) +
              static_cast<std::uint32_t>(group + 1);
  }
}

}  // namespace

void random_numbers(const double* key0, const double* key1, const double* counter, double* out,
                    std::int64_t n) {
  Block b{};
  for (std::int64_t first = 0; first < n; first += kBlock) {
    const auto count = static_cast<std::size_t>(std::min(kBlock, n - first));
    const double *k0 = key0 + first, *k1 = key1 + first, *at = counter + first;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t c = whole(at[i]);
      b.key0[i] = static_cast<std::uint32_t>(whole(k0[i]));
      b.key1[i] = static_cast<std::uint32_t>(whole(k1[i]));
      b.x[i] = static_cast<std::uint32_t>(c >> 32) + b.key0[i];
      b.y[i] = static_cast<std::uint32_t>(c) + b.key1[i];
    }
    four_rounds<13, 15, 26, 6>(b, 0);
    four_rounds<17, 29, 16, 24>(b, 1);
    four_rounds<13, 15, 26, 6>(b, 2);
    four_rounds<17, 29, 16, 24>(b, 3);
    four_rounds<13, 15, 26, 6>(b, 4);
    for (std::size_t i = 0; i < count; ++i) {
      const auto bits = static_cast<std::int32_t>((b.x[i] ^ b.y[i]) >> 9);
      out[first + static_cast<std::int64_t>(i)] = static_cast<double>(bits) * 0x1p-23;
    }
  }
}

}  // namespace logitless::ir
