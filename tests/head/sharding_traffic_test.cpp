// Of ranks on a CPU: the same bits whatever their timing; what a sharded call takes and sends.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "head/sharded.h"
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
  for (const TokenSplit& tokens : {TokenSplit{"replicated"}, TokenSplit{"spread", {30, 0, 10}}}) {
    ShardedRun run{.words = words_at("uneven", {0, 1, 300, 700}), .tokens = tokens};
    run.run.extras = true;
    run.run.chunk_tokens = 12;
    run.run.gradient_dtype = DType::bf16;
    run.run.threads = 1;
    const HeadAnswer first = run_sharded(problem, run);
    ASSERT_FALSE(HasFailure());
    for (unsigned seed = 1; seed <= 20; ++seed) {
      run.delays = seed;
      run.run.threads = 1 + static_cast<int>(seed % 4);
      const HeadAnswer again = run_sharded(problem, run);
      ASSERT_FALSE(HasFailure());
      for (Tensor HeadAnswer::*field :
           {&HeadAnswer::loss, &HeadAnswer::lse, &HeadAnswer::log_prob, &HeadAnswer::entropy,
            &HeadAnswer::argmax, &HeadAnswer::d_hidden, &HeadAnswer::d_weight, &HeadAnswer::d_bias})
        ASSERT_EQ((again.*field).bytes(), (first.*field).bytes()) << "seed " << seed;
    }
  }
}

// As docs/distributed.md says: pieces of d_hidden and the hidden states, and the records of tokens.
TEST(ShardingBytes, AreThoseOfTheFormula) {
  constexpr std::int64_t kTokens = 48, kDim = 16, kRecord = 64 + 8, kAnswer = 24 + 8;
  HeadSpec spec{.tokens = kTokens,
                .dim = kDim,
                .vocab = 600,
                .dtype = DType::bf16,
                .reduction = Reduction::sum};
  const HeadProblem problem(spec);
  for (const std::int64_t ranks : {2, 4}) {
    for (const bool spread : {false, true}) {
      std::atomic<std::int64_t> sent = 0;
      ShardedRun run{.words = even_words(static_cast<int>(ranks), 600)};
      run.sent = &sent;
      if (spread) run.tokens.counts.assign(static_cast<std::size_t>(ranks), kTokens / ranks);
      run_sharded(problem, run);
      ASSERT_FALSE(HasFailure());
      const std::int64_t others = ranks - 1;
      const std::int64_t records = ranks * others * kTokens * kRecord;
      const std::int64_t pieces = others * kTokens * kDim * 4;  // to their tokens' ranks
      const std::int64_t back = spread ? others * kTokens * kDim * 2 : pieces;
      // Targets and answers of tokens, and of each rank its count and its sums.
      const std::int64_t of_tokens =
          spread ? others * kTokens * (4 + kAnswer) + ranks * others * (8 + 8 + 32) : 0;
      EXPECT_EQ(sent, records + pieces + back + of_tokens) << ranks << " ranks";
    }
  }
}

TEST(ShardingMemory, IsThePlansWorkspace) {
  HeadSpec spec{.tokens = 90, .dim = 16, .vocab = 900, .dtype = DType::bf16};
  const HeadProblem problem(spec);
  for (const TokenSplit& tokens : {TokenSplit{"replicated"}, TokenSplit{"spread", {60, 30}}}) {
    ShardedRun run{.words = even_words(2, 900), .tokens = tokens};
    run.after = [](int, const LossPlan& plan, const Context& context) {
      EXPECT_EQ(context.memory().peak_bytes(), plan.workspace_bytes());
      EXPECT_EQ(context.memory().current_bytes(), 0u);
      EXPECT_NE(plan.explain().find("900 words on 2 ranks"), std::string::npos);
    };
    run_sharded(problem, run);
  }
}

// A budget holds for the buffers of the exchanges, too.
TEST(ShardingMemory, StaysInTheBudget) {
  HeadSpec spec{.tokens = 600, .dim = 16, .vocab = 3000};
  const HeadProblem problem(spec);
  ShardedRun run{.words = even_words(3, 3000), .tokens = {"spread", {300, 200, 100}}};
  const auto plan_of = [&](std::size_t budget) {
    run.run.budget = budget;
    std::size_t bytes = 0;
    run.after = [&](int rank, const LossPlan& plan, const Context&) {
      if (rank == 0) bytes = plan.workspace_bytes();
    };
    const HeadAnswer answer = run_sharded(problem, run);
    if (!testing::Test::HasFailure()) expect_matches_oracle(problem, run.run, answer);
    return bytes;
  };
  const std::size_t plenty = plan_of(1_GiB);
  const std::size_t little = plan_of(plenty / 3);
  EXPECT_LE(little, plenty / 3);
  EXPECT_GT(little, 0u);
}

}  // namespace
}  // namespace logitless::test
