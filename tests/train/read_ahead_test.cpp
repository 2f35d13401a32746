// Tests the prefetching thread: order, restarts, errors.
#include "train/data/read_ahead.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <string>

#include "logitless/error.h"

namespace logitless::train {
namespace {

constexpr std::size_t kSlots = 3;
constexpr std::int64_t kStride = 4;

// A reader with slots of one number each.
struct Numbers {
  std::array<std::int64_t, kSlots> slots{};
  std::atomic<std::int64_t> reads{0}, bad{-1};
  ReadAhead ahead{kSlots, kStride, [this](std::int64_t position, std::size_t slot) {
                    ++reads;
                    if (position == bad) throw InvalidArgument("at " + std::to_string(position));
                    slots[slot] = position;
                  }};
  std::int64_t next(std::int64_t position) {
    const std::size_t slot = ahead.take(position);
    const std::int64_t found = slots[slot];
    slots[slot] = -1;  // belongs to the caller until it is given back
    ahead.give_back(slot);
    return found;
  }
};

TEST(ReadAheadTest, GivesWhatIsAskedForInOrder) {
  Numbers numbers;
  for (std::int64_t i = 0; i < 2000; ++i) ASSERT_EQ(numbers.next(i * kStride), i * kStride);
  EXPECT_LE(numbers.reads, std::int64_t{2000 + kSlots});
}

TEST(ReadAheadTest, HoldsNoMoreThanItsSlots) {
  Numbers numbers;
  std::array<std::size_t, kSlots> held{};
  for (std::size_t i = 0; i < kSlots; ++i)
    held[i] = numbers.ahead.take(static_cast<std::int64_t>(i) * kStride);
  for (std::size_t i = 0; i < kSlots; ++i)
    EXPECT_EQ(numbers.slots[held[i]], static_cast<std::int64_t>(i) * kStride);
  EXPECT_EQ(numbers.reads, std::int64_t{kSlots});
  for (const std::size_t slot : held) numbers.ahead.give_back(slot);
  EXPECT_EQ(numbers.next(kSlots * kStride), kSlots * kStride);
}

TEST(ReadAheadTest, RestartsWhereAsked) {
  Numbers numbers;
  for (int round = 0; round < 300; ++round) {
    const std::int64_t first = round % 7 * 100;
    for (std::int64_t i = 0; i < round % 5; ++i)
      ASSERT_EQ(numbers.next(first + i * kStride), first + i * kStride);
  }
  EXPECT_EQ(numbers.next(0), 0);
  EXPECT_EQ(numbers.next(0), 0) << "the same again";
}

TEST(ReadAheadTest, ThrowsWhatReadingThrewWhereItIsAskedFor) {
  Numbers numbers;
  numbers.bad = 5 * kStride;
  for (std::int64_t i = 0; i < 5; ++i) ASSERT_EQ(numbers.next(i * kStride), i * kStride);
  for (int again = 0; again < 3; ++again) {
    try {
      numbers.next(5 * kStride);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const InvalidArgument& error) {
      EXPECT_STREQ(error.what(), "at 20");
    }
  }
  EXPECT_EQ(numbers.next(6 * kStride), 6 * kStride);
  numbers.bad = -1;
  EXPECT_EQ(numbers.next(5 * kStride), 5 * kStride);
}

TEST(ReadAheadTest, StopsWithoutHavingBeenAsked) {
  for (int i = 0; i < 50; ++i) {
    Numbers numbers;
    EXPECT_EQ(numbers.reads, 0);
    if (i % 2 == 1) numbers.next(0);
  }
}

}  // namespace
}  // namespace logitless::train
