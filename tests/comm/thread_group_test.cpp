#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/ranks.h"
#include "logitless/communicator.h"

namespace logitless {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kShort{500};
const Outcome kFine;

// A number that encodes call, sender and receiver.
std::int64_t value(int call, int from, int to) { return call * 10000 + from * 100 + to; }

TEST(ThreadGroup, MovesBytesWhateverTheTiming) {
  for (int size = 1; size <= 8; ++size) {
    const Ranks ranks = make_thread_group(size);
    const auto outcomes = run_ranks(ranks, [&](Communicator& c) {
      ASSERT_EQ(c.size(), size);
      RandomDelays delay(c.rank(), static_cast<unsigned>(size));
      for (int call = 0; call < 20; ++call) {
        const auto count = static_cast<std::size_t>(call % 3);
        std::vector<std::int64_t> mine, all(count * static_cast<std::size_t>(size)), expected;
        const std::size_t bytes_each = count * sizeof(std::int64_t);
        delay();
        if (call % 2 == 0) {
          mine.assign(count, value(call, c.rank(), 0));
          for (int r = 0; r < size; ++r) expected.insert(expected.end(), count, value(call, r, 0));
          c.all_gather(mine.data(), all.data(), bytes_each, nullptr);
        } else {
          for (int r = 0; r < size; ++r) {
            mine.insert(mine.end(), count, value(call, c.rank(), r));
            expected.insert(expected.end(), count, value(call, r, c.rank()));
          }
          c.all_to_all(mine.data(), all.data(), bytes_each, nullptr);
        }
        mine.assign(mine.size(), -1);  // the other ranks have read it
        EXPECT_EQ(all, expected) << "call " << call << " of " << size;
      }
    });
    EXPECT_EQ(outcomes, std::vector<Outcome>(ranks.size()));
  }
}

TEST(ThreadGroup, GathersInPlace) {
  const Ranks ranks = make_thread_group(3);
  run_ranks(ranks, [](Communicator& c) {
    std::vector<int> all(3, -1);
    int& mine = all[static_cast<std::size_t>(c.rank())];
    mine = 10 + c.rank();
    c.all_gather(&mine, all.data(), sizeof(int), nullptr);
    EXPECT_EQ(all, (std::vector<int>{10, 11, 12}));
  });
}

TEST(ThreadGroup, NamesWhoDidNotArrive) {
  const Ranks ranks = make_thread_group(4, kShort);
  std::atomic<int> starting{4}, waiting{4};
  const auto outcomes = run_ranks(ranks, [&](Communicator& c) {
    int mine = 0;
    std::vector<int> all(4);
    --starting;
    while (starting != 0) std::this_thread::yield();
    c.all_gather(&mine, all.data(), sizeof(int), nullptr);
    --waiting;
    if (c.rank() == 1 || c.rank() == 3) {
      // Comes too late, and fails at once.
      while (waiting != 0 || outcome_of([&] { c.wait(nullptr, kShort); }) == kFine)
        std::this_thread::yield();
    }
    c.all_gather(&mine, all.data(), sizeof(int), nullptr);
  });
  const Outcome expected{"DeviceError",
                         "communicator: call 2 (all_gather of 4 bytes): ranks 1 and 3 of 4 did not "
                         "arrive within 500 ms"};
  EXPECT_EQ(outcomes, std::vector<Outcome>(4, expected));
  // Every later call of any kind fails likewise.
  for (const auto& rank : ranks) {
    EXPECT_EQ(outcome_of([&] { rank->all_to_all(nullptr, nullptr, 0, nullptr); }), expected);
    EXPECT_EQ(outcome_of([&] { rank->all_gather_host(nullptr, nullptr, 0); }), expected);
    EXPECT_EQ(outcome_of([&] { rank->wait(nullptr, kShort); }), expected);
  }
}

TEST(ThreadGroup, NamesCallsThatDiffer) {
  for (const bool kind : {false, true}) {
    const Ranks ranks = make_thread_group(3);
    const auto outcomes = run_ranks(ranks, [&](Communicator& c) {
      std::vector<int> mine(6), all(6);
      if (kind && c.rank() == 2) {
        c.all_to_all(mine.data(), all.data(), 8, nullptr);
      } else {
        c.all_gather(mine.data(), all.data(), c.rank() == 2 ? 4 : 8, nullptr);
      }
    });
    const std::string text =
        kind ? "communicator: call 1: rank 2: all_to_all of 8 bytes, rank 0: all_gather of 8 bytes"
             : "communicator: call 1: rank 2: all_gather of 4 bytes, rank 0: all_gather of 8 bytes";
    EXPECT_EQ(outcomes, std::vector<Outcome>(3, {"InvalidArgument", text}));
    EXPECT_EQ(outcome_of([&] { ranks[0]->wait(nullptr, kShort); }), (Outcome{"DeviceError", text}));
  }
}

TEST(ThreadGroup, ARankThatEndsIsMissedAtOnce) {
  for (const bool before : {false, true}) {  // before the other ranks wait for it, or while they do
    Ranks ranks = make_thread_group(3, std::chrono::hours(1));
    Ranks rest{ranks[0], ranks[2]};
    if (before) ranks[1].reset();
    std::thread ends([&] {
      std::this_thread::sleep_for(milliseconds(before ? 0 : 20));
      ranks[1].reset();
    });
    const auto outcomes = run_ranks(rest, [](Communicator& c) {
      char mine[3] = {}, all[3];
      c.all_to_all(mine, all, 1, nullptr);
    });
    ends.join();
    const Outcome expected{
        "DeviceError", "communicator: call 1 (all_to_all of 1 bytes): rank 1 of 3 left before it"};
    EXPECT_EQ(outcomes, std::vector<Outcome>(2, expected));
  }
}

TEST(ThreadGroup, ARankMayEndAfterItsLastCall) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    Ranks ranks = make_thread_group(3);
    const auto outcomes = run_ranks(ranks, [&](Communicator& c) {
      char mine = 'a', all[3];
      for (int call = 0; call < 3; ++call) c.all_gather(&mine, all, 1, nullptr);
      ranks[static_cast<std::size_t>(c.rank())].reset();  // the last owner: c is destroyed
    });
    EXPECT_EQ(outcomes, std::vector<Outcome>(3));
  }
}

