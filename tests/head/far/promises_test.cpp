// Guarantees of the far field: a rigorous bound, an audit that measures, the same bits with any
// number of threads, memory as planned, and refusals with reasons.
#include <gtest/gtest.h>

#include <cmath>
#include <utility>

#include "kernels/cpu_head.h"
#include "support/far_cases.h"
#include "support/refusal.h"

namespace logitless::test {
namespace {

class FarPromises : public FarKernels {
 protected:
  HeadSpec spec() const { return FarKernels::spec(200, 11, 12 * 128 + 7, 4); }
};

// A target's own part is subtracted from its tile's mass in 16 bit, once however often the entry is
// among the targets. The difference may be lost in rounding, which the bound must include.
TEST_P(FarPromises, TheBoundHoldsWhereATileIsAllButATarget) {
  HeadSpec s = spec();
  s.tokens = 60;
  s.reduction = Reduction::sum;
  for (const int per_token : {1, 2}) {
    for (const std::int64_t vocab_count : {1, 2}) {
      SCOPED_TRACE(testing::Message() << per_token << " targets, a tile of " << vocab_count);
      s.per_token = per_token;
      s.vocab = 5 * 128 + vocab_count;
      FarProblem problem(s);
      // Two tiles have 0.4 each, three have nothing. A last tile of one or two equal entries, the
      // first of which is every token's target, has less than 0.3.
      for (std::int64_t at = 0; at < s.vocab; ++at) {
        for (std::int64_t k = 0; k < s.dim; ++k) {
          const double alone = k == 0 ? (vocab_count == 1 ? 2.6 : 2.0) : 0.0;
          const double other =
              k == 0 ? (at < 256 ? 0.0 : -30.0) : 0.01 * static_cast<double>((at + k) % 7 - 3);
          problem.weight.set(problem.order.vocab_ids()[at] * s.dim + k, at < 640 ? other : alone);
        }
      }
      for (std::int64_t i = 0; i < problem.targets.numel(); ++i)
        problem.targets.set(i, static_cast<double>(problem.order.vocab_ids()[640]));
      problem.refresh_oracle();
      RunSpec r = run();
      r.tau = 0.3f;
      const FarResult a = run_far(problem, r);
      EXPECT_DOUBLE_EQ(a.statistics.far.selected, 1.0 / 3.0);
      expect_far_field(problem, r, a);
    }
  }
}

// Many tokens with targets in skipped tiles that they dominate.
TEST_P(FarPromises, TheBoundHoldsForEveryToken) {
  for (const bool everything : {false, true}) {
    HeadSpec s = spec();
    s.ignored = 0.2;
    if (everything) {
      s.bias = s.token_weight = s.class_weight = true;
      s.label_smoothing = 0.1f;
      s.per_token = 3;
      s.logit_scale = 1.2f;
    }
    const FarProblem problem(s);
    const FarResult a = run_far(problem, run());
    expect_far_field(problem, run(), a);
    const std::vector<double> got = a.d_hidden.values();
    EXPECT_LE(distance(got, a.oracle.exact.d_hidden) / norm(got),
              a.statistics.far.bound * (1 + 1e-5) + gradient_bound(s.dtype));
    EXPECT_GT(a.statistics.far.bound, 0.0);
  }
}

TEST_P(FarPromises, ExactPlansHaveABoundOfZero) {
  HeadSpec s = spec();
  s.ignored = 0.2;
  const FarProblem problem(s);
  for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute}) {
    Tensor bound(DType::f32, {s.tokens});
    RunSpec r = run();
    r.plan = kind;
    r.change = [&](auto&, auto&, CrossEntropyOutputs& out) { out.d_hidden_bound = bound.view(); };
    const HeadResult a = run_head(problem, r);
    for (std::int64_t i = 0; i < s.tokens; ++i) ASSERT_EQ(bound.get(i), 0.0);
    EXPECT_EQ(a.statistics.far.selected, 1.0);
    EXPECT_EQ(a.statistics.far.passes, 0.0);
    EXPECT_EQ(a.statistics.far.bound, 0.0);
    EXPECT_EQ(a.statistics.far.audited_error, -1.0);
    EXPECT_EQ(a.statistics.far.audited_tokens, 0);
    EXPECT_FALSE(a.statistics.far.dense_fallback);
  }
}

