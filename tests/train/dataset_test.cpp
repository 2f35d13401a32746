// Tests of llm.c's shards, and of the order of windows.
#include "train/data/dataset.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "logitless/error.h"
#include "train/data/shard.h"
#include "train/model/gpt.h"
#include "train/test_folder.h"

namespace logitless::train {
namespace {

class DatasetTest : public TestFolder {
 protected:
  static void put_number(std::string& bytes, std::size_t at, std::uint32_t value) {
    for (std::size_t b = 0; b < 4; ++b) bytes[at + b] = static_cast<char>(value >> (8 * b) & 255u);
  }
  static std::string shard_bytes(const std::vector<int>& tokens) {
    std::string bytes(1024, '\0');
    put_number(bytes, 0, 20240520);
    put_number(bytes, 4, 1);
    put_number(bytes, 8, static_cast<std::uint32_t>(tokens.size()));
    for (const int token : tokens) {
      bytes.push_back(static_cast<char>(token & 255));
      bytes.push_back(static_cast<char>(token >> 8));
    }
    return bytes;
  }
  std::string shard(const std::string& name, const std::vector<int>& tokens) const {
    write(name, shard_bytes(tokens));
    return path(name);
  }
  static std::vector<int> counting(int from, int count) {
    std::vector<int> tokens(static_cast<std::size_t>(count));
    std::iota(tokens.begin(), tokens.end(), from);
    return tokens;
  }
};

using Row = std::vector<std::int64_t>;

// A thread prefetches the data of steps while validation data is read.
TEST_F(DatasetTest, PartsOfAShardAreReadAtTheSameTime) {
  const auto [train, valid] =
      Dataset::of_shards({shard("a.bin", counting(0, 4001))}, 8, 5000).split(100);
  bool right = true;
  std::thread other([&] {
    for (int i = 0; i < 300; ++i) {
      const Batch batch = train.shuffled_batch(1, i, 2);
      for (std::size_t k = 0; k < batch.tokens.size(); ++k)
        right = right && batch.targets[k] == batch.tokens[k] + 1;
    }
  });
  for (int i = 0; i < 100; ++i) EXPECT_EQ(valid.sequential_batch(i, 1).tokens[0], 8 * (400 + i));
  other.join();
  EXPECT_TRUE(right);
}

TEST_F(DatasetTest, ReadsTokensOfAShard) {
  const Shard shard(this->shard("a.bin", {1, 50256, 65535, 0, 258}));
  EXPECT_EQ(shard.tokens(), 5);
  Row tokens(5);
  shard.read(0, tokens);
  EXPECT_EQ(tokens, (Row{1, 50256, 65535, 0, 258}));
  tokens.resize(2);
  shard.read(3, tokens);
  EXPECT_EQ(tokens, (Row{0, 258}));
  expect_message([&] { shard.read(4, tokens); }, "a.bin': tokens 4 to 6 of 5 do not exist");
  expect_message([&] { shard.read(-1, tokens); }, "tokens -1 to 1 of 5 do not exist");
}

TEST_F(DatasetTest, ReadsTokensOfFourBytes) {
  std::string bytes = shard_bytes({}).substr(0, 1024);
  put_number(bytes, 0, 20240801);
  put_number(bytes, 4, 7);
  put_number(bytes, 8, 3);
  bytes.resize(1024 + 12);
  const std::vector<std::uint32_t> numbers = {128000, 7, 4000000000};
  for (std::size_t i = 0; i < 3; ++i) put_number(bytes, 1024 + 4 * i, numbers[i]);
  write("a.bin", bytes);
  const Shard shard(path("a.bin"));
  Row tokens(2);
  shard.read(1, tokens);
  EXPECT_EQ(tokens, (Row{7, 4000000000}));
  shard.read(0, tokens);
  EXPECT_EQ(tokens, (Row{128000, 7}));
}

TEST_F(DatasetTest, RefusesDamagedShards) {
  const auto refused = [&](const std::string& bytes, const std::string& text) {
    write("bad.bin", bytes);
    expect_message([&] { Shard{path("bad.bin")}; }, path("bad.bin") + "': " + text);
  };
  const std::string good = shard_bytes(counting(0, 10));
  std::string bytes = good;
  put_number(bytes, 0, 20240802);
  refused(bytes, "expected magic number 20240520 (u16 tokens) or 20240801 (u32), found 20240802");
  put_number(bytes, 0, 20240801);
  refused(bytes, "expected version 7, found 1");
  put_number(bytes, 4, 7);
  refused(bytes, "expected 1064 bytes for 10 tokens, the file has 1044");
  bytes = good;
  put_number(bytes, 4, 2);
  refused(bytes, "expected version 1, found 2");
  bytes = good;
  put_number(bytes, 8, 0);
  refused(bytes, "expected at least 1 token, found 0");
  put_number(bytes, 8, 0xffffffffu);
  refused(bytes, "expected at least 1 token, found -1");
  put_number(bytes, 8, 11);
  refused(bytes, "expected 1046 bytes for 11 tokens, the file has 1044");
  put_number(bytes, 8, 9);
  refused(bytes, "expected 1042 bytes for 9 tokens, the file has 1044");
  refused(good.substr(0, good.size() - 1), "expected 1044 bytes for 10 tokens, the file has 1043");
  refused(good.substr(0, 1023), "expected a header of 1024 bytes, the file has 1023");
  refused("", "expected a header of 1024 bytes, the file has 0");
  expect_message([&] { Shard{path("none.bin")}; }, "none.bin': there is no such file");
  expect_message([&] { Shard{root_.string()}; }, "expected a file of tokens");
}

TEST_F(DatasetTest, WindowsFollowEachOtherAndStayInTheirFile) {
  // 3 windows of 4 in the first file (13 tokens needed of 14), 1 in the second, none in the third.
  const Dataset data = Dataset::of_shards(
      {shard("a", counting(0, 14)), shard("b", counting(100, 8)), shard("c", counting(200, 4))}, 4,
      300);
  EXPECT_EQ(data.windows(), 4);
  EXPECT_EQ(data.tokens(), 16);
  const Batch batch = data.sequential_batch(2, 3);
  EXPECT_EQ(batch.tokens, (Row{8, 9, 10, 11, 100, 101, 102, 103, 0, 0, 0, 0}));
  EXPECT_EQ(batch.targets, (Row{9, 10, 11, 12, 101, 102, 103, 104, kIgnoredTarget, kIgnoredTarget,
                                kIgnoredTarget, kIgnoredTarget}));
  EXPECT_EQ(batch.counted, 8);
}

TEST_F(DatasetTest, EveryEpochHasEachWindowOnceInAnOrderOfItsOwn) {
  std::vector<std::int32_t> vocab_ids(101);
  std::iota(vocab_ids.begin(), vocab_ids.end(), 0);
  const Dataset data = Dataset::of_tokens(vocab_ids, 5, 101);
  ASSERT_EQ(data.windows(), 20);
  const auto order = [&](std::uint64_t seed, std::int64_t first) {
    const Batch batch = data.shuffled_batch(seed, first, 20);
    Row starts;
    for (std::size_t i = 0; i < batch.tokens.size(); i += 5) {
      starts.push_back(batch.tokens[i]);
      EXPECT_EQ(batch.targets[i], batch.tokens[i] + 1);
      EXPECT_EQ(batch.targets[i + 4], batch.tokens[i] + 5);
    }
    return starts;
  };
  const Row first = order(1, 0), second = order(1, 20);
  EXPECT_EQ(std::set<std::int64_t>(first.begin(), first.end()).size(), 20u);
  EXPECT_EQ(std::set<std::int64_t>(second.begin(), second.end()).size(), 20u);
  EXPECT_NE(first, second);
  EXPECT_NE(first, order(2, 0));
  EXPECT_EQ(first, order(1, 0));
}

TEST_F(DatasetTest, ABatchIsAFunctionOfItsNumberAlone) {
  const std::string file = shard("a", counting(0, 1000));
  const Dataset one = Dataset::of_shards({file}, 7, 1000),
                two = Dataset::of_shards({file}, 7, 1000);
  for (std::int64_t step = 0; step < 10; ++step) one.shuffled_batch(3, 4 * step, 4);
  const Batch late = one.shuffled_batch(3, 40, 4), direct = two.shuffled_batch(3, 40, 4);
  EXPECT_EQ(late.tokens, direct.tokens);
  EXPECT_EQ(late.targets, direct.targets);
  // A batch of 4 equals two batches of 2.
  const Batch half = two.shuffled_batch(3, 42, 2);
  EXPECT_TRUE(std::equal(half.tokens.begin(), half.tokens.end(), late.tokens.begin() + 14));
}

TEST_F(DatasetTest, SplitsOffItsEnd) {
  const Dataset data = Dataset::of_shards({shard("a", counting(0, 101))}, 5, 101);
  const auto [train, valid] = data.split(3);
  EXPECT_EQ(train.windows(), 17);
  EXPECT_EQ(valid.windows(), 3);
  EXPECT_EQ(valid.sequential_batch(0, 1).tokens, (Row{85, 86, 87, 88, 89}));
  for (const std::int64_t token : train.shuffled_batch(1, 0, 17).tokens) EXPECT_LT(token, 85);
  expect_message([&] { data.split(20); }, "20 windows of 5 tokens cannot be split");
  EXPECT_NE(train.key(), data.key());
  EXPECT_NE(train.key(), valid.key());
}

TEST_F(DatasetTest, KeyChangesWithTheTokens) {
  const auto key = [&](const std::vector<int>& tokens) {
    return Dataset::of_shards({shard("a", tokens)}, 5, 2000).key();
  };
  std::vector<int> tokens = counting(0, 1000);
  const std::uint64_t before = key(tokens);
  EXPECT_EQ(key(tokens), before);
  tokens.back() = 7;
  EXPECT_NE(key(tokens), before);
  tokens = counting(0, 1001);
  EXPECT_NE(key(tokens), before);
}

TEST_F(DatasetTest, SaysWhatIsWrong) {
  expect_message(
      [&] {
        Dataset::of_tokens({1, 2, 3}, 3, 9);
      },
      "length: windows of 3 tokens and one more do not fit into 3 tokens");
  expect_message(
      [&] {
        Dataset::of_tokens({1, 2, 3}, 0, 9);
      },
      "length: expected at least 1, got 0");
  const Dataset data = Dataset::of_shards({shard("a", counting(0, 30))}, 4, 10);
  data.sequential_batch(0, 2);
  const std::string bad = "a': expected tokens below 10 (vocab), found 10 at 10";
  expect_message([&] { data.sequential_batch(2, 1); }, bad);
  expect_message([&] { data.check(); }, bad);
  expect_message([&] { data.split(1).first.check(); }, bad);
  expect_message(
      [&] {
        Dataset::of_tokens({1, 9, 2}, 2, 9).sequential_batch(0, 1);
      },
      "the text: expected tokens below 9 (vocab), found 9 at 1");
}

}  // namespace
}  // namespace logitless::train
