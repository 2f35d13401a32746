// Tests of TCP groups with threads of one process as ranks: exchanges and failures.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/tcp_ranks.h"
#include "comm/tcp_wire.h"

namespace logitless {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kShort{500};
constexpr milliseconds kLong = std::chrono::hours(1);
constexpr std::size_t kBig = 12 << 20;  // more than sockets buffer
const Outcome kFine;

Outcome failure(const std::string& text) { return {"DeviceError", "communicator: " + text}; }

// Waits until the rank knows that the group has failed.
void until_failed(Communicator& c) {
  while (outcome_of([&] { c.wait(nullptr, kShort); }) == kFine)
    std::this_thread::sleep_for(milliseconds(1));
}

TEST(TcpGroup, MovesWhatThreadsMove) {
  for (int size = 1; size <= 4; ++size) {
    const auto expected = exchanged_by_threads(size);
    const auto outcomes = run_ranks(make_tcp_group(size), [&](Communicator& c) {
      ASSERT_EQ(c.size(), size);
      EXPECT_FALSE(c.capturable());
      EXPECT_EQ(c.device(), DeviceKind::cpu);
      EXPECT_EQ(exchange_a_lot(c), expected[static_cast<std::size_t>(c.rank())]);
      c.check();
    });
    EXPECT_EQ(outcomes, std::vector<Outcome>(static_cast<std::size_t>(size)));
  }
}

TEST(TcpGroup, GathersInPlaceAndNothing) {
  const auto outcomes = run_ranks(make_tcp_group(3), [](Communicator& c) {
    std::vector<int> all(3, -1);
    int& mine = all[static_cast<std::size_t>(c.rank())];
    mine = 10 + c.rank();
    c.all_gather(&mine, all.data(), sizeof(int), nullptr);
    EXPECT_EQ(all, (std::vector<int>{10, 11, 12}));
    c.all_gather_host(nullptr, nullptr, 0);
    c.all_to_all(nullptr, nullptr, 0, nullptr);
  });
  EXPECT_EQ(outcomes, std::vector<Outcome>(3));
}

TEST(TcpGroup, MovesMoreThanSocketsKeep) {
  const auto outcomes = run_ranks(make_tcp_group(2), [](Communicator& c) {
    std::vector<std::byte> slices(2 * kBig), all(2 * kBig);
    for (std::size_t i = 0; i < slices.size(); ++i)
      slices[i] = static_cast<std::byte>(i % 251 + static_cast<std::size_t>(c.rank()));
    c.all_to_all(slices.data(), all.data(), kBig, nullptr);
    bool equal = true;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::size_t sent = static_cast<std::size_t>(c.rank()) * kBig + i % kBig;
      equal = equal && all[i] == static_cast<std::byte>(sent % 251 + i / kBig);
    }
    EXPECT_TRUE(equal);
  });
  EXPECT_EQ(outcomes, std::vector<Outcome>(2));
}

TEST(TcpGroup, NamesWhoDidNotArrive) {
  const Ranks ranks = make_tcp_group(4, kShort);
  const auto outcomes = run_ranks(ranks, [](Communicator& c) {
    int mine = 0;
    std::vector<int> all(4);
    c.all_gather(&mine, all.data(), sizeof(int), nullptr);
    // Arrive too late, and fail at once.
    if (c.rank() == 1 || c.rank() == 3) until_failed(c);
    c.all_gather(&mine, all.data(), sizeof(int), nullptr);
  });
  const std::string text = "ranks 1 and 3 of 4 did not arrive within 500 ms";
  for (const std::size_t r : {0U, 2U})
    EXPECT_EQ(outcomes[r], failure("call 2 (all_gather of 4 bytes): " + text));
  for (const std::size_t r : {1U, 3U}) EXPECT_EQ(outcomes[r], failure("after call 1: " + text));
  // Every later call of any kind fails likewise.
  for (std::size_t r = 0; r < 4; ++r) {
    EXPECT_EQ(outcome_of([&] { ranks[r]->all_to_all(nullptr, nullptr, 0, nullptr); }), outcomes[r]);
    EXPECT_EQ(outcome_of([&] { ranks[r]->all_gather_host(nullptr, nullptr, 0); }), outcomes[r]);
    EXPECT_EQ(outcome_of([&] { ranks[r]->check(); }), outcomes[r]);
  }
}