// The audit's error equals the one computed here for tokens evenly spaced among the valid ones,
// against the kernel's own exact plan. That plan is compared with float64.
TEST_P(FarPromises, TheAuditMeasuresTheError) {
  for (const int per_token : {1, 3}) {
    HeadSpec s = spec();
    s.ignored = 0.25;
    s.per_token = per_token;
    s.bias = true;
    const FarProblem problem(s);
    RunSpec r = run();
    const FarResult plain = run_far(problem, r, 0.3);
    r.plan = PlanKind::recompute;
    const HeadResult exact = run_head(problem, r);
    EXPECT_LE(relative_error(exact.d_hidden.values(), plain.oracle.exact.d_hidden),
              gradient_bound(s.dtype));
    r.tau = static_cast<float>(plain.tau);
    for (const std::int64_t rows : {1, 37, 1000}) {
      SCOPED_TRACE(testing::Message() << rows << " rows, " << describe(s));
      r.audit_rows = rows;
      const FarResult a = call_far(problem, r);
      expect_audited_error(a, exact, audited_tokens(plain.oracle.valid, rows), s.dim);
      // The audit changes no result.
      EXPECT_EQ(a.d_hidden.bytes(), plain.d_hidden.bytes());
      EXPECT_EQ(a.d_weight.bytes(), plain.d_weight.bytes());
      EXPECT_EQ(a.bound.bytes(), plain.bound.bytes());
    }
    EXPECT_EQ(plain.statistics.far.audited_error, -1.0);
    EXPECT_EQ(plain.statistics.far.audited_tokens, 0);
  }
}

TEST_P(FarPromises, ATinyTauKeepsEverything) {
  HeadSpec s = spec();
  s.bias = true;
  s.ignored = 0.2;
  s.label_smoothing = 0.1f;
  const FarProblem problem(s);
  RunSpec r = run();
  r.tau = 1e-30f;
  r.audit_rows = 16;
  const FarResult a = run_far(problem, r);
  expect_everything_selected(a, a.oracle.exact, s.dtype);
  EXPECT_EQ(a.statistics.far.bound, 0.0);
  EXPECT_EQ(a.statistics.far.passes, 4.0 + 2.0 / 128.0);
}

// If all tiles are skipped, the mass and the targets remain.
TEST_P(FarPromises, ATauAboveEveryMassKeepsNothing) {
  HeadSpec s = spec();
  s.bias = true;
  const FarProblem problem(s);
  RunSpec r = run();
  r.tau = 0.9999f;
  const FarResult a = run_far(problem, r);
  EXPECT_EQ(a.statistics.far.selected, 0.0);
  expect_far_field(problem, r, a);
}

TEST_P(FarPromises, ThreadsAndRunsGiveTheSameBits) {
  HeadSpec s = spec();
  s.bias = true;
  s.ignored = 0.1;
  s.tokens = 400;
  s.label_smoothing = 0.1f;
  const FarProblem problem(s);
  RunSpec r = run();
  r.audit_rows = 20;
  const FarResult first = run_far(problem, r);
  r.tau = static_cast<float>(first.tau);
  for (const int threads : {2, 1, 3}) {
    r.threads = threads;
    const FarResult a = call_far(problem, r);
    expect_same_bits(a, first);
    EXPECT_EQ(a.bound.bytes(), first.bound.bytes());
  }
}

TEST_P(FarPromises, NoValidToken) {
  HeadSpec s = spec();
  s.ignored = 2.0;
  s.bias = true;
  const FarProblem problem(s);
  RunSpec r = run();
  r.audit_rows = 4;
  r.tau = 0.01f;
  const FarResult a = run_far(problem, r);
  expect_zeros(a);
  for (const double bound : a.bound.values()) ASSERT_EQ(bound, 0.0);
}

