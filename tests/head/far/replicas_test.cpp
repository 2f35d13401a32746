// Controllers of the far field on data-parallel ranks: they decide alike, by the errors of all
// ranks, with one order.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/ranks.h"
#include "head/far/controller.h"

namespace logitless::test {
namespace {

constexpr std::int64_t kVocabCount = 300, kTokens = 8, kDim = 4;

class FarReplicas : public testing::Test {
 protected:
  FarReplicas() {
    for (std::size_t i = 0; i < weight_.size(); ++i)
      weight_[i] = static_cast<float>((i * 37 + i / 13) % 17) - 8.0f;
    options_.refresh_every = 3;
    options_.refresh_delay = 1;
    options_.audit_every = 2;
  }

  // Runs body(controller, rank) on each rank, which aborts the group if it throws.
  std::vector<Outcome> on_ranks(int ranks,
                                const std::function<void(FarController&, int)>& body) const {
    const Ranks group = make_thread_group(ranks, std::chrono::seconds(30));
    return run_ranks(group, [&](Communicator& self) {
      FarFieldOptions own = options_;
      own.replicas = group[static_cast<std::size_t>(self.rank())];
      if (change_) change_(self.rank(), own);
      ContextOptions context;
      context.threads = 1;
      FarController controller(Context(context), own);
      try {
        body(controller, self.rank());
      } catch (const std::exception& error) {
        self.abort(error.what());
        throw;
      }
    });
  }
  void expect_none(const std::vector<Outcome>& outcomes) const {
    for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.text, "");
  }

  // Returns hidden states that differ between ranks.
  std::vector<float> hidden(int rank) const {
    std::vector<float> out;
    for (std::int64_t i = 0; i < kTokens * kDim; ++i)
      out.push_back(static_cast<float>((i * (rank + 2)) % 5) - 2.0f);
    return out;
  }
  FarStep begin(FarController& c, const std::vector<float>& hidden, std::int64_t dim = kDim,
                PlanKind kind = PlanKind::far_backward) const {
    const auto tokens = static_cast<std::int64_t>(hidden.size()) / dim;
    LossPlan plan;
    plan.kind = kind;
    return c.begin(plan, {ConstTensorView(hidden.data(), DType::f32, {tokens, dim}),
                          ConstTensorView(weight_.data(), DType::f32, {kVocabCount, kDim}),
                          {}});
  }
  static FarFieldStatistics found(double error, double selected, std::int64_t tokens = kTokens) {
    FarFieldStatistics s;
    s.selected = selected;
    s.audited_tokens = tokens;
    s.audited_error = tokens > 0 ? error : -1.0;
    return s;
  }

  std::vector<float> weight_ = std::vector<float>(kVocabCount * kDim);
  FarFieldOptions options_;
  std::function<void(int rank, FarFieldOptions&)> change_;
};

TEST_F(FarReplicas, DecideByTheErrorsOfAll) {
  std::vector<std::string> said(3);
  std::vector<int> accepted(3);  // not bool, because ranks write concurrently
  std::vector<VocabOrder> orders(3);
  expect_none(on_ranks(3, [&](FarController& c, int rank) {
    const auto r = static_cast<std::size_t>(rank);
    const std::vector<float> x = hidden(rank);
    FarStep step;
    for (int i = 0; i < 4; ++i) step = begin(c, x);
    ASSERT_TRUE(step.far && step.trial);
    // The error is 0.006 over all ranks; one rank alone would have missed 0.01.
    EXPECT_TRUE(c.accept(step, found(rank == 2 ? 0.0104 : 0.001, 0.1 * (rank + 1))));
    EXPECT_NEAR(c.report().last_error, std::sqrt((2 * 1e-6 + 0.0104 * 0.0104) / 3), 1e-12);
    EXPECT_NEAR(c.report().mean_selected, 0.2, 1e-12);
    begin(c, x);
    step = begin(c, x);
    ASSERT_TRUE(step.audit && !step.trial);
    // A rank without tokens does not count. 0.012 is too much, also for ranks within 0.01.
    accepted[r] =
        c.accept(step, rank == 0 ? found(0.0, 0.0, 0) : found(rank == 1 ? 0.004 : 0.0165, 0.3));
    said[r] = c.explain();
    orders[r] = c.order();
  }));
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_EQ(accepted[r], 0);
    EXPECT_EQ(said[r], said[0]);
    ASSERT_EQ(orders[r].vocab(), kVocabCount);
    EXPECT_TRUE(std::ranges::equal(orders[r].vocab_ids(), orders[0].vocab_ids()));
    EXPECT_TRUE(std::ranges::equal(orders[r].average(), orders[0].average()));
  }
}