// A late rank receives the failure after the call's data.
TEST(TcpGroup, WhoComesLateLearnsWhy) {
  const Ranks ranks = make_tcp_group(3, kShort);
  std::atomic<bool> over = false;
  const auto outcomes = run_ranks(ranks, [&](Communicator& c) {
    while (c.rank() == 1 && !over) std::this_thread::yield();
    std::vector<int> all(3);
    const Outcome outcome = outcome_of([&] {
      if (c.rank() != 2) c.all_gather(&all[0], all.data(), sizeof(int), nullptr);
    });
    if (c.rank() == 0) over = true;
    if (outcome != kFine) throw DeviceError(outcome.text);
  });
  EXPECT_EQ(outcomes[2], kFine);
  EXPECT_EQ(outcomes[1].text, outcomes[0].text);
  EXPECT_EQ(outcomes[0],
            failure("call 1 (all_gather of 4 bytes): ranks 1 and 2 of 3 did not arrive "
                    "within 500 ms"));
}

TEST(TcpGroup, NamesCallsThatDiffer) {
  for (const bool kind : {false, true}) {
    for (const std::size_t bytes : {std::size_t{8}, kBig}) {
      const Ranks ranks = make_tcp_group(3);
      const auto outcomes = run_ranks(ranks, [&](Communicator& c) {
        std::vector<std::byte> mine(3 * bytes), all(3 * bytes);
        if (kind && c.rank() == 2) {
          c.all_to_all(mine.data(), all.data(), bytes, nullptr);
        } else {
          c.all_gather(mine.data(), all.data(), c.rank() == 2 ? 4 : bytes, nullptr);
        }
      });
      const std::string each = std::to_string(bytes) + " bytes";
      const std::string text = "communicator: call 1: rank 2: " +
                               (kind ? "all_to_all of " + each : "all_gather of 4 bytes") +
                               ", rank 0: all_gather of " + each;
      EXPECT_EQ(outcomes, std::vector<Outcome>(3, {"InvalidArgument", text}));
      EXPECT_EQ(outcome_of([&] { ranks[0]->wait(nullptr, kShort); }),
                (Outcome{"DeviceError", text}));
    }
  }
}

TEST(TcpGroup, ARankThatLeavesIsMissedAtOnce) {
  for (const bool before : {false, true}) {  // before the other ranks wait for it, or while they do
    for (const std::size_t bytes : {std::size_t{1}, kBig}) {
      Ranks ranks = make_tcp_group(3, kLong);
      const Ranks rest{ranks[0], ranks[2]};
      if (before) ranks[1].reset();
      std::thread ends([&] {
        std::this_thread::sleep_for(milliseconds(before ? 0 : 20));
        ranks[1].reset();
      });
      const auto outcomes = run_ranks(rest, [&](Communicator& c) {
        std::vector<std::byte> mine(3 * bytes), all(3 * bytes);
        c.all_to_all(mine.data(), all.data(), bytes, nullptr);
      });
      ends.join();
      for (const Outcome& outcome : outcomes)
        EXPECT_EQ(outcome, failure("call 1 (all_to_all of " + std::to_string(bytes) +
                                   " bytes): rank 1 of 3 has left: the process has ended, or given "
                                   "its communicator up"));
    }
  }
}

// A rank that fails after a complete call does not interrupt the other ranks in that call.
TEST(TcpGroup, ACallThatAllHaveMadeEndsWell) {
  for (int repeat = 0; repeat < 100; ++repeat) {
    const auto outcomes = run_ranks(make_tcp_group(2), [&](Communicator& c) {
      RandomDelays delay(c.rank(), static_cast<unsigned>(repeat));
      delay();
      std::vector<int> all(2);
      c.all_gather(&all[0], all.data(), sizeof(int), nullptr);
      c.abort("now");
    });
    EXPECT_EQ(outcomes, std::vector<Outcome>(2)) << repeat;
  }
}

