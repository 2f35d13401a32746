// Plans of a vocabulary sharded over GPUs, without any GPU: common chunks, the memory of
// exponentials, and workspace sizes.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "comm/ranks.h"
#include "head/cuda/layout.h"
#include "logitless/plan.h"

namespace logitless::test {
namespace {

// Exchanges only host memory, and may have exchange memory.
class GpuGroup : public Communicator {
 public:
  GpuGroup(std::shared_ptr<Communicator> host, std::byte* memory)
      : host_(std::move(host)), memory_(memory) {}
  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  DeviceKind device() const override { return DeviceKind::cuda; }
  bool capturable() const override { return false; }
  void all_gather(const void*, void*, std::size_t, void*) override { FAIL(); }
  void all_to_all(const void*, void*, std::size_t, void*) override { FAIL(); }
  void all_gather_host(const void* mine, void* all, std::size_t bytes) override {
    host_->all_gather(mine, all, bytes, nullptr);
  }
  void* exchange_memory(std::size_t) override { return memory_; }
  void wait(void*, std::chrono::milliseconds) override {}
  void abort(std::string_view reason) noexcept override { host_->abort(reason); }

 private:
  std::shared_ptr<Communicator> host_;
  std::byte* const memory_;
};

// Llama-3-8B's head with 8192 tokens in bf16. No tensor has memory.
class ShardingDevicePlan : public testing::Test {
 protected:
  static constexpr std::int64_t kTokens = 8192, kDim = 4096, kVocab = 128256;

  void SetUp() override {
    request.device.kind = DeviceKind::cuda;
    features.d_hidden = features.d_weight = true;
    features.d_hidden_dtype = features.d_weight_dtype = DType::bf16;
    try {
      plan_head({kTokens, kDim, kVocab, DType::bf16}, features, request);
    } catch (const Unsupported& e) {
      GTEST_SKIP() << "a build without CUDA: " << e.what();
    }
  }
  // Returns the plans of ranks with these shard sizes, and equal numbers of tokens if these are
  // sharded.
  std::vector<LossPlan> plans(const std::vector<std::int64_t>& rows_of_ranks, bool spread) {
    const int ranks = static_cast<int>(rows_of_ranks.size());
    std::vector<LossPlan> out(rows_of_ranks.size());
    const std::vector<Outcome> outcomes = run_ranks(make_thread_group(ranks), [&](auto& me) {
      const auto r = static_cast<std::size_t>(me.rank());
      PlanRequest mine = request;
      const auto no_one = [](Communicator*) {};
      mine.sharding.vocab_group =
          std::make_shared<GpuGroup>(std::shared_ptr<Communicator>(&me, no_one), memory);
      for (std::size_t before = 0; before < r; ++before)
        mine.sharding.vocab_begin += rows_of_ranks[before];
      for (const std::int64_t of_rank : rows_of_ranks) mine.sharding.vocab += of_rank;
      mine.sharding.tokens = spread;
      mine.sharding.exchange = exchange;
      if (!cards.empty()) mine.device.card = cards[r];
      out[r] = plan_head({spread ? kTokens / ranks : kTokens, kDim, rows_of_ranks[r], DType::bf16},
                         features, mine);
    });
    for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.text, "");
    return out;
  }
  static std::int64_t first_of(const LossPlan& plan) {
    return plan.weight_ranges > 0 ? plan.first_tokens : plan.chunk_tokens;
  }
  static void expect_alike(const std::vector<LossPlan>& made) {
    for (const LossPlan& plan : made) {
      EXPECT_EQ(plan.chunk_tokens, made[0].chunk_tokens);
      EXPECT_EQ(first_of(plan), first_of(made[0]));
    }
  }
  static std::size_t of_tokens(std::size_t bytes) { return bytes * kTokens * kDim; }

