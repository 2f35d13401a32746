// far_both against float64: the loss from selected tiles and estimated masses, and its gradients.
// Also its guarantees and refusals.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/cpu_head.h"
#include "support/far_both.h"
#include "support/far_cases.h"
#include "support/mirror.h"
#include "support/refusal.h"

namespace logitless::test {
namespace {

class FarBoth : public FarKernels {
 protected:
  // The vocabulary is no multiple of a tile, and D is odd.
  HeadSpec spec() const { return FarKernels::spec(150, 9, 17 * 128 + 37, 3); }
};

FarBothResult check(const FarBothProblem& problem, const RunSpec& run, double fraction = 0.25) {
  SCOPED_TRACE(describe(problem.spec));
  FarBothResult a = run_far_both(problem, run, fraction);
  EXPECT_GT(a.statistics.far.selected, 0.0);
  EXPECT_LE(a.statistics.far.selected, 2.0 / 3.0 + 1e-12);
  EXPECT_FALSE(a.statistics.far.dense_fallback);
  expect_far_both(problem, run, a);
  return a;
}

TEST_P(FarBoth, IsTheOraclesForEachDtypeAndShape) {
  struct Shape {
    std::int64_t tokens, dim, vocab;
    bool of_gpu = false;  // larger than the CPU needs for its blocks
  };
  const Shape shapes[] = {
      {300, 13, 17 * 128 + 37},       // small last tile, small last block of tokens
      {128, 16, 12 * 128},            // full tiles, one full block
      {600, 5, 12 * 128 + 5},         // three blocks of tokens on a CPU
      {600, 24, 21 * 128 + 5, true},  // several blocks of tokens on a GPU
      {129, 1, 12 * 128 + 1},         // tile of one entry
      {1, 7, 9 * 128 + 127},          // one token
      {40, 3, 70 * 128 + 5},          // several tiles in a segment
      {20, 3, 131 * 128 + 9},         // more than one group of means
      {17, 131, 11 * 128 + 64},       // more than one group of axes
  };
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const Shape& shape : shapes) {
      if (shape.of_gpu && !is_device_kernel(GetParam())) continue;
      HeadSpec s = spec();
      s.tokens = shape.tokens;
      s.dim = shape.dim;
      s.vocab = shape.vocab;
      s.dtype = dtype;
      if (accepts_far(GetParam(), s)) check(FarBothProblem(s), run());
    }
  }
}

// The comparisons above would detect exact results, estimates without their quadratic form, and
// dropped skipped tiles.
TEST_P(FarBoth, IsNeitherExactNorDropped) {
  HeadSpec s = spec();
  s.bias = true;
  FarBothProblem problem(s);
  const FarBothResult a = check(problem, run());
  const FarBothOracle& o = a.oracle;
  const double contract = gradient_bound(s.dtype);
  EXPECT_GT(distance(o.exact.d_weight, o.far.d_weight),
            2 * (o.weight_slack + contract * norm(o.far.d_weight)));
  EXPECT_GT(distance(o.exact.d_bias, o.far.d_bias),
            2 * (o.bias_slack + contract * norm(o.far.d_bias)));
  const auto lse_of_far = [&](const FarBothOracle& other) {
    std::int64_t outside = 0;
    for (std::int64_t i = 0; i < s.tokens; ++i)
      outside += std::abs(other.lse[i] - o.lse[i]) >
                         3 * (o.lse_slack[i] + kLseBound * (1 + std::abs(o.lse[i])))
                     ? 1
                     : 0;
    return outside;
  };
  FarBothOracle exact = o;
  exact.lse = o.logits.lse;
  EXPECT_GT(lse_of_far(exact), s.tokens / 2);
  const VocabOrder order = problem.order;
  const std::vector<float> none(order.variance().size(), 0.0f);
  problem.order = order.with_moments(s.dim, order.axes(), none, order.log2_caution());
  RunSpec r = run();
  r.tau = static_cast<float>(a.tau);
  EXPECT_GT(lse_of_far(run_far_both(problem, r).oracle), s.tokens / 2);
  // More caution selects more tiles.
  const std::vector<float> careful(order.log2_caution().size(), 6.0f);
  problem.order = order.with_moments(s.dim, order.axes(), order.variance(), careful);
  EXPECT_GT(call_far_both(problem, r).statistics.far.selected, a.statistics.far.selected);
}

