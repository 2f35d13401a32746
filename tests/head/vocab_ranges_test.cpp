// Exponentials in memory that d_weight does not use yet: each block fits where the next one will be
// written, and the remainder in the workspace is nearly minimal.
#include "head/cuda/vocab_ranges.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

namespace logitless::test {
namespace {

using cuda::aliased_ranges;
using cuda::AliasedRanges;
using cuda::VocabRanges;

struct Head {
  std::int64_t tokens, vocab;
  cuda::RowBytes row;
};

// Checks that no launch overwrites data before it is read: when part q is read, its d_weight and
// the lower bytes are written, in order.
void expect_sound(const Head& h, const AliasedRanges& aliased, std::int64_t vocab_count) {
  const VocabRanges& parts = aliased.ranges;
  ASSERT_GE(parts.count, 2);
  EXPECT_EQ(parts.first[0], 0);
  EXPECT_EQ(parts.first[parts.count], vocab_count);
  std::int64_t ends[2] = {0, 0};  // ends of the parts in d_weight, and in the lower bytes
  for (int p = 0; p < parts.count; ++p) {
    EXPECT_EQ(parts.first[p] % 256, 0);
    ASSERT_GT(parts.vocab_count(p), 0);
    if (p + 1 == parts.count) break;
    EXPECT_EQ(parts.stride(p), parts.vocab_count(p));
    const auto& [low, row] = aliased.places[static_cast<std::size_t>(p)];
    const std::int64_t bytes = low ? h.row.low : h.row.weight;
    EXPECT_GE(row, parts.first[p + 1]);
    EXPECT_EQ(row % 256, 0);
    EXPECT_GE(row * bytes, ends[low]);
    ends[low] = row * bytes + h.tokens * parts.stride(p) * h.row.number;
    EXPECT_LE(ends[low], h.vocab * bytes);
  }
}

TEST(VocabRanges, FitInTheNextOneAndLeaveLittle) {
  std::mt19937_64 random(5);
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
  };
  int made = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    const std::int64_t dim = draw(1, 600) * 8;
    const Head h{draw(1, 9000),
                 draw(1, draw(0, 1) == 0 ? 5000 : 300000),
                 {dim * (draw(0, 1) == 0 ? 2 : 4), draw(0, 1) == 0 ? 0 : (dim + 255) / 256 * 256}};
    const int count = static_cast<int>(draw(2, cuda::kMaxVocabRanges));
    const AliasedRanges aliased = aliased_ranges(h.tokens, h.vocab, h.row, count);
    SCOPED_TRACE(std::to_string(h.tokens) + " tokens, " + std::to_string(h.vocab) +
                 " vocabulary entries, " + std::to_string(h.row.weight) + " and " +
                 std::to_string(h.row.low) + " bytes, " + std::to_string(count) + " ranges");
    if (aliased.ranges.count == 0) continue;
    ++made;
    ASSERT_NO_FATAL_FAILURE(expect_sound(h, aliased, h.vocab));
    // The bound is for lengths that need not be full tiles.
    const double growth = std::max(
        1.0, static_cast<double>(h.tokens) * 2.0 / static_cast<double>(h.row.weight + h.row.low));
    double parts = 0.0;
    for (int r = 0; r < count; ++r) parts += std::pow(growth, -r);
    EXPECT_LE(static_cast<double>(aliased.ranges.vocab_count(aliased.ranges.count - 1)),
              static_cast<double>(h.vocab) / parts + 256.0 * 2 * (count + 1));
  }
  EXPECT_GT(made, 1000);
}