  HeadFeatures features;
  PlanRequest request;
  ExchangeMode exchange = ExchangeMode::planned;
  std::byte* memory = nullptr;
  std::vector<GpuCard> cards;  // of the ranks; empty: the usual one
};

// Other rates choose other chunks: with an H200's links alone a budget is filled.
TEST_F(ShardingDevicePlan, RanksOfOtherCardsPlanWithTheRatesOfRank0) {
  GpuCard slow = gpu_card("H200");
  slow.name = "slow";
  slow.gemm_flops /= 50;
  slow.tile_flops /= 50;
  slow.calibrated = true;
  const std::vector<std::int64_t> rows(2, kVocab / 2);
  for (const bool spread : {false, true}) {
    std::vector<double> alone;
    for (const GpuCard& card : {gpu_card("H200"), slow}) {
      cards = {card, card};
      alone.push_back(plans(rows, spread)[0].predicted_seconds);
    }
    EXPECT_GT(alone[1], 2 * alone[0]);
    for (const bool first_is_slow : {false, true}) {
      cards = {gpu_card("H200"), slow};
      if (first_is_slow) std::swap(cards[0], cards[1]);
      const std::vector<LossPlan> made = plans(rows, spread);
      expect_alike(made);
      for (const LossPlan& plan : made) {
        EXPECT_EQ(plan.predicted_seconds, alone[first_is_slow ? 1 : 0]);
        EXPECT_EQ(plan.calibrated, first_is_slow);
      }
    }
  }
}

TEST_F(ShardingDevicePlan, KeepsExponentialsInThreePasses) {
  const LossPlan alone = plan_head({kTokens, kDim, kVocab, DType::bf16}, features, request);
  for (const int ranks : {2, 4, 8}) {
    for (const bool spread : {false, true}) {
      const std::vector<LossPlan> made =
          plans(std::vector<std::int64_t>(static_cast<std::size_t>(ranks), kVocab / ranks), spread);
      expect_alike(made);
      EXPECT_EQ(made[0].passes, 3.0) << ranks << "\n" << made[0].explain();
      EXPECT_TRUE(ranks > 4 || made[0].weight_ranges > 0) << made[0].explain();
      // Its share of one GPU's plan except for a copy of hidden, plus sent and received sums and
      // all hidden states.
      EXPECT_LE(made[0].workspace_bytes(),
                alone.workspace_bytes() / static_cast<std::size_t>(ranks) +
                    of_tokens(spread ? 12 : 10) + 8_MiB)
          << made[0].explain();
    }
  }
}

TEST_F(ShardingDevicePlan, VocabThatIsUnevenByATileKeepsIt) {
  const std::vector<LossPlan> made = plans({32256, 32000, 32000, 32000}, true);
  expect_alike(made);
  for (const LossPlan& plan : made) EXPECT_EQ(plan.passes, 3.0) << plan.explain();
}

// A budget is a ceiling for ranks, too: they take no more than speed is worth, and have the same
// chunks.
TEST_F(ShardingDevicePlan, PlentyOfMemoryIsNotTaken) {
  for (const bool spread : {false, true}) {
    request.memory_budget = 0;
    const std::vector<LossPlan> free = plans({32256, 32000, 32000, 32000}, spread);
    request.memory_budget = 64_GiB;
    const std::vector<LossPlan> made = plans({32256, 32000, 32000, 32000}, spread);
    expect_alike(made);
    for (std::size_t r = 0; r < made.size(); ++r) {
      EXPECT_EQ(made[r].passes, 3.0) << made[r].explain();
      EXPECT_LE(made[r].predicted_seconds, 1.01 * free[r].predicted_seconds);
      EXPECT_LE(made[r].workspace_bytes(), made[r].logits_bytes()) << made[r].explain();
    }
  }
}

TEST_F(ShardingDevicePlan, RanksWithoutVocabGoByTheOthers) {
  request.memory_budget = 500_MiB;
  const std::vector<LossPlan> made = plans({0, 64128, 0, 64128}, false);
  expect_alike(made);
  EXPECT_GT(made[1].weight_ranges, 0) << made[1].explain();
}

TEST_F(ShardingDevicePlan, RanksWhoseFirstChunksWouldDifferHaveNoLargeOnes) {
  request.memory_budget = 400_MiB;
  const std::vector<LossPlan> made = plans({10000, 54128, 20000, 44128}, true);
  expect_alike(made);
  for (const LossPlan& plan : made) EXPECT_LE(plan.workspace_bytes(), 400_MiB) << plan.explain();
}

TEST_F(ShardingDevicePlan, ARankWithoutVocabGoesByOthersThatAreNotAlike) {
  request.memory_budget = 400_MiB;
  for (const std::vector<std::int64_t>& rows_of_ranks :
       {std::vector<std::int64_t>{54128, 0, 74128}, {54128, 74128, 0}, {0, 10000, 118256}})
    for (const bool spread : {false, true}) expect_alike(plans(rows_of_ranks, spread));
}

TEST_F(ShardingDevicePlan, ExchangesTakeTheGroupsMemoryWhereItHasSome) {
  const std::vector<LossPlan> without = plans({64128, 64128}, true);
  std::byte some;
  memory = &some;
  const std::vector<LossPlan> with = plans({64128, 64128}, true);
  EXPECT_EQ(without[0].exchange_bytes, 0u);
  EXPECT_GE(with[0].exchange_bytes, of_tokens(6));
  EXPECT_EQ(with[0].exchange_bytes + with[0].workspace_bytes(), without[0].workspace_bytes());
}

// The exchange memory replaces the end of the layout.
TEST_F(ShardingDevicePlan, WhatIsReceivedIsTheEndOfTheWorkspace) {
  std::byte some;
  memory = &some;
  const auto expect_end = [&](bool spread, std::size_t least) {
    const LossPlan plan = plans({32256, 32000, 32000, 32000}, spread)[0];
    EXPECT_EQ(LossPlanAccess::layout<cuda::Layout>(plan).exchange_bytes(), plan.exchange_bytes)
        << plan.explain();
    EXPECT_GE(plan.exchange_bytes, least) << plan.explain();
  };
  expect_end(true, of_tokens(6));
  expect_end(false, of_tokens(4));
  exchange = ExchangeMode::weights;
  expect_end(true, 60_MiB);
}

// The next chunk's inputs arrive while GEMMs occupy all SMs. NCCL's kernels would wait for their
// end, and take SMs from GEMMs on other ranks.
TEST_F(ShardingDevicePlan, OfSeveralChunksAllThatComesBesideProductsIsInTheGroupsMemory) {
  std::byte some;
  memory = &some;
  const auto layout_in = [&](std::size_t budget) {
    request.memory_budget = budget;
    const LossPlan plan = plans({32256, 32000, 32000, 32000}, true)[0];
    EXPECT_EQ(plan.chunk_tokens < plan.shape.tokens, budget < 400_MiB) << plan.explain();
    return LossPlanAccess::layout<cuda::Layout>(plan);
  };
  const cuda::Layout several = layout_in(200_MiB);
  for (const std::size_t at : {several.shard.hidden[1], several.shard.targets[0],
                               several.shard.targets[1], several.shard.logits})
    EXPECT_GE(at, several.exchange);
  const cuda::Layout one = layout_in(4096_MiB);
  EXPECT_GE(one.shard.hidden[0], one.exchange);
  for (const std::size_t at : {one.shard.targets[0], one.shard.logits})
    EXPECT_LT(at, one.exchange) << "NCCL has less of a few bytes where nothing else runs";
}

// A chunk's d_hidden is being sent while the next forward gathers rows of the weight.
TEST_F(ShardingDevicePlan, FarForwardsLeaveWhatIsSentAlone) {
  request.kind = PlanKind::far_backward;
  for (const std::size_t budget : {440_MiB, 500_MiB, 600_MiB}) {
    for (const bool spread : {false, true}) {
      request.memory_budget = budget;
      const LossPlan plan = plans({32256, 32000, 32000, 32000}, spread)[0];
      const auto& layout = LossPlanAccess::layout<cuda::Layout>(plan);
      const std::int64_t rows = std::min(layout.far.swept, plan.shape.vocab);
      EXPECT_GT(rows, 0);
      EXPECT_LE(layout.far.gathered + static_cast<std::size_t>(rows * kDim * 2),
                layout.gradients.d_hidden)
          << plan.explain();
    }
  }
}

}  // namespace
}  // namespace logitless::test
