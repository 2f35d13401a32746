#include "train/data/shuffle.h"

#include <bit>

#include "train/hash.h"

namespace logitless::train {

std::int64_t shuffled(std::uint64_t seed, std::int64_t size, std::int64_t index) {
  // A Feistel network is a bijection on 2 * half bits. Walking its cycle until the value is below
  // `size` makes it a bijection on [0, size). Fewer than four steps on average.
  constexpr int kRounds = 4;
  const auto count = static_cast<std::uint64_t>(size);
  const std::uint64_t key = mix(seed, static_cast<std::uint64_t>(index / size));
  const int half = (std::bit_width(count - 1) + 1) / 2;
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  auto value = static_cast<std::uint64_t>(index % size);
  do {
    std::uint64_t left = value >> half;
    std::uint64_t right = value & mask;
    for (int round = 0; round < kRounds; ++round) {
      const std::uint64_t next =
          left ^ (mix(key + static_cast<std::uint64_t>(round), right) & mask);
      left = right;
      right = next;
    }
    value = left << half | right;
  } while (value >= count);
  return static_cast<std::int64_t>(value);
}

}  // namespace logitless::train
