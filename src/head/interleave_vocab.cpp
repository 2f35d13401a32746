#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/check.h"
#include "logitless/sharding.h"
#include "math/mix.h"

namespace logitless {
namespace {

void require_ranks(std::int64_t vocab, int ranks) {
  require(vocab >= 1 && vocab <= INT32_MAX, "vocab: expected 1 to ", INT32_MAX, ", got ", vocab);
  require(ranks >= 1, "ranks: expected 1 or more, got ", ranks);
}

}  // namespace

std::int64_t interleaved_begin(std::int64_t vocab, int ranks, int rank) {
  require_ranks(vocab, ranks);
  require(rank >= 0 && rank <= ranks, "rank: expected 0 to ", ranks, ", got ", rank);
  return vocab / ranks * rank + std::min<std::int64_t>(rank, vocab % ranks);
}

std::vector<std::int32_t> interleave_vocab(std::int64_t vocab, int ranks,
                                           std::span<const float> average, std::uint64_t seed) {
  require_ranks(vocab, ranks);
  require(average.empty() || static_cast<std::int64_t>(average.size()) == vocab,
          "average: expected ", vocab, " values or none, got ", average.size());
  std::vector<std::int32_t> vocab_ids(static_cast<std::size_t>(vocab));
  std::iota(vocab_ids.begin(), vocab_ids.end(), 0);
  if (!average.empty()) {
    for (std::size_t j = 0; j < average.size(); ++j)
      require(!std::isnan(average[j]), "average: expected numbers, got ", average[j],
              " for vocabulary entry ", j);
    std::stable_sort(vocab_ids.begin(), vocab_ids.end(), [&](std::int32_t a, std::int32_t b) {
      return average[static_cast<std::size_t>(a)] > average[static_cast<std::size_t>(b)];
    });
  }
  std::vector<std::int64_t> next(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r)
    next[static_cast<std::size_t>(r)] = interleaved_begin(vocab, ranks, r);
  std::vector<int> order(static_cast<std::size_t>(ranks));
  std::vector<std::int32_t> interleaved(static_cast<std::size_t>(vocab));
  std::uint64_t state = mix64(seed);
  for (std::int64_t at = 0; at < vocab; at += ranks) {
    const std::int64_t count = std::min<std::int64_t>(ranks, vocab - at);
    // The last, incomplete group goes to the first ranks, so their shares are one larger.
    std::iota(order.begin(), order.end(), 0);
    for (std::int64_t i = count - 1; i > 0; --i) {
      state = mix64(state);
      std::swap(order[static_cast<std::size_t>(i)],
                order[static_cast<std::size_t>(state % static_cast<std::uint64_t>(i + 1))]);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      std::int64_t& to = next[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])];
      interleaved[static_cast<std::size_t>(to++)] = vocab_ids[static_cast<std::size_t>(at + i)];
    }
  }
  for (int r = 0; r < ranks; ++r) {
    std::sort(interleaved.begin() + interleaved_begin(vocab, ranks, r),
              interleaved.begin() + interleaved_begin(vocab, ranks, r + 1));
  }
  return interleaved;
}

std::vector<std::int32_t> inverse_of_interleaved(std::span<const std::int32_t> interleaved) {
  std::vector<std::int32_t> inverse(interleaved.size(), -1);
  for (std::size_t i = 0; i < interleaved.size(); ++i) {
    const std::int32_t vocab_id = interleaved[i];
    require(vocab_id >= 0 && static_cast<std::size_t>(vocab_id) < interleaved.size(),
            "interleaved: ", vocab_id, " at row ", i, " is outside [0, ", interleaved.size(), ")");
    std::int32_t& row = inverse[static_cast<std::size_t>(vocab_id)];
    require(row < 0, "interleaved: ", vocab_id, " stands at row ", row, " and at ", i);
    row = static_cast<std::int32_t>(i);
  }
  return inverse;
}

}  // namespace logitless
