// Refusals of sharded plans and calls, equal on every rank.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "head/sharding/sharded.h"
#include "support/mirror.h"

namespace logitless::test {
namespace {

constexpr std::int64_t kTokens = 8, kDim = 4, kVocab = 100;
constexpr int kRanks = 3;

using Change =
    std::function<void(int rank, CrossEntropyOptions&, CrossEntropyInputs&, PlanRequest&)>;

// All state of one rank, so that it can make several calls.
struct RankCall {
  RankCall(const HeadProblem& whole, const ShardedRun& run, std::shared_ptr<Communicator> group)
      : problem(whole, run, group->rank()),
        context(make_context("", 1)),
        loss(DType::f32, {}),
        d_hidden(DType::f32, {problem.part.spec.tokens, kDim}) {
    in = problem.part.inputs();
    in.sharding = problem.sharding(group);
    out.loss = loss.view();
    out.d_hidden = d_hidden.view();
  }
  LossPlan plan(const PlanRequest& request = {}) const {
    return plan_cross_entropy(options, in, out, request);
  }
  void call(const LossPlan& p) {
    const Workspace workspace(context, p);
    cross_entropy(context, p, options, in, out, workspace);
  }

  RankProblem problem;
  Context context;
  Tensor loss, d_hidden;
  CrossEntropyOptions options;
  CrossEntropyInputs in;
  CrossEntropyOutputs out;
};

HeadProblem small_problem() {
  return HeadProblem({.tokens = kTokens, .dim = kDim, .vocab = kVocab, .seed = 2});
}

std::vector<Outcome> run_all(const HeadProblem& problem, const ShardedRun& run,
                             const std::function<void(int rank, RankCall&)>& body) {
  const Ranks group = make_thread_group(kRanks, std::chrono::seconds(30));
  return run_ranks(group, [&](Communicator& me) {
    RankCall call(problem, run, group[static_cast<std::size_t>(me.rank())]);
    body(me.rank(), call);
  });
}

std::vector<Outcome> plan_all(const ShardedRun& run, const Change& change) {
  return run_all(small_problem(), run, [&](int rank, RankCall& c) {
    PlanRequest request{c.context.device()};
    change(rank, c.options, c.in, request);
    c.plan(request);
  });
}

ShardedRun even_run() { return {.vocab = even_vocab(kRanks, kVocab)}; }
ShardedRun spread_run() {
  return {.vocab = even_vocab(kRanks, kVocab), .tokens = {"spread", {3, 0, 5}}};
}

ShardedRun moving_run() {
  ShardedRun run = spread_run();
  run.tokens.exchange = ExchangeMode::weights;
  return run;
}

void expect_all(const std::vector<Outcome>& outcomes, const std::string& kind,
                const std::string& text) {
  for (const Outcome& o : outcomes) {
    EXPECT_EQ(o.kind, kind) << o.text;
    EXPECT_NE(o.text.find(text), std::string::npos) << o.text;
  }
}

TEST(ShardingErrors, WhatIsNotServedIsRefusedByName) {
  expect_all(plan_all(even_run(), [](int, auto&, auto& in,
                                     auto&) { in.sharding.exchange = ExchangeMode::weights; }),
             "InvalidArgument",
             "sharding.exchange: expected planned where all ranks have all tokens, got weights");
  expect_all(
      plan_all(moving_run(), [](int, auto&, auto&, PlanRequest& r) { r.kind = PlanKind::stored; }),
      "Unsupported", "stored: weights move slice by slice, and no exp(z) is saved");
  expect_all(
      plan_all(moving_run(), [](int, auto&, auto&, PlanRequest& r) { r.memory_budget = 1000; }),
      "InvalidArgument", "memory_budget: 1000 B");
  expect_all(plan_all(even_run(),
                      [](int, auto&, auto&, PlanRequest& r) { r.device.kind = DeviceKind::cuda; }),
             "InvalidArgument",
             "vocab_group: expected a communicator of a GPU's memory, got one of the CPU's");
  expect_all(plan_all(even_run(),
                      [](int, auto&, CrossEntropyInputs& in, auto&) {
                        in.weight = {in.weight.data(), DType::bf16, {in.weight.size(0), kDim}};
                      }),
             "Unsupported", "weight: expected f32 as hidden with a sharding, got bf16");
}

TEST(ShardingErrors, RanksThatDifferAreNamed) {
  expect_all(plan_all(even_run(),
                      [](int rank, CrossEntropyOptions& o, auto&, auto&) {
                        if (rank == 2) o.label_smoothing = 0.1f;
                      }),
             "InvalidArgument", "rank 2: label smoothing 1, rank 0: 0");
  expect_all(plan_all(even_run(),
                      [](int rank, CrossEntropyOptions& o, auto&, auto&) {
                        if (rank == 1) o.reduction = Reduction::sum;
                      }),
             "InvalidArgument", "rank 1: reduction");
  expect_all(plan_all(even_run(), [](int rank, CrossEntropyOptions& o, auto&,
                                     auto&) { o.normalizer = rank == 1 ? 4194305.0 : 4194304.0; }),
             "InvalidArgument", "rank 1: normalizer 4194305, rank 0: 4194304");
  expect_all(plan_all(even_run(),
                      [](int rank, CrossEntropyOptions& o, auto&, auto&) {
                        if (rank == 2) o.normalizer = 7.5;
                      }),
             "InvalidArgument", "rank 2: normalizer 7.5, rank 0: none");
  expect_all(plan_all(even_run(),
                      [](int rank, CrossEntropyOptions& o, auto&, auto&) {
                        if (rank == 1) o.precision = Precision::tf32;
                      }),
             "InvalidArgument", "rank 1: precision 1, rank 0: 0");
  expect_all(plan_all(even_run(),
                      [](int rank, auto&, CrossEntropyInputs& in, auto&) {
                        if (rank == 1) in.sharding.tokens = true;
                      }),
             "InvalidArgument", "sharded tokens");
  expect_all(plan_all(even_run(),
                      [](int rank, auto&, CrossEntropyInputs& in, auto&) {
                        if (rank == 1) in.hidden = ConstTensorView();
                      }),
             "InvalidArgument", "rank 1: hidden");
}

// Sums of tokens that all ranks have are exchanged in d_hidden's dtype. Ranks with local tokens may
// have different dtypes.
TEST(ShardingErrors, DtypesOfDHidden) {
  const HeadProblem problem(
      {.tokens = kTokens, .dim = kDim, .vocab = kVocab, .dtype = DType::bf16, .seed = 2});
  const auto plan_with = [&](const ShardedRun& run) {
    return run_all(problem, run, [](int rank, RankCall& c) {
      Tensor narrow(DType::bf16, {c.in.hidden.size(0), kDim});
      if (rank == 1) c.out.d_hidden = narrow.view();
      c.plan();
    });
  };
  expect_all(plan_with(even_run()), "InvalidArgument",
             "rank 1: dtype of d_hidden bf16, rank 0: f32");
  EXPECT_EQ(plan_with(spread_run()), std::vector<Outcome>(kRanks));
}

TEST(ShardingErrors, ColumnsOfTheWeight) {
  ShardedRun run = spread_run();
  run.tokens = with_columns(run.tokens);
  const auto refused = [&](const std::string& kind, const std::string& text, const Change& change) {
    expect_all(plan_all(run, change), kind, text);
  };
  const auto change_in = [](auto change) -> Change {
    return [=](int rank, auto&, CrossEntropyInputs& in, auto&) { change(rank, in); };
  };
  const std::string alone = "sharding: weight by columns: its rows move to each rank's own tokens";
  refused("InvalidArgument", alone, change_in([](int, auto& in) { in.sharding.tokens = false; }));
  refused("InvalidArgument", alone,
          change_in([](int, auto& in) { in.sharding.exchange = ExchangeMode::tokens; }));
  refused("InvalidArgument", "sharding: weight by columns: expected all",
          change_in([](int, auto& in) { in.sharding.vocab_begin = 3; }));
  refused("InvalidArgument", "the sharding's columns, got",
          change_in([](int rank, auto& in) { in.sharding.columns += rank == 1 ? 1 : 0; }));
  refused("InvalidArgument", "on all ranks together, as hidden has, got",
          change_in([](int rank, auto& in) {
            if (rank != 2) return;
            const ConstTensorView& w = in.weight;
            const std::int64_t fewer[] = {w.size(0), w.size(1) - 1};
            const std::int64_t strides[] = {w.stride(0), 1};
            in.weight = ConstTensorView(w.data(), w.dtype(), fewer, strides);
            --in.sharding.columns;
          }));
  refused("Unsupported", "the far field has no weight-gathered plan",
          [](int, auto&, auto&, PlanRequest& r) { r.accuracy = Accuracy::far_backward; });
  expect_all(plan_all(even_run(), change_in([](int, auto& in) { in.sharding.columns = 3; })),
             "InvalidArgument", "sharding: columns: 3 with a weight by rows");
}

TEST(ShardingErrors, RanksThatDifferInWhatMoves) {
  expect_all(plan_all(spread_run(),
                      [](int rank, auto&, CrossEntropyInputs& in, auto&) {
                        if (rank == 2) in.sharding.exchange = ExchangeMode::weights;
                      }),
             "InvalidArgument", "rank 2: what moves weights, rank 0: tokens");
}

TEST(ShardingErrors, VocabThatIsNoPartition) {
  const auto move = [](std::int64_t by) {
    return [by](int rank, auto&, CrossEntropyInputs& in, auto&) {
      if (rank == 1) in.sharding.vocab_begin += by;
    };
  };
  expect_all(plan_all(even_run(), move(-1)), "InvalidArgument", "vocabulary entry 32 is on rank 0");
  expect_all(plan_all(even_run(), move(1)), "InvalidArgument", "vocabulary entry 33 is on no rank");
  // The full weight is given instead of a shard.
  ShardedRun whole{.vocab = even_vocab(1, kVocab)};
  whole.vocab.ranks.assign(kRanks, whole.vocab.ranks.front());
  expect_all(plan_all(whole, [](int, auto&, auto&, auto&) {}), "InvalidArgument",
             "vocabulary entry 0 is on rank 0 and on rank 1");
  // Rows exceed the vocabulary.
  expect_all(plan_all(even_run(), [](int, auto&, CrossEntropyInputs& in,
                                     auto&) { in.sharding.vocab = kVocab - 1; }),
             "InvalidArgument", "are not in [0, 99)");
  ShardedRun table{.vocab = interleaved_vocab(kRanks, kVocab)};
  std::swap(table.vocab.ranks[1][0], table.vocab.ranks[1][1]);
  expect_all(plan_all(table, [](int, auto&, auto&, auto&) {}), "InvalidArgument",
             "rank 1: sharding: vocab_ids: expected ascending vocabulary entries");
}

// A rank may bring at most as many tokens as the largest rank had when the plan was made.
TEST(ShardingErrors, MoreTokensOfARankThanPlanned) {
  expect_all(run_all(small_problem(), spread_run(),
                     [](int, RankCall& c) {
                       const LossPlan plan = c.plan({c.context.device()});
                       const ShardedRun one{.vocab = even_vocab(kRanks, kVocab),
                                            .tokens = {"one", {kTokens, 0, 0}}};
                       RankCall more(small_problem(), one, c.in.sharding.vocab_group);
                       more.call(plan);
                     }),
             "InvalidArgument", "plan: made for at most 5 tokens of a rank, called with 8");
}

// Two vocabulary groups whose means divide by the tokens of both.
class ShardingReplicas : public testing::Test {
 protected:
  // Returns outcomes of `body` on the four ranks; numbers 0 and 1 hold one copy of the vocabulary.
  std::vector<Outcome> run(const std::function<void(int number, RankCall&)>& body) const {
    return run_ranks(make_thread_group(4), [&](Communicator& me) {
      const int number = me.rank();
      const auto copy = static_cast<std::size_t>(number / 2),
                 rank = static_cast<std::size_t>(number % 2);
      RankCall call(small_problem(), {.vocab = even_vocab(2, kVocab)}, vocab_[copy][rank]);
      call.in.sharding.replicas = replicas_[rank][copy];
      body(number, call);
    });
  }
  static Ranks pair() { return make_thread_group(2, std::chrono::seconds(30)); }
  const std::vector<Ranks> vocab_ = {pair(), pair()}, replicas_ = {pair(), pair()};
};

TEST_F(ShardingReplicas, WhatOneGroupRefusesIsRefusedByBothAndTheNextPlanGoes) {
  const std::vector<Outcome> outcomes = run([](int number, RankCall& c) {
    const CrossEntropyInputs in = c.in;
    if (number == 1) c.in.hidden = ConstTensorView();
    const Outcome refused = outcome_of([&] { c.plan({c.context.device()}); });
    EXPECT_EQ(refused.kind, "InvalidArgument") << number << ": " << refused.text;
    EXPECT_NE(refused.text.find("hidden"), std::string::npos) << number << ": " << refused.text;
    c.in = in;
    c.call(c.plan({c.context.device()}));
  });
  for (const Outcome& o : outcomes) EXPECT_EQ(o.kind, "") << o.text;
}

TEST_F(ShardingReplicas, ACallOfAnotherShardingIsRefusedByAllAndTheNextGoes) {
  const std::vector<Outcome> outcomes = run([](int number, RankCall& c) {
    const LossPlan plan = c.plan({c.context.device()});
    const CrossEntropyInputs in = c.in;
    if (number == 2) c.in.sharding.vocab = kVocab + 1;
    const Outcome refused = outcome_of([&] { c.call(plan); });
    EXPECT_EQ(refused.kind, "InvalidArgument") << number << ": " << refused.text;
    EXPECT_NE(refused.text.find("not the one that the plan was made for"), std::string::npos)
        << number << ": " << refused.text;
    c.in = in;
    c.call(plan);
  });
  for (const Outcome& o : outcomes) EXPECT_EQ(o.kind, "") << o.text;
}

TEST(ShardingErrors, NextTokenOfSpreadTokens) {
  expect_all(plan_all(spread_run(),
                      [](int, CrossEntropyOptions& o, CrossEntropyInputs& in, auto&) {
                        o.next_token = true;
                        const std::int64_t n = in.hidden.size(0);
                        in.hidden = ConstTensorView(in.hidden.data(), DType::f32, {1, n, kDim});
                        in.targets = ConstTensorView(in.targets.data(), in.targets.dtype(), {1, n});
                      }),
             "InvalidArgument", "next_token");
}

TEST(ShardingErrors, ClassWeightsAreGivenWhole) {
  static const std::vector<float> weights(kVocab, 1.0f);
  expect_all(plan_all(even_run(),
                      [](int, auto&, CrossEntropyInputs& in, auto&) {
                        in.class_weight = ConstTensorView(weights.data(), DType::f32, {33});
                      }),
             "InvalidArgument", "class_weight: expected shape [100], got f32[33]");
}

TEST(ShardingErrors, ABadTargetIsEverybodysAndTheNextCallGoes) {
  for (const ShardedRun& run : {even_run(), spread_run(), moving_run()}) {
    const HeadProblem good = small_problem();
    std::vector<std::vector<Outcome>> calls(kRanks);
    const std::vector<Outcome> outcomes = run_all(good, run, [&](int rank, RankCall& c) {
      const LossPlan plan = c.plan({c.context.device()});
      Tensor bad = c.problem.part.targets;
      if (rank == 2) bad.set(1, kVocab);
      const CrossEntropyInputs in = c.in;
      c.in.targets = std::as_const(bad).view();
      calls[static_cast<std::size_t>(rank)].push_back(outcome_of([&] { c.call(plan); }));
      c.in = in;
      calls[static_cast<std::size_t>(rank)].push_back(outcome_of([&] { c.call(plan); }));
    });
    for (const Outcome& o : outcomes) EXPECT_EQ(o.text, "");
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto& made = calls[static_cast<std::size_t>(rank)];
      EXPECT_EQ(made[0].kind, "InvalidArgument") << rank;
      EXPECT_NE(made[0].text.find("targets: 100 at position 1"), std::string::npos) << made[0].text;
      EXPECT_EQ(made[0].text.find("rank 2") != std::string::npos, rank != 2) << made[0].text;
      EXPECT_EQ(made[1].text, "") << rank;
    }
  }
}

TEST(ShardingErrors, OneRanksMistakeInACall) {
  for (const ShardedRun& run : {even_run(), moving_run()}) {
    expect_all(run_all(small_problem(), run,
                       [&](int rank, RankCall& c) {
                         const LossPlan plan = c.plan({c.context.device()});
                         if (rank == 1) c.out.d_hidden = TensorView();
                         c.call(plan);
                       }),
               "InvalidArgument", "plan: made for other options, inputs or outputs");
  }
}

TEST(ShardingErrors, PlansAndCallsGoTogether) {
  expect_all(run_all(small_problem(), even_run(),
                     [&](int, RankCall& c) {
                       const LossPlan plan = c.plan({c.context.device()});
                       c.in.sharding = {};
                       c.call(plan);
                     }),
             "InvalidArgument", "sharding: not the one that the plan was made for");
  expect_all(run_all(small_problem(), even_run(),
                     [&](int, RankCall& c) {
                       const Sharding sharding = c.in.sharding;
                       c.in.sharding = {};
                       const LossPlan plan = c.plan({c.context.device()});
                       c.in.sharding = sharding;
                       c.call(plan);
                     }),
             "InvalidArgument", "plan: made without a sharding");
  HeadFeatures features;
  features.vocab_ranks = 2;
  EXPECT_THROW(plan_head({.tokens = 1, .dim = 1, .vocab = 1}, features), InvalidArgument);
}

}  // namespace
}  // namespace logitless::test
