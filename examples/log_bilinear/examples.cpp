#include "examples.h"

#include <fmt/format.h>

#include <bit>
#include <stdexcept>

#include "hash.h"

namespace log_bilinear {

Examples::Examples(const std::vector<std::int32_t>& stream, std::int64_t context)
    : stream_(stream),
      context_(context),
      size_(static_cast<std::int64_t>(stream.size()) - context) {
  if (size_ < 1) {
    throw std::runtime_error(fmt::format(
        "--context {} leaves nothing to predict in a text of {} words", context, stream.size()));
  }
}

void Examples::take(const std::vector<std::int64_t>& examples, std::int32_t* contexts,
                    std::int32_t* targets) const {
  for (const std::int64_t example : examples) {
    const std::int64_t at = example + context_;
    *targets++ = stream_[at];
    for (std::int64_t k = 1; k <= context_; ++k) *contexts++ = stream_[at - k];
  }
}

std::int64_t shuffled(std::uint64_t seed, std::int64_t size, std::int64_t index) {
  // A Feistel network is a bijection of 2 * half bits; walking along its cycle until the value is
  // below `size` makes it one of [0, size). Fewer than four walks on average.
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

}  // namespace log_bilinear