TEST_P(FarBoth, OptionsOneByOne) {
  for (const FarOption& option : far_options(/*softcap=*/false)) {
    SCOPED_TRACE(option.name);
    HeadSpec s = spec();
    option.change(s);
    check(FarBothProblem(s), run());
  }
}

TEST_P(FarBoth, MaskedVocab) {
  HeadSpec s = spec();
  s.bias = true;
  s.tokens = 60;
  FarBothProblem problem(s);
  problem.mask_vocab();
  problem.measure();
  const FarBothResult a = check(problem, run());
  std::int64_t masked = 0, whole = 0;
  for (std::int64_t j = 0; j < s.vocab; ++j) {
    ASSERT_TRUE(std::isfinite(a.d_bias.get(j))) << j;
    masked += std::isinf(problem.bias.get(j)) ? 1 : 0;
    whole += problem.order.positions()[j] / 128 == 2 && std::isinf(problem.bias.get(j)) ? 1 : 0;
  }
  EXPECT_GT(masked, 200);
  EXPECT_EQ(whole, 128) << "no tile without any vocabulary entry";
}

TEST_P(FarBoth, SeveralChunks) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    HeadSpec s = spec();
    s.tokens = 270;
    s.dim = 6;
    s.dtype = dtype;
    s.bias = true;
    s.ignored = 0.1;
    s.label_smoothing = 0.05f;
    if (!accepts_far(GetParam(), s)) continue;
    const FarBothProblem problem(s);
    RunSpec r = run();
    r.tau = 0.02f;
    r.budget = 1;
    try {
      call_far_both(problem, r);
      FAIL() << "a budget of one byte was enough";
    } catch (const InvalidArgument& e) {
      const std::string text = e.what();
      EXPECT_NE(text.find("far_both"), std::string::npos) << text;
      r.budget = static_cast<std::size_t>(std::stoull(text.substr(text.rfind('(') + 1)));
    }
    r.tau = 0.0f;
    const FarBothResult a = check(problem, r);
    EXPECT_EQ(a.plan.workspace_bytes(), r.budget);
    EXPECT_LT(a.plan.chunk_tokens * 3, a.statistics.valid_tokens);
    // 16-bit gradients still need fp32 sums between chunks, which take memory.
    r.gradient_dtype = dtype;
    r.budget += static_cast<std::size_t>(4 * s.vocab * s.dim) + 256;
    EXPECT_LT(check(problem, r).plan.chunk_tokens * 2, a.statistics.valid_tokens);
  }
}

TEST_P(FarBoth, UpstreamGradients) {
  HeadSpec s = spec();
  for (const Reduction reduction : {Reduction::mean, Reduction::sum}) {
    s.reduction = reduction;
    RunSpec r = run();
    r.grad_loss = -2.5;
    check(FarBothProblem(s), r);
  }
  s.reduction = Reduction::none;
  RunSpec r = run();
  r.grad_losses = some_upstream(s.tokens);
  const FarBothResult a = check(FarBothProblem(s), r);
  for (std::int64_t i = 0; i < s.tokens; i += 3)
    for (std::int64_t k = 0; k < s.dim; ++k) ASSERT_EQ(a.d_hidden.get(i * s.dim + k), 0.0) << i;
}

TEST_P(FarBoth, FrozenSidesDoNotChangeTheOther) {
  HeadSpec s = spec();
  s.bias = true;
  s.label_smoothing = 0.1f;
  const FarBothProblem problem(s);
  const FarBothResult all = check(problem, run());
  for (const int wanted : {1, 2, 4, 5}) {
    SCOPED_TRACE(wanted);
    RunSpec r = run();
    r.tau = static_cast<float>(all.tau);
    set_wanted(r, wanted);
    const FarBothResult a = check(problem, r);
    EXPECT_EQ(a.d_weight.defined(), r.d_weight);
    EXPECT_EQ(a.d_bias.defined(), r.d_bias);
    EXPECT_EQ(a.lse.bytes(), all.lse.bytes());
  }
}

