// Logits of any size: correct in the documented range, and never finite but wrong beyond it
// (docs/explain/losses.md).
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

constexpr double kRange = 7e8;

class RangeTest : public testing::TestWithParam<std::string> {
 protected:
  // Returns a problem where entries 5, 140 and 299, in different tiles, have these biases, and all
  // others `rest`.
  static HeadProblem problem(double first, double second, double third, double rest) {
    HeadSpec spec;
    spec.tokens = 17;
    spec.dim = 8;
    spec.vocab = 300;
    spec.dtype = tested_dtypes(GetParam()).front();
    spec.bias = true;
    spec.reduction = Reduction::none;
    HeadProblem problem(spec);
    problem.bias.fill(rest);
    problem.bias.set(5, first);
    problem.bias.set(140, second);
    problem.bias.set(299, third);
    for (std::int64_t i = 0; i < spec.tokens; ++i)
      problem.targets.set(i, i % 4 == 0 ? 5 : i % 4 == 1 ? 140 : i % 4 == 2 ? 299 : 77);
    problem.refresh_oracle();
    return problem;
  }

  // Returns a problem with logits that fp32 holds exactly, whatever the `offset` here.
  static HeadProblem exact_problem(double offset, float smoothing) {
    HeadSpec spec;
    spec.tokens = 17;
    spec.dim = 8;
    spec.vocab = 300;
    spec.dtype = tested_dtypes(GetParam()).front();
    spec.bias = true;
    spec.label_smoothing = smoothing;
    spec.reduction = Reduction::none;
    HeadProblem problem(spec);
    for (std::int64_t i = 0; i < spec.tokens * spec.dim; ++i)
      problem.hidden.set(i, static_cast<double>(i * 7 % 5 - 2) / 2);
    for (std::int64_t i = 0; i < spec.vocab * spec.dim; ++i)
      problem.weight.set(i, static_cast<double>(i * i * 3 % 11 % 7 - 3) / 4);
    problem.bias.fill(offset);
    problem.refresh_oracle();
    return problem;
  }
  static double entropy_of(const double* z, double lse, std::int64_t vocab) {
    double entropy = 0.0;
    for (std::int64_t j = 0; j < vocab; ++j) entropy += std::exp(z[j] - lse) * (lse - z[j]);
    return entropy;
  }

  // `within`: the logits are in the documented range, so the result must be correct.
  static void expect_right_or_none(const HeadProblem& problem, bool within) {
    const OracleLogits exact = oracle_logits(problem.oracle);
    for (const PlanKind kind : {PlanKind::forward, PlanKind::dense, PlanKind::recompute}) {
      if (!offers(GetParam(), kind)) continue;
      SCOPED_TRACE(name_of(kind));
      RunSpec r;
      r.kernel = GetParam();
      r.plan = kind;
      r.gradients = kind != PlanKind::forward;
      const HeadResult result = run_head(problem, r);
      for (std::int64_t i = 0; i < problem.spec.tokens; ++i) {
        SCOPED_TRACE(i);
        const double lse = result.lse.get(i), expected = exact.lse[static_cast<std::size_t>(i)];
        EXPECT_TRUE(std::isfinite(lse) || !within);
        const double z = exact.z[static_cast<std::size_t>(i * problem.spec.vocab) +
                                 static_cast<std::size_t>(problem.targets.get(i))];
        const bool fits = expected - z < std::numeric_limits<float>::max();
        EXPECT_EQ(std::isfinite(lse) && fits, std::isfinite(result.loss.get(i)));
        if (!std::isfinite(lse)) continue;
        EXPECT_NEAR(lse, expected, 1e-6 * std::abs(expected) + 1e-5);
        if (!fits) continue;
        // Both terms of the difference are rounded to fp32.
        EXPECT_NEAR(result.loss.get(i), expected - z,
                    1e-6 * (std::abs(expected) + std::abs(z)) + 1e-5);
      }
    }
  }
};

TEST_P(RangeTest, GreatLogits) {
  for (const double z : {1e3,   1e6,   3e7,   1e8, 6e8, kRange, 8e8,  1e9,  1.4e9, 1.6e9, 2.1e9,
                         2.9e9, 3.1e9, 3.4e9, 4e9, 5e9, 7.7e9,  1e10, 1e12, 1e20,  1e30,  3e38}) {
    SCOPED_TRACE(z);
    expect_right_or_none(problem(z, 0.0, 0.0, 0.0), z <= kRange);
    expect_right_or_none(problem(0.0, z, 0.9999 * z, 0.0), z <= kRange);
    expect_right_or_none(problem(z, z, -z, 0.0), z <= kRange);
  }
}

