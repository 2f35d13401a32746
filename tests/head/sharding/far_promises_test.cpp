// Guarantees of vocabulary-parallel far-field calls: any shards, the same bits, audits, samples of
// d_weight, errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "head/sharding/far_shards.h"
#include "kernels/cpu_head.h"
#include "math/far_sums.h"
#include "support/far_both.h"
#include "support/far_cases.h"
#include "support/mirror.h"

namespace logitless::test {
namespace {

HeadSpec spec_of(std::int64_t tokens = 60, std::int64_t tiles = 12) {
  HeadSpec spec;
  spec.tokens = tokens;
  spec.dim = 7;
  spec.vocab = tiles * 128 + 37;
  spec.bias = true;
  spec.ignored = 0.1;
  spec.seed = 4;
  return spec;
}

std::vector<double> mean_upstream(const HeadProblem& problem) {
  return std::vector<double>(static_cast<std::size_t>(problem.spec.tokens),
                             1.0 / oracle_normalizer(problem.oracle));
}

// Tiles of arbitrary entries, short ones in the middle, and a rank without entries. The loss is
// exact and d_hidden within its bound; if all tiles are selected, everything is exact.
TEST(ShardingFarPromises, AnyVocabOnARank) {
  const HeadSpec spec = spec_of(300, 40);  // each rank has its own blocks
  const FarProblem problem(spec);
  const OracleGradients exact = oracle_gradients(problem.oracle, mean_upstream(problem));
  for (const VocabSplit& vocab_shards : vocab_splits(4, spec.vocab)) {
    const FarSplit split = split_order(problem.order, vocab_shards);
    for (const TokenSplit& tokens : token_splits(4, spec.tokens, false)) {
      SCOPED_TRACE(vocab_shards.name + ", tokens " + tokens.name);
      RunSpec run;
      run.tau = 0.05f;
      run.audit_rows = 20;
      const FarResult a = call_sharded_far(problem, split, run, tokens);
      ASSERT_FALSE(HasFailure());
      EXPECT_LT(a.statistics.far.selected, 0.9);
      EXPECT_GT(a.statistics.far.selected, 0.05);
      const OracleLogits logits = oracle_logits(problem.oracle);
      for (std::int64_t i = 0; i < spec.tokens; ++i) {
        const bool ignored = oracle_ignored(problem.oracle, i);
        ASSERT_NEAR(a.lse.get(i), ignored ? 0.0 : logits.lse[i],
                    kLseBound * (1 + std::abs(logits.lse[i])));
        double error = 0, size = 0;
        for (std::int64_t k = i * spec.dim; k < (i + 1) * spec.dim; ++k) {
          error += std::pow(a.d_hidden.get(k) - exact.d_hidden[k], 2);
          size += std::pow(exact.d_hidden[k], 2);
        }
        ASSERT_LE(std::sqrt(error), a.bound.get(i) + 1e-5 * std::sqrt(size) + 1e-9) << i;
      }
      EXPECT_GT(a.statistics.far.audited_error, 1e-5);
      EXPECT_LE(a.statistics.far.audited_error, a.statistics.far.bound * 3);
      run.tau = 1e-7f;
      const FarResult all = call_sharded_far(problem, split, run, tokens);
      ASSERT_FALSE(HasFailure());
      EXPECT_EQ(all.statistics.far.selected, 1.0);
      EXPECT_TRUE(all.statistics.far.dense_fallback);
      EXPECT_LE(relative_error(all.d_hidden.values(), exact.d_hidden), 1e-5);
      EXPECT_LE(relative_error(all.d_weight.values(), exact.d_weight), 1e-5);
      EXPECT_LE(relative_error(all.d_bias.values(), exact.d_bias), 1e-5);
    }
  }
}

// The same for far_both, with moments that the ranks measure together.
TEST(ShardingFarPromises, AnyVocabOnARankBothWays) {
  HeadSpec spec = spec_of(12, 60);  // few targets, whose tiles are always selected
  spec.label_smoothing = 0.1f;
  const FarBothProblem problem(spec, /*span=*/3.0);  // moments are meaningful for arbitrary tiles
  const OracleGradients exact = oracle_gradients(problem.oracle, mean_upstream(problem));
  RunSpec run;
  run.plan = PlanKind::far_both;
  run.audit_rows = 1000;
  const auto moments = [&](CrossEntropyOptions& o, CrossEntropyInputs& in, auto&) {
    if (in.sharding.tokens) return;
    in.order = measure_tiles(make_context("", 1), in.order, in.hidden, in.weight, in.bias,
                             o.logit_scale, 0.02f, in.sharding);
  };
  run.change = moments;
  for (const VocabSplit& vocab_shards : vocab_splits(4, spec.vocab)) {
    SCOPED_TRACE(vocab_shards.name);
    const FarSplit split = split_order(problem.order, vocab_shards);
    run.tau = 0.03f;
    const FarResult a = call_sharded_far(problem, split, run);
    ASSERT_FALSE(HasFailure());
    const FarFieldStatistics& s = a.statistics.far;
    EXPECT_LT(s.selected, 0.9);
    EXPECT_GT(s.audited_error, 1e-6);
    EXPECT_LT(s.audited_error, 0.3);
    EXPECT_LT(s.audited_lse_error_max, 0.3);
    // The audit's errors are those of the results.
    EXPECT_NEAR(s.audited_error, relative_error(a.d_hidden.values(), exact.d_hidden),
                1e-4 * s.audited_error + 1e-6);
    EXPECT_EQ(s.bound, -1.0);
    run.tau = 1e-7f;
    const FarResult all = call_sharded_far(problem, split, run);
    ASSERT_FALSE(HasFailure());
    EXPECT_EQ(all.statistics.far.selected, 1.0);
    EXPECT_LE(relative_error(all.d_hidden.values(), exact.d_hidden), 1e-5);
    EXPECT_LE(relative_error(all.d_weight.values(), exact.d_weight), 1e-5);
  }
}

void expect_same_result(const FarResult& a, const FarResult& b) {
  expect_same_bits(a, b);
  EXPECT_EQ(a.bound.bytes(), b.bound.bytes());
  expect_same_far(a.statistics.far, b.statistics.far);
}

TEST(ShardingFarPromises, TheSameBitsWhateverTimingAndThreads) {
  const HeadSpec spec = spec_of(150);
  const FarBothProblem problem(spec);
  for (const PlanKind kind : {PlanKind::far_backward, PlanKind::far_both}) {
    const FarSplit split = interleave_tiles(problem.order, 3);
    for (const TokenSplit& tokens : {TokenSplit{"replicated"}, TokenSplit{"spread", {70, 0, 80}}}) {
      SCOPED_TRACE(std::string(name_of(kind)) + ", tokens " + tokens.name);
      RunSpec run;
      run.plan = kind;
      run.tau = 0.02f;
      run.audit_rows = 16;
      run.sample_every = 4;
      run.chunk_tokens = 120;  // several
      run.threads = 1;
      const FarResult one = call_sharded_far(problem, split, run, tokens);
      ASSERT_FALSE(HasFailure());
      EXPECT_GT(one.statistics.far.sampled, 0.0);
      EXPECT_EQ(one.statistics.far.audited_tokens, 16);
      for (const unsigned delays : {1u, 2u}) {
        run.threads = static_cast<int>(1 + delays);
        const FarResult again = call_sharded_far(problem, split, run, tokens, delays);
        ASSERT_FALSE(HasFailure());
        expect_same_result(again, one);
      }
    }
  }
}

// A sharding of one rank equals no sharding. Ranks with full tiles of one order compute its
// d_weight up to rounding.
TEST(ShardingFarPromises, IsThatOfOneRank) {
  HeadSpec spec = spec_of(150);
  FarProblem problem(spec);
  RunSpec run;
  run.tau = 0.02f;
  run.audit_rows = 150;  // all, in any order
  run.extras = true;
  run.chunk_tokens = 64;
  for (const int ranks : {1, 4}) {
    SCOPED_TRACE(ranks);
    FarProblem whole = problem;
    const FarSplit split = interleave_tiles(problem.order, ranks);
    whole.order = split.whole;
    const FarResult alone = call_far(whole, run);
    const FarResult a = call_sharded_far(whole, split, run);
    ASSERT_FALSE(HasFailure());
    EXPECT_EQ(a.statistics.far.selected, alone.statistics.far.selected);
    EXPECT_LE(relative_error(a.lse.values(), alone.lse.values()), kLseBound);
    EXPECT_LE(relative_error(a.entropy.values(), alone.entropy.values()), 1e-5);
    EXPECT_EQ(a.argmax.bytes(), alone.argmax.bytes());
    EXPECT_LE(relative_error(a.d_hidden.values(), alone.d_hidden.values()), 1e-5);
    EXPECT_LE(relative_error(a.d_weight.values(), alone.d_weight.values()), 1e-5);
    EXPECT_LE(relative_error(a.d_bias.values(), alone.d_bias.values()), 1e-5);
    EXPECT_NEAR(a.statistics.far.audited_error, alone.statistics.far.audited_error, 1e-6);
    EXPECT_NEAR(a.statistics.far.bound, alone.statistics.far.bound,
                1e-5 * alone.statistics.far.bound);
    EXPECT_NEAR(a.statistics.far.passes, alone.statistics.far.passes, 0.05);
  }
}

// The inputs of orders: averages over the tokens of all ranks with a global lse, and moments whose
// cautions use global totals.
TEST(ShardingFarPromises, OrdersAreMadeFromAllRanks) {
  const HeadSpec spec = spec_of(40, 10);
  const FarProblem problem(spec);
  const CrossEntropyInputs whole = problem.inputs();
  const Context context = make_context("", 1);
  const std::vector<float> average =
      average_probability(context, whole.hidden, whole.weight, whole.bias);
  for (const TokenSplit& tokens : token_splits(3, spec.tokens, false)) {
    for (const VocabSplit& vocab_shards : vocab_splits(3, spec.vocab)) {
      SCOPED_TRACE(vocab_shards.name + ", tokens " + tokens.name);
      const ShardedRun run{.vocab = vocab_shards, .tokens = tokens};
      const Ranks group = make_thread_group(3, std::chrono::seconds(30));
      const auto outcomes = run_ranks(group, [&](Communicator& me) {
        const auto r = static_cast<std::size_t>(me.rank());
        const RankProblem part(problem, run, me.rank());
        const CrossEntropyInputs in = part.part.inputs();
        const std::vector<float> mine = average_probability(context, in.hidden, in.weight, in.bias,
                                                            1.0f, 0.0f, 0, part.sharding(group[r]));
        ASSERT_EQ(mine.size(), part.vocab_ids.size());
        for (std::size_t j = 0; j < mine.size(); ++j) {
          const float want = average[static_cast<std::size_t>(part.vocab_ids[j])];
          ASSERT_NEAR(mine[j], want, 2e-5f * want + 1e-9f);
        }
      });
      for (const Outcome& outcome : outcomes) ASSERT_EQ(outcome.text, "");
    }
  }
  const VocabOrder alone =
      measure_tiles(context, problem.order, whole.hidden, whole.weight, whole.bias);
  const Ranks one = make_thread_group(1);
  Sharding sharding{.vocab_group = one[0], .vocab = spec.vocab};
  const VocabOrder of_one = measure_tiles(context, problem.order, whole.hidden, whole.weight,
                                          whole.bias, 1.0f, 0.003f, sharding);
  EXPECT_TRUE(std::equal(alone.log2_caution().begin(), alone.log2_caution().end(),
                         of_one.log2_caution().begin(), of_one.log2_caution().end()));
  EXPECT_TRUE(std::equal(alone.variance().begin(), alone.variance().end(),
                         of_one.variance().begin(), of_one.variance().end()));
  sharding.tokens = true;
  EXPECT_THROW(measure_tiles(context, problem.order, whole.hidden, whole.weight, whole.bias, 1.0f,
                             0.003f, sharding),
               Unsupported);
}

// Over all seeds, each pair is sampled once, whichever its rank. Tiles of two ranks are sampled
// differently.
TEST(ShardingFarPromises, SamplesAverageToTheExactGradient) {
  HeadSpec spec = spec_of(400);
  const FarProblem problem(spec);
  const OracleGradients exact = oracle_gradients(problem.oracle, mean_upstream(problem));
  const FarSplit split = interleave_tiles(problem.order, 2);
  std::vector<double> mean(exact.d_weight.size(), 0.0);
  constexpr std::uint64_t kEvery = 3;
  for (std::uint64_t seed = 6; seed < 6 + kEvery; ++seed) {
    RunSpec run;
    run.tau = 0.05f;
    run.sample_every = kEvery;
    run.change = [&](auto&, CrossEntropyInputs& in, auto&) { in.sample_seed = seed; };
    const FarResult a = call_sharded_far(problem, split, run);
    ASSERT_FALSE(HasFailure());
    EXPECT_GT(a.statistics.far.sampled, 0.0);
    EXPECT_GT(relative_error(a.d_weight.values(), exact.d_weight), 1e-4);
    for (std::size_t i = 0; i < mean.size(); ++i)
      mean[i] += a.d_weight.get(static_cast<std::int64_t>(i)) / static_cast<double>(kEvery);
  }
  EXPECT_LE(relative_error(mean, exact.d_weight), 1e-5);
  FarSample first(64, 5, 0), second = first;
  second.first_tile = 6;
  int alike = 0;
  for (std::int64_t tile = 0; tile < 6; ++tile) {
    alike += first.first_of(tile) == second.first_of(tile) ? 1 : 0;
    EXPECT_EQ(first.first_of(tile + 6), second.first_of(tile));
  }
  EXPECT_LT(alike, 3);
}

// Traffic beyond that of an exact plan: 4 bytes per token and rank for totals or bounds, the sums
// of the call, and a hash of the order.
TEST(ShardingFarPromises, SendsLittleMore) {
  HeadSpec spec = spec_of(90);
  spec.ignored = 0.0;
  const FarBothProblem problem(spec);
  constexpr std::int64_t kRanks = 3;
  const FarSplit split = interleave_tiles(problem.order, kRanks);
  for (const TokenSplit& tokens : {TokenSplit{"replicated"}, TokenSplit{"spread", {40, 10, 40}}}) {
    for (const PlanKind kind : {PlanKind::far_backward, PlanKind::far_both}) {
      SCOPED_TRACE(std::string(name_of(kind)) + ", tokens " + tokens.name);
      RunSpec run;
      run.chunk_tokens = 60;
      std::atomic<std::int64_t> exact = 0, far = 0;
      run.plan = PlanKind::dense;
      run_sharded(problem, {.vocab = split.vocab, .tokens = tokens, .run = run, .sent = &exact});
      run.plan = kind;
      run.tau = 0.02f;
      call_sharded_far(problem, split, run, tokens, 0, &far);
      ASSERT_FALSE(HasFailure());
      const auto of_all = [&](std::size_t bytes) {
        return static_cast<std::int64_t>(bytes) * kRanks * (kRanks - 1);
      };
      EXPECT_EQ(far - exact,
                of_all(4 * 90) + of_all(sizeof(FarSums)) + of_all(sizeof(std::uint64_t)));
    }
  }
}

TEST(ShardingFarPromises, AddsAndLeavesIgnoredTokensAlone) {
  HeadSpec spec = spec_of();
  spec.ignored = 0.5;
  const FarProblem problem(spec);
  const FarSplit split = interleave_tiles(problem.order, 2);
  for (const TokenSplit& tokens : token_splits(2, spec.tokens, false)) {
    RunSpec run;
    run.tau = 0.02f;
    const FarResult plain = call_sharded_far(problem, split, run, tokens);
    add_to_gradients(run);
    const FarResult added = call_sharded_far(problem, split, run, tokens);
    ASSERT_FALSE(HasFailure());
    expect_added(added, plain);
  }
}

TEST(ShardingFarPromises, NoTokenAtAll) {
  HeadSpec spec = spec_of();
  spec.ignored = 1.0;
  const FarProblem problem(spec);
  RunSpec run;
  run.tau = 0.02f;
  run.audit_rows = 4;
  for (const TokenSplit& tokens : token_splits(2, spec.tokens, false)) {
    const FarResult a = call_sharded_far(problem, interleave_tiles(problem.order, 2), run, tokens);
    ASSERT_FALSE(HasFailure());
    expect_zeros(a);
  }
}

// --- Refusals on all ranks.

using Change = std::function<void(int rank, CrossEntropyInputs&, PlanRequest&)>;

std::vector<Outcome> call_all(const Change& before_plan, const Change& before_call) {
  const HeadSpec spec = spec_of();
  const FarProblem problem(spec);
  const FarSplit split = interleave_tiles(problem.order, 3);
  const ShardedRun run{.vocab = split.vocab};
  const Ranks group = make_thread_group(3, std::chrono::seconds(30));
  return run_ranks(group, [&](Communicator& me) {
    const auto r = static_cast<std::size_t>(me.rank());
    const RankProblem part(problem, run, me.rank());
    Tensor loss(DType::f32, {}), d_hidden(DType::f32, {spec.tokens, spec.dim});
    CrossEntropyInputs in = part.part.inputs();
    in.sharding = part.sharding(group[r]);
    in.order = share_order(split.orders[r], in.sharding);
    CrossEntropyOutputs out;
    out.loss = loss.view();
    out.d_hidden = d_hidden.view();
    const Context context = make_context("", 1);
    PlanRequest request;
    request.device = context.device();
    request.kind = PlanKind::far_backward;
    before_plan(me.rank(), in, request);
    const LossPlan plan = plan_cross_entropy({}, in, out, request);
    before_call(me.rank(), in, request);
    cross_entropy(context, plan, {}, in, out, Workspace(context, plan));
  });
}

void expect_all(const std::vector<Outcome>& outcomes, const std::string& kind,
                const std::string& text) {
  for (const Outcome& o : outcomes) {
    EXPECT_EQ(o.kind, kind) << o.text;
    EXPECT_NE(o.text.find(text), std::string::npos) << o.text;
  }
}

TEST(ShardingFarErrors, AllRanksThrowWhatOneDoes) {
  const Change nothing = [](int, CrossEntropyInputs&, PlanRequest&) {};
  expect_all(call_all(nothing, nothing), "", "");
  expect_all(call_all(
                 [](int rank, auto&, PlanRequest& r) {
                   if (rank == 1) r.kind = PlanKind::far_both;
                 },
                 nothing),
             "InvalidArgument", "rank 1: far field far_both, rank 0: far_backward");
  expect_all(call_all(
                 [](int rank, auto&, PlanRequest& r) {
                   if (rank == 2) r.tau = 0.5f;
                 },
                 nothing),
             "InvalidArgument", "rank 2: tau 0.5, rank 0: 0");
  expect_all(call_all(nothing,
                      [](int rank, CrossEntropyInputs& in, auto&) {
                        if (rank == 1) in.order = {};
                      }),
             "InvalidArgument", "order: plan far_backward walks the vocabulary in a VocabOrder");
  expect_all(call_all(nothing,
                      [](int rank, CrossEntropyInputs& in, auto&) {
                        if (rank == 1)
                          in.order = VocabOrder(in.order.vocab_ids(), in.order.average());
                      }),
             "InvalidArgument",
             "order: expected one of share_order, with the places of the 1573 "
             "vocabulary of all ranks, got one without places");
  // Ranks whose orders were not made together would put other tokens into a chunk.
  expect_all(call_all(nothing,
                      [](int rank, CrossEntropyInputs& in, auto&) {
                        VocabOrder other = in.order;
                        if (rank == 2) {
                          std::vector<std::int64_t> vocab_ids(in.order.vocab_ids().rbegin(),
                                                              in.order.vocab_ids().rend());
                          other = VocabOrder(vocab_ids, in.order.average());
                        }
                        other = share_order(other, in.sharding);
                        if (rank != 2) other = in.order;
                        in.order = other;
                      }),
             "InvalidArgument", "order: rank 2 has another one than rank 0");
}

TEST(ShardingFarErrors, OrdersOfAVocabThatDoesNotFit) {
  const Ranks group = make_thread_group(2, std::chrono::seconds(30));
  const std::vector<std::int64_t> vocab_ids = {1, 0, 2};
  const std::vector<float> average = {1, 1, 1};
  const auto outcomes = run_ranks(group, [&](Communicator& me) {
    Sharding sharding;
    sharding.vocab_group = group[static_cast<std::size_t>(me.rank())];
    sharding.vocab = 7;
    sharding.vocab_begin = me.rank() * 3;
    share_order(VocabOrder(vocab_ids, average), sharding);
  });
  expect_all(outcomes, "InvalidArgument", "vocabulary entry 6 is on no rank");
  EXPECT_THROW(share_order(VocabOrder(vocab_ids, average), {}), InvalidArgument);
}

// The planner knows that ids run from frequent to rare, so the first of many ranges selects nearly
// all. Ranks with different shards take one kind of plan.
TEST(ShardingFarPlans, CountTheRankThatKeepsMost) {
  enum class Say { ranges, table, interleaved };
  for (const auto& [ranks, say, kind] :
       {std::tuple{2, Say::ranges, PlanKind::far_backward},
        std::tuple{16, Say::ranges, PlanKind::dense},
        std::tuple{16, Say::table, PlanKind::far_backward},
        std::tuple{16, Say::interleaved, PlanKind::far_backward}}) {
    SCOPED_TRACE(ranks);
    const std::int64_t vocab = 131072;
    std::vector<std::int64_t> borders = {0, 5};  // one rank with few entries, one with none
    borders.push_back(5);
    for (int r = 3; r <= ranks; ++r) borders.push_back(5 + (vocab - 5) * (r - 2) / (ranks - 2));
    if (ranks == 2) borders = {0, vocab / 2, vocab};
    const VocabSplit vocab_shards = vocab_at("some", borders);
    const Ranks group = make_thread_group(ranks, std::chrono::seconds(30));
    std::vector<LossPlan> plans(static_cast<std::size_t>(ranks));
    const auto outcomes = run_ranks(group, [&, say = say](Communicator& me) {
      const auto r = static_cast<std::size_t>(me.rank());
      const auto& mine = vocab_shards.ranks[r];
      HeadShape shape{.tokens = 512, .dim = 64, .vocab = static_cast<std::int64_t>(mine.size())};
      HeadFeatures features;
      features.d_hidden = features.d_weight = true;
      PlanRequest request;
      request.device.threads = 1;
      request.accuracy = Accuracy::far_backward;
      request.audit_rows = 32;
      request.sharding.vocab_group = group[r];
      request.sharding.vocab = vocab;
      request.sharding.interleaved = say == Say::interleaved;
      if (say == Say::table) {
        request.sharding.vocab_ids = ConstTensorView(mine.data(), DType::i32, {shape.vocab});
      } else {
        request.sharding.vocab_begin = mine.empty() ? 0 : mine.front();
      }
      plans[r] = plan_head(shape, features, request);
    });
    for (const Outcome& outcome : outcomes) ASSERT_EQ(outcome.text, "");
    for (const LossPlan& plan : plans) {
      EXPECT_EQ(plan.kind == PlanKind::far_backward, kind == PlanKind::far_backward)
          << plan.explain();
      EXPECT_EQ(plan.chunk_tokens, plans[0].chunk_tokens);
      if (plan.audit == nullptr) continue;
      EXPECT_EQ(plan.audit->chunk_tokens, plans[0].audit->chunk_tokens);
    }
    EXPECT_EQ(plans.back().explain().find("on the first of the ranks") != std::string::npos,
              kind == PlanKind::dense)
        << plans.back().explain();
  }
}

}  // namespace
}  // namespace logitless::test