TEST_P(FarBoth, Accumulates) {
  HeadSpec s = spec();
  s.bias = true;
  s.ignored = 0.2;
  const FarBothProblem problem(s);
  const FarBothResult plain = check(problem, run());
  RunSpec r = run();
  r.tau = static_cast<float>(plain.tau);
  r.audit_rows = 32;  // of this call's part only
  add_to_gradients(r);
  const FarBothResult added = call_far_both(problem, r);
  expect_added(added, plain);
  EXPECT_EQ(added.lse.bytes(), plain.lse.bytes());
  r.change = nullptr;
  const FarFieldStatistics apart = call_far_both(problem, r).statistics.far;
  EXPECT_EQ(apart.audited_error, added.statistics.far.audited_error);
  EXPECT_EQ(apart.audited_lse_error, added.statistics.far.audited_lse_error);
}

TEST_P(FarBoth, NextToken) {
  constexpr std::int64_t kBatch = 3, kTime = 50;
  HeadSpec s = spec();
  s.tokens = kBatch * kTime;
  FarBothProblem problem(s);
  RunSpec r = run();
  predict_next_tokens(problem, r, kBatch, kTime);
  EXPECT_EQ(check(problem, r).statistics.valid_tokens, kBatch * (kTime - 1));
}

TEST_P(FarBoth, ThreadsAndRunsGiveTheSameBits) {
  HeadSpec s = spec();
  s.bias = true;
  s.ignored = 0.1;
  s.tokens = 400;
  s.vocab = 150 * 128 + 3;
  s.label_smoothing = 0.1f;
  const FarBothProblem problem(s);
  RunSpec r = run();
  r.audit_rows = 20;
  r.tau = 0.02f;
  const FarBothResult first = call_far_both(problem, r);
  EXPECT_LT(first.statistics.far.selected, 2.0 / 3.0);
  for (const int threads : {2, 1, 3}) {
    r.threads = threads;
    const FarBothResult a = call_far_both(problem, r);
    expect_same_bits(a, first);
  }
}

// The audit's errors equal those computed here for tokens evenly spaced among the valid ones.
TEST_P(FarBoth, TheAuditMeasuresTheErrors) {
  for (const int per_token : {1, 3}) {
    HeadSpec s = spec();
    s.ignored = 0.25;
    s.per_token = per_token;
    s.bias = true;
    const FarBothProblem problem(s);
    const FarBothResult plain = check(problem, run());
    EXPECT_EQ(plain.statistics.far.audited_error, -1.0);
    EXPECT_EQ(plain.statistics.far.audited_lse_error, 0.0);
    const std::vector<std::int64_t> valid =
        far_tokens(problem.oracle, problem.order, far_grid(plain));
    RunSpec r = run();
    r.plan = PlanKind::recompute;
    const HeadResult exact = run_head(problem, r);
    r.tau = static_cast<float>(plain.tau);
    for (const std::int64_t rows : {1, 37, 1000}) {
      SCOPED_TRACE(testing::Message() << rows << " rows, " << describe(s));
      r.audit_rows = rows;
      const FarBothResult a = call_far_both(problem, r);
      const std::vector<std::int64_t> tokens = audited_tokens(valid, rows);
      expect_audited_error(a, exact, tokens, s.dim);
      double squares = 0, most = 0;
      for (const std::int64_t token : tokens) {
        const double off = a.lse.get(token) - plain.oracle.logits.lse[token];
        squares += off * off;
        most = std::max(most, std::abs(off));
      }
      ASSERT_GT(most, 1e-4);
      // The exact lse of the audit is within its documented error of float64's.
      EXPECT_NEAR(a.statistics.far.audited_lse_error,
                  std::sqrt(squares / static_cast<double>(tokens.size())), 2 * kLseBound * 20);
      EXPECT_NEAR(a.statistics.far.audited_lse_error_max, most, 2 * kLseBound * 20);
      EXPECT_EQ(a.d_hidden.bytes(), plain.d_hidden.bytes());
      EXPECT_EQ(a.d_weight.bytes(), plain.d_weight.bytes());
      EXPECT_EQ(a.lse.bytes(), plain.lse.bytes());
    }
  }
}