TEST_P(FarPromises, ANaNStaysInItsRow) {
  HeadSpec s = spec();
  s.reduction = Reduction::sum;
  FarProblem problem(s);
  const FarResult clean = run_far(problem, run());
  constexpr std::int64_t kBad = 70;
  problem.hidden.set(kBad * s.dim + 3, NAN);
  RunSpec r = run();
  r.tau = static_cast<float>(clean.tau);
  const FarResult a = call_far(problem, r);
  // The other tokens have the blocks and tiles of a call without the bad one.
  problem.targets.set(kBad, static_cast<double>(problem.oracle.ignore_index));
  const FarResult without = call_far(problem, r);
  EXPECT_TRUE(std::isnan(a.loss.get(0)));
  for (std::int64_t i = 0; i < s.tokens; ++i) {
    if (i == kBad) {
      EXPECT_TRUE(std::isnan(a.lse.get(i)));
      for (std::int64_t k = 0; k < s.dim; ++k)
        EXPECT_TRUE(std::isnan(a.d_hidden.get(i * s.dim + k)));
      EXPECT_FALSE(a.bound.get(i) <= 1e30) << "a bound of a NaN";
      continue;
    }
    EXPECT_EQ(a.lse.get(i), clean.lse.get(i)) << i;
    EXPECT_EQ(a.bound.get(i), without.bound.get(i)) << i;
    double error = 0;
    for (std::int64_t k = 0; k < s.dim; ++k)
      ASSERT_EQ(a.d_hidden.get(i * s.dim + k), without.d_hidden.get(i * s.dim + k)) << i;
    for (std::int64_t k = 0; k < s.dim; ++k)
      error +=
          std::pow(a.d_hidden.get(i * s.dim + k) - clean.oracle.exact.d_hidden[i * s.dim + k], 2);
    EXPECT_LE(std::sqrt(error),
              a.bound.get(i) * (1 + 1e-5) + gradient_bound(s.dtype) * clean.oracle.row_size[i])
        << i;
  }
}

// Logits of one tile are 100 nats and more away from the others, beyond the range of 16-bit codes.
TEST_P(FarPromises, MassesFarBelowAndAboveTheFirst) {
  for (const double shift : {-150.0, 150.0}) {
    HeadSpec s = spec();
    s.vocab = 130 * 128;  // several tiles in each of the segments
    s.dim = 3;
    s.tokens = 30;
    s.bias = true;
    FarProblem problem(s, 6.0);
    for (std::int64_t at = 0; at < s.vocab; ++at) {
      if (at / 128 % 3 == 0)
        problem.bias.set(problem.order.vocab_ids()[at],
                         shift + problem.bias.get(problem.order.vocab_ids()[at]));
    }
    problem.refresh_oracle();
    for (const double tau : {0.003, 0.05}) {
      RunSpec r = run();
      r.tau = static_cast<float>(tau);
      const FarResult a = run_far(problem, r);
      const double contract = gradient_bound(s.dtype);
      // The selection may differ, since a mass too large for its code is selected. The bound may
      // not.
      for (std::int64_t i = 0; i < s.tokens; ++i) {
        double error = 0;
        for (std::int64_t k = 0; k < s.dim; ++k)
          error +=
              std::pow(a.d_hidden.get(i * s.dim + k) - a.oracle.exact.d_hidden[i * s.dim + k], 2);
        EXPECT_LE(std::sqrt(error), a.bound.get(i) * (1 + 1e-5) + contract * a.oracle.row_size[i])
            << shift << " token " << i;
      }
      const OracleLogits logits = oracle_logits(problem.oracle);
      EXPECT_LE(relative_error(a.lse.values(), logits.lse), kLseBound);
    }
  }
}

