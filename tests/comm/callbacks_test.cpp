#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "comm/ranks.h"
#include "logitless/communicator.h"

namespace logitless {
namespace {

using std::chrono::milliseconds;

// Callbacks that forward everything to a rank of another group.
CommunicatorCallbacks to(const std::shared_ptr<Communicator>& inner) {
  CommunicatorCallbacks callbacks;
  callbacks.rank = inner->rank();
  callbacks.size = inner->size();
  callbacks.all_gather = [inner](const void* mine, void* all, std::size_t bytes, void* stream) {
    inner->all_gather(mine, all, bytes, stream);
  };
  callbacks.all_to_all = [inner](const void* slices, void* all, std::size_t bytes, void* stream) {
    inner->all_to_all(slices, all, bytes, stream);
  };
  callbacks.abort = [inner](std::string_view reason) { inner->abort(reason); };
  return callbacks;
}

TEST(Callbacks, MoveBytes) {
  Ranks ranks;
  for (const auto& inner : make_thread_group(3)) ranks.push_back(make_callbacks(to(inner)));
  const auto outcomes = run_ranks(ranks, [](Communicator& c) {
    std::vector<int> mine{c.rank() * 10, c.rank() * 10 + 1, c.rank() * 10 + 2}, all(3);
    c.all_gather(mine.data(), all.data(), sizeof(int), nullptr);
    EXPECT_EQ(all, (std::vector<int>{0, 10, 20}));
    c.all_to_all(mine.data(), all.data(), sizeof(int), nullptr);
    EXPECT_EQ(all, (std::vector<int>{c.rank(), 10 + c.rank(), 20 + c.rank()}));
    c.all_gather_host(mine.data() + 1, all.data(), sizeof(int));
    EXPECT_EQ(all, (std::vector<int>{1, 11, 21}));
    c.wait(nullptr, milliseconds(1));
    EXPECT_FALSE(c.capturable());
    EXPECT_EQ(c.device(), DeviceKind::cpu);
  });
  EXPECT_EQ(outcomes, std::vector<Outcome>(3));
}

TEST(Callbacks, AFailureIsForGood) {
  int calls = 0;
  CommunicatorCallbacks callbacks = to(make_thread_group(1)[0]);
  callbacks.all_to_all = [&](const void*, void*, std::size_t, void*) {
    ++calls;
    throw std::runtime_error("the link is down");
  };
  const auto communicator = make_callbacks(callbacks);
  int mine = 1, all = 0;
  communicator->all_gather(&mine, &all, sizeof(int), nullptr);
  const Outcome expected{
      "DeviceError", "communicator: call 2 (all_to_all of 4 bytes) on rank 0: the link is down"};
  for (int repeat = 0; repeat < 2; ++repeat) {
    EXPECT_EQ(outcome_of([&] { communicator->all_to_all(&mine, &all, 4, nullptr); }), expected);
    EXPECT_EQ(outcome_of([&] { communicator->all_gather(&mine, &all, 4, nullptr); }), expected);
    EXPECT_EQ(outcome_of([&] { communicator->wait(nullptr, milliseconds(1)); }), expected);
  }
  EXPECT_EQ(calls, 1);
}

// The other ranks may not know that a callback failed here.
TEST(Callbacks, AbortAfterAFailureReachesTheCaller) {
  int aborts = 0;
  CommunicatorCallbacks callbacks = to(make_thread_group(1)[0]);
  callbacks.all_to_all = [](const void*, void*, std::size_t, void*) {
    throw std::runtime_error("the link is down");
  };
  callbacks.abort = [&](std::string_view) { ++aborts; };
  const auto communicator = make_callbacks(callbacks);
  int mine = 1, all = 0;
  const Outcome failed = outcome_of([&] { communicator->all_to_all(&mine, &all, 4, nullptr); });
  communicator->abort("no more");
  communicator->abort("no more");
  EXPECT_EQ(aborts, 1);
  EXPECT_EQ(outcome_of([&] { communicator->all_to_all(&mine, &all, 4, nullptr); }), failed);
}

TEST(Callbacks, AbortReachesTheOthers) {
  Ranks ranks;
  for (const auto& inner : make_thread_group(2, std::chrono::hours(1)))
    ranks.push_back(make_callbacks(to(inner)));
  const auto outcomes = run_ranks(ranks, [](Communicator& c) {
    if (c.rank() == 1) c.abort("no memory");
    int mine = 0, all[2];
    c.all_gather(&mine, all, sizeof(int), nullptr);
  });
  EXPECT_EQ(outcomes[1], (Outcome{"DeviceError", "communicator: rank 1 gave up: no memory"}));
  EXPECT_EQ(outcomes[0].kind, "DeviceError");
  EXPECT_NE(outcomes[0].text.find("rank 1 gave up: no memory"), std::string::npos);
}

TEST(Callbacks, OfAGpu) {
  std::vector<std::string> made;
  CommunicatorCallbacks callbacks = to(make_thread_group(1)[0]);
  callbacks.device = DeviceKind::cuda;
  callbacks.capturable = true;
  callbacks.all_gather_host = [&](const void*, void*, std::size_t) { made.push_back("host"); };
  callbacks.wait = [&](void*, milliseconds limit) {
    made.push_back("wait " + std::to_string(limit.count()));
    if (limit.count() == 7) throw std::runtime_error("too long");
  };
  const auto communicator = make_callbacks(callbacks);
  EXPECT_TRUE(communicator->capturable());
  EXPECT_EQ(communicator->device(), DeviceKind::cuda);
  int mine = 1, all = 0;
  communicator->all_gather_host(nullptr, nullptr, 0);  // an empty call calls nothing
  communicator->all_gather_host(&mine, &all, sizeof(int));
  communicator->wait(nullptr, milliseconds(5));
  EXPECT_EQ(outcome_of([&] { communicator->wait(nullptr, milliseconds(7)); }),
            (Outcome{"DeviceError", "communicator: wait after call 2 on rank 0: too long"}));
  EXPECT_EQ(made, (std::vector<std::string>{"host", "wait 5", "wait 7"}));
}

TEST(Callbacks, NamesWhatIsMissing) {
  const auto refusal = [](auto change) {
    CommunicatorCallbacks callbacks = to(make_thread_group(1)[0]);
    change(callbacks);
    const Outcome outcome = outcome_of([&] { make_callbacks(callbacks); });
    EXPECT_EQ(outcome.kind, "InvalidArgument");
    return outcome.text;
  };
  using C = CommunicatorCallbacks;
  EXPECT_EQ(refusal([](C& c) { c.size = 0; }), "make_callbacks: size: expected 1 or more, got 0");
  EXPECT_EQ(refusal([](C& c) { c.rank = 1; }),
            "make_callbacks: rank: expected one in [0, 1), got 1");
  EXPECT_EQ(refusal([](C& c) { c.all_gather = nullptr; }),
            "make_callbacks: all_gather: expected a function, got none");
  EXPECT_EQ(refusal([](C& c) { c.all_to_all = nullptr; }),
            "make_callbacks: all_to_all: expected a function, got none");
  EXPECT_EQ(refusal([](C& c) { c.capturable = true; }),
            "make_callbacks: capturable: the CPU captures nothing");
  EXPECT_EQ(refusal([](C& c) { c.wait = [](void*, milliseconds) {}; }),
            "make_callbacks: wait: only a GPU's communicator has one");
  EXPECT_EQ(refusal([](C& c) { c.device = DeviceKind::cuda; }),
            "make_callbacks: all_gather_host: expected a function, got none");
}

}  // namespace
}  // namespace logitless