TEST_P(FarBoth, ATinyTauKeepsEverything) {
  HeadSpec s = spec();
  s.bias = true;
  s.ignored = 0.2;
  s.label_smoothing = 0.1f;
  const FarBothProblem problem(s);
  RunSpec r = run();
  r.tau = 1e-30f;
  r.audit_rows = 16;
  const FarBothResult a = call_far_both(problem, r);
  expect_everything_selected(a, oracle_gradients(problem.oracle, upstream_of(problem, r)), s.dtype);
  EXPECT_LE(a.statistics.far.audited_lse_error_max, 2 * kLseBound * 20);
  OracleLogits logits = oracle_logits(problem.oracle);
  for (std::int64_t i = 0; i < s.tokens; ++i)
    if (oracle_ignored(problem.oracle, i)) logits.lse[i] = 0.0;
  EXPECT_LE(relative_error(a.lse.values(), logits.lse), kLseBound);
}

// Only targets' tiles are selected (on a GPU only those above tau), and everything else is an
// estimate.
TEST_P(FarBoth, ATauAboveEveryMassKeepsNoMoreThanTheTargets) {
  HeadSpec s = spec();
  s.bias = true;
  FarBothProblem problem(s, 2.0);
  problem.measure(0.0);  // a caution would lift masses above tau
  RunSpec r = run();
  r.tau = 0.999f;
  const FarBothResult a = run_far_both(problem, r);
  if (is_device_kernel(GetParam())) {
    EXPECT_EQ(a.statistics.far.selected, 0.0);
  } else {
    EXPECT_LE(a.statistics.far.selected, 4.0 / 18.0);
    EXPECT_GT(a.statistics.far.selected, 0.0);
  }
  expect_far_both(problem, r, a);
}

TEST_P(FarBoth, NoValidToken) {
  HeadSpec s = spec();
  s.ignored = 2.0;
  s.bias = true;
  const FarBothProblem problem(s);
  RunSpec r = run();
  r.audit_rows = 4;
  r.tau = 0.01f;
  expect_zeros(call_far_both(problem, r));
}

TEST_P(FarBoth, ANaNStaysInItsRow) {
  HeadSpec of_sums = spec();
  of_sums.reduction = Reduction::sum;
  FarBothProblem problem(of_sums);
  const HeadSpec& s = problem.spec;
  constexpr std::int64_t kBad = 70;
  RunSpec r = run();
  r.tau = static_cast<float>(run_far_both(problem, r).tau);
  problem.hidden.set(kBad * s.dim + 3, NAN);
  const FarBothResult a = call_far_both(problem, r);
  EXPECT_TRUE(std::isnan(a.loss.get(0)));
  // Nothing was measured, so the error must not be 0.
  r.audit_rows = 1000;
  const FarFieldStatistics far = call_far_both(problem, r).statistics.far;
  EXPECT_TRUE(std::isnan(far.audited_error)) << far.audited_error;
  EXPECT_TRUE(std::isnan(far.audited_lse_error)) << far.audited_lse_error;
  EXPECT_TRUE(std::isnan(far.audited_lse_error_max)) << far.audited_lse_error_max;
  // The other tokens have the blocks and tiles of a call without the bad one.
  problem.targets.set(kBad, static_cast<double>(problem.oracle.ignore_index));
  const FarBothResult without = call_far_both(problem, r);
  for (std::int64_t i = 0; i < s.tokens; ++i) {
    if (i == kBad) {
      EXPECT_TRUE(std::isnan(a.lse.get(i)));
      for (std::int64_t k = 0; k < s.dim; ++k)
        EXPECT_TRUE(std::isnan(a.d_hidden.get(i * s.dim + k)));
      continue;
    }
    ASSERT_TRUE(std::isfinite(a.lse.get(i))) << i;
    EXPECT_EQ(a.lse.get(i), without.lse.get(i)) << i;
    for (std::int64_t k = 0; k < s.dim; ++k)
      ASSERT_EQ(a.d_hidden.get(i * s.dim + k), without.d_hidden.get(i * s.dim + k)) << i;
  }
}

