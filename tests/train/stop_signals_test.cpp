// Tests that the first signal is recorded, that the second ends the process, and that ignored
// signals stay ignored.
#include "train/run/stop_signals.h"

#include <gtest/gtest.h>

#include <csignal>

namespace logitless::train {
namespace {

TEST(StopSignals, KeepsTheFirst) {
  for (const int signal : {SIGINT, SIGTERM}) {
    std::signal(signal, SIG_DFL);  // a script's background processes start with SIGINT ignored
    const StopSignals stop;
    EXPECT_EQ(stop.caught(), 0);
    std::raise(signal);
    EXPECT_EQ(stop.caught(), signal);
  }
  EXPECT_STREQ(name_of_signal(SIGINT), "SIGINT");
  EXPECT_STREQ(name_of_signal(SIGTERM), "SIGTERM");
}

TEST(StopSignals, GivesTheHandlersBack) {
  const auto before = std::signal(SIGTERM, SIG_IGN);
  {
    const StopSignals stop;
    std::raise(SIGTERM);
    EXPECT_EQ(stop.caught(), 0) << "it was ignored";
  }
  EXPECT_EQ(std::signal(SIGTERM, SIG_DFL), SIG_IGN);
  { const StopSignals stop; }
  EXPECT_EQ(std::signal(SIGTERM, before), SIG_DFL);
}

TEST(StopSignalsDeathTest, EndsAtTheSecond) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto twice = [](int first, int second) {
    std::signal(SIGINT, SIG_DFL);
    std::signal(SIGTERM, SIG_DFL);
    const StopSignals stop;
    std::raise(first);
    std::raise(second);
  };
  EXPECT_EXIT(twice(SIGINT, SIGINT), testing::KilledBySignal(SIGINT), "stopping after this step");
  EXPECT_EXIT(twice(SIGINT, SIGTERM), testing::KilledBySignal(SIGTERM), "stopping after this step");
}

}  // namespace
}  // namespace logitless::train
