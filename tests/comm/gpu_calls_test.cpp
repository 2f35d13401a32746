// Tests of calls whose exchanges are enqueued, as on a GPU: one host barrier precedes the first
// exchange.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "comm/collective_calls.h"
#include "comm/ranks.h"

namespace logitless {
namespace {

// Host memory in place of a GPU's.
class LikeGpu : public Communicator {
 public:
  explicit LikeGpu(std::shared_ptr<Communicator> host) : host_(std::move(host)) {}
  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  DeviceKind device() const override { return DeviceKind::cuda; }
  bool capturable() const override { return false; }
  void all_gather(const void* mine, void* all, std::size_t bytes, void* stream) override {
    host_->all_gather(mine, all, bytes, stream);
  }
  void all_to_all(const void* slices, void* of_all, std::size_t bytes, void* stream) override {
    host_->all_to_all(slices, of_all, bytes, stream);
  }
  void all_gather_host(const void* mine, void* all, std::size_t bytes) override {
    ++meetings;
    host_->all_gather(mine, all, bytes, nullptr);
  }
  void wait(void*, std::chrono::milliseconds) override {}
  void abort(std::string_view reason) noexcept override { host_->abort(reason); }

  int meetings = 0;

 private:
  std::shared_ptr<Communicator> host_;
};

std::vector<Outcome> run(const std::function<void(CollectiveCalls&, LikeGpu&)>& body) {
  const Ranks ranks = make_thread_group(3, std::chrono::seconds(30));
  return run_ranks(ranks, [&](Communicator& c) {
    const auto gpu = std::make_shared<LikeGpu>(ranks[static_cast<std::size_t>(c.rank())]);
    CollectiveCalls calls(gpu, 0x1234);
    body(calls, *gpu);
  });
}

void exchange(CollectiveCalls& calls) {
  const int mine = calls.communicator().rank();
  int all[3] = {-1, -1, -1};
  calls.all_gather(&mine, all, sizeof(int));
  for (int r = 0; r < 3; ++r) EXPECT_EQ(all[r], r);
}

TEST(GpuCalls, SynchronizeOnceACall) {
  const auto outcomes = run([](CollectiveCalls& calls, LikeGpu& gpu) {
    for (int call = 1; call <= 3; ++call) {
      calls.run([&] {
        if (call > 1) calls.require_same_tokens(100);
        for (int i = 0; i < 4; ++i) exchange(calls);
      });
      EXPECT_EQ(gpu.meetings, call);
    }
  });
  EXPECT_EQ(outcomes, std::vector<Outcome>(3));
}

TEST(GpuCalls, WhatFailsBeforeTheFirstExchangeAllThrow) {
  const auto outcomes = run([](CollectiveCalls& calls, LikeGpu& gpu) {
    const auto failing = [&] {
      calls.run([&] {
        if (gpu.rank() == 1) throw InvalidArgument("hidden: expected something else");
        exchange(calls);
      });
    };
    const Outcome found = outcome_of(failing);
    EXPECT_EQ(found.kind, "InvalidArgument");
    EXPECT_NE(found.text.find("hidden: expected something else"), std::string::npos) << found.text;
    calls.run([&] { exchange(calls); });  // the next call is possible
  });
  EXPECT_EQ(outcomes, std::vector<Outcome>(3));
}

TEST(GpuCalls, DifferentNumbersOfTokensAreReported) {
  const auto outcomes = run([](CollectiveCalls& calls, LikeGpu& gpu) {
    calls.run([&] {
      calls.require_same_tokens(gpu.rank() == 2 ? 900 : 1000);
      exchange(calls);
    });
  });
  const Outcome expected{"InvalidArgument",
                         "rank 2: call 1 with 900 tokens, rank 0: call 1 with 1000 tokens"};
  EXPECT_EQ(outcomes, std::vector<Outcome>(3, expected));
}

TEST(GpuCalls, WhatFailsLaterGivesTheGroupUp) {
  const auto outcomes = run([](CollectiveCalls& calls, LikeGpu& gpu) {
    calls.run([&] {
      exchange(calls);
      if (gpu.rank() == 1) throw InvalidArgument("too late");
      exchange(calls);
    });
  });
  EXPECT_EQ(outcomes[1].text, "too late");
  for (const int r : {0, 2}) {
    EXPECT_EQ(outcomes[static_cast<std::size_t>(r)].kind, "DeviceError");
    EXPECT_NE(outcomes[static_cast<std::size_t>(r)].text.find("too late"), std::string::npos);
  }
}

}  // namespace
}  // namespace logitless
