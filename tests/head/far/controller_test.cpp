// Decisions of the far field's controller, from made-up statistics: no step is computed.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "head/far/far_controller.h"
#include "head/plan/far_forecast.h"
#include "logitless/tensor_file.h"
#include "support/refusal.h"

namespace logitless::test {
namespace {

TEST_F(FarControllerTest, RequestsAreThoseOfTheStep) {
  options_.memory_budget = 12345678;
  const FarController c(context_, options_);
  const PlanRequest dense = c.request({});
  EXPECT_EQ(dense.accuracy, Accuracy::exact);
  EXPECT_EQ(dense.tau, 0.0f);
  EXPECT_EQ(dense.audit_rows, 0);
  EXPECT_EQ(dense.memory_budget, 12345678u);
  const PlanRequest far = c.request({.far = true});
  EXPECT_EQ(far.accuracy, Accuracy::far_backward);
  EXPECT_EQ(far.tau, static_cast<float>(c.report().tau));
  EXPECT_EQ(far.audit_rows, 0);
  EXPECT_EQ(c.request({.far = true, .audit = true}).audit_rows, options_.audit_rows);
}

TEST_F(FarControllerTest, ATrialThenAuditsEveryFewSteps) {
  FarController c(context_, options_);
  FarStep step;
  EXPECT_EQ(until_far(c, step), 9);  // an order, and its trial at step 10
  EXPECT_TRUE(step.trial && step.audit);
  EXPECT_EQ(c.report().refreshes, 1);
  EXPECT_TRUE(c.accept(step, error(0.005)));
  EXPECT_TRUE(c.report().far);
  for (int i = 1; i <= 8; ++i) {
    step = begin(c);
    EXPECT_TRUE(step.far);
    EXPECT_FALSE(step.trial);
    EXPECT_EQ(step.audit, i % 4 == 0) << i;
    EXPECT_TRUE(c.accept(step, step.audit ? error(0.005) : unaudited()));
  }
  EXPECT_EQ(c.report().audits, 3);
  EXPECT_EQ(c.report().dense_steps, 9);
  EXPECT_EQ(c.report().worst_accepted_error, 0.005);
  EXPECT_NEAR(c.report().mean_selected, 0.1, 1e-12);
}

TEST_F(FarControllerTest, AMissedAuditIsDoneAgainAndMakesAnOrderAtOnce) {
  FarController c(context_, options_);
  FarStep step;
  until_far(c, step);
  c.accept(step, error(0.005));
  do {
    step = begin(c);
    if (!step.audit) c.accept(step, unaudited());
  } while (!step.audit);
  EXPECT_FALSE(c.accept(step, error(0.02)));
  EXPECT_EQ(c.report().repeated_steps, 1);
  EXPECT_EQ(c.report().dense_steps, 10);
  EXPECT_FALSE(c.report().far);
  EXPECT_EQ(c.report().last_error, 0.02);
  EXPECT_EQ(c.report().worst_accepted_error, 0.005);
  step = begin(c);
  EXPECT_TRUE(step.trial) << "of a new order, made in the step itself";
  EXPECT_EQ(c.report().refreshes, 2);
}

TEST_F(FarControllerTest, WhatCannotBeRepeatedStands) {
  FarController c(context_, options_);
  FarStep step;
  until_far(c, step);
  EXPECT_TRUE(c.accept(step, error(0.5), /*may_repeat=*/false));
  EXPECT_EQ(c.report().repeated_steps, 0);
  EXPECT_EQ(c.report().dense_steps, 9);
  EXPECT_FALSE(c.report().far);
  EXPECT_EQ(c.report().worst_accepted_error, 0.5) << "its gradients were kept";
}

TEST_F(FarControllerTest, TheWorstErrorKeptIsNoNumbersOneToo) {
  FarController c(context_, options_);
  FarStep step;
  until_far(c, step);
  EXPECT_TRUE(c.accept(step, error(NAN), /*may_repeat=*/false));
  EXPECT_EQ(c.report().worst_accepted_error, INFINITY);
  FarController again(context_, options_);
  again.set_state(c.state());
  EXPECT_EQ(again.report().worst_accepted_error, INFINITY);
}

TEST_F(FarControllerTest, AnOutlineIsTheStateWithoutItsOrders) {
  FarController c(context_, options_);
  EXPECT_EQ(c.outline().orders, "");
  EXPECT_EQ(c.outline().front, c.state());
  FarStep step;
  until_far(c, step);
  EXPECT_TRUE(c.accept(step, error(0.005)));
  const std::vector<std::byte> state = c.state();
  const StateOutline outline = c.outline();
  EXPECT_NE(outline.orders, "");
  EXPECT_EQ(outline.bytes, state.size());
  ASSERT_LT(outline.front.size(), state.size());
  EXPECT_TRUE(std::equal(outline.front.begin(), outline.front.end(), state.begin()));
  FarController again(context_, options_);
  again.set_state(state);
  EXPECT_EQ(again.outline().orders, outline.orders);
  EXPECT_EQ(again.outline().front, outline.front);
  std::vector<std::byte> other = state;  // another order: two of its entries swapped
  const std::size_t at = outline.front.size();
  std::swap_ranges(other.begin() + at, other.begin() + at + 8, other.begin() + at + 8);
  again.set_state(other);
  EXPECT_NE(again.outline().orders, outline.orders);
  EXPECT_NE(again.outline().front, outline.front);
}

// Ignored tokens and gradients of 0 measure nothing, so no step uses the order until a trial with
// gradients.
TEST_F(FarControllerTest, ATrialWithoutGradientsIsDueAgain) {
  for (const bool after_another : {false, true}) {
    SCOPED_TRACE(after_another);
    FarController c(context_, options_);
    FarStep step;
    until_far(c, step);
    if (after_another) {
      EXPECT_TRUE(c.accept(step, error(0.009)));
      do {
        step = begin(c);
        if (!step.trial) c.accept(step, step.audit ? error(0.009) : unaudited());
      } while (!step.trial);
    }
    EXPECT_EQ(c.report().refreshes, after_another ? 2 : 1);
    for (int i = 0; i < 3; ++i) {
      EXPECT_TRUE(c.accept(step, i == 1 ? error(0.0) : without_tokens()));
      EXPECT_NE(c.explain().find("next step: far_backward, a trial had no gradient"),
                std::string::npos)
          << c.explain();
      FarController resumed(context_, options_);
      resumed.set_state(c.state());
      EXPECT_TRUE(begin(resumed).trial);
      // If the plan is exact, the trial stays due, too.
      exact_.kind = PlanKind::dense;
      EXPECT_FALSE(c.begin(exact_, source()).far);
      step = begin(c);
      EXPECT_TRUE(step.far && step.trial && step.audit);
    }
    const std::int64_t audits = c.report().audits;
    EXPECT_TRUE(c.accept(step, error(0.005)));
    EXPECT_EQ(c.report().audits, audits + 1);
    step = begin(c);
    EXPECT_TRUE(step.far && !step.trial && !step.audit);
    // The same holds for a due audit.
    for (; !step.audit; step = begin(c)) c.accept(step, unaudited());
    EXPECT_TRUE(c.accept(step, error(0.0)));
    EXPECT_TRUE(begin(c).audit);
    EXPECT_EQ(c.report().audits, audits + 1);
  }
}

// After a failed step, an order, its trial or an audit is due again.
TEST_F(FarControllerTest, AStepThatThrowsIsNone) {
  for (const std::int64_t delay : {0, 3}) {
    SCOPED_TRACE(delay);
    options_.refresh_delay = delay;
    FarController one(context_, options_), other(context_, options_);
    for (int i = 0; i < 40; ++i) {
      // Reading the state waits for an order that is being made, so only some steps read it.
      const bool asked = i % 4 == 0;
      const std::vector<std::byte> before = asked ? other.state() : std::vector<std::byte>();
      EXPECT_EQ(message_of([&] { fail(other, source()); }), "no such target");
      if (asked) {
        ASSERT_EQ(other.state(), before) << i;
      }
      const FarStep a = begin(one), b = begin(other);
      ASSERT_EQ(a.far, b.far) << i;
      ASSERT_EQ(a.trial, b.trial) << i;
      ASSERT_EQ(a.audit, b.audit) << i;
      if (!a.far) continue;
      // Some audits miss the error.
      const FarFieldStatistics s = a.audit ? error(i % 3 == 0 ? 0.02 : 0.006) : unaudited();
      ASSERT_EQ(one.accept(a, s), other.accept(b, s)) << i;
    }
    EXPECT_EQ(one.state(), other.state());
    EXPECT_GE(one.report().refreshes, 2);
    EXPECT_GE(one.report().repeated_steps, 1);
  }
}

TEST_F(FarControllerTest, AnOrderThatCannotBeMadeIsBegunAgain) {
  for (const std::int64_t delay : {0, 3}) {
    SCOPED_TRACE(delay);
    options_.refresh_delay = delay;
    FarController c(context_, options_);
    for (int i = 1; i < 10; ++i) EXPECT_FALSE(begin(c).far);
    if (delay > 0) {  // the thread that makes the order fails, and the step that waits for it
                      // throws
      EXPECT_NO_THROW(c.begin(far_, mismatched()));
      EXPECT_FALSE(begin(c).far);
      EXPECT_FALSE(begin(c).far);
      EXPECT_NE(message_of([&] { fail(c, source()); }), "no such target");
    } else {
      EXPECT_NE(message_of([&] { fail(c, mismatched()); }), "no such target");
    }
    const std::int64_t steps = delay > 0 ? 12 : 9;
    EXPECT_EQ(c.report().steps, steps);
    EXPECT_EQ(c.report().refreshes, 0);
    FarController resumed(context_, options_);
    EXPECT_EQ(message_of([&] { resumed.set_state(c.state()); }), "accepted");
    FarStep step;
    EXPECT_EQ(until_far(c, step), delay) << "made of the next step's tokens";
    EXPECT_TRUE(step.trial);
    EXPECT_EQ(c.report().refreshes, 1);
    EXPECT_EQ(c.order().vocab(), kVocabCount);
  }
}

// A copy of the context has its trace and memory meter.
TEST_F(FarControllerTest, KeepsItsContext) {
  std::vector<std::string> lines;
  ContextOptions traced = one_;
  traced.trace = [&](std::string_view line) { lines.emplace_back(line); };
  Context context(traced);
  const FarController c(context, options_);
  const MemoryMeter* const meter = &context.memory();
  context = Context(one_);
  EXPECT_EQ(&c.context().memory(), meter);
  c.context().trace("a line");
  EXPECT_EQ(lines, std::vector<std::string>{"a line"});
}

TEST_F(FarControllerTest, IntervalsAreNeverShorterThanTheFirst) {
  options_.refresh_every = 10000;  // for example 100, of 100 batches each
  FarController c(context_, options_);
  std::vector<std::int64_t> trials;
  while (c.report().steps < 40000) {
    const FarStep step = begin(c);
    if (step.trial) trials.push_back(c.report().steps);
    if (step.far) c.accept(step, step.audit ? error(0.004) : unaudited());
  }
  EXPECT_EQ(trials, (std::vector<std::int64_t>{10000, 20000, 30000, 40000}));
}

TEST_F(FarControllerTest, AStateOfBeforeStepsCouldGoBackwardIsTaken) {
  FarController c(context_, options_);
  FarStep step;
  until_far(c, step);
  c.accept(step, error(0.005));
  const std::string path = testing::TempDir() + "far_state_before_" + std::to_string(::getpid());
  c.save(path);
  {
    const TensorFile now(path);
    std::vector<NamedTensor> tensors;
    for (const std::string& tensor : now.names()) {
      ConstTensorView view = now.tensor(tensor);
      if (tensor == "counts") view = ConstTensorView(view.data(), view.dtype(), {16});
      if (tensor == "numbers") view = ConstTensorView(view.data(), view.dtype(), {4});
      tensors.push_back({tensor, view});
    }
    write_safetensors(path + ".before", tensors, now.metadata());
  }
  FarController again(context_, options_);
  again.load(path + ".before");
  EXPECT_EQ(again.explain(), c.explain());
  std::remove(path.c_str());
  std::remove((path + ".before").c_str());
}

TEST_F(FarControllerTest, TrialsLowerTauThenWaitLongerEachTime) {
  options_.error = 1e-6;
  FarController c(context_, options_);
  std::vector<int> waits;
  std::vector<double> taus;
  for (int trial = 0; trial < 6; ++trial) {
    FarStep step;
    waits.push_back(until_far(c, step));
    taus.push_back(c.report().tau);
    EXPECT_TRUE(step.trial);
    EXPECT_FALSE(c.accept(step, error(0.5)));
  }
  // Three trials with the first order; with the least tau, one with each.
  EXPECT_EQ(waits, (std::vector<int>{9, 0, 0, 9, 19, 39}));
  EXPECT_GT(taus[0], taus[1]);
  EXPECT_GT(taus[1], taus[2]);
  EXPECT_EQ(taus[2], taus[3]);
  EXPECT_EQ(c.report().repeated_steps, 6);
}

// The miss may be due to the choice of audited tokens, since tau has kept the error before. A
// second miss lowers tau further.
TEST_F(FarControllerTest, AMissOfAnOrdersFirstTrialLowersTauALittle) {
  FarController c(context_, options_);
  FarStep step;
  until_far(c, step);
  EXPECT_TRUE(c.accept(step, error(0.005)));
  do {
    step = begin(c);
    if (!step.trial) c.accept(step, step.audit ? error(0.005) : unaudited());
  } while (!step.trial);
  const double before = c.report().tau;
  EXPECT_FALSE(c.accept(step, error(0.5)));
  EXPECT_NEAR(c.report().tau, 0.7 * before, 1e-12);
  step = begin(c);
  EXPECT_TRUE(step.trial);
  EXPECT_FALSE(c.accept(step, error(0.0125)));
  EXPECT_NEAR(c.report().tau, 0.4 * 0.7 * before, 1e-12);
}

TEST_F(FarControllerTest, TauRisesWhereErrorsAllow) {
  FarController c(context_, options_);
  FarStep step;
  until_far(c, step);
  const double before = c.report().tau;
  c.accept(step, error(options_.error / 4));
  EXPECT_NEAR(c.report().tau, 1.25 * before, 1e-12);
}

// tau does not return at once to a value with which an audit has missed.
TEST_F(FarControllerTest, TauFallsWhereAnAuditMissesAndRisesSlowlyFromThenOn) {
  FarController c(context_, options_);
  FarStep step;
  until_far(c, step);
  EXPECT_TRUE(c.accept(step, error(options_.error / 4)));
  double tau = c.report().tau;
  do {
    step = begin(c);
    ASSERT_TRUE(step.far);
    if (!step.audit) c.accept(step, error(-1.0));
  } while (!step.audit);
  EXPECT_FALSE(step.trial);
  EXPECT_FALSE(c.accept(step, error(2 * options_.error)));
  EXPECT_NEAR(c.report().tau, 0.7 * tau, 1e-12);
  tau = c.report().tau;
  until_far(c, step);
  EXPECT_TRUE(step.trial);
  EXPECT_TRUE(c.accept(step, error(options_.error / 4)));
  EXPECT_NEAR(c.report().tau, 1.05 * tau, 1e-12);
  // A resumed run continues in the same way.
  FarController again(context_, options_);
  again.set_state(c.state());
  tau = again.report().tau;
  do {
    step = begin(again);
    ASSERT_TRUE(step.far);
    if (!step.audit) again.accept(step, error(-1.0));
  } while (!step.audit);
  EXPECT_TRUE(again.accept(step, error(options_.error / 4)));
  EXPECT_NEAR(again.report().tau, 1.05 * tau, 1e-12);
}

// Such a tau may select so many tiles that the planner takes exact plans, which are never audited.
// After a while, the first tau is used again.
TEST_F(FarControllerTest, ATauThatThePlannerRefusesIsGivenUp) {
  FarController c(context_, options_);
  const double first = c.report().tau;
  FarStep step;
  until_far(c, step);
  EXPECT_TRUE(c.accept(step, error(options_.error / 2)));
  do {
    step = begin(c);
    ASSERT_TRUE(step.far);
    if (!step.audit) c.accept(step, error(-1.0));
  } while (!step.audit);
  EXPECT_FALSE(c.accept(step, error(2 * options_.error)));
  EXPECT_LT(c.report().tau, first);
  const LossPlan far = far_;
  far_ = LossPlan();
  EXPECT_FALSE(begin(c).far);
  EXPECT_EQ(c.report().tau, first);
  far_ = far;
  EXPECT_GT(until_far(c, step), 1) << "at once";
  EXPECT_TRUE(step.trial);
}

TEST_F(FarControllerTest, TooManyTilesKeptMeansDense) {
  FarController c(context_, options_);
  FarStep step;
  until_far(c, step);
  FarFieldStatistics all = error(0.0, 1.0);
  all.dense_fallback = true;
  EXPECT_TRUE(c.accept(step, all));
  EXPECT_FALSE(c.report().far);
  EXPECT_FALSE(begin(c).far);
}

TEST_F(FarControllerTest, ExplainsInNumbersOfThreeDigits) {
  FarController c(context_, options_);
  EXPECT_EQ(c.explain().find("last"), std::string::npos) << "nothing was audited";
  FarStep step;
  until_far(c, step);
  EXPECT_TRUE(c.accept(step, error(0.00512345, 0.1234567)));
  EXPECT_NE(c.explain().find(
                "error wanted 0.01, last 0.00512, worst accepted 0.00512; tau 0.003, 12.3 % "),
            std::string::npos)
      << c.explain();
}

TEST_F(FarControllerTest, RefusesAStateThatNoneCouldHave) {
  const std::string path = testing::TempDir() + "far_state_" + std::to_string(::getpid());
  FarController c(context_, options_);
  c.save(path);
  const TensorFile good(path);
  const auto crafted = [&](const char* name, std::size_t index, auto value) {
    std::vector<NamedTensor> tensors;
    std::vector<std::byte> changed;
    for (const std::string& tensor : good.names()) {
      ConstTensorView view = good.tensor(tensor);
      if (tensor == name) {
        const auto* data = static_cast<const std::byte*>(view.data());
        changed.assign(data, data + view.bytes());
        std::memcpy(changed.data() + index * sizeof(value), &value, sizeof(value));
        view = ConstTensorView(changed.data(), view.dtype(), {view.size(0)});
      }
      tensors.push_back({tensor, view});
    }
    const std::string bad = path + ".bad";
    write_safetensors(bad, tensors, good.metadata());
    FarController other(context_, options_);
    EXPECT_THROW(other.load(bad), InvalidArgument) << name << " " << index << ": " << value;
    std::remove(bad.c_str());
  };
  for (std::size_t i = 0; i < 15; ++i) {
    crafted("counts", i, INT64_MAX);
    crafted("counts", i, INT64_MIN);
  }
  crafted("counts", 8, std::int64_t{0});               // interval
  crafted("counts", 10, std::int64_t{-1});             // wait
  crafted("counts", 13, (std::int64_t{1} << 32) + 1);  // trials
  crafted("counts", 16, std::int64_t{1});              // changed kind, with far_backward
  for (const std::size_t i : {17, 18, 19}) crafted("counts", i, std::int64_t{-1});
  for (const double value : {-1.0, 2.0, 1e300, static_cast<double>(NAN)}) {
    crafted("numbers", 2, value);  // tau
    crafted("numbers", 3, value);  // selected fraction
    crafted("numbers", 4, value);  // misses of far_both
    crafted("numbers", 5, value);  // tau of the other kind
  }
  FarController again(context_, options_);
  again.load(path);
  std::remove(path.c_str());
}

TEST_F(FarControllerTest, AnExactPlanMeansDenseAndSaysWhy) {
  FarController c(context_, options_);
  exact_.kind = PlanKind::dense;
  for (int i = 0; i < 30; ++i) EXPECT_FALSE(c.begin(exact_, source()).far);
  EXPECT_EQ(c.report().dense_steps, 30);
  EXPECT_EQ(c.report().refreshes, 0);
  EXPECT_NE(c.explain().find("next step: dense"), std::string::npos);
}

TEST_F(FarControllerTest, AnOrderRemembersTheAverageOfTheOneBefore) {
  FarController c(context_, options_);
  FarStep step;
  until_far(c, step);
  const std::vector<float> before(c.order().average().begin(), c.order().average().end());
  for (float& x : hidden_) x = 1.0f - x;
  for (int i = 0; i < 100 && c.report().refreshes < 2; ++i) {
    c.accept(step, step.audit ? error(0.005) : unaudited());
    step = begin(c);
  }
  ASSERT_EQ(c.report().refreshes, 2);
  const std::vector<float> now =
      average_of(context_, sample_of(source(), options_.sample_rows, /*copy=*/false, nullptr));
  double off = 0.0, changed = 0.0;
  for (std::size_t i = 0; i < now.size(); ++i) {
    off += std::abs(c.order().average()[i] - now[i]);
    changed += std::abs(before[i] - now[i]);
  }
  EXPECT_GT(changed, 0.1);
  EXPECT_GT(off, 0.1 * changed);
  EXPECT_LT(off, 0.9 * changed);
}

TEST_F(FarControllerTest, OrdersSampleEvenlySpacedTokens) {
  const OrderSample looked = sample_of(source(), 3, /*copy=*/false, &context_.memory());
  EXPECT_EQ(looked.weight.data(), weight_.data());
  const OrderSample copied = sample_of(source(), 3, /*copy=*/true, &context_.memory());
  EXPECT_NE(copied.weight.data(), static_cast<const void*>(weight_.data()));
  EXPECT_TRUE(
      std::equal(weight_.begin(), weight_.end(), static_cast<const float*>(copied.weight.data())));
  ASSERT_EQ(copied.hidden.size(0), 3);
  const auto* rows = static_cast<const float*>(copied.hidden.data());
  const std::int64_t from[] = {0, 2, 5};
  for (int i = 0; i < 3; ++i)
    for (std::int64_t k = 0; k < kDim; ++k)
      EXPECT_EQ(rows[i * kDim + k], hidden_[static_cast<std::size_t>(from[i] * kDim + k)]);
  EXPECT_EQ(sample_of(source(), 99, false, nullptr).hidden.size(0), kTokens);
}

}  // namespace
}  // namespace logitless::test
