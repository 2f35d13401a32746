#include "comm/collective_calls.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/ranks.h"

namespace logitless {
namespace {

constexpr std::uint64_t kPlan = 0x1234;

Outcome invalid(const std::string& text) { return {"InvalidArgument", text}; }

// Work of a body: two exchanges, whose results are checked. `point` runs before each and after the
// last: 0, 1, 2.
void work(CollectiveCalls& calls, const std::function<void(int)>& point) {
  const int size = calls.communicator().size(), rank = calls.communicator().rank();
  std::vector<int> mine(static_cast<std::size_t>(size), rank), all(mine.size()), ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(r);
  point(0);
  calls.all_gather(mine.data(), all.data(), sizeof(int));
  EXPECT_EQ(all, ranks);
  point(1);
  calls.all_to_all(mine.data(), all.data(), sizeof(int));
  EXPECT_EQ(all, ranks);
  point(2);
}

// Runs each rank's calls; returns the exceptions by rank.
std::vector<Outcome> run(int size, const std::function<void(CollectiveCalls&, int rank)>& body,
                         std::chrono::milliseconds limit = kCommunicatorLimit) {
  Ranks ranks = make_thread_group(size, limit);
  return run_ranks(ranks, [&](Communicator& c) {
    const int rank = c.rank();
    CollectiveCalls calls(std::move(ranks[static_cast<std::size_t>(rank)]), kPlan);
    body(calls, rank);
  });
}

TEST(CollectiveCalls, ReturnWhateverTheTiming) {
  for (int size = 1; size <= 8; ++size) {
    const auto outcomes = run(size, [&](CollectiveCalls& calls, int rank) {
      RandomDelays delay(rank, static_cast<unsigned>(size));
      for (int call = 0; call < 5; ++call) {
        calls.run([&] { work(calls, [&](int) { delay(); }); });
      }
    });
    EXPECT_EQ(outcomes, std::vector<Outcome>(static_cast<std::size_t>(size)));
  }
}

// All ranks throw if any rank fails at any point, and the next call works.
TEST(CollectiveCalls, AllThrowWhereOneFails) {
  for (int size = 1; size <= 8; ++size) {
    for (int where = 0; where <= 2; ++where) {
      const int bad = (size + where) % size;
      run(size, [&](CollectiveCalls& calls, int rank) {
        RandomDelays delay(rank, static_cast<unsigned>(size));
        const Outcome outcome = outcome_of([&] {
          calls.run([&] {
            work(calls, [&](int point) {
              delay();
              if (rank == bad && point == where) throw Unsupported("no kernel");
            });
          });
        });
        const std::string name = "rank " + std::to_string(bad) + ": ";
        EXPECT_EQ(outcome, (Outcome{"Unsupported", (rank == bad ? "" : name) + "no kernel"}));
        EXPECT_EQ(outcome_of([&] { calls.run([&] { work(calls, [](int) {}); }); }), Outcome{});
      });
    }
  }
}

TEST(CollectiveCalls, SeveralFailAtOnce) {
  const auto outcomes = run(4, [](CollectiveCalls& calls, int rank) {
    calls.run([&] {
      work(calls, [&](int point) {
        if (point != 1) return;
        if (rank == 1) throw std::bad_alloc();
        if (rank == 3) throw InvalidArgument("targets: 9 at position 2 is outside [0, 5)");
      });
    });
  });
  const Outcome others{"DeviceError",
                       "rank 1: out of memory; rank 3: targets: 9 at position 2 is outside [0, 5)"};
  EXPECT_EQ(outcomes,
            (std::vector<Outcome>{others,
                                  {"exception", "std::bad_alloc"},
                                  others,
                                  invalid("targets: 9 at position 2 is outside [0, 5)")}));
}

TEST(CollectiveCalls, ABadTargetIsEverybodys) {
  for (int where = 0; where <= 2; ++where) {
    run(3, [&](CollectiveCalls& calls, int rank) {
      const Outcome outcome = outcome_of([&] {
        calls.run([&] {
          work(calls, [&](int point) {
            if (rank != 1 || point != where) return;
            calls.bad_target(17, 128256);
            calls.bad_target(18, -1);  // only the first is kept
          });
        });
      });
      EXPECT_EQ(outcome, invalid("rank 1: targets: 128256 at position 17 is no vocabulary entry"));
      EXPECT_EQ(outcome_of([&] { calls.run([&] { work(calls, [](int) {}); }); }), Outcome{});
    });
  }
}

// The rank that skipped a call arrives at it with its next one, and is missing at the last.
TEST(CollectiveCalls, ASkippedCallIsMissed) {
  const auto outcomes = run(3, [](CollectiveCalls& calls, int rank) {
    for (int call = 0; call < 3; ++call) {
      if (rank != 2 || call != 1) calls.run([&] { work(calls, [](int) {}); });
    }
  });
  const Outcome expected{"DeviceError",
                         "communicator: call 11 (all_gather of 64 bytes): rank 2 of 3 left before "
                         "it"};
  EXPECT_EQ(outcomes, (std::vector<Outcome>{expected, expected, {}}));
}

// Alternates two plans: the rank is in the other one's call.
TEST(CollectiveCalls, ASkippedCallOfAnotherPlanIsNamed) {
  const Ranks ranks = make_thread_group(3);
  const auto outcomes = run_ranks(ranks, [&](Communicator& c) {
    const auto& mine = ranks[static_cast<std::size_t>(c.rank())];
    CollectiveCalls forward(mine, 0xab), backward(mine, 0xcd);
    for (int step = 0; step < 2; ++step) {
      if (c.rank() != 2 || step != 1) forward.run([] {});
      backward.run([] {});
    }
  });
  EXPECT_EQ(outcomes, std::vector<Outcome>(3, invalid("rank 2: plan cd, rank 0: plan ab")));
}

TEST(CollectiveCalls, NumbersThatDifferAreNamed) {
  const auto outcomes = run_ranks(make_thread_group(3), [](Communicator& c) {
    StatusHeader header;
    header.stage = Stage::exchange;
    header.call = c.rank() == 2 ? 5 : 6;
    std::vector<StatusHeader> all;
    exchange_status(c, header, "", all);
  });
  EXPECT_EQ(outcomes, std::vector<Outcome>(3, invalid("rank 2: call 5, rank 0: call 6")));
}

TEST(CollectiveCalls, ASkippedExchangeIsNamed) {
  const auto outcomes = run(3, [](CollectiveCalls& calls, int rank) {
    calls.run([&] {
      std::vector<int> mine(3), all(3);
      calls.all_gather(mine.data(), all.data(), sizeof(int));
      if (rank != 1) calls.all_to_all(mine.data(), all.data(), sizeof(int));
    });
  });
  EXPECT_EQ(outcomes, std::vector<Outcome>(3, invalid("rank 1: the end of call 1, rank 0: exchange "
                                                      "2 of call 1 (all_to_all of 4 bytes)")));
}

TEST(CollectiveCalls, SizesThatDifferAreNamed) {
  const auto outcomes = run(2, [](CollectiveCalls& calls, int rank) {
    calls.run([&] {
      std::vector<int> mine(4), all(8);
      calls.all_gather(mine.data(), all.data(), rank == 1 ? 12 : 16);
    });
  });
  EXPECT_EQ(outcomes, std::vector<Outcome>(2, invalid("rank 1: exchange 1 of call 1 (all_gather of "
                                                      "12 bytes), rank 0: exchange 1 of call 1 "
                                                      "(all_gather of 16 bytes)")));
}

TEST(CollectiveCalls, ARankThatEndsIsMissed) {
  for (int where = 0; where <= 2; ++where) {
    Ranks ranks = make_thread_group(3, std::chrono::hours(1));
    const auto outcomes = run_ranks(ranks, [&](Communicator& c) {
      const int rank = c.rank();
      auto calls = std::make_unique<CollectiveCalls>(
          std::move(ranks[static_cast<std::size_t>(rank)]), kPlan);
      if (rank != 1) return calls->run([&] { work(*calls, [](int) {}); });
      // It makes its exchanges by hand, and then no more of them.
      Communicator& mine = calls->communicator();
      StatusHeader header;
      header.plan = kPlan;
      header.call = 1;
      header.stage = Stage::exchange;
      header.bytes_each = sizeof(int);
      std::vector<StatusHeader> all;
      std::vector<int> slices(3, 1), others(3);
      for (int exchange = 1; exchange <= where; ++exchange) {
        header.exchange = static_cast<std::uint32_t>(exchange);
        header.kind = exchange == 1 ? ExchangeKind::all_gather : ExchangeKind::all_to_all;
        exchange_status(mine, header, "", all);
        if (exchange == 1) {
          mine.all_gather(slices.data(), others.data(), sizeof(int), nullptr);
        } else {
          mine.all_to_all(slices.data(), others.data(), sizeof(int), nullptr);
        }
      }
      calls.reset();
    });
    const Outcome expected{"DeviceError", "communicator: call " + std::to_string(2 * where + 1) +
                                              " (all_gather of 64 bytes): rank 1 of 3 left before "
                                              "it"};
    EXPECT_EQ(outcomes, (std::vector<Outcome>{expected, {}, expected}));
  }
}

TEST(CollectiveCalls, ARankThatHangsIsMissed) {
  std::atomic<int> starting{3}, waiting{2};
  const auto outcomes = run(
      3,
      [&](CollectiveCalls& calls, int rank) {
        --starting;
        while (starting != 0) std::this_thread::yield();
        calls.run([&] {
          if (rank == 1) {
            while (waiting != 0) std::this_thread::yield();
          }
          try {
            work(calls, [](int) {});
          } catch (...) {
            --waiting;
            throw;
          }
        });
      },
      std::chrono::milliseconds(500));
  const Outcome expected{"DeviceError",
                         "communicator: call 1 (all_gather of 64 bytes): rank 1 of 3 did not "
                         "arrive within 500 ms"};
  EXPECT_EQ(outcomes, std::vector<Outcome>(3, expected));
}

}  // namespace
}  // namespace logitless
