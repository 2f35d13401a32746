// Tests the sharding of parameters: one rank updates each element, and tensors that programs read
// are contiguous and aligned.
#include "train/ranks/rank_partition.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "train/ranks/gradient_buckets.h"

namespace logitless::train {
namespace {

const std::vector<std::size_t> kCounts = {100000, 7, 64, 12345, 300, 1, 4096};
const std::vector<ParameterUse> kUses = {{true, true},  {true, false}, {false, true}, {false, true},
                                         {true, false}, {true, true},  {false, true}};

RankPartition partition_of(int rank, int ranks, std::size_t bucket = 4096) {
  return {kCounts, kUses, rank, ranks, bucket};
}

TEST(RankPartitionTest, OwnEveryElementOnce) {
  for (const int ranks : {1, 2, 3, 4, 7, 8}) {
    std::vector<std::vector<int>> owners(kCounts.size());
    for (std::size_t t = 0; t < kCounts.size(); ++t) owners[t].resize(kCounts[t], 0);
    for (int rank = 0; rank < ranks; ++rank) {
      const RankPartition partition = partition_of(rank, ranks);
      std::set<std::size_t> owned;
      for (const OwnedSlice& s : partition.slices()) {
        EXPECT_EQ(s.at, partition.layout().offsets[s.tensor] + s.begin);
        EXPECT_EQ(s.at % 64, 0U);
        EXPECT_EQ(s.owned % 64, 0U);
        EXPECT_LE(s.owned + s.count, partition.owned());
        for (std::size_t i = 0; i < s.count; ++i) {
          ++owners[s.tensor][s.begin + i];
          EXPECT_TRUE(owned.insert(s.owned + i).second) << "two elements in one place";
        }
      }
    }
    for (const std::vector<int>& tensor : owners)
      for (const int count : tensor) ASSERT_EQ(count, 1) << ranks << " ranks";
  }
}

TEST(RankPartitionTest, OwnEquallyMuch) {
  const std::size_t all = partition_of(0, 1).owned();
  for (const int ranks : {2, 4, 8}) {
    for (int rank = 0; rank < ranks; ++rank) {
      const std::size_t owned = partition_of(rank, ranks).owned();
      EXPECT_EQ(owned, partition_of(0, ranks).owned());
      EXPECT_LT(owned, all / static_cast<std::size_t>(ranks) + 1024);
    }
  }
}

// Adds a row-sharded tensor of 1001 rows of 24 elements; the unit of rows is 8.
RankPartition with_local_rows(int rank, int ranks, bool rounded) {
  std::vector<std::size_t> counts = kCounts;
  std::vector<ParameterUse> uses = kUses;
  counts.insert(counts.begin() + 2, 1001 * 24);
  uses.insert(uses.begin() + 2, {!rounded, rounded, 24});
  return {counts, uses, rank, ranks, 4096};
}

TEST(RankPartitionTest, RowsOfTheirOwnAreExchangedByNobody) {
  for (const bool rounded : {true, false}) {
    for (const int ranks : {2, 3, 8, 200}) {
      std::int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const RankPartition partition = with_local_rows(rank, ranks, rounded);
        const LocalRows rows = partition.local_rows().value();
        EXPECT_EQ(rows.tensor, 2U);
        EXPECT_EQ(rows.first, next);
        EXPECT_EQ(rows.each % 8, 0);
        next += rows.count;
        std::size_t updated = 0;
        for (const OwnedSlice& s : partition.slices()) {
          if (s.tensor != rows.tensor) {
            EXPECT_LT(s.at, partition.shared_end());
            continue;
          }
          // The slices cover the rank's rows without gaps, both in the local part of the set and in
          // the shard.
          const std::size_t first = partition.local_begin(2);
          EXPECT_EQ(s.begin, static_cast<std::size_t>(rows.first) * 24 + updated);
          EXPECT_EQ(s.at, first + updated);
          EXPECT_EQ(partition.local_at(s.at), partition.shared_end() + updated);
          EXPECT_EQ(partition.is_rounded(s.at), rounded);
          EXPECT_TRUE(!rounded || partition.rounded_at(s.at) == partition.rounded_end() + updated);
          EXPECT_EQ(partition.master_of(s), partition.master_at(first) + updated);
          EXPECT_LE(partition.master_of(s) + s.count, partition.masters());
          EXPECT_LE(s.owned + s.count, partition.owned());
          updated += s.count;
        }
        EXPECT_EQ(updated, static_cast<std::size_t>(rows.count) * 24);
        for (const Bucket& b : partition.buckets())
          EXPECT_LE(b.begin + static_cast<std::size_t>(ranks) * b.slice_size,
                    partition.shared_end());
      }
      EXPECT_EQ(next, 1001);
    }
  }
  EXPECT_FALSE(with_local_rows(0, 1, true).local_rows().has_value());
}

TEST(RankPartitionTest, LayThemOutTheSameOnAllRanks) {
  for (const int ranks : {1, 3, 8}) {
    const RankPartition first = partition_of(0, ranks);
    for (int rank = 1; rank < ranks; ++rank)
      EXPECT_EQ(partition_of(rank, ranks).layout().offsets, first.layout().offsets);
    std::size_t end = 0;
    for (const Bucket& b : first.buckets()) {
      EXPECT_GE(b.begin, end) << "buckets overlap";
      EXPECT_LE(b.slice_size * static_cast<std::size_t>(ranks), first.longest_bucket());
      EXPECT_EQ(b.slice_size % 64, 0U);
      end = b.begin + b.slice_size * static_cast<std::size_t>(ranks);
      EXPECT_LE(end, first.layout().end);
      EXPECT_EQ(b.use.rounded, b.begin < first.rounded_end());
      EXPECT_EQ(b.use.master, b.begin >= first.master_begin());
    }
    if (ranks > 1) {
      EXPECT_LE(first.longest_bucket(), 4096U);
    }
  }
}

TEST(RankPartitionTest, KeepWholeWhatProgramsRead) {
  for (const int ranks : {1, 4}) {
    const RankPartition partition = partition_of(ranks - 1, ranks);
    for (std::size_t t = 0; t < kCounts.size(); ++t) {
      const std::size_t at = partition.layout().offsets[t], end = at + kCounts[t];
      EXPECT_EQ(kUses[t].rounded, end <= partition.rounded_end());
      EXPECT_EQ(kUses[t].rounded, at < partition.rounded_end());
      EXPECT_EQ(kUses[t].master, at >= partition.master_begin());
      if (kUses[t].master) {
        EXPECT_LE(partition.master_at(end), partition.masters());
      }
    }
    for (const OwnedSlice& s : partition.slices()) {
      EXPECT_LE(partition.master_of(s) + s.count, partition.masters());
      EXPECT_EQ(partition.master_of(s) < partition.owned_before_masters(), !kUses[s.tensor].master);
    }
    // A rank holds only its shard of masters that programs do not read.
    EXPECT_LT(partition.owned_before_masters(),
              (64 + 12345 + 4096) / static_cast<std::size_t>(ranks) + 1024);
  }
}

TEST(RankPartitionTest, OfOneRankAreTheTensorsInTheirOrder) {
  const RankPartition partition(kCounts, std::vector<ParameterUse>(kCounts.size()));
  ASSERT_EQ(partition.slices().size(), kCounts.size());
  EXPECT_EQ(partition.buckets().size(), 1U);
  std::size_t at = 0;
  for (std::size_t t = 0; t < kCounts.size(); ++t) {
    const OwnedSlice& s = partition.slices()[t];
    EXPECT_EQ(s.tensor, t);
    EXPECT_EQ(s.count, kCounts[t]);
    EXPECT_EQ(s.at, at);
    EXPECT_EQ(s.owned, at);
    EXPECT_EQ(partition.master_of(s), at);
    at += (kCounts[t] + 127) / 128 * 128;
  }
  EXPECT_EQ(partition.layout().end, at);
}

// --- Buckets with complete gradients

TEST(GradientBucketsTest, AreWholeWithTheLastOfTheirTensors) {
  for (const int ranks : {1, 2, 3, 8}) {
    const RankPartition partition = partition_of(0, ranks);
    GradientBuckets buckets(partition);
    for (int round = 0; round < 2; ++round) {
      buckets.begin();
      std::set<std::size_t> made, whole;
      std::vector<std::size_t> in_order;
      for (const std::size_t tensor : {5U, 2U, 0U, 6U, 4U, 1U, 3U}) {
        made.insert(tensor);
        buckets.done(tensor, [&](std::size_t b) {
          EXPECT_TRUE(whole.insert(b).second) << "twice";
          in_order.push_back(b);
        });
        for (std::size_t b = 0; b < partition.buckets().size(); ++b) {
          const Bucket& bucket = partition.buckets()[b];
          const std::size_t end =
              bucket.begin + static_cast<std::size_t>(ranks) * bucket.slice_size;
          bool all = true;
          for (std::size_t t = 0; t < kCounts.size(); ++t) {
            const std::size_t first = partition.layout().offsets[t];
            if (first < end && first + kCounts[t] > bucket.begin) all = all && made.contains(t);
          }
          EXPECT_EQ(whole.contains(b), all) << "bucket " << b << " after tensor " << tensor;
        }
      }
      EXPECT_EQ(whole.size(), partition.buckets().size());
      EXPECT_EQ(buckets.found(), in_order);
    }
  }
}

TEST(GradientBucketsTest, FindAllOfThemInAnyCase) {
  const RankPartition partition = partition_of(0, 2);
  GradientBuckets buckets(partition);
  buckets.done(5, [](std::size_t) {});
  const std::vector<std::size_t> found = buckets.found();
  EXPECT_EQ(found.size(), partition.buckets().size());
  EXPECT_EQ(std::set<std::size_t>(found.begin(), found.end()).size(), found.size());
}

}  // namespace
}  // namespace logitless::train