TEST_P(RangeTest, AllLogitsFarBelowZero) {
  for (const double z : {-1e3, -1e6, -1e8, -6e8, -kRange, -8e8, -1e9, -1.6e9, -2.9e9, -3.4e9, -4e9,
                         -1e10, -1e12, -1e30, -3e38}) {
    SCOPED_TRACE(z);
    expect_right_or_none(problem(z, z, z, z), z >= -kRange);
    // The others are masked, and the remaining one is correct.
    expect_right_or_none(problem(-1e3, z, z, z), true);
  }
}

// Logits that are exact in fp32 and share an `offset`: everything that depends on their differences
// is unchanged. A GPU's loss with label smoothing uses an fp32 lse.
TEST_P(RangeTest, ACommonOffsetChangesNoDifference) {
  for (const float smoothing : {0.0f, 0.1f}) {
    const bool fp32_loss = smoothing != 0.0f && is_device_kernel(GetParam());
    for (const double offset : {0.0, 1e4, 1e5, -1e5}) {
      const HeadProblem problem = exact_problem(offset, smoothing);
      const HeadSpec& spec = problem.spec;
      const OracleLogits exact = oracle_logits(problem.oracle);
      for (const PlanKind kind : {PlanKind::forward, PlanKind::dense, PlanKind::recompute}) {
        if (!offers(GetParam(), kind)) continue;
        SCOPED_TRACE(testing::Message() << name_of(kind) << ' ' << offset << ' ' << smoothing);
        RunSpec r;
        r.kernel = GetParam();
        r.plan = kind;
        r.gradients = kind != PlanKind::forward;
        r.extras = true;
        r.grad_losses.assign(static_cast<std::size_t>(spec.tokens), 1.0);
        const HeadResult result = run_head(problem, r);
        for (std::int64_t i = 0; i < spec.tokens; ++i) {
          const double* const z = exact.z.data() + i * spec.vocab;
          const double lse = exact.lse[static_cast<std::size_t>(i)];
          const double entropy = entropy_of(z, lse, spec.vocab);
          if (!fp32_loss) {
            EXPECT_NEAR(result.loss.get(i), oracle_token_loss(problem.oracle, i, z), 1e-5) << i;
          }
          EXPECT_NEAR(result.log_prob.get(i),
                      z[static_cast<std::int64_t>(problem.targets.get(i))] - lse, 1e-5)
              << i;
          EXPECT_NEAR(result.entropy.get(i), entropy, 1e-5) << i;
          EXPECT_NEAR(result.lse.get(i), lse, 1e-7 * std::abs(lse) + 1e-6) << i;
        }
        if (!r.gradients) continue;
        const OracleGradients g = oracle_gradients(problem.oracle, r.grad_losses);
        EXPECT_LE(relative_error(result.d_hidden.values(), g.d_hidden), gradient_bound(spec.dtype));
        EXPECT_LE(relative_error(result.d_weight.values(), g.d_weight), gradient_bound(spec.dtype));
      }
    }
  }
}