TEST(VocabRanges, OfKnownHeads) {
  // Llama-3-8B's head with 8192 tokens: at most half of the exponentials in bf16, an eighth in
  // fp32.
  const AliasedRanges bf16 = aliased_ranges(8192, 128256, {8192, 0}, 4);
  expect_sound({8192, 128256, {8192, 0}}, bf16, 128256);
  ASSERT_EQ(bf16.ranges.count, 4);
  EXPECT_NEAR(static_cast<double>(bf16.ranges.vocab_count(3)) / 128256.0, 8.0 / 15.0, 0.004);
  const AliasedRanges fp32 = aliased_ranges(8192, 128256, {16384, 0}, 8);
  expect_sound({8192, 128256, {16384, 0}}, fp32, 128256);
  ASSERT_EQ(fp32.ranges.count, 8);
  EXPECT_NEAR(static_cast<double>(fp32.ranges.vocab_count(7)) / 128256.0, 1.0 / 8.0, 0.004);
  // The first 5632 of Gemma-2-2B's tokens: 3 bytes of reused memory per element.
  const cuda::RowBytes gemma{2304 * 2, 2304};
  const AliasedRanges first = aliased_ranges(5632, 256000, gemma, 4);
  expect_sound({5632, 256000, gemma}, first, 256000);
  ASSERT_EQ(first.ranges.count, 7);
  EXPECT_LT(static_cast<double>(first.ranges.vocab_count(6)) / 256000.0, 0.46);
}

TEST(VocabRanges, SavedOnesLieBeforeBlocksThatFitAfterThem) {
  std::mt19937 random(7);
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  int made = 0;
  int aliased = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    const Head h{draw(1, 9000),
                 draw(300, draw(0, 1) == 0 ? 9000 : 300000),
                 {.weight = draw(1, 600) * 8 * (draw(0, 1) == 0 ? 2 : 4),
                  .number = draw(0, 3) == 0 ? 4 : 2}};
    const int count = static_cast<int>(draw(2, 6));
    const std::int64_t last = draw(1, 20) * 256;
    SCOPED_TRACE(std::to_string(h.tokens) + " tokens, " + std::to_string(h.vocab) +
                 " vocabulary entries, " + std::to_string(h.row.weight) + " bytes, " +
                 std::to_string(count) + " ranges, " + std::to_string(last) +
                 " vocabulary entries last");
    const AliasedRanges kept = cuda::saved_ranges(h.tokens, h.vocab, h.row, count, last);
    if (kept.ranges.count > 0) {
      ++made;
      ASSERT_EQ(kept.ranges.count, count);
      ASSERT_NO_FATAL_FAILURE(expect_sound(h, kept, kept.ranges.first[count]));
      EXPECT_LE(kept.ranges.vocab_count(count - 1), last);
    }
    for (std::int64_t first = 0; first < h.vocab;) {
      const cuda::AliasedBlock vocab_block =
          cuda::aliased_block(h.tokens, h.vocab, h.row, first, last);
      ASSERT_GT(vocab_block.vocab_count, 0);
      const std::int64_t next = first + vocab_block.vocab_count;
      ASSERT_LE(next, h.vocab);
      if (vocab_block.in_weight) {
        ++aliased;
        EXPECT_EQ(vocab_block.vocab_count % 256, 0);
        EXPECT_GT(vocab_block.vocab_count, last);
        EXPECT_LE(next * h.row.weight + h.tokens * vocab_block.vocab_count * h.row.number,
                  h.vocab * h.row.weight);
      } else {
        EXPECT_EQ(vocab_block.vocab_count, std::min(last, h.vocab - first));
      }
      first = next;
    }
  }
  EXPECT_GT(made, 500);
  EXPECT_GT(aliased, 500);
}

TEST(VocabRanges, NoneWhereTheVocabIsTooSmall) {
  EXPECT_EQ(aliased_ranges(700, 256, {128, 0}, 2).ranges.count, 0);
  EXPECT_EQ(aliased_ranges(700, 100000, {128, 0}, 1).ranges.count, 0);
  EXPECT_EQ(aliased_ranges(700, 100000, {128, 0}, cuda::kMaxVocabRanges + 1).ranges.count, 0);
  EXPECT_EQ(aliased_ranges(700, 100000, {128, 64}, cuda::kMaxVocabRanges).ranges.count,
            0);  // 15 parts
  EXPECT_EQ(aliased_ranges(100000, 512, {16, 0}, 2).ranges.count,
            0);  // a row is smaller than a tile
  EXPECT_EQ(aliased_ranges(256, 257, {1024, 0}, 2).ranges.count, 0);  // nor does one entry fit
}

}  // namespace
}  // namespace logitless::test
