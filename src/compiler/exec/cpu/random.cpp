// Random numbers by counters, in blocks that compilers vectorise.
#include <algorithm>
#include <array>
#include <cstdint>

#include "compiler/exec/cpu/run.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

constexpr std::int64_t kBlock = 64;
using Words = std::array<std::uint32_t, kBlock>;

std::uint64_t whole(double number) {
  return static_cast<std::uint64_t>(static_cast<std::int64_t>(number));
}

// --- Function::random: Threefry-2x32 with 20 rounds

struct Block {
  Words key0, key1, x, y;
};

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

// --- Function::uniform: Philox-4x32 with 10 rounds

// Philox of kCount keys and counters, which its words replace.
template <std::size_t kCount>
struct Philox {
  std::array<std::uint32_t, kCount> key0, key1;
  std::array<std::array<std::uint32_t, kCount>, 4> x;

  void set(std::size_t i, std::uint32_t k0, std::uint32_t k1, std::uint32_t block,
           std::uint32_t part) {
    key0[i] = k0;
    key1[i] = k1;
    x[0][i] = block;
    x[1][i] = part;
    x[2][i] = x[3][i] = 0;
  }
  void run() {
    for (int round = 0; round < 10; ++round) {
      for (std::size_t i = 0; i < kCount; ++i) {
        const std::uint64_t a = std::uint64_t{0xD2511F53u} * x[0][i];
        const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * x[2][i];
        x[0][i] = static_cast<std::uint32_t>(b >> 32) ^ x[1][i] ^ key0[i];
        x[1][i] = static_cast<std::uint32_t>(b);
        x[2][i] = static_cast<std::uint32_t>(a >> 32) ^ x[3][i] ^ key1[i];
        x[3][i] = static_cast<std::uint32_t>(a);
        key0[i] += 0x9E3779B9u;
        key1[i] += 0xBB67AE85u;
      }
    }
  }
};

// An entry's index among the random numbers of its key (compiler/ir/function.h).
struct Slot {
  explicit Slot(std::uint32_t entry)
      : block(entry / 32 * 4 + entry % 8 / 2), slot(entry / 8 % 4 * 2 + entry % 2) {}
  std::uint32_t block, slot;

  // pair: its word of part 0. more: its word of the part with the lower bits.
  double number(std::uint32_t pair, std::uint32_t more) const {
    const std::uint32_t first = slot % 2 == 0 ? pair & 0xFFFFu : pair >> 16;
    const std::int64_t n = static_cast<std::int64_t>(first) << 24 | more >> 9 << 1 | 1;
    return std::min(static_cast<float>(n) * 0x1p-40f, 1.0f - 0x1p-24f);
  }
};

// Entries that share their blocks: 32 in a row, of one key.
constexpr std::int64_t kShared = 32;

bool share_blocks(const double* key0, const double* key1, const double* entry, std::int64_t n) {
  if (n < kShared || whole(entry[0]) % kShared != 0) return false;
  bool same = true;
  for (std::int64_t i = 1; i < kShared; ++i)
    same &=
        key0[i] == key0[0] && key1[i] == key1[0] && entry[i] == entry[0] + static_cast<double>(i);
  return same;
}

// kShared entries from a multiple of kShared on: 4 blocks of 3 parts.
void shared_numbers(std::uint32_t key0, std::uint32_t key1, std::uint32_t first, double* out) {
  Philox<12> p;
  const std::uint32_t block = Slot(first).block;
  for (std::uint32_t i = 0; i < 12; ++i) p.set(i, key0, key1, block + i % 4, i / 4);
  p.run();
  for (std::uint32_t i = 0; i < kShared; ++i) {
    const Slot at(i);
    const std::uint32_t part = 1 + at.slot / 4;
    out[i] = at.number(p.x[at.slot / 2][at.block], p.x[at.slot % 4][part * 4 + at.block]);
  }
}

// At most kShared entries, each with blocks of its own.
void separate_numbers(const double* key0, const double* key1, const double* entry, double* out,
                      std::size_t n) {
  Philox<2 * kShared> p{};
  for (std::size_t i = 0; i < n; ++i) {
    const auto k0 = static_cast<std::uint32_t>(whole(key0[i]));
    const auto k1 = static_cast<std::uint32_t>(whole(key1[i]));
    const Slot at(static_cast<std::uint32_t>(whole(entry[i])));
    p.set(i, k0, k1, at.block, 0);
    p.set(kShared + i, k0, k1, at.block, 1 + at.slot / 4);
  }
  p.run();
  for (std::size_t i = 0; i < n; ++i) {
    const Slot at(static_cast<std::uint32_t>(whole(entry[i])));
    out[i] = at.number(p.x[at.slot / 2][i], p.x[at.slot % 4][kShared + i]);
  }
}

void uniform_numbers(const double* key0, const double* key1, const double* entry, double* out,
                     std::int64_t n) {
  for (std::int64_t i = 0; i < n;) {
    const double *k0 = key0 + i, *k1 = key1 + i, *at = entry + i;
    if (share_blocks(k0, k1, at, n - i)) {
      shared_numbers(static_cast<std::uint32_t>(whole(*k0)), static_cast<std::uint32_t>(whole(*k1)),
                     static_cast<std::uint32_t>(whole(*at)), out + i);
      i += kShared;
      continue;
    }
    // Up to the next entry that may begin shared blocks.
    const auto past = static_cast<std::int64_t>(whole(*at) % kShared);
    const std::int64_t count = std::min(kShared - past, n - i);
    separate_numbers(k0, k1, at, out + i, static_cast<std::size_t>(count));
    i += count;
  }
}

}  // namespace

RandomFunction random_function(Function function) {
  check(is_random(function), "a function without random numbers");
  return function == Function::random ? &random_numbers : &uniform_numbers;
}

}  // namespace logitless::ir