TEST_P(FarPromises, MemoryIsAsPlanned) {
  HeadSpec s = spec();
  s.bias = true;
  s.label_smoothing = 0.1f;
  const FarProblem problem(s);
  for (const std::int64_t audit : {0, 9}) {
    for (const std::size_t budget : {std::size_t{0}, 3_MiB}) {
      PlanRequest request;
      request.kind = PlanKind::far_backward;
      request.tau = 0.02f;
      request.audit_rows = audit;
      request.memory_budget = budget;
      expect_memory_as_planned(problem, GetParam(), request, /*with_lse=*/false);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllKernels, FarPromises, testing::ValuesIn(far_kernels()),
                         [](const auto& kernel) { return kernel.param; });

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text << "\nexpected: " << part;
}

HeadSpec plain_spec() {
  HeadSpec s;
  s.tokens = 50;
  s.dim = 6;
  s.vocab = 700;
  return s;
}

TEST(FarRefusals, OfCalls) {
  const FarProblem problem(plain_spec());
  RunSpec r;
  r.plan = PlanKind::far_backward;
  r.tau = 0.02f;
  const auto call = [&] { return message_of<InvalidArgument>([&] { run_head(problem, r); }); };
  EXPECT_EQ(call(), "order: plan far_backward walks the vocabulary in a VocabOrder, got none");
  std::vector<std::int64_t> vocab_ids = {1, 0, 2};
  r.change = [&](auto&, CrossEntropyInputs& in, auto&) {
    in.order = VocabOrder(vocab_ids, std::vector<float>(3, 1.0f));
  };
  EXPECT_EQ(call(), "order: made for 3 vocabulary entries, the weights have 700");
  r.change = [&](auto&, CrossEntropyInputs& in, CrossEntropyOutputs& out) {
    in.order = problem.order;
    out.d_hidden_bound = out.lse;
    out.lse = TensorView();
    out.d_hidden = TensorView();
  };
  EXPECT_EQ(call(), "d_hidden_bound: asked for without d_hidden");
  r.change = [&](auto&, CrossEntropyInputs& in, CrossEntropyOutputs& out) {
    in.order = problem.order;
    out.d_hidden_bound = TensorView(out.lse.data(), DType::f32, {49});
  };
  expect_contains(call(), "d_hidden_bound: expected shape [50]");
  r.change = [&](auto&, CrossEntropyInputs& in, auto&) { in.order = problem.order; };
  EXPECT_EQ(call(), "accepted");
  // Other plans ignore the order, even one of another vocabulary.
  r.plan = PlanKind::dense;
  r.tau = 0.0f;
  r.change = [&](auto&, CrossEntropyInputs& in, auto&) {
    in.order = VocabOrder(vocab_ids, std::vector<float>(3, 1.0f));
  };
  EXPECT_EQ(call(), "accepted");
}

TEST(FarRefusals, NothingIsWrittenBeforeThem) {
  const FarProblem problem(plain_spec());
  const CrossEntropyInputs in = problem.inputs();
  Tensor d_hidden(DType::f32, {50, 6}), lse(DType::f32, {50});
  CrossEntropyOutputs out;
  out.d_hidden = d_hidden.view();
  out.lse = lse.view();
  const std::vector<std::byte> before = d_hidden.bytes(), lse_before = lse.bytes();
  const Context context;
  PlanRequest request;
  request.device = context.device();
  request.kind = PlanKind::far_backward;
  const LossPlan plan = plan_cross_entropy({}, in, out, request);
  EXPECT_THROW(cross_entropy(context, plan, {}, in, out, Workspace(context, plan)),
               InvalidArgument);
  EXPECT_EQ(d_hidden.bytes(), before);
  EXPECT_EQ(lse.bytes(), lse_before);
}

// Requested by kind, it is used where it gains nothing, and audited.
TEST(FarPromises, ASmallVocabularyHasThePlanItAsksFor) {
  for (const std::int64_t vocab : {3, 130}) {
    HeadSpec spec;
    spec.tokens = 50;
    spec.dim = 6;
    spec.vocab = vocab;
    const HeadProblem problem(spec);
    CrossEntropyInputs in = problem.inputs();
    Tensor d_hidden(DType::f32, {50, 6}), exact(DType::f32, {50, 6});
    CrossEntropyOutputs out;
    out.d_hidden = d_hidden.view();
    const Context context({.kernel = "scalar"});
    in.order =
        make_vocab_order(context, in.weight, average_probability(context, in.hidden, in.weight));
    const LossPlan plan =
        plan_cross_entropy(context, {}, in, out, {.kind = PlanKind::far_backward, .audit_rows = 7});
    ASSERT_EQ(plan.kind, PlanKind::far_backward);
    const LossStatistics stats =
        cross_entropy(context, plan, {}, in, out, Workspace(context, plan));
    EXPECT_EQ(stats.far.selected, 1.0);
    EXPECT_EQ(stats.far.audited_tokens, 7);
    EXPECT_GE(stats.far.audited_error, 0.0);
    EXPECT_LT(stats.far.audited_error, 1e-5);
    out.d_hidden = exact.view();
    cross_entropy(context, {}, in, out);
    EXPECT_LT(relative_error(d_hidden.values(), exact.values()), 1e-5);
  }
}

TEST(FarRefusals, OfPlans) {
  const HeadShape shape{4096, 64, 131072, DType::bf16};
  HeadFeatures features;
  features.d_hidden = features.d_weight = true;
  PlanRequest far;
  far.kind = PlanKind::far_backward;
  const auto invalid = [&](const PlanRequest& request) {
    return message_of<InvalidArgument>([&] { plan_head(shape, features, request); });
  };
  const auto unsupported = [&](const HeadFeatures& f, const PlanRequest& request) {
    return message_of<Unsupported>([&] { plan_head(shape, f, request); });
  };
  EXPECT_EQ(plan_head(shape, features, far).tau, 0.003f);
  for (const float tau :
       {-0.1f, 1.0f, 2.0f, static_cast<float>(NAN), static_cast<float>(INFINITY)}) {
    PlanRequest request = far;
    request.tau = tau;
    expect_contains(invalid(request), "tau: expected a number in (0, 1), or 0 for the default");
  }
  PlanRequest request = far;
  request.audit_rows = -1;
  EXPECT_EQ(invalid(request), "audit_rows: expected 0 or more, got -1");
  request = far;
  request.expected_ignored = 0.5f;
  EXPECT_EQ(invalid(request),
            "expected_ignored: expected 0 with a sharding or the far field, got 0.5");
  for (const bool tau : {false, true}) {
    PlanRequest exact;
    exact.tau = tau ? 0.01f : 0.0f;
    exact.audit_rows = tau ? 0 : 5;
    EXPECT_EQ(invalid(exact),
              "tau, audit_rows, sample_every: only the far field has them; ask for it by accuracy "
              "or kind");
  }
  request = {};
  request.accuracy = static_cast<Accuracy>(7);
  EXPECT_EQ(invalid(request), "accuracy: 7 is no Accuracy");
  request = far;
  request.memory_budget = 1000;
  expect_contains(invalid(request), "is below the least plan, far_backward, which needs");

  HeadFeatures smooth = features;
  smooth.label_smoothing = true;
  smooth.softcap = 5.0f;
  EXPECT_EQ(unsupported(smooth, far),
            "no plan: far_backward: label smoothing under a softcap has a gradient of its own at "
            "every vocabulary entry");
  HeadFeatures entropy = features;
  entropy.entropy = entropy.entropy_gradient = true;
  expect_contains(unsupported(entropy, far),
                  "no plan: far_backward: a gradient through the entropy weighs each vocabulary "
                  "entry by its logit");
  HeadFeatures no_hidden = features;
  no_hidden.d_hidden = false;
  request = far;
  request.audit_rows = 5;
  EXPECT_EQ(message_of<InvalidArgument>([&] { plan_head(shape, no_hidden, request); }),
            "audit_rows: an audit measures the error of d_hidden, which is not asked for");
  HeadFeatures forward;
  EXPECT_EQ(unsupported(forward, far), "no plan: far_backward: no gradient is wanted");
  PlanRequest reference = far;
  reference.device.kernel = "reference";
  EXPECT_EQ(unsupported(features, reference),
            "no plan: far_backward: kernel reference has no far field");
}

const PlanCandidate* candidate(const LossPlan& plan) {
  for (const PlanCandidate& c : plan.candidates)
    if (c.kind == PlanKind::far_backward) return &c;
  return nullptr;
}

TEST(FarPlans, ByAccuracyWhereItIsFaster) {
  HeadFeatures features;
  features.d_hidden = features.d_weight = true;
  HeadShape shape{4096, 512, 131072, DType::bf16};
  PlanRequest request;
  request.accuracy = Accuracy::far_backward;
  const LossPlan large = plan_head(shape, features, request);
  EXPECT_EQ(large.kind, PlanKind::far_backward) << large.explain();
  EXPECT_LT(large.passes, 3.0);
  EXPECT_EQ(large.tau, 0.003f);

  shape.vocab = 1000;
  request.audit_rows = 10;
  const LossPlan small = plan_head(shape, features, request);
  EXPECT_NE(small.kind, PlanKind::far_backward);
  EXPECT_EQ(small.tau, 0.0f);
  EXPECT_EQ(small.audit, nullptr);
  ASSERT_NE(candidate(small), nullptr);
  EXPECT_FALSE(candidate(small)->possible);
  EXPECT_EQ(candidate(small)->reason,
            "would keep about 100 % of the tiles of 1000 vocabulary entries: nothing to gain");
  // Requested by kind, it is used nevertheless.
  request.kind = PlanKind::far_backward;
  EXPECT_EQ(plan_head(shape, features, request).kind, PlanKind::far_backward);

  // Exact requests do not consider it.
  EXPECT_EQ(candidate(plan_head(shape, features, {})), nullptr);
  // Features that it cannot serve are no error when only accuracy is requested.
  request = {};
  request.accuracy = Accuracy::far_backward;
  features.softcap = 5.0f;
  features.label_smoothing = true;
  const LossPlan other = plan_head(shape, features, request);
  EXPECT_NE(other.kind, PlanKind::far_backward);
  expect_contains(candidate(other)->reason, "label smoothing under a softcap");
}

}  // namespace
}  // namespace logitless::test
