// Dense steps of a FarFieldHead, and the calls and files that it refuses, which change nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <utility>

#include "head/far/far_training.h"
#include "logitless/tensor_file.h"
#include "support/refusal.h"
#include "support/temp_dir.h"

namespace logitless::test {
namespace {

// Up to three trials with one order, then waits that double each time. This includes a smaller tau
// that would select too much of a small vocabulary to be worth a trial.
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
    EXPECT_EQ(head.report().worst_accepted_error, 0.0);
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

// A run that has diverged: orders are made from such weights, but no trial is accepted.
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
    EXPECT_EQ(head.report().worst_accepted_error, 0.0);
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
  EXPECT_NE(head.explain().find("would keep about 100 % of the tiles of 2000 vocabulary entries"),
            std::string::npos)
      << head.explain();
}

TEST(FarHeadErrors, OptionsAreNamed) {
  const Context context = context_of();
  struct Case {
    std::function<void(FarFieldOptions&)> change;
    const char* text;
  };
  constexpr std::int64_t kMost = std::int64_t{1} << 40, kTooMany = kMost + 1;
  const Case cases[] = {
      {[](auto& o) { o.accuracy = Accuracy::exact; },
       "accuracy: expected far_backward or far_both, got 0"},
      {[](auto& o) { o.accuracy = static_cast<Accuracy>(9); }, "accuracy: expected"},
      {[](auto& o) { o.error = 0.0; }, "error: expected a number in (0, 1), got 0"},
      {[](auto& o) { o.error = 1.0; }, "error: expected a number in (0, 1), got 1"},
      {[](auto& o) { o.error = NAN; }, "error: expected a number in (0, 1)"},
      {[](auto& o) { o.sample_every = -1; }, "sample_every: expected 0 to 1099511627776, got -1"},
      {[](auto& o) { o.audit_rows = 0; }, "audit_rows: expected 1 to 1099511627776, got 0"},
      {[](auto& o) { o.audit_every = 0; }, "audit_every: expected 1 to 1099511627776, got 0"},
      {[](auto& o) { o.refresh_every = -3; }, "refresh_every: expected 1 to 1099511627776, got -3"},
      {[](auto& o) { o.refresh_delay = -1; }, "refresh_delay: expected 0 to 1099511627776, got -1"},
      {[](auto& o) { o.sample_rows = 0; }, "sample_rows: expected 1 to 1099511627776, got 0"},
      {[](auto& o) { o.sample_every = kTooMany; },
       "sample_every: expected 0 to 1099511627776, got"},
      {[](auto& o) { o.audit_rows = kTooMany; }, "audit_rows: expected 1 to 1099511627776, got"},
      {[](auto& o) { o.audit_every = INT64_MAX; },
       "audit_every: expected 1 to 1099511627776, got 9223372036854775807"},
      {[](auto& o) { o.refresh_every = kTooMany; },
       "refresh_every: expected 1 to 1099511627776, got 1099511627777"},
      {[](auto& o) { o.refresh_delay = kTooMany; },
       "refresh_delay: expected 0 to 1099511627776, got"},
      {[](auto& o) { o.sample_rows = kTooMany; }, "sample_rows: expected 1 to 1099511627776, got"},
  };
  for (const Case& c : cases) {
    FarFieldOptions o;
    c.change(o);
    const std::string text = message_of([&] { FarFieldHead(context, o); });
    EXPECT_NE(text.find(c.text), std::string::npos) << text << "\nexpected: " << c.text;
  }
  EXPECT_EQ(message_of([&] { FarFieldHead(context, FarFieldOptions()); }), "accepted");
}

// The largest values of all options, with a state that holds them.
TEST(FarHeadErrors, TheLargestOptionsAreTaken) {
  const Context context = context_of();
  FarFieldOptions o;
  o.sample_every = o.audit_rows = o.audit_every = o.refresh_every = o.refresh_delay =
      o.sample_rows = std::int64_t{1} << 40;
  FarFieldHead head(context, o);
  Training t;
  t.step(head);
  FarFieldHead resumed(context, o);
  resumed.set_state(head.state());
  EXPECT_EQ(resumed.report().steps, 1);
  o.refresh_every = 1;
  FarFieldHead making(context, o);
  t.step(making);
  resumed.set_state(making.state());
  EXPECT_EQ(resumed.explain(), making.explain());
}

// A call with a bad target before each good one: at the start, where an order is begun and taken
// over, at trials and at audits.
TEST(FarHeadErrors, ABadTargetIsNoStep) {
  const Context context = context_of();
  FarFieldHead one(context, quick()), other(context, quick());
  Training a, b;
  for (int step = 1; step <= 12; ++step) {
    SCOPED_TRACE(step);
    const std::vector<std::byte> before = other.state();
    const std::int64_t good = std::exchange(b.targets[77], b.vocab);
    EXPECT_EQ(message_of([&] { b.step(other); }),
              "targets: 65536 at position 77 is outside [0, 65536) and not ignore_index -100");
    EXPECT_EQ(message_of([&] { other.statistics(); }),
              "statistics: expected a step before, which succeeded");
    b.targets[77] = good;
    ASSERT_EQ(other.state(), before);
    a.step(one);
    b.step(other);
    ASSERT_EQ(a.results(), b.results());
    a.move();
    b.move();
  }
  expect_same(one.report(), other.report());
  EXPECT_GE(one.report().audits, 2);
}

// Steps count in the memory meter of its context, even after the original is replaced.
TEST(FarHeadErrors, OutlivesItsContext) {
  Context context = context_of();
  Training t;
  {
    FarFieldHead head(context, quick());
    context = context_of();
    for (int step = 1; step <= 9; ++step) t.step(head);
    EXPECT_TRUE(head.report().far);
    EXPECT_EQ(context.memory().peak_bytes(), 0u);
  }
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

// An order of one vocabulary, in use or being made, is refused for another one.
TEST(FarHeadErrors, AnotherVocabularyIsRefused) {
  const Context context = context_of();
  Training t, other(65536 + 128);
  for (const int steps : {5, 8}) {
    FarFieldHead head(context, quick());
    for (int step = 1; step <= steps; ++step) t.step(head);
    const std::string expected =
        "weight: expected 65536 vocabulary entries, of which the order of this far field is, got "
        "65664";
    EXPECT_EQ(message_of([&] { other.step(head); }), expected);
    FarFieldHead resumed(context, quick());
    resumed.set_state(head.state());
    EXPECT_EQ(message_of([&] { other.step(resumed); }), expected);
    EXPECT_EQ(resumed.report().steps, steps);
  }
}

// A loss multiplied by 0, like that of a batch with weights of 0: its gradients have no error.
TEST(FarHeadPolicy, GradientsOfZeroTryNoOrder) {
  const Context context = context_of();
  FarFieldOptions o = quick();
  o.refresh_every = 1;
  o.refresh_delay = 0;
  FarFieldHead head(context, o);
  Training t;
  CrossEntropyInputs in = t.inputs();
  in.grad_loss = 0.0f;
  EXPECT_TRUE(far_step(head.step({}, in, t.outputs())));
  EXPECT_EQ(head.report().audits, 0);
  EXPECT_FALSE(head.report().far);
  EXPECT_TRUE(audited(t.step(head)));
  EXPECT_EQ(head.report().audits, 1);
  EXPECT_TRUE(head.report().far);
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
  std::vector<std::int64_t> counts(16, 0);
  counts[8] = 1;  // steps between orders
  const std::vector<double> numbers(4, 0.0);
  for (const std::int64_t size : {15, 16}) {
    const std::vector<NamedTensor> tensors = {
        {"counts", ConstTensorView(counts.data(), DType::i64, {size})},
        {"numbers", ConstTensorView(numbers.data(), DType::f64, {4})}};
    write_safetensors(state, tensors,
                      {{"kind", "logitless far field"}, {"accuracy", "far_backward"}});
    const std::string text = message_of([&] { head.load(state); });
    EXPECT_EQ(text.rfind(state + (size == 15 ? ": counts:" : ": numbers:"), 0), 0u) << text;
  }
  expect_same(head.report(), before);
  EXPECT_FALSE(head.order().empty());
}

}  // namespace
}  // namespace logitless::test
