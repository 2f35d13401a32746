#include "core/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "logitless/context.h"

namespace logitless {
namespace {

class ParallelFor : public testing::TestWithParam<int> {};

TEST_P(ParallelFor, RunsEachTaskOnce) {
  for (const std::int64_t tasks : {0, 1, 2, 3, 1000}) {
    std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
    parallel_for(GetParam(), tasks,
                 [&](std::int64_t task, int) { ++runs[static_cast<std::size_t>(task)]; });
    for (const std::atomic<int>& count : runs) ASSERT_EQ(count, 1) << "of " << tasks;
  }
}

TEST_P(ParallelFor, NumbersThreadsBelowTheLimit) {
  std::atomic<int> outside{0};
  // One slot per thread without a lock: two threads of one number would race and lose counts.
  std::vector<std::int64_t> counts(static_cast<std::size_t>(GetParam()), 0);
  parallel_for(GetParam(), 5000, [&](std::int64_t, int thread) {
    if (thread < 0 || thread >= GetParam()) {
      ++outside;
    } else {
      ++counts[static_cast<std::size_t>(thread)];
    }
  });
  EXPECT_EQ(outside, 0);
  std::int64_t total = 0;
  for (const std::int64_t count : counts) total += count;
  EXPECT_EQ(total, 5000);
}

TEST_P(ParallelFor, ThrowsTheErrorOfTheLowestTaskAfterAllRan) {
  std::atomic<int> runs{0};
  std::string message;
  try {
    parallel_for(GetParam(), 200, [&](std::int64_t task, int) {
      ++runs;
      if (task == 17)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));  // later ones throw first
      if (task >= 17 && task % 2 == 1) throw std::runtime_error(std::to_string(task));
    });
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  EXPECT_EQ(message, "17");
  EXPECT_EQ(runs, 200);
}

TEST_P(ParallelFor, CanBeNested) {
  std::vector<std::atomic<int>> runs(6 * 7);
  parallel_for(GetParam(), 6, [&](std::int64_t outer, int) {
    parallel_for(GetParam(), 7, [&](std::int64_t inner, int) {
      ++runs[static_cast<std::size_t>(outer * 7 + inner)];
    });
  });
  for (const std::atomic<int>& count : runs) EXPECT_EQ(count, 1);
}

TEST_P(ParallelFor, NestedErrorReachesTheCaller) {
  EXPECT_THROW(parallel_for(GetParam(), 4,
                            [&](std::int64_t outer, int) {
                              parallel_for(GetParam(), 4, [&](std::int64_t inner, int) {
                                if (outer == 2 && inner == 3) throw std::out_of_range("inner");
                              });
                            }),
               std::out_of_range);
}

TEST_P(ParallelFor, SeesWritesMadeBefore) {
  std::vector<double> input(1000);
  for (std::size_t i = 0; i < input.size(); ++i) input[i] = static_cast<double>(i);
  std::vector<double> output(input.size());
  parallel_for(GetParam(), 1000, [&](std::int64_t task, int) {
    output[static_cast<std::size_t>(task)] = 2.0 * input[static_cast<std::size_t>(task)];
  });
  for (std::size_t i = 0; i < input.size(); ++i) ASSERT_EQ(output[i], 2.0 * input[i]);
}

INSTANTIATE_TEST_SUITE_P(Threads, ParallelFor, testing::Values(1, 2, 5));

TEST(ParallelForTeam, NoThreadsMeansOne) {
  for (const int threads : {0, -3}) {
    int runs = 0;
    parallel_for(threads, 10, [&](std::int64_t, int thread) {
      EXPECT_EQ(thread, 0);
      ++runs;
    });
    EXPECT_EQ(runs, 10);
  }
}

// Sets an environment variable, and restores it.
class ScopedEnvironment {
 public:
  ScopedEnvironment(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    set(value);
  }
  ~ScopedEnvironment() { set(old_ ? old_->c_str() : nullptr); }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

 private:
  void set(const char* value) {
    if (value != nullptr) {
      setenv(name_, value, 1);
    } else {
      unsetenv(name_);
    }
  }

  const char* name_;
  std::optional<std::string> old_;
};

TEST(DefaultThreads, FollowsTheEnvironment) {
  const ScopedEnvironment environment("OMP_NUM_THREADS", "3");
  EXPECT_EQ(default_threads(), 3);
}

TEST(DefaultThreads, AreNoMoreThanThereMayBe) {
  for (const char* text : {"1025", "100000000", "4294967296", "99999999999999999999"}) {
    const ScopedEnvironment environment("OMP_NUM_THREADS", text);
    EXPECT_EQ(default_threads(), kMostThreads) << text;
  }
}

TEST(DefaultThreads, IgnoresNonsenseInTheEnvironment) {
  int without = 0;
  {
    const ScopedEnvironment environment("OMP_NUM_THREADS", nullptr);
    without = default_threads();
  }
  EXPECT_GE(without, 1);
  for (const char* text : {"", "many", "-2", "0"}) {
    const ScopedEnvironment environment("OMP_NUM_THREADS", text);
    EXPECT_EQ(default_threads(), without) << text;
  }
}

}  // namespace
}  // namespace logitless
