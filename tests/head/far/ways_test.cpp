// A FarFieldHead with far_both that misses the error: the change to far_backward, and back.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "head/far/far_controller.h"
#include "head/far/plans.h"

namespace logitless::test {
namespace {

TEST_F(FarControllerTest, BothErrorsOfFarBothCount) {
  options_.accuracy = Accuracy::far_both;
  far_.kind = PlanKind::far_both;
  const double nan = NAN;
  for (const auto& [gradients, lse, accepted] :
       {std::tuple{0.005, 0.002, true}, std::tuple{0.005, 0.02, false},
        std::tuple{0.02, 0.0, false}, std::tuple{0.005, nan, false}, std::tuple{nan, 0.0, false}}) {
    FarController c(context_, options_);
    FarStep step;
    until_far(c, step);
    FarFieldStatistics s = error(gradients);
    s.audited_lse_error = lse;
    EXPECT_EQ(c.accept(step, s), accepted) << gradients << " " << lse;
    EXPECT_EQ(c.report().far, accepted);
  }
}

// far_both misses with any tau; far_backward keeps the error.
TEST_F(FarControllerTest, WhereBothWaysMissStepsGoBackwardAlone) {
  options_.accuracy = Accuracy::far_both;
  FarController c(context_, options_);
  int repeated = 0, both_trials = 0, backward = 0;
  std::vector<std::int64_t> tried;  // steps that used far_both
  for (int i = 1; i <= 400; ++i) {
    const FarStep step = begin(c);
    if (!step.far) continue;
    const bool both = c.request(step).accuracy == Accuracy::far_both;
    if (both) tried.push_back(c.report().steps);
    both_trials += both ? 1 : 0;
    backward += both ? 0 : 1;
    repeated += c.accept(step, !step.audit ? unaudited() : error(both ? 0.05 : 0.005)) ? 0 : 1;
  }
  EXPECT_EQ(c.report().dense_steps, 9 + repeated) << "never dense but for what both ways cost";
  EXPECT_EQ(repeated, both_trials);
  EXPECT_EQ(400 - 9 - both_trials, backward);
  ASSERT_GE(tried.size(), 6u);
  EXPECT_EQ((std::vector<std::int64_t>{tried.begin(), tried.begin() + 3}),
            (std::vector<std::int64_t>{10, 11, 12}));
  for (std::size_t i = 4; i + 1 < tried.size(); ++i)
    EXPECT_GT(tried[i + 1] - tried[i], (tried[i] - tried[i - 1]) * 3 / 2)
        << "put off twice as long";
  EXPECT_LE(tried.size(), 9u);
  EXPECT_NE(c.explain().find("next step: far_backward"), std::string::npos) << c.explain();
  EXPECT_NE(c.explain().find(std::to_string(backward) + " steps backward alone"), std::string::npos)
      << c.explain();
  // The misses are part of the state.
  FarController again(context_, options_);
  again.set_state(c.state());
  EXPECT_EQ(again.explain(), c.explain());
  EXPECT_EQ(again.request({.far = true}).accuracy, Accuracy::far_backward);
}

TEST_F(FarControllerTest, BothWaysThatMissMoreOftenThanTheyKeepAreLeft) {
  options_.accuracy = Accuracy::far_both;
  FarController c(context_, options_);
  FarStep step;
  until_far(c, step);
  EXPECT_TRUE(c.accept(step, error(0.005)));
  int audits = 0;
  for (; c.request({.far = true}).accuracy == Accuracy::far_both && audits < 100;) {
    step = begin(c);
    if (!step.far) continue;
    c.accept(step, !step.audit ? unaudited() : error(++audits % 3 == 0 ? 0.005 : 0.05));
  }
  EXPECT_GT(audits, 4);
  EXPECT_LT(audits, 12);
}

TEST_F(FarControllerTest, OneMissInTenIsBadLuckAndBothWaysGoOn) {
  options_.accuracy = Accuracy::far_both;
  FarController c(context_, options_);
  int audits = 0;
  for (int i = 0; i < 2000; ++i) {
    const FarStep step = begin(c);
    if (!step.far) continue;
    ASSERT_EQ(c.request(step).accuracy, Accuracy::far_both) << i;
    c.accept(step, !step.audit ? unaudited() : error(++audits % 10 == 0 ? 0.05 : 0.002));
  }
  EXPECT_GT(audits, 100);
}

TEST_F(FarControllerTest, BothWaysThatKeepTheErrorAgainStay) {
  options_.accuracy = Accuracy::far_both;
  FarController c(context_, options_);
  bool both = true;
  for (int i = 0; i < 400; ++i) {
    const FarStep step = begin(c);
    if (!step.far) continue;
    both = c.request(step).accuracy == Accuracy::far_both;
    c.accept(step, !step.audit ? unaudited() : error(both && i < 100 ? 0.05 : 0.005));
  }
  EXPECT_TRUE(both);
  EXPECT_TRUE(c.report().far);
}

TEST_F(FarControllerTest, BothWaysAreTriedAgainWhereBackwardAloneIsNotWorthWhile) {
  options_.accuracy = Accuracy::far_both;
  FarController c(context_, options_);
  exact_.kind = PlanKind::dense;
  bool left = false;
  int again = 0;
  for (int i = 0; i < 100; ++i) {
    const bool both = c.request({.far = true}).accuracy == Accuracy::far_both;
    left = left || !both;
    const FarStep step = both ? begin(c) : c.begin(exact_, source());
    EXPECT_TRUE(both || !step.far);
    if (!step.far) continue;
    if (left && again == 0) {
      EXPECT_TRUE(step.trial);
      EXPECT_EQ(c.report().refreshes, 2) << "with an order of its own";
    }
    again += left ? 1 : 0;
    c.accept(step, !step.audit ? unaudited() : error(left ? 0.005 : 0.05));
  }
  EXPECT_TRUE(left);
  EXPECT_GT(again, 20);
}

// A softcap, for example, makes far_both plans far_backward: there is no other kind to change to.
TEST_F(FarControllerTest, APlanBackwardForBothWaysThatMissesIsLeftAlone) {
  options_.accuracy = Accuracy::far_both;
  FarController c(context_, options_);
  for (int trial = 0; trial < 3; ++trial) {
    FarStep step = c.begin(far_, source());
    for (int i = 0; !step.far && i < 100; ++i) step = c.begin(far_, source());
    EXPECT_TRUE(step.trial);
    EXPECT_FALSE(c.accept(step, error(0.5)));
  }
  EXPECT_NE(c.explain().find("next step: dense, trials miss the error"), std::string::npos)
      << c.explain();
}

// Trials of far_both lower tau to its minimum. far_backward begins with the first tau, and so does
// far_both when it is tried again.
TEST_F(FarControllerTest, ATauLoweredInVainIsNotKept) {
  options_.accuracy = Accuracy::far_both;
  FarController c(context_, options_);
  const auto goes_both = [&] { return c.request({.far = true}).accuracy == Accuracy::far_both; };
  std::vector<double> taus;
  bool was = true;
  for (int i = 0; i < 60; ++i) {
    const FarStep step = begin(c);
    if (step.far) {
      if (goes_both() != was || taus.empty()) taus.push_back(c.report().tau);
      was = goes_both();
      c.accept(step, !step.audit ? unaudited() : error(was ? 0.05 : 0.005));
    }
  }
  ASSERT_GE(taus.size(), 4u);
  for (const double tau : taus) EXPECT_EQ(tau, 0.003);
}

TEST_F(FarControllerTest, EachWayHasItsOwnTauAndOrdersComeAsAtFirst) {
  options_.accuracy = Accuracy::far_both;
  options_.audit_every = 1;
  FarController c(context_, options_);
  FarStep step;
  until_far(c, step);
  c.accept(step, error(0.001));
  double both = 0.0;
  const auto goes_both = [&] { return c.request({.far = true}).accuracy == Accuracy::far_both; };
  for (int i = 0; i < 100 && goes_both(); ++i) {
    step = begin(c);
    both = c.report().tau;
    if (step.far) c.accept(step, error(0.05));
  }
  EXPECT_NE(c.report().tau, both);
  EXPECT_EQ(c.report().tau, 0.003);
  // With far_backward, trials of orders have the initial interval.
  std::vector<std::int64_t> trials;
  for (int i = 0; i < 25 && !goes_both(); ++i) {
    step = begin(c);
    if (step.trial) trials.push_back(c.report().steps);
    if (step.far) c.accept(step, error(0.005));
  }
  ASSERT_GE(trials.size(), 2u);
  EXPECT_GE(trials[trials.size() - 1] - trials[trials.size() - 2], options_.refresh_every);
}

// far_both and far_backward may have the same tau.
TEST_F(FarControllerTest, AnotherAccuracyIsAnotherPlan) {
  const HeadShape shape{kTokens, kDim, kVocabCount, DType::f32};
  FarPlans plans;
  const auto kind_for = [&](Accuracy accuracy) {
    PlanRequest request;
    request.accuracy = accuracy;
    request.tau = 0.003f;
    return plans
        .get(context_, shape, {}, request,
             [&](const PlanRequest& r) {
               LossPlan plan;
               plan.kernel = "a kernel";
               plan.shape = shape;
               plan.kind =
                   r.accuracy == Accuracy::far_both ? PlanKind::far_both : PlanKind::far_backward;
               return plan;
             })
        .kind;
  };
  EXPECT_EQ(kind_for(Accuracy::far_both), PlanKind::far_both);
  EXPECT_EQ(kind_for(Accuracy::far_backward), PlanKind::far_backward);
  EXPECT_EQ(kind_for(Accuracy::far_backward), PlanKind::far_backward);
  EXPECT_EQ(plans.made(), 2);
}

}  // namespace
}  // namespace logitless::test