// The gradient of the entropy is made of differences of logits, too.
TEST_P(RangeTest, ACommonOffsetChangesNoGradientOfTheEntropy) {
  for (const double offset : {0.0, 1e4, 1e5, -1e5}) {
    SCOPED_TRACE(offset);
    const HeadProblem p = exact_problem(offset, 0.0f);
    const HeadSpec& spec = p.spec;
    Tensor d_entropy(DType::f32, {spec.tokens});
    d_entropy.fill(1.0);
    Tensor d_hidden(DType::f32, {spec.tokens, spec.dim}),
        d_weight(DType::f32, {spec.vocab, spec.dim});
    Mirror mirror(GetParam());
    HeadInputs in;
    in.hidden = mirror.in(p.hidden.view());
    in.weight = mirror.in(p.weight.view());
    in.targets = mirror.in(p.targets.view());
    in.bias = mirror.in(p.bias.view());
    HeadCotangents cotangents;
    cotangents.entropy = mirror.in(std::as_const(d_entropy).view());
    const HeadGradients gradients{mirror.out(d_hidden.view()), mirror.out(d_weight.view()), {}};
    const Context c = make_context(GetParam());
    const LossPlan plan =
        plan_head_backward(HeadOptions{}, in, cotangents, gradients, {c.device(), 0, {}, 0.0});
    const Workspace workspace(c, plan);
    head_backward(c, plan, HeadOptions{}, in, cotangents, gradients, workspace);
    mirror.finish();
    const OracleLogits exact = oracle_logits(p.oracle);
    std::vector<double> dz(exact.z.size());
    for (std::int64_t i = 0; i < spec.tokens; ++i) {
      const double* const z = exact.z.data() + i * spec.vocab;
      const double lse = exact.lse[static_cast<std::size_t>(i)];
      const double entropy = entropy_of(z, lse, spec.vocab);
      for (std::int64_t j = 0; j < spec.vocab; ++j)
        dz[static_cast<std::size_t>(i * spec.vocab + j)] =
            -std::exp(z[j] - lse) * (entropy + z[j] - lse);
    }
    const OracleGradients g = oracle_chain(p.oracle, exact, dz);
    EXPECT_LE(relative_error(d_hidden.values(), g.d_hidden), gradient_bound(spec.dtype));
    EXPECT_LE(relative_error(d_weight.values(), g.d_weight), gradient_bound(spec.dtype));
  }
}

// Equal logits near 3e4, which a scale rounds: the loss is log(V), without a bias and with one.
TEST_P(RangeTest, AScaleKeepsEqualLogitsEqual) {
  for (const bool bias : {false, true}) {
    for (const float scale : {1.0f, 0.5f, 0.3f, 1.7f}) {
      HeadSpec spec;
      spec.tokens = 17;
      spec.dim = 8;
      spec.vocab = 300;
      spec.dtype = tested_dtypes(GetParam()).front();
      spec.bias = bias;
      spec.logit_scale = scale;
      spec.reduction = Reduction::none;
      HeadProblem p(spec);
      p.hidden.fill(0.0);
      for (std::int64_t i = 0; i < spec.tokens; ++i)
        p.hidden.set(i * spec.dim + 3, 320.0 + 2.0 * static_cast<double>(i));
      p.weight.fill(320.0);
      if (bias) p.bias.fill(0.0);
      p.refresh_oracle();
      for (const PlanKind kind : {PlanKind::forward, PlanKind::dense, PlanKind::recompute}) {
        if (!offers(GetParam(), kind)) continue;
        SCOPED_TRACE(testing::Message() << name_of(kind) << ' ' << scale << ' ' << bias);
        RunSpec r;
        r.kernel = GetParam();
        r.plan = kind;
        r.gradients = kind != PlanKind::forward;
        r.grad_losses.assign(static_cast<std::size_t>(spec.tokens), 1.0);
        const HeadResult result = run_head(p, r);
        for (std::int64_t i = 0; i < spec.tokens; ++i)
          EXPECT_NEAR(result.loss.get(i), std::log(300.0), 1e-5) << i;
        if (!r.gradients) continue;
        const OracleGradients g = oracle_gradients(p.oracle, r.grad_losses);
        EXPECT_LE(relative_error(result.d_weight.values(), g.d_weight), gradient_bound(spec.dtype));
      }
    }
  }
}

// An entry far above all others has probability 1, however its logit and the log-sum-exp were
// rounded.
TEST_P(RangeTest, ACertainTargetHasNoGradient) {
  for (const double z : {1e2, 1e3, 1e5, 3e6}) {
    HeadProblem p = problem(z, 0.0, 0.0, 0.0);
    p.targets.fill(5);
    p.refresh_oracle();
    for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute}) {
      if (!offers(GetParam(), kind)) continue;
      SCOPED_TRACE(testing::Message() << name_of(kind) << ' ' << z);
      RunSpec r;
      r.kernel = GetParam();
      r.plan = kind;
      r.grad_losses.assign(static_cast<std::size_t>(p.spec.tokens), 1.0);
      const HeadResult result = run_head(p, r);
      for (const Tensor* g : {&result.d_hidden, &result.d_weight, &result.d_bias})
        for (const double v : g->values()) ASSERT_LE(std::abs(v), 1e-4);
    }
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(RangeTest);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, RangeTest, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test
