// The controller of the far field in small synthetic runs: dense steps, the takeover of an order,
// the effect of audits, and reproducible runs, also when saved and resumed.
#include "head/far/head.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "head/far/far_training.h"
#include "support/problem.h"
#include "support/temp_dir.h"

namespace logitless::test {
namespace {

double relative(const std::vector<float>& a, const std::vector<float>& b) {
  return relative_error(std::vector<double>(a.begin(), a.end()),
                        std::vector<double>(b.begin(), b.end()));
}

// Returns d_hidden of results().
std::vector<float> hidden_of(const std::vector<float>& results) {
  const auto first = results.begin() + 1 + Training::kTokens;
  return {first, first + Training::kTokens * Training::kDim};
}

class FarHead : public testing::TestWithParam<Accuracy> {};

TEST_P(FarHead, IsDenseUntilATrialOfTheFirstOrder) {
  const Context context = context_of();
  FarFieldHead head(context, quick(GetParam()));
  EXPECT_NE(head.explain().find("next step: dense"), std::string::npos) << head.explain();
  EXPECT_EQ(head.report().last_error, -1.0);
  Training t;
  std::int64_t dense = 0, audits = 0, far = 0, last_audit = 0;
  double selected = 0, worst = 0;
  for (std::int64_t step = 1; step <= 16; ++step) {
    SCOPED_TRACE(step);
    const bool next_far = head.report().far;
    const std::vector<float> exact = t.dense(context);
    const LossStatistics s = t.step(head);
    const FarFieldReport& r = head.report();
    // An order is begun at step 5, and taken over and tried at 8.
    EXPECT_EQ(far_step(s), step >= 8);
    EXPECT_EQ(head.order().empty(), step < 8);
    EXPECT_EQ(next_far, step > 8) << "what `far` said of this step";
    if (!far_step(s)) {
      ++dense;
      EXPECT_EQ(t.results(), exact);
    } else {
      ++far;
      selected += s.far.selected;
      EXPECT_GT(s.far.selected, 0.0);
      EXPECT_LT(s.far.selected, 0.6);
      EXPECT_NE(t.results(), exact);
      // Steps between audits are nearly as good, because the weights move little.
      EXPECT_LE(relative(t.d_hidden, hidden_of(exact)), 0.1);
    }
    if (audited(s)) {
      ++audits;
      EXPECT_EQ(s.far.audited_tokens, Training::kTokens);
      const double error = GetParam() == Accuracy::far_both
                               ? std::max(s.far.audited_error, s.far.audited_lse_error)
                               : s.far.audited_error;
      EXPECT_EQ(r.last_error, error);
      EXPECT_LE(error, 0.05) << "the heads of this test are to be kept";
      worst = std::max(worst, error);
      last_audit = step;
      // The same error against another exact plan, up to rounding.
      EXPECT_NEAR(relative(t.d_hidden, hidden_of(exact)), s.far.audited_error, 1e-5);
    } else if (far_step(s)) {
      EXPECT_LT(step - last_audit, 3) << "an audit was due";
    }
    EXPECT_EQ(r.steps, step);
    EXPECT_EQ(r.dense_steps, dense);
    EXPECT_EQ(r.repeated_steps, 0);
    EXPECT_EQ(r.audits, audits);
    EXPECT_EQ(r.worst_accepted_error, worst);
    if (far > 0) {
      EXPECT_NEAR(r.mean_selected, selected / static_cast<double>(far), 1e-12);
    }
    if (step == 8) {
      EXPECT_EQ(r.refreshes, 1);
      EXPECT_TRUE(audited(s)) << "a trial is audited";
      EXPECT_EQ(head.order().has_moments(), GetParam() == Accuracy::far_both);
      EXPECT_NE(head.explain().find(std::string("next step: ") + std::string(name_of(GetParam()))),
                std::string::npos)
          << head.explain();
    }
    t.move();
  }
  EXPECT_GE(head.report().refreshes, 2) << "an order every five steps or a few more";
}

TEST_P(FarHead, AnAuditNoticesNewWeights) {
  const Context context = context_of();
  FarFieldHead head(context, [] {
    FarFieldOptions o = quick(GetParam());
    o.refresh_every = 20;  // only a missed audit makes an order soon
    return o;
  }());
  Training t;
  for (int step = 1; step <= 24; ++step) t.step(head);
  ASSERT_TRUE(head.report().far) << head.explain();
  t.shake();
  std::int64_t noticed = 0;
  for (std::int64_t step = 25; noticed == 0 && step <= 28; ++step) {
    const LossStatistics s = t.step(head);
    EXPECT_EQ(far_step(s), head.report().far);
    if (!head.report().far) noticed = step;
  }
  ASSERT_GT(noticed, 0) << "an audit every 3 steps";
  EXPECT_EQ(t.results(), t.dense(context)) << "done again densely";
  EXPECT_EQ(head.report().repeated_steps, 1);
  EXPECT_GT(head.report().last_error, 0.05);
  EXPECT_LE(head.report().worst_accepted_error, 0.05);
  const std::int64_t refreshes = head.report().refreshes;
  for (std::int64_t after = 1; after <= 5; ++after) {
    const LossStatistics s = t.step(head);
    // Begun at the next step and taken over refresh_delay = 3 steps later.
    EXPECT_EQ(head.report().refreshes, refreshes + (after >= 4 ? 1 : 0)) << after;
    EXPECT_EQ(far_step(s), after >= 4) << after;
    if (after == 4) {
      EXPECT_TRUE(audited(s));
    }
  }
  EXPECT_TRUE(head.report().far) << head.explain();
  EXPECT_EQ(head.report().repeated_steps, 1);
}

TEST_P(FarHead, AccumulatedStepsAreNotDoneAgain) {
  const Context context = context_of();
  FarFieldHead head(context, quick(GetParam()));
  Training t;
  CrossEntropyOptions add;
  add.accumulate = true;
  while (!head.report().far && head.report().steps < 20) t.step(head, add);
  ASSERT_TRUE(head.report().far);
  t.shake();
  for (int step = 0; step < 4 && head.report().far; ++step) {
    std::fill(t.d_weight.begin(), t.d_weight.end(), 0.25f);
    std::fill(t.d_hidden.begin(), t.d_hidden.end(), 0.25f);
    const LossStatistics s = t.step(head, add);
    EXPECT_TRUE(far_step(s));
  }
  EXPECT_FALSE(head.report().far);
  EXPECT_EQ(head.report().repeated_steps, 0);
  EXPECT_GT(head.report().last_error, 0.05);
  EXPECT_EQ(head.report().worst_accepted_error, head.report().last_error) << "what stays is kept";
  // It is added once: the difference from 0.25 has a gradient's size and is not the exact gradient.
  const std::vector<float> exact = t.dense(context);
  double error = 0, sum = 0, size = 0;
  for (std::size_t i = 0; i < t.d_hidden.size(); ++i) {
    const double want = exact[1 + Training::kTokens + i], got = t.d_hidden[i] - 0.25;
    error += std::pow(got - want, 2);
    sum += got * want;
    size += want * want;
  }
  EXPECT_GT(error, 0.05 * 0.05 * size);
  EXPECT_LT(sum, 1.7 * size);
  EXPECT_FALSE(far_step(t.step(head, add)));
}

// Returns the outputs of each step up to the last.
std::vector<std::vector<float>> run_of(FarFieldHead& head, Training& t, std::int64_t last,
                                       FarFieldReport* report = nullptr) {
  std::vector<std::vector<float>> all;
  while (head.report().steps < last) {
    t.step(head);
    all.push_back(t.results());
    t.move();
  }
  if (report != nullptr) *report = head.report();
  return all;
}

TEST_P(FarHead, RunsRepeatToTheBitAndResume) {
  const TempDir directory;
  const std::string path = directory.file("state.safetensors");
  constexpr std::int64_t kLast = 14;
  FarFieldReport whole_report;
  std::vector<std::vector<float>> whole;
  {
    const Context context = context_of();
    FarFieldHead head(context, quick(GetParam()));
    Training t;
    whole = run_of(head, t, kLast, &whole_report);
    EXPECT_TRUE(whole_report.far);
  }
  {  // another run, with other threads
    const Context context = context_of(3);
    FarFieldHead head(context, quick(GetParam()));
    Training t;
    FarFieldReport report;
    EXPECT_TRUE(run_of(head, t, kLast, &report) == whole);
    expect_same(report, whole_report);
  }
  // Saved before the first order, while it is made (5 to 8), at its takeover, and after.
  const Context context = context_of();
  FarFieldHead saved(context, quick(GetParam()));
  Training then;
  for (const std::int64_t at : {2, 5, 7, 8, 10}) {
    SCOPED_TRACE(at);
    run_of(saved, then, at);
    saved.save(path);
    FarFieldHead resumed(context, quick(GetParam()));
    resumed.load(path);
    EXPECT_EQ(resumed.report().steps, at);
    EXPECT_EQ(resumed.order().empty(), at < 8);
    Training t = then;
    FarFieldReport report;
    const std::vector<std::vector<float>> rest = run_of(resumed, t, kLast, &report);
    EXPECT_TRUE(std::equal(rest.begin(), rest.end(), whole.begin() + at));
    expect_same(report, whole_report);
  }
}

TEST_P(FarHead, SavingChangesNothing) {
  const TempDir directory;
  const std::string path = directory.file("state.safetensors");
  const Context context = context_of();
  FarFieldHead one(context, quick(GetParam())), other(context, quick(GetParam()));
  Training a, b;
  for (int step = 1; step <= 10; ++step) {
    a.step(one);
    b.step(other);
    other.save(path);
    ASSERT_EQ(a.results(), b.results()) << step;
    a.move();
    b.move();
  }
  expect_same(one.report(), other.report());
}

TEST_P(FarHead, AnOrderOfTheStepItself) {
  const Context context = context_of();
  FarFieldOptions o = quick(GetParam());
  o.refresh_delay = 0;
  FarFieldHead head(context, o);
  Training t;
  for (int step = 1; step <= 7; ++step) {
    const LossStatistics s = t.step(head);
    EXPECT_EQ(far_step(s), step >= 5) << step;
    EXPECT_EQ(audited(s), step == 5) << step;
    t.move();
  }
  EXPECT_EQ(head.report().refreshes, 1);
}

TEST_P(FarHead, ABorrowedWorkspaceIsTakenOnceAStep) {
  const Context context = context_of();
  FarFieldOptions o = quick(GetParam());
  o.error = 1e-6;  // audits miss it
  FarFieldHead own(context, o), borrowing(context, o);
  FarPlans& plans = FarFieldAccess::of(borrowing).plans;
  Training a, b;
  for (int step = 1; step <= 10; ++step) {
    SCOPED_TRACE(step);
    std::vector<Buffer> allocated;
    plans.borrow([&](std::size_t bytes) {
      Buffer& memory = allocated.emplace_back(bytes, nullptr);
      std::memset(memory.data(), 0xff, bytes);  // NaN
      return Workspace(memory.data(), bytes);
    });
    b.step(borrowing);
    plans.borrow(nullptr);
    a.step(own);
    EXPECT_EQ(allocated.size(), 1u) << "a repeated step has the same workspace";
    EXPECT_EQ(a.results(), b.results());
    a.move();
    b.move();
  }
  EXPECT_GE(own.report().repeated_steps, 1);
  expect_same(own.report(), borrowing.report());
}

INSTANTIATE_TEST_SUITE_P(Accuracies, FarHead,
                         testing::Values(Accuracy::far_backward, Accuracy::far_both),
                         [](const auto& a) { return std::string(name_of(a.param)); });

// Each step takes another sample, and two of them cover every block of every tile.
TEST(FarHeadSample, StepsAverageToTheExactGradientOfTheWeights) {
  const Context context = context_of();
  FarFieldOptions o = quick();
  o.refresh_delay = 0;
  o.sample_every = 2;
  FarFieldHead head(context, o);
  Training t;
  const std::vector<float> exact = t.dense(context);
  const std::vector<float> exact_weight(exact.end() - static_cast<std::ptrdiff_t>(t.weight.size()),
                                        exact.end());
  std::vector<float> mean(t.weight.size());
  double sampled = 0, selected = 0;
  for (int step = 1; step <= 7; ++step) {
    const LossStatistics s = t.step(head);
    ASSERT_EQ(far_step(s), step >= 5) << step;
    if (step < 6) continue;
    sampled += s.far.sampled;
    selected = s.far.selected;
    EXPECT_GT(relative(t.d_weight, exact_weight), 1e-3);
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += 0.5f * t.d_weight[i];
  }
  EXPECT_NEAR(sampled, 1 - selected, 1e-12);
  EXPECT_LE(relative(mean, exact_weight), 1e-5);
}

}  // namespace
}  // namespace logitless::test
