// Ranks on a CPU: the same bits for any timing, and the memory and traffic of sharded calls.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "head/plan/choose.h"
#include "head/sharding/sharded.h"
#include "support/mirror.h"

namespace logitless::test {
namespace {

TEST(ShardingRuns, AreTheSameWhateverTheRanksTiming) {
  HeadSpec spec{.tokens = 40,
                .dim = 12,
                .vocab = 700,
                .dtype = DType::bf16,
                .bias = true,
                .class_weight = true,
                .label_smoothing = 0.1f,
                .z_loss = 0.01f};
  const HeadProblem problem(spec);
  const TokenSplit spread{"spread", {30, 0, 10}};
  for (const TokenSplit& tokens :
       {TokenSplit{"replicated"}, spread, with_weights_moving(spread, 150)}) {
    ShardedRun run{.vocab = vocab_at("uneven", {0, 1, 300, 700}), .tokens = tokens};
    run.run.extras = true;
    run.run.chunk_tokens = 12;
    run.run.gradient_dtype = DType::bf16;
    run.run.threads = 1;
    const HeadResult first = run_sharded(problem, run);
    ASSERT_FALSE(HasFailure());
    for (unsigned seed = 1; seed <= 20; ++seed) {
      run.delays = seed;
      run.run.threads = 1 + static_cast<int>(seed % 4);
      const HeadResult again = run_sharded(problem, run);
      ASSERT_FALSE(HasFailure());
      for (Tensor HeadResult::*field :
           {&HeadResult::loss, &HeadResult::lse, &HeadResult::log_prob, &HeadResult::entropy,
            &HeadResult::argmax, &HeadResult::d_hidden, &HeadResult::d_weight, &HeadResult::d_bias})
        ASSERT_EQ((again.*field).bytes(), (first.*field).bytes()) << "seed " << seed;
    }
  }
}

// The formula of docs/explain/distributed.md: partial sums of d_hidden, hidden states, and records
// of tokens.
TEST(ShardingBytes, AreThoseOfTheFormula) {
  constexpr std::int64_t kTokens = 48, kDim = 16, kRecord = 64 + 8, kResult = 24 + 8;
  HeadSpec spec{.tokens = kTokens,
                .dim = kDim,
                .vocab = 600,
                .dtype = DType::bf16,
                .reduction = Reduction::sum};
  const HeadProblem problem(spec);
  for (const std::int64_t ranks : {2, 4}) {
    for (const bool spread : {false, true}) {
      std::atomic<std::int64_t> sent = 0;
      ShardedRun run{.vocab = even_vocab(static_cast<int>(ranks), 600)};
      run.sent = &sent;
      if (spread) run.tokens.counts.assign(static_cast<std::size_t>(ranks), kTokens / ranks);
      run_sharded(problem, run);
      ASSERT_FALSE(HasFailure());
      const std::int64_t others = ranks - 1;
      const std::int64_t records = ranks * others * kTokens * kRecord;
      const std::int64_t slices = others * kTokens * kDim * 4;  // sent to the ranks of their tokens
      const std::int64_t back = spread ? others * kTokens * kDim * 2 : slices;
      // Targets and cotangents of tokens, and a count and sums of each rank.
      const std::int64_t of_tokens =
          spread ? others * kTokens * (4 + kResult) + ranks * others * (8 + 8 + 32) : 0;
      EXPECT_EQ(sent, records + slices + back + of_tokens) << ranks << " ranks";
    }
  }
}

// Weight-gathered traffic: rows of the weight (the last slice once, the others twice), and sums of
// d_weight. Each rank counts with the rows of the largest.
TEST(ShardingBytes, OfWeightsThatMoveAreThoseOfTheFormula) {
  constexpr std::int64_t kTokens = 48, kDim = 16, kVocab = 2400;
  for (const bool gradients : {false, true}) {
    HeadSpec spec{.tokens = kTokens,
                  .dim = kDim,
                  .vocab = kVocab,
                  .dtype = DType::bf16,
                  .bias = true,
                  .reduction = Reduction::sum};
    const HeadProblem problem(spec);
    for (const std::int64_t ranks : {2, 4}) {
      std::atomic<std::int64_t> sent = 0;
      TokenSplit tokens{
          "spread", std::vector<std::int64_t>(static_cast<std::size_t>(ranks), kTokens / ranks)};
      ShardedRun run{.vocab = even_vocab(static_cast<int>(ranks), kVocab),
                     .tokens = with_weights_moving(tokens, 128)};
      run.sent = &sent;
      run.run.gradients = gradients;
      run_sharded(problem, run);
      ASSERT_FALSE(HasFailure());
      const std::int64_t slices = (kVocab / ranks + 127) / 128;
      const std::int64_t rows = 128 * (kDim * 2 + 4);  // with the bias
      const std::int64_t sums = 128 * (kDim * 4 + 4);  // with d_bias
      const std::int64_t of_rank =
          gradients ? (2 * slices - 1) * rows + slices * sums : slices * rows;
      // A count, a share of the mean and sums of each rank.
      EXPECT_EQ(sent, ranks * (ranks - 1) * (of_rank + 8 + 8 + 32)) << ranks << " ranks";
    }
  }
}

// Chunks of tokens and vocabulary blocks may differ between ranks. Slices and the number of threads
// do not change the bits of lse.
TEST(ShardingBits, DoNotDependOnSlicesAndChunksOfTokens) {
  HeadSpec spec{.tokens = 90, .dim = 12, .vocab = 2300, .dtype = DType::bf16, .bias = true};
  const HeadProblem problem(spec);
  const TokenSplit spread{"spread", {60, 30}};
  ShardedRun run{.vocab = vocab_at("blocks", {0, 1280, 2300}),
                 .tokens = with_weights_moving(spread, 1280)};
  run.run.threads = 1;
  const HeadResult whole = run_sharded(problem, run);
  run.tokens.slice_rows = 256;
  const HeadResult slices = run_sharded(problem, run);
  run.run.chunk_tokens = 17;
  const HeadResult chunks = run_sharded(problem, run);
  ASSERT_FALSE(HasFailure());
  for (Tensor HeadResult::*field :
       {&HeadResult::loss, &HeadResult::lse, &HeadResult::log_prob, &HeadResult::target_logit}) {
    EXPECT_EQ((slices.*field).bytes(), (whole.*field).bytes());
    EXPECT_EQ((chunks.*field).bytes(), (whole.*field).bytes());
  }
}

TEST(ShardingMemory, IsThePlansWorkspace) {
  HeadSpec spec{.tokens = 90, .dim = 16, .vocab = 900, .dtype = DType::bf16};
  const HeadProblem problem(spec);
  const TokenSplit spread{"spread", {60, 30}};
  for (const TokenSplit& tokens : {TokenSplit{"replicated"}, spread, with_weights_moving(spread)}) {
    ShardedRun run{.vocab = even_vocab(2, 900), .tokens = tokens};
    run.after = [](int, const LossPlan& plan, const Context& context) {
      EXPECT_EQ(context.memory().peak_bytes(), plan.workspace_bytes());
      EXPECT_EQ(context.memory().current_bytes(), 0u);
      EXPECT_NE(plan.explain().find("900 vocabulary entries on 2 ranks"), std::string::npos);
    };
    run_sharded(problem, run);
  }
}

// A budget includes the buffers of the exchanges.
TEST(ShardingMemory, StaysInTheBudget) {
  HeadSpec spec{.tokens = 600, .dim = 16, .vocab = 3000};
  const HeadProblem problem(spec);
  const TokenSplit spread{"spread", {300, 200, 100}};
  for (const TokenSplit& tokens : {spread, with_weights_moving(spread)}) {
    ShardedRun run{.vocab = even_vocab(3, 3000), .tokens = tokens};
    const auto plan_of = [&](std::size_t budget) {
      run.run.budget = budget;
      std::size_t bytes = 0;
      run.after = [&](int rank, const LossPlan& plan, const Context& context) {
        EXPECT_LE(context.memory().peak_bytes(), budget);
        if (rank == 0) bytes = plan.workspace_bytes();
      };
      const HeadResult result = run_sharded(problem, run);
      if (!testing::Test::HasFailure()) expect_matches_oracle(problem, run.run, result);
      return bytes;
    };
    const std::size_t plenty = plan_of(1_GiB);
    const std::size_t little = plan_of(plenty / 2);
    EXPECT_LE(little, plenty / 2);
    EXPECT_GT(little, 0u);
  }
}

// The full weight and the full d_weight are never held: the least memory is much less than either.
TEST(ShardingMemory, WeightsThatMoveAreHeldInSlices) {
  constexpr std::int64_t kVocab = 20000, kDim = 64;
  const HeadProblem problem({.tokens = 64, .dim = kDim, .vocab = kVocab});
  const TokenSplit spread{"spread", {32, 32}};
  ShardedRun run{.vocab = even_vocab(2, kVocab), .tokens = with_weights_moving(spread)};
  run.run.budget = 2_MiB;  // the weight is 4.9 MiB
  run.after = [](int, const LossPlan& plan, const Context& context) {
    EXPECT_LE(plan.slice_rows, kVocab / 4);
    EXPECT_LE(context.memory().peak_bytes(), 2_MiB);
  };
  const HeadResult result = run_sharded(problem, run);
  if (!HasFailure()) expect_matches_oracle(problem, run.run, result);
}

// The faster movement is chosen on all ranks alike, and the plan explains it.
TEST(ShardingExchange, IsPlannedByTokensAndVocab) {
  struct Case {
    std::int64_t vocab;
    std::vector<std::int64_t> tokens;
    ExchangeMode exchange;
  };
  for (const Case& c :
       {Case{4000, {8, 0}, ExchangeMode::tokens}, {40, {4000, 0}, ExchangeMode::weights}}) {
    const HeadProblem problem({.tokens = c.tokens[0] + c.tokens[1], .dim = 32, .vocab = c.vocab});
    ShardedRun run{.vocab = even_vocab(2, c.vocab),
                   .tokens = {"spread", c.tokens, ExchangeMode::planned}};
    const bool weights = c.exchange == ExchangeMode::weights;
    run.after = [&](int, const LossPlan& plan, const Context&) {
      EXPECT_EQ(plan.slice_rows > 0, weights);
      const std::string text = plan.explain();
      EXPECT_NE(text.find(weights ? "  weights move: " : "  tokens move: "), std::string::npos)
          << text;
      EXPECT_NE(text.find(weights ? "  not tokens: " : "  not weights: "), std::string::npos)
          << text;
      EXPECT_NE(text.find(" from each rank, predicted "), std::string::npos) << text;
    };
    const HeadResult result = run_sharded(problem, run);
    if (!HasFailure()) expect_matches_oracle(problem, run.run, result);
  }
}

// Llama 3's head on four ranks with 8192 tokens each: a rank holds a fraction of the weight's 1002
// MiB.
TEST(ShardingExchange, OfAGpuHoldsSlicesWithinTheBudget) {
  const HeadShape shape{
      .tokens = 8192, .dim = 4096, .vocab = 128256, .dtype = DType::bf16, .global_vocab = 128256};
  HeadFeatures features{.d_hidden = true, .d_weight = true};
  features.d_hidden_dtype = features.d_weight_dtype = DType::bf16;
  features.vocab_ranks = 4;
  features.tokens_sharded = true;
  features.gathered_rows = 32064;
  PlanRequest request;
  request.device.kind = DeviceKind::cuda;
  request.device.compute_capability = 90;
  std::int64_t last = 1 << 30;
  for (const std::size_t budget : {2_GiB, 768_MiB, 300_MiB}) {
    request.memory_budget = budget;
    const LossPlan plan = LocalPlanner().plan(shape, features, request);
    EXPECT_EQ(plan.kind, PlanKind::recompute);
    EXPECT_LE(plan.workspace_bytes(), budget);
    EXPECT_EQ(plan.slice_rows % 256, 0);
    EXPECT_LE(plan.slice_rows, 32064 / 2 + 256);
    EXPECT_LE(plan.slice_rows, last);
    last = plan.slice_rows;
  }
}

TEST(ShardingExchange, OfAPlanThatOneWayCannotMakeIsTheOther) {
  const HeadProblem problem({.tokens = 4000, .dim = 32, .vocab = 40});
  ShardedRun run{.vocab = even_vocab(2, 40),
                 .tokens = {"spread", {4000, 0}, ExchangeMode::planned}};
  run.run.plan = PlanKind::dense;
  run.after = [](int, const LossPlan& plan, const Context&) {
    EXPECT_EQ(plan.slice_rows, 0);
    EXPECT_NE(plan.explain().find("not weights: no plan: dense: weights move slice by slice"),
              std::string::npos)
        << plan.explain();
  };
  run_sharded(problem, run);
}

}  // namespace
}  // namespace logitless::test
