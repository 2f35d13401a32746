// Sharded vocabulary and tokens on a CPU: logits far apart, masks, NaN, accumulated gradients,
// strides, replicas.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "head/sharding/sharded.h"
#include "support/mirror.h"

namespace logitless::test {
namespace {

constexpr std::int64_t kTokens = 11, kDim = 6, kVocab = 300;

TEST(Sharding, AllTargetsOnOneRank) {
  HeadSpec spec{.tokens = kTokens, .dim = kDim, .vocab = kVocab, .label_smoothing = 0.1f};
  for (const std::int64_t vocab_id : {std::int64_t{0}, kVocab - 1}) {
    HeadProblem problem(spec);
    for (std::int64_t i = 0; i < kTokens; ++i)
      problem.targets.set(i, static_cast<double>(std::abs(vocab_id - i % 5)));
    problem.refresh_oracle();
    for (const TokenSplit& tokens : token_splits(3, kTokens)) {
      expect_matches_oracle(
          problem, {}, run_sharded(problem, {.vocab = even_vocab(3, kVocab), .tokens = tokens}));
    }
  }
}

// Logits far below 0, and far apart between ranks: detects a maximum that starts at 0 or is local.
TEST(Sharding, LogitsFarFromZeroAndFromEachOther) {
  for (const double shift : {-1e4, 1e4}) {
    HeadSpec spec{.tokens = 9, .dim = 4, .vocab = 200, .bias = true};
    HeadProblem problem(spec);
    for (const bool one_rank : {false, true}) {
      for (std::int64_t j = 0; j < spec.vocab; ++j)
        problem.bias.set(j, one_rank && j >= 100 ? 0.0 : shift + 0.01 * static_cast<double>(j));
      problem.refresh_oracle();
      RunSpec run;
      run.extras = true;
      const HeadResult result = run_sharded(problem, {.vocab = even_vocab(4, 200), .run = run});
      ASSERT_FALSE(HasFailure());
      const OracleLogits exact = oracle_logits(problem.oracle);
      EXPECT_LE(relative_error(result.lse.values(), exact.lse), kLseBound);
      for (const double h : result.entropy.values())
        EXPECT_TRUE(h > -2e-3 && h < std::log(200.0) + 2e-3) << h;
    }
  }
}

TEST(Sharding, MaskedVocabOfAWholeRankIsNoMass) {
  HeadSpec spec{.tokens = 9, .dim = 4, .vocab = 200, .bias = true};
  HeadProblem problem(spec);
  for (std::int64_t j = 50; j < 100; ++j) problem.bias.set(j, -INFINITY);
  for (std::int64_t i = 0; i < spec.tokens; ++i) problem.targets.set(i, static_cast<double>(i));
  problem.refresh_oracle();
  expect_matches_oracle(problem, {}, run_sharded(problem, {.vocab = even_vocab(4, 200)}));
}

TEST(Sharding, NaNStaysInItsToken) {
  HeadSpec spec{.tokens = 9, .dim = 4, .vocab = 200, .reduction = Reduction::none};
  HeadProblem problem(spec);
  const HeadResult clean = run_sharded(problem, {.vocab = even_vocab(2, 200)});
  problem.hidden.set(3 * spec.dim, NAN);
  const HeadResult result = run_sharded(problem, {.vocab = even_vocab(2, 200)});
  ASSERT_FALSE(HasFailure());
  for (std::int64_t i = 0; i < spec.tokens; ++i) {
    if (i == 3) {
      EXPECT_TRUE(std::isnan(result.lse.get(i)));
      EXPECT_TRUE(std::isnan(result.d_hidden.get(i * spec.dim)));
    } else {
      EXPECT_EQ(result.lse.get(i), clean.lse.get(i));
      EXPECT_EQ(result.d_hidden.get(i * spec.dim), clean.d_hidden.get(i * spec.dim));
    }
  }
}

// Sums of a 16-bit d_hidden are exchanged in fp32 and rounded once.
TEST(Sharding, ErrorOfDHiddenDoesNotGrowWithRanksOrChunks) {
  HeadSpec spec{.tokens = 64, .dim = 32, .vocab = 1024, .dtype = DType::bf16};
  const HeadProblem problem(spec);
  const std::vector<double> upstream(64, 1.0 / 64.0);
  const OracleGradients exact = oracle_gradients(problem.oracle, upstream);
  RunSpec run;
  run.gradient_dtype = DType::bf16;
  const double alone = relative_error(run_head(problem, run).d_hidden.values(), exact.d_hidden);
  for (const int ranks : {2, 4, 8}) {
    for (const std::int64_t chunk : {16, 64}) {
      run.chunk_tokens = chunk;
      const HeadResult result =
          run_sharded(problem, {.vocab = even_vocab(ranks, 1024), .run = run});
      EXPECT_LE(relative_error(result.d_hidden.values(), exact.d_hidden), 1.05 * alone);
    }
  }
}

TEST(Sharding, AddsToWhatGradientsHold) {
  HeadSpec spec{.tokens = kTokens, .dim = kDim, .vocab = kVocab, .bias = true};
  const HeadProblem problem(spec);
  for (const TokenSplit& tokens : token_splits(3, kTokens)) {
    RunSpec run;
    const HeadResult fresh =
        run_sharded(problem, {.vocab = even_vocab(3, kVocab), .tokens = tokens, .run = run});
    run.change = [](CrossEntropyOptions& o, auto&, CrossEntropyOutputs& out) {
      o.accumulate = true;
      for (const TensorView& view : {out.d_hidden, out.d_weight, out.d_bias})
        std::fill_n(static_cast<float*>(view.data()), view.numel(), 3.0f);
    };
    const HeadResult added =
        run_sharded(problem, {.vocab = even_vocab(3, kVocab), .tokens = tokens, .run = run});
    ASSERT_FALSE(HasFailure());
    for (Tensor HeadResult::*field :
         {&HeadResult::d_hidden, &HeadResult::d_weight, &HeadResult::d_bias}) {
      for (std::int64_t i = 0; i < (fresh.*field).numel(); ++i)
        ASSERT_NEAR((added.*field).get(i), (fresh.*field).get(i) + 3.0, 1e-6);
    }
  }
}

// Rows of hidden and d_hidden have gaps, like [S, B, D] viewed as [B, S, D].
void expect_strides_are_read(const TokenSplit& tokens) {
  HeadSpec spec{.tokens = 12, .dim = kDim, .vocab = kVocab};
  const HeadProblem problem(spec);
  const ShardedRun plain{.vocab = even_vocab(2, kVocab), .tokens = tokens};
  const HeadResult expected = run_sharded(problem, plain);
  std::vector<std::vector<float>> hidden(2), d_hidden(2);
  ShardedRun strided = plain;
  strided.run.change = [&](auto&, CrossEntropyInputs& in, CrossEntropyOutputs& out) {
    const auto r = static_cast<std::size_t>(in.sharding.vocab_group->rank());
    hidden[r].assign(6 * 20, NAN);
    d_hidden[r].assign(6 * 20, 7.0f);
    const auto* const from = static_cast<const float*>(in.hidden.data());
    for (int i = 0; i < 6; ++i) {
      for (int k = 0; k < kDim; ++k) hidden[r][i * 20 + 2 * k] = from[i * kDim + k];
    }
    const std::int64_t shape[] = {6, kDim}, strides[] = {20, 2};
    in.hidden = ConstTensorView(hidden[r].data(), DType::f32, shape, strides);
    out.d_hidden = TensorView(d_hidden[r].data(), DType::f32, shape, strides);
  };
  const HeadResult result = run_sharded(problem, strided);
  ASSERT_FALSE(testing::Test::HasFailure());
  EXPECT_EQ(result.d_weight.bytes(), expected.d_weight.bytes());
  for (std::size_t r = 0; r < 2; ++r) {
    for (int i = 0; i < 6; ++i) {
      for (int k = 0; k < 20; ++k) {
        const bool written = k % 2 == 0 && k / 2 < kDim;
        const auto token = static_cast<std::int64_t>(r) * 6 + i;
        EXPECT_EQ(d_hidden[r][i * 20 + k],
                  written ? expected.d_hidden.get(token * kDim + k / 2) : 7.0);
      }
    }
  }
}

TEST(Sharding, StridedHiddenOfSpreadTokens) {
  const TokenSplit spread{"spread", {6, 6}};
  expect_strides_are_read(spread);
  expect_strides_are_read(with_weights_moving(spread));
}

// Two groups of two ranks with different tokens: the mean is over all tokens.
TEST(Sharding, MeanOverReplicas) {
  HeadSpec spec{.tokens = 12, .dim = kDim, .vocab = kVocab, .token_weight = true, .ignored = 0.3};
  const HeadProblem whole(spec);
  const std::vector<double> upstream(12, 1.0 / oracle_normalizer(whole.oracle));
  const OracleGradients exact = oracle_gradients(whole.oracle, upstream);
  // The tokens of each group are a problem of their own.
  ShardedRun by_group{.vocab = even_vocab(1, kVocab), .tokens = {"groups", {5, 7}}};
  by_group.vocab.ranks.push_back(by_group.vocab.ranks.front());
  std::vector<HeadResult> results(4);
  std::vector<Ranks> groups = {make_thread_group(2), make_thread_group(2)};
  std::vector<Ranks> replicas = {make_thread_group(2), make_thread_group(2)};
  const Ranks all = make_thread_group(4);
  const std::vector<Outcome> outcomes = run_ranks(all, [&](Communicator& me) {
    const int group = me.rank() / 2, rank = me.rank() % 2;
    HeadProblem mine = RankProblem(whole, by_group, group).part;
    const ShardedRun by_vocab{.vocab = even_vocab(2, kVocab)};
    const RankProblem part(mine, by_vocab, rank);
    HeadResult& a = results[static_cast<std::size_t>(me.rank())];
    const HeadSpec& s = part.part.spec;
    a.loss = Tensor(DType::f32, {});
    a.d_weight = Tensor(DType::f32, {s.vocab, s.dim});
    CrossEntropyOutputs out;
    out.loss = a.loss.view();
    out.d_weight = a.d_weight.view();
    CrossEntropyInputs in = part.part.inputs();
    in.sharding = part.sharding(groups[group][rank]);
    in.sharding.replicas = replicas[rank][group];
    const Context context = make_context("", 1);
    a.plan = plan_cross_entropy(context, {}, in, out);
    const Workspace workspace(context, a.plan);
    a.statistics = cross_entropy(context, a.plan, {}, in, out, workspace);
  });
  for (const Outcome& outcome : outcomes) ASSERT_EQ(outcome.text, "");
  for (const HeadResult& a : results)
    EXPECT_NEAR(a.statistics.normalizer, oracle_normalizer(whole.oracle), 1e-6);
  std::vector<double> d_weight;
  for (int rank = 0; rank < 2; ++rank) {
    const std::vector<double> a = results[rank].d_weight.values();
    const std::vector<double> b = results[2 + rank].d_weight.values();
    for (std::size_t i = 0; i < a.size(); ++i) d_weight.push_back(a[i] + b[i]);
  }
  EXPECT_LE(relative_error(d_weight, exact.d_weight), 1e-5);
}

}  // namespace
}  // namespace logitless::test
