// Exponentials in memory that d_weight has not come to yet: each range has room where the next one
// will be written, and what is left for the workspace is about as little as can be.
#include "head/cuda/word_ranges.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

namespace logitless::test {
namespace {

using cuda::word_ranges;
using cuda::WordRanges;

struct Head {
  std::int64_t tokens, vocab, dim, element;
};

void expect_sound(const Head& h, const WordRanges& ranges, int count) {
  ASSERT_EQ(ranges.count, count);
  EXPECT_EQ(ranges.first[0], 0);
  EXPECT_EQ(ranges.first[count], h.vocab);
  for (int r = 0; r < count; ++r) {
    EXPECT_EQ(ranges.first[r] % 256, 0);
    ASSERT_GT(ranges.words(r), 0);
    if (r + 1 < count) {
      EXPECT_EQ(ranges.stride(r), ranges.words(r));
      EXPECT_LE(h.tokens * ranges.stride(r) * 2, ranges.words(r + 1) * h.dim * h.element);
    }
  }
}

TEST(WordRanges, HaveRoomInTheNextOneAndLeaveLittle) {
  std::mt19937_64 random(5);
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
  };
  int made = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    const Head h{draw(1, 9000), draw(1, draw(0, 1) == 0 ? 5000 : 300000), draw(1, 600) * 8,
                 draw(0, 1) == 0 ? 2 : 4};
    const int count = static_cast<int>(draw(2, cuda::kMostWordRanges));
    const WordRanges ranges = word_ranges(h.tokens, h.vocab, h.dim, h.element, count);
    SCOPED_TRACE(std::to_string(h.tokens) + " tokens, " + std::to_string(h.vocab) + " words, " +
                 std::to_string(h.dim) + " x " + std::to_string(h.element) + " bytes, " +
                 std::to_string(count) + " ranges");
    if (ranges.count == 0) continue;
    ++made;
    expect_sound(h, ranges, count);
    // Of lengths that need not be whole tiles.
    const double growth =
        std::max(1.0, static_cast<double>(h.tokens) * 2.0 / static_cast<double>(h.dim * h.element));
    double parts = 0.0;
    for (int r = 0; r < count; ++r) parts += std::pow(growth, -r);
    EXPECT_LE(static_cast<double>(ranges.words(count - 1)),
              static_cast<double>(h.vocab) / parts + 256.0 * (count + 1));
  }
  EXPECT_GT(made, 1000);
}

TEST(WordRanges, OfKnownHeads) {
  // Llama-3-8B's with 8192 tokens: half of the exponentials at most in bf16, an eighth in fp32.
  const WordRanges bf16 = word_ranges(8192, 128256, 4096, 2, 4);
  expect_sound({8192, 128256, 4096, 2}, bf16, 4);
  EXPECT_NEAR(static_cast<double>(bf16.words(3)) / 128256.0, 8.0 / 15.0, 0.004);
  const WordRanges fp32 = word_ranges(8192, 128256, 4096, 4, 8);
  expect_sound({8192, 128256, 4096, 4}, fp32, 8);
  EXPECT_NEAR(static_cast<double>(fp32.words(7)) / 128256.0, 1.0 / 8.0, 0.004);
}

TEST(WordRanges, NoneWhereThereAreTooFewWords) {
  EXPECT_EQ(word_ranges(700, 256, 64, 2, 2).count, 0);
  EXPECT_EQ(word_ranges(700, 100000, 64, 2, 1).count, 0);
  EXPECT_EQ(word_ranges(700, 100000, 64, 2, cuda::kMostWordRanges + 1).count, 0);
  EXPECT_EQ(word_ranges(100000, 512, 8, 2, 2).count, 0);  // a row has room for no tile
  EXPECT_EQ(word_ranges(256, 257, 256, 4, 2).count, 0);   // nor the single word after it
}

}  // namespace
}  // namespace logitless::test
