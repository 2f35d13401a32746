// FarFieldHead with a sharded vocabulary: equal decisions on all ranks, reproducible and resumed
// runs, states of another layout, errors.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "head/far/far_training.h"
#include "head/sharding/far_shards.h"
#include "support/sanitizers.h"
#include "support/temp_dir.h"

namespace logitless::test {
namespace {

double relative(const std::vector<float>& a, const std::vector<float>& b) {
  return relative_error(std::vector<double>(a.begin(), a.end()),
                        std::vector<double>(b.begin(), b.end()));
}

// Tokens [first, end) of a rank.
struct Rows {
  std::int64_t first, end;
};

// The heads of all ranks, for one Training.
class ShardedHeads {
 public:
  using Change = std::function<void(int rank, CrossEntropyInputs&, CrossEntropyOutputs&)>;

  ShardedHeads(const VocabSplit& vocab_shards, std::vector<Rows> tokens,
               const FarFieldOptions& options, int threads = 1, unsigned delays = 0)
      : vocab_(vocab_shards), tokens_(std::move(tokens)) {
    for (auto& rank : make_thread_group(ranks(), std::chrono::seconds(30)))
      group_.push_back(delays == 0 ? rank : watched(rank, delays, nullptr));
    for (int r = 0; r < ranks(); ++r)
      heads_.push_back(std::make_unique<FarFieldHead>(context_of(threads), options));
  }
  int ranks() const { return static_cast<int>(vocab_.ranks.size()); }
  FarFieldHead& head(int rank) { return *heads_[static_cast<std::size_t>(rank)]; }
  const Ranks& group() const { return group_; }

  // Takes a step on all ranks; the gradients of t are the global ones.
  std::vector<Outcome> try_step(Training& t, const Change& change = {},
                                const CrossEntropyOptions& options = {}) {
    statistics_.assign(static_cast<std::size_t>(ranks()), {});
    return run_ranks(group_, [&](Communicator& me) {
      const int rank = me.rank();
      const auto r = static_cast<std::size_t>(rank);
      const auto& mine = vocab_.ranks[r];
      const auto count = static_cast<std::int64_t>(mine.size());
      constexpr std::int64_t kDim = Training::kDim;
      const Rows rows = tokens_.empty() ? Rows{0, Training::kTokens} : tokens_[r];
      const std::int64_t n = rows.end - rows.first;
      std::vector<float> weight(static_cast<std::size_t>(count * kDim));
      std::vector<float> d_weight(weight.size()), d_hidden(static_cast<std::size_t>(n * kDim));
      std::vector<float> lse(static_cast<std::size_t>(n));
      float loss = 0;
      for (std::int64_t j = 0; j < count; ++j)
        std::copy_n(t.weight.begin() + mine[static_cast<std::size_t>(j)] * kDim, kDim,
                    weight.begin() + j * kDim);
      if (options.accumulate) {
        std::copy_n(t.d_hidden.begin() + rows.first * kDim, n * kDim, d_hidden.begin());
      }
      CrossEntropyInputs in;
      in.hidden = ConstTensorView(t.hidden.data() + rows.first * kDim, DType::f32, {n, kDim});
      in.targets = ConstTensorView(t.targets.data() + rows.first, DType::i64, {n});
      in.weight = ConstTensorView(weight.data(), DType::f32, {count, kDim});
      in.sharding.vocab_group = group_[r];
      in.sharding.vocab = t.vocab;
      in.sharding.tokens = !tokens_.empty();
      if (vocab_.table) {
        in.sharding.vocab_ids = ConstTensorView(mine.data(), DType::i32, {count});
      } else {
        in.sharding.vocab_begin = mine.empty() ? 0 : mine.front();
      }
      CrossEntropyOutputs out;
      out.loss = TensorView(&loss, DType::f32, std::span<const std::int64_t>());
      out.lse = TensorView(lse.data(), DType::f32, {n});
      out.d_hidden = TensorView(d_hidden.data(), DType::f32, {n, kDim});
      out.d_weight = TensorView(d_weight.data(), DType::f32, {count, kDim});
      if (change) change(rank, in, out);
      statistics_[r] = head(rank).step(options, in, out);
      const auto put = [&](std::vector<float>& to, std::int64_t at,
                           const std::vector<float>& from) {
        std::copy(from.begin(), from.end(), to.begin() + at);
      };
      for (std::int64_t j = 0; j < count; ++j)
        std::copy_n(d_weight.begin() + j * kDim, kDim,
                    t.d_weight.begin() + mine[static_cast<std::size_t>(j)] * kDim);
      if (tokens_.empty() && rank > 0) return;
      put(t.d_hidden, rows.first * kDim, d_hidden);
      put(t.lse, rows.first, lse);
      if (rank == 0) t.loss = loss;
    });
  }
  // Takes a step and expects equal results on all ranks.
  LossStatistics step(Training& t, const CrossEntropyOptions& options = {}) {
    for (const Outcome& outcome : try_step(t, {}, options)) EXPECT_EQ(outcome.text, "");
    for (int r = 1; r < ranks(); ++r) {
      expect_same(head(r).report(), head(0).report());
      EXPECT_EQ(head(r).explain(), head(0).explain());
      expect_same_far(statistics_[static_cast<std::size_t>(r)].far, statistics_[0].far);
      EXPECT_EQ(head(r).order().places().size(), head(0).order().places().size());
    }
    return statistics_[0];
  }
  void save(std::vector<std::vector<std::byte>>& states) {
    states.clear();
    for (const auto& head : heads_) states.push_back(head->state());
  }
  void load(const std::vector<std::vector<std::byte>>& states) {
    for (std::size_t r = 0; r < heads_.size(); ++r) heads_[r]->set_state(states[r % states.size()]);
  }

