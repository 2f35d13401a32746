// The controller of the far field over small synthetic runs: when it is dense, when an order is
// taken over, what an audit does, and that runs repeat, saved and resumed ones too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <utility>

#include "logitless/far_field.h"
#include "logitless/tensor_file.h"
#include "support/common_kernel.h"
#include "support/problem.h"
#include "support/recording.h"
#include "support/temp_dir.h"

namespace logitless::test {
namespace {

// Words in clusters, shuffled; tokens of a few topics; both moved a little by every step.
struct Training {
  explicit Training(std::int64_t words_wanted = 65536)
      : vocab(words_wanted), weight(vocab * kDim), d_weight(vocab * kDim) {
    std::mt19937_64 random(5);
    std::normal_distribution<float> normal;
    std::vector<std::int64_t> words(vocab);
    for (std::int64_t j = 0; j < vocab; ++j) words[j] = j;
    std::shuffle(words.begin(), words.end(), random);
    float center[kDim];
    for (std::int64_t at = 0; at < vocab; ++at) {
      for (std::int64_t k = 0; k < kDim; ++k) {
        if (at % 128 == 0) center[k] = normal(random);
        weight[words[at] * kDim + k] = center[k] + 0.1f * normal(random);
      }
    }
    for (std::int64_t i = 0; i < kTokens; ++i) {
      for (std::int64_t k = 0; k < kDim; ++k) {
        if (i % (kTokens / 4) == 0) center[k] = 1.2f * normal(random);
        hidden.push_back(center[k] + 0.2f * normal(random));
      }
      targets.push_back(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(vocab)));
    }
  }
  CrossEntropyInputs inputs() const {
    CrossEntropyInputs in;
    in.hidden = ConstTensorView(hidden.data(), DType::f32, {kTokens, kDim});
    in.weight = ConstTensorView(weight.data(), DType::f32, {vocab, kDim});
    in.targets = ConstTensorView(targets.data(), DType::i64, {kTokens});
    return in;
  }
  CrossEntropyOutputs outputs() {
    CrossEntropyOutputs out;
    out.loss = TensorView(&loss, DType::f32, std::span<const std::int64_t>());
    out.lse = TensorView(lse.data(), DType::f32, {kTokens});
    out.d_hidden = TensorView(d_hidden.data(), DType::f32, {kTokens, kDim});
    out.d_weight = TensorView(d_weight.data(), DType::f32, {vocab, kDim});
    return out;
  }
  LossStatistics step(FarFieldHead& head, const CrossEntropyOptions& options = {}) {
    return head.step(options, inputs(), outputs());
  }
  void move(float rate = 0.5f) {
    for (std::size_t i = 0; i < weight.size(); ++i) weight[i] -= rate * d_weight[i];
    for (std::size_t i = 0; i < hidden.size(); ++i) hidden[i] -= rate * d_hidden[i];
  }
  // Words change places: an order of before is worth nothing.
  void shake() { std::reverse(weight.begin(), weight.end()); }
  // Every output of the last step.
  std::vector<float> results() const {
    std::vector<float> all = {loss};
    for (const auto* v : {&lse, &d_hidden, &d_weight}) all.insert(all.end(), v->begin(), v->end());
    record("results", std::as_bytes(std::span(all)));
    return all;
  }
  // What the exact plan gives.
  std::vector<float> dense(const Context& context) const {
    Training copy = *this;
    PlanRequest request;
    request.device = context.device();
    const LossPlan plan = plan_cross_entropy({}, copy.inputs(), copy.outputs(), request);
    cross_entropy(context, plan, {}, copy.inputs(), copy.outputs(), Workspace(context, plan));
    return copy.results();
  }

