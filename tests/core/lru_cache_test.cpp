#include "core/lru_cache.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

namespace logitless {
namespace {

TEST(LruCache, DropsWhatWasAskedForTheLongestTimeAgo) {
  LruCache<int, std::string> cache(2);
  int made = 0;
  const auto get = [&](int key) {
    return cache.get(key, [&] {
      ++made;
      return std::to_string(key);
    });
  };
  const auto one = get(1);
  get(2);
  EXPECT_EQ(get(1), one);  // 2 is the older one now
  get(3);
  EXPECT_EQ(cache.size(), 2u);
  EXPECT_EQ(get(1), one);
  EXPECT_EQ(made, 3);
  get(2);
  EXPECT_EQ(made, 4);
  EXPECT_EQ(*get(1), "1");
  get(4);
  get(5);
  EXPECT_EQ(*one, "1");  // in use though it was dropped
  EXPECT_NE(get(1), one);
}

TEST(LruCache, MakesAValueOnceForManyThreads) {
  LruCache<int, int> cache(4);
  int made = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) cache.get(i % 3, [&] { return ++made; });
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(made, 3);
  EXPECT_EQ(cache.size(), 3u);
}

TEST(LruCache, KeepsNothingOfAFailure) {
  LruCache<int, int> cache(1);
  EXPECT_THROW(cache.get(1, []() -> int { throw 7; }), int);
  EXPECT_EQ(cache.size(), 0u);
  EXPECT_EQ(*cache.get(1, [] { return 5; }), 5);
}

}  // namespace
}  // namespace logitless