 private:
  VocabSplit vocab_;
  std::vector<Rows> tokens_;
  Ranks group_;
  std::vector<std::unique_ptr<FarFieldHead>> heads_;
  std::vector<LossStatistics> statistics_;
};

constexpr std::int64_t kVocab = 65536;
const std::vector<Rows> kReplicated = {};

std::vector<Rows> spread(int ranks) {
  std::vector<Rows> rows;
  for (int r = 0; r < ranks; ++r)  // rank 1 of more than 2 has none
    rows.push_back({Training::kTokens * r / ranks, Training::kTokens * (r + 1) / ranks});
  if (ranks > 2) {
    rows[0].end = rows[1].end;
    rows[1].first = rows[1].end;
  }
  return rows;
}

class ShardingFarHead : public testing::TestWithParam<Accuracy> {};

// Like a head on one rank, it is dense until the trial of the first order, which is begun at step 5
// and taken over at 8.
TEST_P(ShardingFarHead, DecidesAlikeOnAllRanks) {
  for (const int ranks : {1, 2, 4}) {
    for (const bool spread_tokens : {false, true}) {
      if (spread_tokens != (ranks == 4) && ranks != 2) continue;
      if (kThreadSanitizer && !spread_tokens) continue;
      SCOPED_TRACE(std::to_string(ranks) + (spread_tokens ? ", tokens spread" : ""));
      VocabSplit vocab_shards = even_vocab(ranks, kVocab);
      if (ranks == 4) vocab_shards = vocab_at("one empty", {0, 20000, 20000, 42000, kVocab});
      vocab_shards.table = ranks == 4;  // else the first rank is assumed to select too much
      ShardedHeads heads(vocab_shards, spread_tokens ? spread(ranks) : kReplicated,
                         quick(GetParam()));
      Training t;
      const Context context = context_of();
      for (std::int64_t step = 1; step <= 12; ++step) {
        SCOPED_TRACE(step);
        std::vector<float> exact;
        if (step >= 7) exact = t.dense(context);
        const LossStatistics s = heads.step(t);
        ASSERT_FALSE(HasFailure());
        ASSERT_EQ(far_step(s), step >= 8) << heads.head(0).explain();
        ASSERT_EQ(heads.head(0).order().empty(), step < 8);
        t.move();
        if (step < 7) continue;
        const std::vector<float> d_hidden(exact.begin() + 1 + Training::kTokens,
                                          exact.begin() + 1 + Training::kTokens * 9);
        const double error = relative(t.d_hidden, d_hidden);
        if (!far_step(s)) {
          EXPECT_LE(relative(t.results(), exact), 1e-5);
        } else {
          EXPECT_LE(error, 0.1);
          EXPECT_GT(error, 1e-6);
          EXPECT_LT(s.far.selected, 0.65);
        }
        EXPECT_TRUE(step != 8 || audited(s));
        if (audited(s)) {
          EXPECT_EQ(s.far.audited_tokens, Training::kTokens);
          EXPECT_NEAR(error, s.far.audited_error, 3e-5);
          EXPECT_EQ(heads.head(0).report().last_error,
                    GetParam() == Accuracy::far_both
                        ? std::max(s.far.audited_error, s.far.audited_lse_error)
                        : s.far.audited_error);
        }
      }
      EXPECT_EQ(heads.head(0).report().refreshes, 1);
    }
  }
}

TEST_P(ShardingFarHead, AnAuditOfNewWeightsIsMissedOnAllRanks) {
  const Context context = context_of();
  ShardedHeads heads(even_vocab(2, kVocab), kReplicated, quick(GetParam()));
  Training t;
  for (int step = 1; step <= 9; ++step) heads.step(t);
  ASSERT_TRUE(heads.head(1).report().far) << heads.head(1).explain();
  t.shake();
  std::int64_t noticed = 0;
  for (std::int64_t step = 10; noticed == 0 && step <= 13; ++step) {
    heads.step(t);
    if (!heads.head(0).report().far) noticed = step;
  }
  ASSERT_GT(noticed, 0);
  EXPECT_LE(relative(t.results(), t.dense(context)), 1e-5) << "done again densely";
  EXPECT_EQ(heads.head(1).report().repeated_steps, 1);
}

std::vector<std::vector<float>> run_of(ShardedHeads& heads, Training& t, std::int64_t last) {
  std::vector<std::vector<float>> all;
  while (heads.head(0).report().steps < last) {
    heads.step(t);
    all.push_back(t.results());
    t.move();
  }
  return all;
}

TEST_P(ShardingFarHead, RunsRepeatToTheBitAndResume) {
  constexpr std::int64_t kLast = 11;
  const VocabSplit vocab_shards = interleaved_vocab(2, kVocab);
  const auto tokens = GetParam() == Accuracy::far_both ? spread(2) : kReplicated;
  Training t;
  ShardedHeads first(vocab_shards, tokens, quick(GetParam()));
  const auto whole = run_of(first, t, kLast);
  ASSERT_TRUE(first.head(0).report().far) << first.head(0).explain();
  {
    Training again;
    ShardedHeads heads(vocab_shards, tokens, quick(GetParam()), 3, 7);
    EXPECT_TRUE(run_of(heads, again, kLast) == whole);
  }
  // Saved before the first order, while it is pending, and after it.
  Training then;
  ShardedHeads saved(vocab_shards, tokens, quick(GetParam()));
  for (const std::int64_t at : {2, 6, 9}) {
    if (kThreadSanitizer && at != 6) continue;
    SCOPED_TRACE(at);
    run_of(saved, then, at);
    std::vector<std::vector<std::byte>> states;
    saved.save(states);
    ShardedHeads resumed(vocab_shards, tokens, quick(GetParam()));
    resumed.load(states);
    Training rest = then;
    const auto steps = run_of(resumed, rest, kLast);
    ASSERT_FALSE(HasFailure());
    EXPECT_TRUE(std::equal(steps.begin(), steps.end(), whole.begin() + at));
    expect_same(resumed.head(1).report(), first.head(1).report());
  }
}

// Both accuracies exchange and share alike; ThreadSanitizer follows the one that exchanges more.
INSTANTIATE_TEST_SUITE_P(
    Accuracies, ShardingFarHead,
    testing::ValuesIn(std::vector<Accuracy>(kThreadSanitizer ? std::vector{Accuracy::far_both}
                                                             : std::vector{Accuracy::far_backward,
                                                                           Accuracy::far_both})),
    [](const auto& a) { return std::string(name_of(a.param)); });

// Each rank's state names its layout: another layout keeps the decisions, but drops the order.
TEST(ShardingFarHeadState, OfAnotherLayoutAsksForANewOrder) {
  Training t;
  ShardedHeads two(even_vocab(2, kVocab), kReplicated, quick());
  run_of(two, t, 9);
  ASSERT_TRUE(two.head(0).report().far);
  std::vector<std::vector<std::byte>> states;
  two.save(states);
  const auto expect_fresh = [&](FarFieldHead& head, const std::function<LossStatistics()>& step) {
    EXPECT_EQ(head.report().steps, 9);
    EXPECT_FALSE(far_step(step())) << head.explain();
    EXPECT_EQ(head.report().steps, 10);
    EXPECT_EQ(head.report().audits, two.head(0).report().audits);
    EXPECT_TRUE(head.order().empty());
    for (int i = 0; i < 2; ++i) EXPECT_FALSE(far_step(step())) << i;
    EXPECT_TRUE(far_step(step())) << head.explain();  // with an order begun at once, 3 steps later
    EXPECT_EQ(head.report().refreshes, 2);
  };
  {  // more ranks, with a table
    for (VocabSplit vocab_shards : {even_vocab(4, kVocab), interleaved_vocab(2, kVocab)}) {
      vocab_shards.table = true;
      SCOPED_TRACE(vocab_shards.name);
      ShardedHeads heads(vocab_shards, kReplicated, quick());
      heads.load(states);
      Training now = t;
      expect_fresh(heads.head(0), [&] { return heads.step(now); });
      ASSERT_FALSE(HasFailure());
    }
  }
  {  // to a single rank, and back
    const Context context = context_of();
    FarFieldHead alone(context, quick());
    alone.set_state(states[1]);
    Training now = t;
    expect_fresh(alone, [&] { return now.step(alone); });
    ShardedHeads heads(even_vocab(2, kVocab), kReplicated, quick());
    heads.load({alone.state()});
    EXPECT_FALSE(far_step(heads.step(now)));
    EXPECT_TRUE(heads.head(1).order().empty());
  }
  {  // states restored to their own layout
    const TempDir directory;
    two.head(1).save(directory.file("rank1.safetensors"));
    two.head(1).load(directory.file("rank1.safetensors"));
    EXPECT_TRUE(far_step(two.step(t)));
  }
}

void expect_all(const std::vector<Outcome>& outcomes, const std::string& kind,
                const std::string& text) {
  for (const Outcome& o : outcomes) {
    EXPECT_EQ(o.kind, kind) << o.text;
    EXPECT_NE(o.text.find(text), std::string::npos) << o.text;
  }
}

TEST(ShardingFarHeadErrors, WhatOneRankThrowsAllThrowAndNoStepIsTaken) {
  ShardedHeads heads(even_vocab(2, kVocab), kReplicated, quick());
  Training t;
  // Failures before an order is begun, at the step that would begin it, and in a far-field step.
  for (const std::int64_t at : {1, 4, 8, 9}) {
    run_of(heads, t, at);
    SCOPED_TRACE(at);
    std::vector<std::vector<std::byte>> before, after;
    heads.save(before);
    Training bad = t;
    bad.targets[5] = kVocab;
    expect_all(heads.try_step(bad), "InvalidArgument", "targets: 65536 at position 5");
    std::int64_t wrong = -1;
    expect_all(heads.try_step(t,
                              [&](int rank, CrossEntropyInputs& in, auto&) {
                                if (rank == 1)
                                  in.targets = ConstTensorView(&wrong, DType::i64, {1});
                              }),
               "InvalidArgument", "targets: expected shape [128]");
    expect_all(heads.try_step(t,
                              [](int rank, auto&, CrossEntropyOutputs& out) {
                                if (rank == 1) out.d_hidden = {};
                              }),
               "InvalidArgument", "rank 1: d_hidden: expected one");
    heads.save(after);
    EXPECT_TRUE(before == after);
  }
  EXPECT_TRUE(far_step(heads.step(t)));
}

TEST(ShardingFarHeadErrors, HeadsThatDiffer) {
  Training t(32768);
  {
    ShardedHeads heads(even_vocab(2, t.vocab), kReplicated, quick());
    FarFieldOptions other = quick();
    other.error = 0.02;
    heads.head(1) = FarFieldHead(context_of(), other);
    expect_all(heads.try_step(t), "InvalidArgument", "rank 1: error 0.02, rank 0: 0.05");
  }
  {
    ShardedHeads heads(even_vocab(2, t.vocab), kReplicated, quick());
    t.step(heads.head(1));
    expect_all(heads.try_step(t), "InvalidArgument",
               "rank 1: steps of the FarFieldHead 1, rank 0: 0");
  }
  {
    ShardedHeads heads(even_vocab(2, t.vocab), kReplicated, quick());
    const Ranks others = make_thread_group(2, std::chrono::seconds(30));
    expect_all(heads.try_step(t,
                              [&](int rank, CrossEntropyInputs& in, auto&) {
                                in.sharding.replicas = others[static_cast<std::size_t>(rank)];
                              }),
               "Unsupported", "sharding: replicas: groups of ranks would decide apart");
  }
}

}  // namespace
}  // namespace logitless::test