// The planners of the ranks decide separately before the first order exists.
TEST_F(FarReplicas, GoBackwardAloneTogether) {
  options_.accuracy = Accuracy::far_both;
  options_.refresh_delay = 0;
  std::vector<std::vector<std::string>> said(2);
  expect_none(on_ranks(2, [&](FarController& c, int rank) {
    const auto r = static_cast<std::size_t>(rank);
    const std::vector<float> x = hidden(rank);
    for (int i = 0; i < 20; ++i) {
      const bool none = rank == 1 && i == 2;  // where the first order is made
      const FarStep step = begin(c, none ? std::vector<float>() : x, kDim,
                                 none ? PlanKind::dense : PlanKind::far_both);
      const bool both = c.request({.far = true}).accuracy == Accuracy::far_both;
      if (step.far) {
        EXPECT_EQ(step.both, both);
        c.accept(step, none ? found(0.0, 0.0, 0) : found(both ? 0.5 : 0.001, 0.1));
      }
      said[r].push_back(c.explain());
    }
  }));
  EXPECT_EQ(said[0], said[1]);
  EXPECT_NE(said[0].back().find("steps backward alone"), std::string::npos) << said[0].back();
}

TEST_F(FarReplicas, AnOrderIsOfTheFirstRankWithTokens) {
  std::vector<VocabOrder> orders(2);
  const auto order_with = [&](const std::function<bool(int rank, int step)>& has) {
    expect_none(on_ranks(2, [&](FarController& c, int rank) {
      for (int i = 0; i < 5; ++i) begin(c, has(rank, i) ? hidden(rank) : std::vector<float>());
      orders[static_cast<std::size_t>(rank)] = c.order();
    }));
    EXPECT_EQ(orders[0].empty(), orders[1].empty());
    if (!orders[0].empty()) {
      EXPECT_TRUE(std::ranges::equal(orders[0].average(), orders[1].average()));
    }
    return orders[0];
  };
  const VocabOrder of_first = order_with([](int, int) { return true; });
  const VocabOrder of_second = order_with([](int rank, int) { return rank == 1; });
  EXPECT_FALSE(std::ranges::equal(of_first.average(), of_second.average()));
  // It is made one step later, since no rank has tokens when it is due.
  const VocabOrder later = order_with([](int, int step) { return step > 2; });
  EXPECT_TRUE(std::ranges::equal(of_first.average(), later.average()));
  EXPECT_TRUE(order_with([](int, int) { return false; }).empty());
}

// The ranks agree with the order on the choice that each planner would make for its tokens.
TEST_F(FarReplicas, OneForWhichExactPlansAreFaster) {
  const auto said_with = [&](const std::function<bool(int rank, int step)>& is_dense) {
    std::vector<std::string> said(2);
    std::vector<int> far(2);
    expect_none(on_ranks(2, [&](FarController& c, int rank) {
      const auto r = static_cast<std::size_t>(rank);
      for (int i = 1; i < 8; ++i) {
        const PlanKind kind = is_dense(rank, i) ? PlanKind::dense : PlanKind::far_backward;
        const FarStep step = begin(c, hidden(rank), kDim, kind);
        far[r] += step.far ? 1 : 0;
        if (!step.far) continue;
        EXPECT_TRUE(c.request(step).kind.has_value());  // a far plan, even if another is faster
        c.accept(step, found(step.audit ? 0.001 : -1.0, 0.1, step.audit ? kTokens : 0));
      }
      said[r] = c.explain();
    }));
    EXPECT_EQ(said[0], said[1]);
    EXPECT_EQ(far[0], far[1]);
    return far[0];
  };
  EXPECT_EQ(said_with([](int, int) { return false; }), 4);
  EXPECT_EQ(said_with([](int rank, int step) { return rank == 1 && step == 3; }), 1);
  EXPECT_EQ(said_with([](int rank, int step) { return rank == 1 && step != 3; }), 4);
}

TEST_F(FarReplicas, ThoseWithoutAGradientHaveNoSay) {
  expect_none(on_ranks(2, [&](FarController& c, int rank) {
    FarStep step;
    for (int i = 0; i < 4; ++i) step = begin(c, hidden(rank));
    ASSERT_TRUE(step.trial);
    EXPECT_FALSE(c.accept(step, found(rank == 0 ? 0.013 : 0.0, rank == 0 ? 0.2 : 1.0)));
    EXPECT_EQ(c.report().last_error, 0.013);
    EXPECT_EQ(c.report().mean_selected, 0.2);
  }));
}

TEST_F(FarReplicas, FailTogetherWhereOneCannotMakeTheOrder) {
  const std::vector<Outcome> outcomes = on_ranks(2, [&](FarController& c, int rank) {
    const std::vector<float> x = hidden(rank);
    for (int i = 0; i < 5; ++i) begin(c, x, rank == 0 ? kDim / 2 : kDim);
  });
  for (const Outcome& outcome : outcomes) EXPECT_EQ(outcome.kind, "InvalidArgument");
  EXPECT_NE(outcomes[1].text.find("rank 0: "), std::string::npos) << outcomes[1].text;
}

TEST_F(FarReplicas, HaveTheSameOptions) {
  change_ = [](int rank, FarFieldOptions& o) { o.error = rank == 1 ? 0.02 : 0.01; };
  for (const Outcome& outcome : on_ranks(2, [&](FarController&c, int rank) {
         for (int i = 0; i < 3; ++i) begin(c, hidden(rank));
       })) {
    EXPECT_EQ(outcome.kind, "InvalidArgument");
    EXPECT_NE(outcome.text.find("error 0.02"), std::string::npos) << outcome.text;
  }
}

}  // namespace
}  // namespace logitless::test