TEST_P(FarBoth, MemoryIsAsPlanned) {
  if (is_device_kernel(GetParam())) GTEST_SKIP() << "tensors of the host";
  HeadSpec s = spec();
  s.bias = true;
  s.label_smoothing = 0.1f;
  const FarBothProblem problem(s);
  for (const std::int64_t audit : {0, 9}) {
    PlanRequest request;
    request.kind = PlanKind::far_both;
    request.tau = 0.02f;
    request.audit_rows = audit;
    expect_memory_as_planned(problem, GetParam(), request, /*with_lse=*/true);
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(FarBoth);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, FarBoth, testing::ValuesIn(far_kernels()),
                         [](const auto& kernel) { return kernel.param; });

HeadSpec plain_spec() {
  HeadSpec s;
  s.tokens = 50;
  s.dim = 6;
  s.vocab = 1500;
  return s;
}

TEST(FarBothRefusals, OfCalls) {
  const FarBothProblem problem(plain_spec());
  RunSpec r;
  r.plan = PlanKind::far_both;
  r.tau = 0.02f;
  const auto call = [&] { return message_of<InvalidArgument>([&] { run_head(problem, r); }); };
  EXPECT_EQ(call(), "order: plan far_both walks the vocabulary in a VocabOrder, got none");
  const VocabOrder bare(problem.order.vocab_ids(), problem.order.average());
  r.change = [&](auto&, CrossEntropyInputs& in, auto&) { in.order = bare; };
  EXPECT_EQ(call(),
            "order: plan far_both needs the moments of its tiles (measure_tiles) of dim 6, got "
            "none");
  const std::vector<float> axes(25, 0.5f), variance(12 * 5, 0.0f), caution(12, 0.0f);
  const VocabOrder other = bare.with_moments(5, axes, variance, caution);
  r.change = [&](auto&, CrossEntropyInputs& in, auto&) { in.order = other; };
  EXPECT_EQ(call(),
            "order: plan far_both needs the moments of its tiles (measure_tiles) of dim 6, got "
            "some of 5");
  Tensor bound(DType::f32, {50});
  r.change = [&](auto&, CrossEntropyInputs& in, CrossEntropyOutputs& out) {
    in.order = problem.order;
    out.d_hidden_bound = bound.view();
  };
  EXPECT_EQ(call(), "d_hidden_bound: plan far_both has none; its audit measures the error");
  r.change = [&](auto&, CrossEntropyInputs& in, auto&) { in.order = problem.order; };
  EXPECT_EQ(call(), "accepted");
  // far_backward ignores moments, even of another dim.
  r.plan = PlanKind::far_backward;
  r.change = [&](auto&, CrossEntropyInputs& in, auto&) { in.order = other; };
  EXPECT_EQ(call(), "accepted");
}

TEST(FarBothRefusals, OfPlans) {
  const HeadShape shape{4096, 512, 131072, DType::bf16};
  HeadFeatures features;
  features.d_hidden = features.d_weight = true;
  PlanRequest both;
  both.kind = PlanKind::far_both;
  const auto refused = [&](const HeadFeatures& f) {
    return message_of<Unsupported>([&] { plan_head(shape, f, both); });
  };
  EXPECT_EQ(refused(features), "accepted");
  HeadFeatures f = features;
  f.softcap = 5.0f;
  EXPECT_EQ(refused(f), "no plan: far_both: the moments of a tile do not pass through a softcap");
  for (const bool argmax : {false, true}) {
    f = features;
    f.argmax = argmax;
    f.entropy = !argmax;
    EXPECT_EQ(refused(f),
              "no plan: far_both: argmax and entropy need every vocabulary entry's logit");
  }
  EXPECT_EQ(refused(HeadFeatures()), "no plan: far_both: no gradient is wanted");
  // Requested by accuracy, it is one candidate of several, and its refusal is no error.
  PlanRequest request;
  request.accuracy = Accuracy::far_both;
  EXPECT_EQ(plan_head(shape, features, request).kind, PlanKind::far_both);
  EXPECT_EQ(plan_head(shape, f, request).kind, PlanKind::far_backward);
  HeadShape small = shape;
  small.vocab = 16000;
  EXPECT_LT(plan_head(small, features, request).kind, PlanKind::far_backward);
}

}  // namespace
}  // namespace logitless::test
