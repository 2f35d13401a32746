// Far field of a vocabulary-parallel head whose ranks share a GPU: against float64, guarantees
// beyond the numbers, and its training head.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "cuda/far_training.h"
#include "head/sharding/far_shards.h"
#include "kernels/device/order.h"
#include "support/far_both.h"
#include "support/far_cases.h"

namespace logitless::test {
namespace {

constexpr DType kType = DType::bf16;

// One block of tokens per chunk, so that it has the same tokens on every rank.
HeadSpec spec_of(std::int64_t tokens = 240, std::int64_t tiles = 32) {
  HeadSpec spec;
  spec.tokens = tokens;
  spec.dim = 16;
  spec.vocab = tiles * 128 + 37;
  spec.dtype = kType;
  spec.seed = 3;
  return spec;
}

class CudaShardingFar : public testing::Test {
 protected:
  void SetUp() override {
    if (far_kernel().empty()) GTEST_SKIP() << "no GPU kernel with a far field";
  }
  static RunSpec run_of(PlanKind kind = PlanKind::far_backward) {
    RunSpec run;
    run.kernel = far_kernel();
    run.plan = kind;
    return run;
  }
  static std::vector<TokenSplit> splits(int ranks, std::int64_t tokens) {
    return token_splits(ranks, tokens, false);
  }
};

TEST_F(CudaShardingFar, BackwardIsTheOraclesForEachOption) {
  for (const FarOption& option : far_backward_options()) {
    for (const int ranks : {2, 4}) {
      HeadSpec spec = spec_of();
      option.change(spec);
      FarProblem problem(spec);
      const FarSplit split = interleave_tiles(problem.order, ranks);
      problem.order = split.whole;
      for (const TokenSplit& tokens : splits(ranks, spec.tokens)) {
        SCOPED_TRACE(std::string(option.name) + " on " + std::to_string(ranks) + ", " +
                     tokens.name);
        RunSpec run = run_of();
        run.tau = 0.02f;  // the cut into blocks does not depend on it
        FarGrid grid = far_grid(call_sharded_far(problem, split, run, tokens));
        ASSERT_FALSE(HasFailure());
        run.tau = far_tau(problem.oracle, upstream_of(problem, run), problem.order, grid, 0.3);
        FarResult a = call_sharded_far(problem, split, run, tokens);
        ASSERT_FALSE(HasFailure());
        a.oracle = far_oracle(problem.oracle, upstream_of(problem, run), problem.order, far_grid(a),
                              a.tau);
        EXPECT_LT(a.statistics.far.selected, 0.6);
        expect_far_field(problem, run, a);
        EXPECT_GE(a.statistics.far.imbalance, 1.0);
        EXPECT_LE(a.statistics.far.imbalance, ranks);
      }
    }
  }
}

TEST_F(CudaShardingFar, BothWaysIsTheOraclesForEachOption) {
  if (!cuda::moments_unsupported().empty()) GTEST_SKIP() << cuda::moments_unsupported();
  for (const FarOption& option : far_both_options()) {
    for (const int ranks : {2, 4}) {
      HeadSpec spec = spec_of();
      option.change(spec);
      FarBothProblem problem(spec);
      const FarSplit split = interleave_tiles(problem.order, ranks);
      problem.order = split.whole;
      RunSpec run = run_of(PlanKind::far_both);
      run.tau = static_cast<float>(run_far_both(problem, run).tau);  // in a gap of the masses
      for (const TokenSplit& tokens : splits(ranks, spec.tokens)) {
        SCOPED_TRACE(std::string(option.name) + " on " + std::to_string(ranks) + ", " +
                     tokens.name);
        FarBothResult a;
        static_cast<HeadResult&>(a) = call_sharded_far(problem, split, run, tokens);
        ASSERT_FALSE(HasFailure());
        a.tau = static_cast<double>(run.tau);
        a.oracle = far_both_oracle(problem.oracle, upstream_of(problem, run), problem.order,
                                   far_grid(a), kType, a.tau);
        expect_far_both(problem, run, a);
      }
    }
  }
}

// Several chunks and blocks, with each rank's own order of tokens. Errors are within the bound. The
// audit measures them, on more than 256 tokens: other calls list so many. With all tiles selected
// gradients are exact.
TEST_F(CudaShardingFar, AnyVocabOnARank) {
  HeadSpec spec = spec_of(1500, 40);
  spec.bias = spec.token_weight = true;
  spec.ignored = 0.1;
  const FarProblem problem(spec);
  const std::vector<double> upstream(static_cast<std::size_t>(spec.tokens),
                                     1.0 / oracle_normalizer(problem.oracle));
  const OracleGradients exact = oracle_gradients(problem.oracle, upstream);
  const double contract = gradient_bound(kType);
  for (const VocabSplit& vocab_shards : vocab_splits(3, spec.vocab)) {
    const FarSplit split = split_order(problem.order, vocab_shards);
    for (const TokenSplit& tokens : splits(3, spec.tokens)) {
      SCOPED_TRACE(vocab_shards.name + ", tokens " + tokens.name);
      RunSpec run = run_of();
      run.tau = 0.05f;
      run.audit_rows = 3 * 1500;  // all tokens of any rank
      run.extras = true;
      run.chunk_tokens = tokens.sharded() ? 768 : 512;
      const FarResult a = call_sharded_far(problem, split, run, tokens);
      ASSERT_FALSE(HasFailure());
      const FarFieldStatistics& far = a.statistics.far;
      EXPECT_LT(far.selected, 0.95);
      EXPECT_GT(far.selected, 0.05);
      const OracleLogits logits = oracle_logits(problem.oracle);
      double errors = 0, norms = 0;
      for (std::int64_t i = 0; i < spec.tokens; ++i) {
        const bool ignored = oracle_ignored(problem.oracle, i);
        ASSERT_NEAR(a.lse.get(i), ignored ? 0.0 : logits.lse[i],
                    1e-5 * (1 + std::abs(logits.lse[i])));
        double error = 0, size = 0;
        for (std::int64_t k = i * spec.dim; k < (i + 1) * spec.dim; ++k) {
          error += std::pow(a.d_hidden.get(k) - exact.d_hidden[k], 2);
          size += std::pow(exact.d_hidden[k], 2);
        }
        ASSERT_LE(std::sqrt(error), a.bound.get(i) + 2 * contract * std::sqrt(size) + 1e-9) << i;
        errors += error;
        norms += size;
      }
      EXPECT_EQ(far.audited_tokens, a.statistics.valid_tokens);
      EXPECT_NEAR(far.audited_error, std::sqrt(errors / norms), 2 * contract);
      EXPECT_LE(far.audited_error, far.bound * 3);
      run.tau = 1e-7f;
      const FarResult all = call_sharded_far(problem, split, run, tokens);
      ASSERT_FALSE(HasFailure());
      EXPECT_EQ(all.statistics.far.selected, 1.0);
      EXPECT_TRUE(all.statistics.far.dense_fallback);
      EXPECT_LE(relative_error(all.d_hidden.values(), exact.d_hidden), contract);
      EXPECT_LE(relative_error(all.d_weight.values(), exact.d_weight), contract);
      EXPECT_LE(relative_error(all.d_bias.values(), exact.d_bias), contract);
    }
  }
}

TEST_F(CudaShardingFar, TheSameBitsWhateverTheRanksTiming) {
  HeadSpec spec = spec_of(1100);
  spec.bias = true;
  const FarBothProblem problem(spec);
  const FarSplit split = interleave_tiles(problem.order, 3);
  for (const PlanKind kind : {PlanKind::far_backward, PlanKind::far_both}) {
    for (const TokenSplit& tokens :
         {TokenSplit{"replicated"}, TokenSplit{"spread", {500, 0, 600}}}) {
      SCOPED_TRACE(std::string(name_of(kind)) + ", tokens " + tokens.name);
      RunSpec run = run_of(kind);
      run.tau = 0.02f;
      run.audit_rows = 48;
      run.sample_every = 2;
      run.gradient_dtype = DType::bf16;
      run.chunk_tokens = tokens.sharded() ? 768 : 512;
      const FarResult one = call_sharded_far(problem, split, run, tokens);
      ASSERT_FALSE(HasFailure());
      EXPECT_GT(one.statistics.far.sampled, 0.0);
      EXPECT_EQ(one.statistics.far.audited_tokens, tokens.sharded() ? 32 : 48);
      for (const unsigned delays : {1u, 2u}) {
        const FarResult again = call_sharded_far(problem, split, run, tokens, delays);
        ASSERT_FALSE(HasFailure());
        expect_same_bits(again, one);
        EXPECT_EQ(again.bound.bytes(), one.bound.bytes());
        expect_same_far(again.statistics.far, one.statistics.far);
      }
    }
  }
}

// Over all seeds each pair is sampled once, on whichever rank.
TEST_F(CudaShardingFar, SamplesAverageToTheExactGradient) {
  HeadSpec spec = spec_of(1100);
  const FarProblem problem(spec);
  const std::vector<double> upstream(static_cast<std::size_t>(spec.tokens),
                                     1.0 / oracle_normalizer(problem.oracle));
  const OracleGradients exact = oracle_gradients(problem.oracle, upstream);
  const FarSplit split = interleave_tiles(problem.order, 2);
  std::vector<double> mean(exact.d_weight.size(), 0.0);
  constexpr std::uint64_t kEvery = 3;
  for (std::uint64_t seed = 6; seed < 6 + kEvery; ++seed) {
    RunSpec run = run_of();
    run.tau = 0.05f;
    run.sample_every = kEvery;
    run.change = [&](auto&, CrossEntropyInputs& in, auto&) { in.sample_seed = seed; };
    const FarResult a = call_sharded_far(problem, split, run);
    ASSERT_FALSE(HasFailure());
    EXPECT_GT(a.statistics.far.sampled, 0.0);
    for (std::size_t i = 0; i < mean.size(); ++i)
      mean[i] += a.d_weight.get(static_cast<std::int64_t>(i)) / static_cast<double>(kEvery);
  }
  EXPECT_LE(relative_error(mean, exact.d_weight), 2 * gradient_bound(kType));
}

TEST_F(CudaShardingFar, AddsAndLeavesIgnoredTokensAlone) {
  HeadSpec spec = spec_of(600);
  spec.ignored = 0.5;
  spec.bias = true;
  const FarProblem problem(spec);
  const FarSplit split = interleave_tiles(problem.order, 2);
  for (const TokenSplit& tokens : splits(2, spec.tokens)) {
    RunSpec run = run_of();
    run.tau = 0.02f;
    const FarResult plain = call_sharded_far(problem, split, run, tokens);
    add_to_gradients(run);
    const FarResult added = call_sharded_far(problem, split, run, tokens);
    ASSERT_FALSE(HasFailure());
    expect_added(added, plain);
  }
}

TEST_F(CudaShardingFar, NoTokenAtAll) {
  HeadSpec spec = spec_of();
  spec.ignored = 1.0;
  const FarProblem problem(spec);
  RunSpec run = run_of();
  run.tau = 0.02f;
  run.audit_rows = 4;
  for (const TokenSplit& tokens : splits(2, spec.tokens)) {
    const FarResult a = call_sharded_far(problem, interleave_tiles(problem.order, 2), run, tokens);
    ASSERT_FALSE(HasFailure());
    expect_zeros(a);
  }
}

// Ranks with orders that were not made together would put different tokens into a chunk.
TEST_F(CudaShardingFar, AnOrderOfItsOwnIsNamed) {
  const FarProblem problem(spec_of());
  const FarSplit split = interleave_tiles(problem.order, 2);
  const ShardedRun run{.vocab = split.vocab};
  const auto call_all = [&](const auto& change) {
    const Ranks group = make_group(far_kernel(), 2);
    return run_ranks(group, [&](Communicator& me) {
      const auto r = static_cast<std::size_t>(me.rank());
      const RankProblem part(problem, run, me.rank());
      Tensor loss(DType::f32, {}), d_hidden(DType::f32, {problem.spec.tokens, problem.spec.dim});
      Mirror mirror(far_kernel());
      CrossEntropyInputs in = part.part.inputs();
      in.sharding = part.sharding(group[r]);
      VocabOrder order = share_order(split.orders[r], in.sharding);
      change(me.rank(), in.sharding, order);
      in = mirror.in(in);
      in.order = order;
      CrossEntropyOutputs out;
      out.loss = mirror.out(loss.view());
      out.d_hidden = mirror.out(d_hidden.view());
      const Context context = make_context(far_kernel());
      PlanRequest request;
      request.device = context.device();
      request.kind = PlanKind::far_backward;
      const LossPlan plan = plan_cross_entropy({}, in, out, request);
      cross_entropy(context, plan, {}, in, out, Workspace(context, plan));
      mirror.finish();
    });
  };
  const auto expect_all = [](const std::vector<Outcome>& outcomes, const std::string& text) {
    for (const Outcome& o : outcomes) EXPECT_NE(o.text.find(text), std::string::npos) << o.text;
  };
  expect_all(call_all([](int rank, const Sharding& sharding, VocabOrder& order) {
               VocabOrder other = order;
               if (rank == 1)
                 other =
                     VocabOrder(std::vector(order.vocab_ids().rbegin(), order.vocab_ids().rend()),
                                order.average());
               other = share_order(other, sharding);
               if (rank == 1) order = other;
             }),
             "order: rank 1 has another one than rank 0");
  expect_all(call_all([](int rank, const Sharding&, VocabOrder& order) {
               if (rank == 1) order = VocabOrder(order.vocab_ids(), order.average());
             }),
             "vocabulary of all ranks, got one without places");
}

// --- Head of a training run.

using CudaShardingFarHead = testing::TestWithParam<Accuracy>;

// Like a head of one rank: dense until the trial of its first order at step 8, then far with errors
// that the audit allows. Dense again after all vocabulary entries have moved.
TEST_P(CudaShardingFarHead, DecidesAlikeOnAllRanks) {
  if (far_kernel().empty()) GTEST_SKIP() << "no GPU kernel with a far field";
  if (!cuda::moments_unsupported().empty()) GTEST_SKIP() << cuda::moments_unsupported();
  constexpr int kRanks = 2;
  for (const bool spread : {false, true}) {
    SCOPED_TRACE(spread ? "tokens spread" : "tokens replicated");
    Training t(131072, 128, 2048, 0.02, kRanks, 16 * kTile);
    const Ranks group = make_group(far_kernel(), kRanks);
    std::vector<std::unique_ptr<FarFieldHead>> heads(kRanks);
    std::vector<Context> contexts;
    for (auto& head : heads) {
      contexts.push_back(make_context(far_kernel()));
      head = std::make_unique<FarFieldHead>(contexts.back(), quick(GetParam()));
    }
    std::vector<LossStatistics> all(kRanks);
    const auto step = [&] {
      const std::int64_t vocab_count = t.vocab / kRanks,
                         tokens = spread ? t.tokens / kRanks : t.tokens;
      const auto outcomes = run_ranks(group, [&](Communicator& me) {
        const auto r = static_cast<std::size_t>(me.rank());
        const std::int64_t vocab_id = me.rank() * vocab_count,
                           token = spread ? me.rank() * tokens : 0;
        const auto at = [](const Tensor& x, std::int64_t first) {
          return static_cast<const std::byte*>(x.view().data()) +
                 first * static_cast<std::int64_t>(size_of(x.view().dtype()));
        };
        std::vector<float> loss(1), lse(static_cast<std::size_t>(tokens));
        std::vector<float> d_hidden(static_cast<std::size_t>(tokens * t.dim));
        std::vector<float> d_weight(static_cast<std::size_t>(vocab_count * t.dim));
        Mirror mirror(far_kernel());
        CrossEntropyInputs in;
        in.hidden = ConstTensorView(at(t.hidden, token * t.dim), kType, {tokens, t.dim});
        in.weight = ConstTensorView(at(t.weight, vocab_id * t.dim), kType, {vocab_count, t.dim});
        in.targets = ConstTensorView(at(t.targets, token), DType::i64, {tokens});
        in = mirror.in(in);
        in.sharding = {.vocab_group = group[r], .vocab = t.vocab, .vocab_begin = vocab_id};
        in.sharding.tokens = spread;
        CrossEntropyOutputs out;
        out.loss = TensorView(loss.data(), DType::f32, std::span<const std::int64_t>());
        out.lse = TensorView(lse.data(), DType::f32, {tokens});
        out.d_hidden = TensorView(d_hidden.data(), DType::f32, {tokens, t.dim});
        out.d_weight = TensorView(d_weight.data(), DType::f32, {vocab_count, t.dim});
        heads[r]->step({}, in, mirror.out(out));
        all[r] = heads[r]->statistics();
        mirror.finish();
        for (std::int64_t i = 0; i < vocab_count * t.dim; ++i)
          t.d_weight.set(vocab_id * t.dim + i, d_weight[static_cast<std::size_t>(i)]);
        if (!spread && r > 0) return;
        for (std::int64_t i = 0; i < tokens * t.dim; ++i)
          t.d_hidden.set(token * t.dim + i, d_hidden[static_cast<std::size_t>(i)]);
      });
      for (const Outcome& outcome : outcomes) ASSERT_EQ(outcome.text, "");
    };
    for (int number = 1; number <= 12; ++number) {
      SCOPED_TRACE(number);
      const Training exact = t.dense();
      step();
      ASSERT_FALSE(HasFailure());
      const FarFieldStatistics& far = all[0].far;
      const bool is_far = far.passes > 0.0;
      expect_same_far(all[1].far, far);
      EXPECT_EQ(heads[0]->explain(), heads[1]->explain());
      if (number < 8 || number >= 10) {
        EXPECT_EQ(is_far, number >= 8) << heads[0]->explain();
      }
      const double error = relative_error(t.d_hidden.values(), exact.d_hidden.values());
      if (!is_far) {
        EXPECT_LE(error, gradient_bound(kType));
      } else {
        EXPECT_LT(far.selected, 0.6);
        EXPECT_LE(error, 0.15);
        EXPECT_EQ(heads[0]->order().has_moments(), GetParam() == Accuracy::far_both);
      }
      t.move();
    }
    EXPECT_TRUE(heads[0]->report().far) << heads[0]->explain();
    EXPECT_GT(heads[0]->report().audits, 0);
    t.shake();
    for (int i = 0; i < 4 && heads[0]->report().far; ++i) step();
    EXPECT_FALSE(heads[0]->report().far) << "an audit every 3 steps";
    EXPECT_FALSE(heads[1]->report().far);
  }
}

INSTANTIATE_TEST_SUITE_P(Accuracies, CudaShardingFarHead,
                         testing::Values(Accuracy::far_backward, Accuracy::far_both),
                         [](const auto& a) { return std::string(name_of(a.param)); });

}  // namespace
}  // namespace logitless::test