  static constexpr std::int64_t kTokens = 128, kDim = 8;
  std::int64_t vocab;
  std::vector<float> weight, hidden, d_weight;
  std::vector<float> lse = std::vector<float>(kTokens),
                     d_hidden = std::vector<float>(kTokens * kDim);
  std::vector<std::int64_t> targets;
  float loss = 0;
};

// One thread unless threads are what is tested: those of a busy machine wait for each other.
Context context_of(int threads = 1) {
  ContextOptions options;
  options.threads = threads;
  options.kernel = common_kernel();
  return Context(options);
}

FarFieldOptions quick(Accuracy accuracy = Accuracy::far_backward) {
  FarFieldOptions o;
  o.accuracy = accuracy;
  o.error = 0.05;
  o.audit_rows = 1000;
  o.audit_every = 3;
  o.refresh_every = 5;
  o.refresh_delay = 3;
  o.sample_rows = 128;
  return o;
}

bool far_step(const LossStatistics& s) { return s.far.passes > 0.0; }
bool audited(const LossStatistics& s) { return s.far.audited_error >= 0.0; }

double relative(const std::vector<float>& a, const std::vector<float>& b) {
  return relative_error(std::vector<double>(a.begin(), a.end()),
                        std::vector<double>(b.begin(), b.end()));
}

// d_hidden of results().
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
  double kept = 0, worst = 0;
  for (std::int64_t step = 1; step <= 16; ++step) {
    SCOPED_TRACE(step);
    const bool next_far = head.report().far;
    const std::vector<float> exact = t.dense(context);
    const LossStatistics s = t.step(head);
    const FarFieldReport& r = head.report();
    // An order is begun at step 5 and taken over, and tried, at 8.
    EXPECT_EQ(far_step(s), step >= 8);
    EXPECT_EQ(head.order().empty(), step < 8);
    EXPECT_EQ(next_far, step > 8) << "what `far` said of this step";
    if (!far_step(s)) {
      ++dense;
      EXPECT_EQ(t.results(), exact);
    } else {
      ++far;
      kept += s.far.kept;
      EXPECT_GT(s.far.kept, 0.0);
      EXPECT_LT(s.far.kept, 0.6);
      EXPECT_NE(t.results(), exact);
      // Steps between audits are as good, nearly: the weights move little.
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
      // The same error against another exact plan: roundings apart.
      EXPECT_NEAR(relative(t.d_hidden, hidden_of(exact)), s.far.audited_error, 1e-5);
    } else if (far_step(s)) {
      EXPECT_LT(step - last_audit, 3) << "an audit was due";
    }
    EXPECT_EQ(r.steps, step);
    EXPECT_EQ(r.dense_steps, dense);
    EXPECT_EQ(r.repeated_steps, 0);
    EXPECT_EQ(r.audits, audits);
    EXPECT_EQ(r.worst_kept_error, worst);
    if (far > 0) {
      EXPECT_NEAR(r.mean_kept, kept / static_cast<double>(far), 1e-12);
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
    o.refresh_every = 20;  // only the audit's own notice makes an order soon
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
  EXPECT_LE(head.report().worst_kept_error, 0.05);
  const std::int64_t refreshes = head.report().refreshes;
  for (std::int64_t after = 1; after <= 5; ++after) {
    const LossStatistics s = t.step(head);
    // Begun at the next step, there three later: at refresh_delay, and kept.
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
  EXPECT_LE(head.report().worst_kept_error, 0.05);
  // Once, not twice: what was added is a gradient's size from 0.25, and not the exact one's.
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

// The outputs of each step up to the last.
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

void expect_same(const FarFieldReport& a, const FarFieldReport& b) {
  EXPECT_EQ(a.steps, b.steps);
  EXPECT_EQ(a.dense_steps, b.dense_steps);
  EXPECT_EQ(a.audits, b.audits);
  EXPECT_EQ(a.refreshes, b.refreshes);
  EXPECT_EQ(a.last_error, b.last_error);
  EXPECT_EQ(a.worst_kept_error, b.worst_kept_error);
  EXPECT_EQ(a.tau, b.tau);
  EXPECT_EQ(a.mean_kept, b.mean_kept);
  EXPECT_EQ(a.far, b.far);
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
  {  // another run, of other threads
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

INSTANTIATE_TEST_SUITE_P(Accuracies, FarHead,
                         testing::Values(Accuracy::far_backward, Accuracy::far_both),
                         [](const auto& a) { return std::string(name_of(a.param)); });

// Up to three trials with one order, then waits, each twice as long as the one before: also where
// the smaller tau of the next trial would keep too much of a vocabulary to be worth one.
// Each step takes another sample, which two of them complete: every block of every tile.
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
  double sampled = 0, kept = 0;
  for (int step = 1; step <= 7; ++step) {
    const LossStatistics s = t.step(head);
    ASSERT_EQ(far_step(s), step >= 5) << step;
    if (step < 6) continue;
    sampled += s.far.sampled;
    kept = s.far.kept;
    EXPECT_GT(relative(t.d_weight, exact_weight), 1e-3);
    for (std::size_t i = 0; i < mean.size(); ++i) mean[i] += 0.5f * t.d_weight[i];
  }
  EXPECT_NEAR(sampled, 1 - kept, 1e-12);
  EXPECT_LE(relative(mean, exact_weight), 1e-5);
}

TEST(FarHeadPolicy, AnImpossibleErrorStaysDense) {
  for (const std::int64_t vocab : {131072, 32768}) {
    SCOPED_TRACE(vocab);
    const Context context = context_of();
    FarFieldOptions o = quick();
    o.error = 1e-9;
    o.refresh_every = 4;
    o.refresh_delay = 0;
    FarFieldHead head(context, o);
    Training t(vocab);
    std::vector<std::int64_t> taken;
    std::int64_t repeated = 0;
    for (std::int64_t step = 1; step <= 24; ++step) {
      const std::int64_t before = head.report().refreshes;
      const LossStatistics s = t.step(head);
      if (head.report().refreshes > before) taken.push_back(step);
      EXPECT_FALSE(far_step(s)) << "done again, so the exact plan's";
      EXPECT_FALSE(head.report().far);
      repeated = head.report().repeated_steps;
    }
    EXPECT_EQ(t.results(), t.dense(context));
    EXPECT_EQ(head.report().dense_steps, 24);
    EXPECT_EQ(head.report().worst_kept_error, 0.0);
    EXPECT_EQ(head.report().audits, repeated);
    EXPECT_GE(repeated, 2);
    EXPECT_NE(head.explain().find("next step: dense"), std::string::npos) << head.explain();
    ASSERT_GE(taken.size(), 3u) << head.explain();
    EXPECT_EQ(taken.front(), 4);
    EXPECT_LE(taken.size(), 4u);
    for (std::size_t i = 2; i < taken.size(); ++i)
      EXPECT_GT(taken[i] - taken[i - 1], taken[i - 1] - taken[i - 2]) << i;
  }
}

// A run that has diverged: orders of such weights are made, and no trial is taken for a good one.
TEST(FarHeadPolicy, NaNsStayDense) {
  for (const bool weights : {false, true}) {
    SCOPED_TRACE(weights);
    const Context context = context_of();
    FarFieldOptions o = quick(Accuracy::far_both);
    o.refresh_delay = 1;
    o.refresh_every = 2;
    FarFieldHead head(context, o);
    Training t;
    if (weights) {
      for (std::size_t i = 0; i < t.weight.size(); i += 1001) t.weight[i] = NAN;
    } else {
      t.hidden[70 * Training::kDim] = NAN;
    }
    for (int step = 1; step <= 8; ++step) {
      t.step(head);
      EXPECT_FALSE(head.report().far) << step;
      EXPECT_TRUE(std::isnan(t.loss));
    }
    EXPECT_GE(head.report().refreshes, 1);
    EXPECT_GE(head.report().audits, 1);
    EXPECT_EQ(head.report().worst_kept_error, 0.0);
    EXPECT_EQ(head.report().dense_steps, 8);
  }
}

TEST(FarHeadPolicy, ASmallVocabularyIsDense) {
  const Context context = context_of();
  FarFieldHead head(context, quick());
  Training t(2000);
  for (int step = 1; step <= 12; ++step) {
    EXPECT_FALSE(far_step(t.step(head)));
    EXPECT_EQ(t.results(), t.dense(context));
    t.move();
  }
  EXPECT_EQ(head.report().dense_steps, 12);
  EXPECT_EQ(head.report().refreshes, 0);
  EXPECT_TRUE(head.order().empty());
  EXPECT_NE(head.explain().find("would keep about 100 % of the tiles of 2000 words"),
            std::string::npos)
      << head.explain();
}

template <typename F>
std::string message_of(F&& call) {
  try {
    call();
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "accepted";
}

TEST(FarHeadErrors, OptionsAreNamed) {
  const Context context = context_of();
  struct Case {
    std::function<void(FarFieldOptions&)> change;
    const char* text;
  };
  const Case cases[] = {
      {[](auto& o) { o.accuracy = Accuracy::exact; },
       "accuracy: expected far_backward or far_both, got 0"},
      {[](auto& o) { o.accuracy = static_cast<Accuracy>(9); }, "accuracy: expected"},
      {[](auto& o) { o.error = 0.0; }, "error: expected a number in (0, 1), got 0"},
      {[](auto& o) { o.error = 1.0; }, "error: expected a number in (0, 1), got 1"},
      {[](auto& o) { o.error = NAN; }, "error: expected a number in (0, 1)"},
      {[](auto& o) { o.sample_every = -1; }, "sample_every: expected 0 or more, got -1"},
      {[](auto& o) { o.audit_rows = 0; }, "audit_rows: expected 1 or more, got 0"},
      {[](auto& o) { o.audit_every = 0; }, "audit_every: expected 1 or more, got 0"},
      {[](auto& o) { o.refresh_every = -3; }, "refresh_every: expected 1 or more, got -3"},
      {[](auto& o) { o.refresh_delay = -1; }, "refresh_delay: expected 0 or more, got -1"},
      {[](auto& o) { o.sample_rows = 0; }, "sample_rows: expected 1 or more, got 0"},
  };
  for (const Case& c : cases) {
    FarFieldOptions o;
    c.change(o);
    const std::string text = message_of([&] { FarFieldHead(context, o); });
    EXPECT_NE(text.find(c.text), std::string::npos) << text << "\nexpected: " << c.text;
  }
  EXPECT_EQ(message_of([&] { FarFieldHead(context, FarFieldOptions()); }), "accepted");
}

TEST(FarHeadErrors, CallsThatThrowLeaveTheStateAlone) {
  const Context context = context_of();
  FarFieldHead head(context, quick());
  Training t;
  CrossEntropyOutputs out = t.outputs();
  out.d_hidden = {};
  EXPECT_EQ(message_of([&] { head.step({}, t.inputs(), out); }),
            "d_hidden: expected one, since audits measure its error");
  EXPECT_EQ(head.report().steps, 0);
  CrossEntropyInputs in = t.inputs();
  in.weight = {};
  EXPECT_NE(message_of([&] { head.step({}, in, t.outputs()); }), "accepted");
  EXPECT_EQ(head.report().steps, 0);
  t.step(head);
  EXPECT_EQ(head.report().steps, 1);
}

// An order of one vocabulary, in use or being made, is none of another one.
TEST(FarHeadErrors, AnotherVocabularyIsRefused) {
  const Context context = context_of();
  Training t, other(65536 + 128);
  for (const int steps : {5, 8}) {
    FarFieldHead head(context, quick());
    for (int step = 1; step <= steps; ++step) t.step(head);
    const std::string expected =
        "weight: expected 65536 words, of which the order of this far field is, got 65664";
    EXPECT_EQ(message_of([&] { other.step(head); }), expected);
    FarFieldHead resumed(context, quick());
    resumed.set_state(head.state());
    EXPECT_EQ(message_of([&] { other.step(resumed); }), expected);
    EXPECT_EQ(resumed.report().steps, steps);
  }
}

TEST(FarHeadPolicy, AStepWithoutTokensMakesNoOrder) {
  const Context context = context_of();
  FarFieldOptions o = quick();
  o.refresh_every = 1;
  o.refresh_delay = 0;
  FarFieldHead head(context, o);
  Training t;
  CrossEntropyInputs in = t.inputs();
  CrossEntropyOutputs out = t.outputs();
  in.hidden = ConstTensorView(t.hidden.data(), DType::f32, {0, Training::kDim});
  in.targets = ConstTensorView(t.targets.data(), DType::i64, {0});
  out.d_hidden = TensorView(t.d_hidden.data(), DType::f32, {0, Training::kDim});
  out.lse = {};
  head.step({}, in, out);
  EXPECT_TRUE(head.order().empty());
  EXPECT_TRUE(far_step(t.step(head))) << "made of the next tokens";
}

TEST(FarHeadErrors, OtherFilesAreRefused) {
  const TempDir folder;
  const std::string order = folder.file("order.safetensors");
  const std::string state = folder.file("state.safetensors");
  const Context context = context_of();
  FarFieldHead head(context, quick());
  Training t;
  while (head.order().empty() && head.report().steps < 20) t.step(head);
  ASSERT_FALSE(head.order().empty());
  const FarFieldReport before = head.report();
  head.order().save(order);
  EXPECT_EQ(message_of([&] { head.load(order); }),
            order + ": expected the state of a FarFieldHead");
  FarFieldHead both(context, quick(Accuracy::far_both));
  both.save(state);
  EXPECT_EQ(message_of([&] { head.load(state); }),
            state + ": saved with accuracy far_both, this head has far_backward");
  EXPECT_THROW(head.load(folder.file("missing.safetensors")), Error);
  std::vector<std::int64_t> counts(15, 0);
  counts[8] = 1;  // steps between orders
  const std::vector<double> numbers(4, 0.0);
  for (const std::int64_t size : {14, 15}) {
    const std::vector<NamedTensor> tensors = {
        {"counts", ConstTensorView(counts.data(), DType::i64, {size})},
        {"numbers", ConstTensorView(numbers.data(), DType::f64, {4})}};
    write_safetensors(state, tensors,
                      {{"kind", "logitless far field"}, {"accuracy", "far_backward"}});
    const std::string text = message_of([&] { head.load(state); });
    EXPECT_EQ(text.rfind(state + (size == 14 ? ": counts:" : ": numbers:"), 0), 0u) << text;
  }
  expect_same(head.report(), before);
  EXPECT_FALSE(head.order().empty());
}

}  // namespace
}  // namespace logitless::test