TEST(ThreadGroup, ARankThatGivesUpWakesTheOthers) {
  const Ranks ranks = make_thread_group(3, std::chrono::hours(1));
  const auto outcomes = run_ranks(ranks, [](Communicator& c) {
    if (c.rank() == 2) {
      std::this_thread::sleep_for(milliseconds(20));
      c.abort("out of memory");
      c.abort("the second counts for nothing");
    }
    int mine = 0;
    std::vector<int> all(3);
    c.all_gather(&mine, all.data(), sizeof(int), nullptr);
  });
  const Outcome expected{
      "DeviceError", "communicator: call 1 (all_gather of 4 bytes): rank 2 gave up: out of memory"};
  EXPECT_EQ(outcomes, std::vector<Outcome>(3, expected));
}

// At every moment of a failure, a rank that throws has not been read from, and one that returns has
// all data.
TEST(ThreadGroup, AllGoOnOrNone) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    const Ranks ranks = make_thread_group(4);
    std::atomic<int> done{0};
    run_ranks(ranks, [&](Communicator& c) {
      RandomDelays delay(c.rank(), static_cast<unsigned>(repeat));
      delay();
      if (c.rank() == 0) {
        std::thread([&] { c.abort("now"); }).join();
      }
      std::vector<int> all(4);
      const auto mine = std::make_unique<int>(c.rank());
      c.all_gather(mine.get(), all.data(), sizeof(int), nullptr);
      ++done;
    });
    EXPECT_EQ(done, 0);
    std::thread aborts;
    const Ranks more = make_thread_group(4);
    const auto outcomes = run_ranks(more, [&](Communicator& c) {
      RandomDelays delay(c.rank(), static_cast<unsigned>(repeat));
      if (c.rank() == 0) aborts = std::thread([&] { c.abort("soon"); });
      delay();
      std::vector<int> all(4);
      const auto mine = std::make_unique<int>(c.rank());
      c.all_gather(mine.get(), all.data(), sizeof(int), nullptr);
      EXPECT_EQ(all, (std::vector<int>{0, 1, 2, 3}));
    });
    aborts.join();
    for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome, outcomes[0]);
  }
}

TEST(ThreadGroup, WaitsForEver) {
  const auto outcomes = run_ranks(make_thread_group(2, milliseconds::max()), [](Communicator& c) {
    if (c.rank() == 1) std::this_thread::sleep_for(milliseconds(20));
    char mine = 'a', all[2];
    c.all_gather(&mine, all, 1, nullptr);
  });
  EXPECT_EQ(outcomes, std::vector<Outcome>(2));
}

TEST(ThreadGroup, RefusesWhatIsNoGroup) {
  EXPECT_EQ(outcome_of([] { make_thread_group(0); }),
            (Outcome{"InvalidArgument", "make_thread_group: size: expected 1 or more, got 0"}));
  EXPECT_EQ(outcome_of([] { make_thread_group(2, milliseconds(0)); }),
            (Outcome{"InvalidArgument", "make_thread_group: limit: expected 1 ms or more, got 0"}));
}

}  // namespace
}  // namespace logitless