TEST(TcpGroup, ARankMayLeaveAfterItsLastCall) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    Ranks ranks = make_tcp_group(3);
    const auto outcomes = run_ranks(ranks, [&](Communicator& c) {
      std::vector<std::byte> mine(100000), all(300000);
      for (int call = 0; call < 3; ++call)
        c.all_gather(mine.data(), all.data(), mine.size(), nullptr);
      if (c.rank() == 0) c.wait(nullptr, kShort);
      ranks[static_cast<std::size_t>(c.rank())].reset();  // the last owner: c is destroyed
    });
    EXPECT_EQ(outcomes, std::vector<Outcome>(3));
  }
}

TEST(TcpGroup, CheckSaysWhoHasLeft) {
  Ranks ranks = make_tcp_group(3);
  ranks[1].reset();
  EXPECT_EQ(outcome_of([&] { ranks[0]->wait(nullptr, kShort); }), kFine);
  EXPECT_EQ(outcome_of([&] { ranks[0]->check(); }),
            failure("before the first call: rank 1 of 3 has left: the process has ended, or given "
                    "its communicator up"));
  until_failed(*ranks[2]);
}

TEST(TcpGroup, ARankThatGivesUpWakesTheOthers) {
  for (const std::size_t bytes : {std::size_t{4}, kBig}) {
    const auto outcomes = run_ranks(make_tcp_group(3, kLong), [&](Communicator& c) {
      std::vector<std::byte> mine(bytes), all(3 * bytes);
      if (c.rank() == 2) {
        std::this_thread::sleep_for(milliseconds(20));
        c.abort("out of memory");
        c.abort("the second counts for nothing");
      }
      c.all_gather(mine.data(), all.data(), bytes, nullptr);
    });
    const std::string text = "rank 2 gave up: out of memory";
    for (const std::size_t r : {0U, 1U})
      EXPECT_EQ(outcomes[r],
                failure("call 1 (all_gather of " + std::to_string(bytes) + " bytes): " + text));
    EXPECT_EQ(outcomes[2], failure(text));
  }
}

// Aborts from another thread, while the rank waits in a call and while it transfers data.
TEST(TcpGroup, AnyThreadMayGiveUp) {
  const Ranks ranks = make_tcp_group(3, kLong);
  std::thread aborts([&] {
    std::this_thread::sleep_for(milliseconds(100));
    ranks[0]->abort("enough");
  });
  const auto outcomes = run_ranks({ranks[0], ranks[1]}, [](Communicator& c) {
    std::vector<std::byte> mine(kBig), all(3 * kBig);
    c.all_gather(mine.data(), all.data(), kBig, nullptr);
  });
  aborts.join();
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.kind, "DeviceError");
    EXPECT_NE(outcome.text.find("rank 0 gave up: enough"), std::string::npos) << outcome.text;
  }
}

// Control characters from another process are escaped for terminals.
TEST(TcpGroup, ReasonsOfOthersAreEscaped) {
  const Ranks ranks = make_tcp_group(2);
  ranks[0]->abort("\x1b]0;title\a\r\nerror: \xff \u00e9");
  const Outcome outcome = outcome_of([&] { ranks[1]->all_to_all(nullptr, nullptr, 0, nullptr); });
  EXPECT_EQ(outcome, failure("call 1 (all_to_all of 0 bytes): rank 0 gave up: "
                             "\\x1b]0;title\\x07\\x0d\\nerror: \\xff \u00e9"));
}

TEST(TcpGroup, LongReasonsAreCut) {
  const Ranks ranks = make_tcp_group(2);
  ranks[0]->abort(std::string(100000, 'x'));
  const Outcome outcome = outcome_of([&] { ranks[1]->all_to_all(nullptr, nullptr, 0, nullptr); });
  EXPECT_EQ(outcome.kind, "DeviceError");
  EXPECT_NE(outcome.text.find("rank 0 gave up: xxx"), std::string::npos);
  EXPECT_LT(outcome.text.size(), 2 * kMostTcpReason);
}

}  // namespace
}  // namespace logitless
