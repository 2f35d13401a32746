// Vocabulary- and sequence-parallel heads whose ranks share a GPU: guarantees beyond the numbers,
// and refusals.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "head/sharding/sharded.h"
#include "support/mirror.h"

namespace logitless::test {
namespace {

constexpr int kRanks = 3;

HeadSpec spec_of(const std::string& kernel) {
  return {.tokens = 600,
          .dim = 72,
          .vocab = 1100,
          .dtype = narrow_dtype(kernel),
          .bias = true,
          .ignored = 0.1,
          .weight_scale = 3.0};
}

// Returns the kernels that take vocabulary entries over ranks.
std::vector<std::string> kernels_of_shards() {
  std::vector<std::string> kernels = tested_kernels();
  std::erase_if(kernels,
                [](const std::string& kernel) { return !takes_shards(kernel, spec_of(kernel)); });
  return kernels;
}

class CudaSharding : public testing::TestWithParam<std::string> {
 protected:
  static HeadSpec spec() { return spec_of(GetParam()); }
  ShardedRun run_of(const TokenSplit& tokens) const {
    ShardedRun run{.vocab = vocab_at("uneven", {0, 400, 401, 1100}), .tokens = tokens};
    run.run.kernel = kernel_;
    run.run.extras = true;
    run.run.chunk_tokens = tokens.sharded() ? 256 * kRanks : 256;
    return run;
  }
  static std::vector<TokenSplit> splits() {
    const TokenSplit spread{"spread", {500, 0, 100}};
    return {{"replicated"}, spread, with_weights_moving(spread, 256), with_columns(spread, 256)};
  }
  // Returns the plan's outcome on each rank, or what it throws; runs nothing.
  std::vector<Outcome> plan_all(
      const std::function<void(CrossEntropyInputs&, CrossEntropyOutputs&, PlanRequest&)>& change,
      bool of_gpu = true) const {
    const HeadProblem problem(spec());
    const ShardedRun run{.vocab = even_vocab(kRanks, 1100)};
    const Ranks group = make_group(of_gpu ? kernel_ : "", kRanks);
    return run_ranks(group, [&](Communicator& me) {
      const RankProblem rank(problem, run, me.rank());
      Mirror mirror(kernel_);
      const Context context = make_context(kernel_);
      Tensor loss(DType::f32, {}), d_weight(DType::f32, {rank.part.spec.vocab, 72});
      CrossEntropyInputs in = mirror.in(rank.part.inputs());
      in.sharding = rank.sharding(group[static_cast<std::size_t>(me.rank())]);
      CrossEntropyOutputs out;
      out.loss = mirror.out(loss.view());
      out.d_weight = mirror.out(d_weight.view());
      PlanRequest request{context.device()};
      change(in, out, request);
      plan_cross_entropy({}, in, out, request);
    });
  }
  const std::string kernel_ = GetParam();
};

void expect_all(const std::vector<Outcome>& outcomes, const std::string& text) {
  for (const Outcome& o : outcomes) EXPECT_NE(o.text.find(text), std::string::npos) << o.text;
}

constexpr Tensor HeadResult::*kFields[] = {
    &HeadResult::loss,   &HeadResult::lse,      &HeadResult::log_prob, &HeadResult::entropy,
    &HeadResult::argmax, &HeadResult::d_hidden, &HeadResult::d_weight, &HeadResult::d_bias};

TEST_P(CudaSharding, RunsAreTheSameWhateverTheRanksTiming) {
  const HeadProblem problem(spec());
  for (const TokenSplit& tokens : splits()) {
    ShardedRun run = run_of(tokens);
    run.run.gradient_dtype = problem.spec.dtype;
    const HeadResult first = run_sharded(problem, run);
    ASSERT_FALSE(HasFailure());
    for (unsigned seed = 1; seed <= 5; ++seed) {
      run.delays = seed;
      const HeadResult again = run_sharded(problem, run);
      ASSERT_FALSE(HasFailure());
      for (Tensor HeadResult::*field : kFields)
        ASSERT_EQ((again.*field).bytes(), (first.*field).bytes()) << "seed " << seed;
    }
  }
}

// Without a bias to exchange, the rows of all ranks in a slice form one call.
TEST_P(CudaSharding, RowsThatMoveTogetherAreTheSameWhateverTheRanksTiming) {
  HeadSpec together = spec();
  together.bias = false;
  together.vocab = 1536;
  const HeadProblem problem(together);
  ShardedRun run = run_of(with_weights_moving({"spread", {500, 0, 100}}, 256));
  run.vocab = even_vocab(kRanks, together.vocab);
  const HeadResult first = run_sharded(problem, run);
  ASSERT_FALSE(HasFailure());
  for (run.delays = 1; run.delays <= 5; ++run.delays) {
    const HeadResult again = run_sharded(problem, run);
    ASSERT_FALSE(HasFailure());
    for (Tensor HeadResult::*field : {&HeadResult::loss, &HeadResult::lse, &HeadResult::argmax,
                                      &HeadResult::d_hidden, &HeadResult::d_weight})
      ASSERT_EQ((again.*field).bytes(), (first.*field).bytes()) << "seed " << run.delays;
  }
}

TEST_P(CudaSharding, AddsToWhatGradientsHold) {
  const HeadProblem problem(spec());
  for (const TokenSplit& tokens : splits()) {
    ShardedRun run = run_of(tokens);
    const HeadResult fresh = run_sharded(problem, run);
    run.run.change = [](CrossEntropyOptions& o, auto&, CrossEntropyOutputs& out) {
      o.accumulate = true;
      for (const TensorView& view : {out.d_hidden, out.d_weight, out.d_bias})
        std::fill_n(static_cast<float*>(view.data()), view.numel(), 3.0f);
    };
    const HeadResult added = run_sharded(problem, run);
    ASSERT_FALSE(HasFailure());
    for (Tensor HeadResult::*field :
         {&HeadResult::d_hidden, &HeadResult::d_weight, &HeadResult::d_bias}) {
      for (std::int64_t i = 0; i < (fresh.*field).numel(); ++i)
        ASSERT_NEAR((added.*field).get(i), (fresh.*field).get(i) + 3.0, 1e-6) << tokens.name;
    }
  }
}

// The loss is NaN on all ranks, and the status names the target's rank and index.
TEST_P(CudaSharding, ABadTargetIsKnownToAllRanks) {
  HeadProblem problem(spec());
  problem.targets.set(550, 1100.0);
  for (const TokenSplit& tokens : splits()) {
    const std::string where = tokens.sharded() ? "rank 2: targets: the one at position 50"
                                               : "targets: the one at position 550";
    const ShardedRun run = run_of(tokens);
    const Ranks group = make_group(kernel_, kRanks);
    const std::vector<Outcome> outcomes = run_ranks(group, [&](Communicator& me) {
      const RankProblem rank(problem, run, me.rank());
      Mirror mirror(kernel_);
      const Context context = make_context(kernel_);
      Tensor loss(DType::f32, {});
      CrossEntropyInputs in = mirror.in(rank.part.inputs());
      in.sharding = rank.sharding(group[static_cast<std::size_t>(me.rank())]);
      CrossEntropyOutputs out;
      out.loss = mirror.out(loss.view());
      const LossPlan plan = plan_cross_entropy({}, in, out, {context.device()});
      const Workspace workspace(context, plan);
      cross_entropy(context, plan, {}, in, out, workspace);
      mirror.finish();
      EXPECT_TRUE(std::isnan(loss.get(0)));
      device_statistics(context, plan, workspace);
    });
    for (const Outcome& o : outcomes) {
      EXPECT_EQ(o.kind, "InvalidArgument");
      EXPECT_EQ(o.text, where + " is outside [0, 1100) and not ignore_index");
    }
  }
}

// Two groups of two ranks (data parallel), each with its own tokens: the mean is over all tokens.
TEST_P(CudaSharding, MeanOverReplicas) {
  HeadSpec s = spec();
  s.token_weight = true;
  const HeadProblem whole(s);
  const double normalizer = oracle_normalizer(whole.oracle);
  ShardedRun by_group{.vocab = even_vocab(1, s.vocab), .tokens = {"groups", {250, 350}}};
  by_group.vocab.ranks.push_back(by_group.vocab.ranks.front());
  std::vector<Tensor> d_weight;
  std::vector<double> normalizers(4);
  for (int r = 0; r < 4; ++r) d_weight.emplace_back(DType::f32, std::vector{s.vocab / 2, s.dim});
  const std::vector<Ranks> groups = {make_group(kernel_, 2), make_group(kernel_, 2)};
  const std::vector<Ranks> replicas = {make_group(kernel_, 2), make_group(kernel_, 2)};
  const std::vector<Outcome> outcomes = run_ranks(make_thread_group(4), [&](Communicator& me) {
    const auto group = static_cast<std::size_t>(me.rank() / 2);
    const auto rank = static_cast<std::size_t>(me.rank() % 2);
    const HeadProblem mine = RankProblem(whole, by_group, me.rank() / 2).part;
    const RankProblem part(mine, {.vocab = even_vocab(2, s.vocab)}, me.rank() % 2);
    Mirror mirror(kernel_);
    const Context context = make_context(kernel_);
    CrossEntropyInputs in = mirror.in(part.part.inputs());
    in.sharding = part.sharding(groups[group][rank]);
    in.sharding.replicas = replicas[rank][group];
    CrossEntropyOutputs out;
    out.d_weight = mirror.out(d_weight[static_cast<std::size_t>(me.rank())].view());
    const LossPlan plan = plan_cross_entropy(context, {}, in, out);
    const Workspace workspace(context, plan);
    cross_entropy(context, plan, {}, in, out, workspace);
    mirror.finish();
    normalizers[static_cast<std::size_t>(me.rank())] =
        device_statistics(context, plan, workspace).normalizer;
  });
  for (const Outcome& outcome : outcomes) ASSERT_EQ(outcome.text, "");
  for (const double n : normalizers) EXPECT_NEAR(n, normalizer, 1e-9 * normalizer);
  const std::vector<double> upstream(static_cast<std::size_t>(s.tokens), 1.0 / normalizer);
  const OracleGradients exact = oracle_gradients(whole.oracle, upstream);
  std::vector<double> sum;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const std::vector<double> a = d_weight[rank].values(), b = d_weight[2 + rank].values();
    for (std::size_t i = 0; i < a.size(); ++i) sum.push_back(a[i] + b[i]);
  }
  EXPECT_LE(relative_error(sum, exact.d_weight), gradient_bound(DType::bf16));
}

TEST_P(CudaSharding, StaysInTheBudget) {
  const HeadProblem problem(spec());
  for (const TokenSplit& tokens : splits()) {
    ShardedRun run = run_of(tokens);
    run.run.chunk_tokens = 0;
    const auto bytes_of = [&](std::size_t budget) {
      run.run.budget = budget;
      const HeadResult result = run_sharded(problem, run);
      if (!HasFailure()) expect_matches_oracle(problem, run.run, result);
      return result.plan.workspace_bytes();
    };
    const std::size_t plenty = bytes_of(1_GiB);
    // weight-gathered plans, whose minimum is close to it
    const bool weights = tokens.exchange == ExchangeMode::weights;
    const std::size_t less = weights ? plenty * 9 / 10 : plenty * 2 / 3;
    EXPECT_LE(bytes_of(less), less) << tokens.name;
  }
}

// Rows of weight (the last slice once, the others twice), the bias once, and sums of d_weight and
// d_bias.
TEST_P(CudaSharding, WeightsThatMoveSendWhatTheFormulaSays) {
  const HeadProblem problem(spec());
  std::atomic<std::int64_t> sent = 0;
  for (const TokenSplit& tokens : splits()) {
    if (tokens.exchange != ExchangeMode::weights) continue;
    SCOPED_TRACE(tokens.name);
    ShardedRun run = run_of(tokens);
    run.sent = &sent;
    sent = 0;
    run_sharded(problem, run);
    ASSERT_FALSE(HasFailure());
    // Entries [401, 1100) only; or all entries, with at most 40 columns and a bias that stays.
    const std::int64_t slices = tokens.columns ? 5 : 3, columns = tokens.columns ? 40 : 72;
    const std::int64_t bias = tokens.columns ? 0 : 700 * 4;
    const std::int64_t rows = (2 * slices - 2) * 256 * columns * 2 + bias;
    const std::int64_t sums = slices * 256 * (columns + 1) * 4;
    EXPECT_EQ(sent, kRanks * (kRanks - 1) * (rows + sums + 8 + 48));
  }
}

TEST_P(CudaSharding, WhatIsNotServedIsRefusedByName) {
  ShardedRun run{.vocab = interleaved_vocab(kRanks, 1100), .tokens = {"spread", {500, 0, 100}}};
  run.tokens.exchange = ExchangeMode::weights;
  run.run.kernel = kernel_;
  const HeadProblem problem(spec());
  const Ranks group = make_group(kernel_, kRanks);
  expect_all(run_ranks(group,
                       [&](Communicator& me) {
                         const RankProblem rank(problem, run, me.rank());
                         const Context context = make_context(kernel_);
                         PlanRequest request{context.device()};
                         request.sharding =
                             rank.sharding(group[static_cast<std::size_t>(me.rank())]);
                         HeadFeatures features;
                         features.d_weight = true;
                         plan_head({rank.part.spec.tokens, 72, rank.part.spec.vocab, spec().dtype},
                                   features, request);
                       }),
             "exchange: weights with vocab_ids move on the CPU alone");
  expect_all(plan_all([](auto&, auto&, PlanRequest& r) { r.device.kernel = "cublas"; }),
             "takes no sharded vocabulary");
  expect_all(plan_all([](auto&, auto&, auto&) {}, false),
             "vocab_group: expected a communicator of a GPU's memory, got one of the CPU's");
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaSharding);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, CudaSharding, testing::ValuesIn(kernels_of_shards()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test
