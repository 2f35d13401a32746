// Sampling of the far field: d_weight and d_bias have an error in one call, and are exact in the
// mean over the seeds.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <utility>

#include "kernels/cpu_head.h"
#include "math/far_sample.h"
#include "support/far_both.h"
#include "support/far_cases.h"

namespace logitless::test {
namespace {

TEST(FarSample, TakesEveryPairOnceInAPeriodOfSeeds) {
  for (const std::int64_t every : {1, 2, 5, 16}) {
    for (const std::uint64_t window : {0u, 7u}) {
      for (std::int64_t tile = 0; tile < 40; ++tile) {
        for (std::int64_t block = 0; block < 20; ++block) {
          int taken = 0;
          for (std::int64_t seed = 0; seed < every; ++seed) {
            const FarSample sample(every, window * every + seed, 384);
            taken += sample.takes(tile, block) ? 1 : 0;
          }
          EXPECT_EQ(taken, 1) << every << " " << tile << " " << block;
        }
      }
    }
  }
  EXPECT_FALSE(FarSample().takes(3, 5));
  EXPECT_FALSE(FarSample(0, 9, 0).takes(3, 5));
}

TEST(FarSample, DiffersByTileWindowAndChunk) {
  const auto taken = [](std::uint64_t seed, std::int64_t chunk) {
    std::set<std::int64_t> blocks;
    for (std::int64_t tile = 0; tile < 64; ++tile) {
      for (std::int64_t block = 0; block < 16; ++block)
        if (FarSample(16, seed, chunk).takes(tile, block)) blocks.insert(tile * 16 + block);
    }
    return blocks;
  };
  std::set<std::int64_t> starts;
  for (const std::int64_t pair : taken(0, 0)) starts.insert(pair % 16);
  EXPECT_GT(starts.size(), 8u);
  EXPECT_EQ(taken(5, 128), taken(5, 128));
  EXPECT_NE(taken(0, 0), taken(16, 0));
  EXPECT_NE(taken(0, 0), taken(0, 128));
}

class FarSampled : public FarKernels {
 protected:
  HeadSpec spec(std::int64_t tokens = 300, std::int64_t vocab = 11 * 128 + 37) const {
    HeadSpec s = FarKernels::spec(tokens, 13, vocab, 3);
    s.bias = true;
    return s;
  }
};

RunSpec sampled(RunSpec run, std::int64_t every, std::uint64_t seed) {
  run.sample_every = every;
  run.change = [seed](CrossEntropyOptions&, CrossEntropyInputs& in, CrossEntropyOutputs&) {
    in.sample_seed = seed;
  };
  return run;
}

void add(const std::vector<double>& from, double factor, std::vector<double>& to) {
  to.resize(from.size(), 0.0);
  for (std::size_t i = 0; i < from.size(); ++i) to[i] += factor * from[i];
}

// Checks the mean over `every` seeds; returns the results without a sample.
FarResult expect_exact_mean(const FarProblem& problem, RunSpec run, std::int64_t every) {
  SCOPED_TRACE(describe(problem.spec));
  FarResult mass = run_far(problem, run);
  EXPECT_GT(mass.statistics.far.selected, 0.0);
  EXPECT_FALSE(mass.statistics.far.dense_fallback);
  EXPECT_EQ(mass.statistics.far.sampled, 0.0);
  run.tau = static_cast<float>(mass.tau);
  const OracleGradients& exact = mass.oracle.exact;
  const double contract = gradient_bound(problem.spec.dtype);
  std::vector<double> d_weight, d_bias;
  double taken = 0;
  for (std::int64_t seed = 0; seed < every; ++seed) {
    const FarResult a = call_far(problem, sampled(run, every, static_cast<std::uint64_t>(seed)));
    EXPECT_EQ(a.plan.sample_every, every);
    EXPECT_EQ(a.loss.values(), mass.loss.values());
    EXPECT_EQ(a.d_hidden.values(), mass.d_hidden.values());
    EXPECT_EQ(a.bound.values(), mass.bound.values());
    EXPECT_EQ(a.statistics.far.selected, mass.statistics.far.selected);
    taken += a.statistics.far.sampled;
    EXPECT_NEAR(a.statistics.far.passes, mass.statistics.far.passes + 2 * a.statistics.far.sampled,
                1e-12);
    if (a.statistics.far.sampled > 0) {
      EXPECT_NE(a.d_weight.values(), mass.d_weight.values());
    }
    add(a.d_weight.values(), 1.0 / static_cast<double>(every), d_weight);
    if (a.d_bias.defined()) add(a.d_bias.values(), 1.0 / static_cast<double>(every), d_bias);
  }
  EXPECT_NEAR(taken, 1 - mass.statistics.far.selected, 1e-12);
  EXPECT_LE(distance(d_weight, exact.d_weight), contract * norm(exact.d_weight));
  if (!d_bias.empty()) {
    EXPECT_LE(distance(d_bias, exact.d_bias), contract * norm(exact.d_bias));
  }
  return mass;
}

TEST_P(FarSampled, TheMeanOverSeedsIsExact) {
  const FarProblem problem(spec());
  const FarResult mass = expect_exact_mean(problem, run(), 5);  // more than there are blocks
  // The mass alone is not exact.
  EXPECT_GT(distance(mass.d_weight.values(), mass.oracle.exact.d_weight),
            3 * gradient_bound(problem.spec.dtype) * norm(mass.oracle.exact.d_weight));
  expect_exact_mean(problem, run(), 1);
}

TEST_P(FarSampled, TheMeanIsExactWithEveryOption) {
  const auto check = [&](void (*change)(HeadSpec&)) {
    HeadSpec s = spec(140, 5 * 128 + 37);
    change(s);
    if (accepts_far(GetParam(), s)) expect_exact_mean(FarProblem(s), run(), 2);
  };
  check([](HeadSpec& s) { s.softcap = 5.0f; });
  check([](HeadSpec& s) { s.label_smoothing = 0.1f; });
  check([](HeadSpec& s) { s.z_loss = 0.01f; });
  check([](HeadSpec& s) { s.logit_scale = 0.7f; });
  check([](HeadSpec& s) { s.per_token = 3; });
  check([](HeadSpec& s) {
    s.ignored = 0.4;
    s.token_weight = s.class_weight = true;
  });
  check([](HeadSpec& s) { s.dtype = DType::bf16; });
  check([](HeadSpec& s) { s.dim = 600; });
}

TEST_P(FarSampled, TheMeanIsExactOverChunks) {
  RunSpec small = run();
  const HeadSpec s = spec(500, 6 * 128);
  const FarProblem problem(s);
  small.tau = 0.05f;
  small.budget = least_far_budget(problem, small);
  small.tau = 0.0f;
  const FarResult mass = expect_exact_mean(problem, small, 2);
  EXPECT_LT(mass.plan.chunk_tokens, s.tokens);
}

TEST_P(FarSampled, GradientsAloneAndNone) {
  const FarProblem problem(spec());
  RunSpec r = run();
  r.tau = 0.05f;
  r.sample_every = 2;
  const FarResult all = call_far(problem, r);
  r.d_hidden = false;
  const FarResult weight = call_far(problem, r);
  EXPECT_EQ(weight.d_weight.values(), all.d_weight.values());
  EXPECT_EQ(weight.d_bias.values(), all.d_bias.values());
  r.d_hidden = true;
  r.d_weight = r.d_bias = false;
  const FarResult hidden = call_far(problem, r);
  EXPECT_EQ(hidden.d_hidden.values(), all.d_hidden.values());
  EXPECT_EQ(hidden.statistics.far.sampled, 0.0);
}

TEST_P(FarSampled, ThreadsAndRunsGiveTheSameBits) {
  const FarProblem problem(spec());
  RunSpec r = sampled(run(), 4, 11);
  r.tau = 0.05f;
  const FarResult first = call_far(problem, r);
  for (const int threads : {1, 2, 3}) {
    r.threads = threads;
    const FarResult again = call_far(problem, r);
    EXPECT_EQ(again.d_weight.values(), first.d_weight.values());
    EXPECT_EQ(again.d_bias.values(), first.d_bias.values());
  }
}

// far_both is exact with respect to the estimated lse of the call, with each tile's own mass in it.
TEST_P(FarSampled, BothWays) {
  const HeadSpec s = FarKernels::spec(12, 9, 61 * 128 + 37, 3);
  const FarBothProblem problem(s);
  RunSpec r = run();
  const FarBothResult mass = run_far_both(problem, r);
  r.tau = static_cast<float>(mass.tau);
  std::vector<double> d_weight;
  double taken = 0, error_squared = 0, most = 0;
  for (std::uint64_t seed = 0; seed < 2; ++seed) {
    const FarBothResult a = call_far_both(problem, sampled(r, 2, seed));
    EXPECT_EQ(a.d_hidden.values(), mass.d_hidden.values());
    taken += a.statistics.far.sampled;
    error_squared += std::pow(a.statistics.far.sampled_lse_error, 2) * a.statistics.far.sampled;
    most = std::max(most, a.statistics.far.sampled_most);
    add(a.d_weight.values(), 0.5, d_weight);
  }
  EXPECT_NEAR(taken, 1 - mass.statistics.far.selected, 1e-12);
  const logitless::FarSampled& found = mass.oracle.of_sample;
  const double groups = found.tokens / static_cast<double>(s.tokens);
  // A mass is known up to the errors of its estimate and of 16 bits.
  EXPECT_NEAR(std::sqrt(error_squared / taken),
              std::sqrt(groups * found.error_squared / found.tokens),
              0.02 * std::sqrt(groups * found.error_squared / found.tokens));
  EXPECT_NEAR(most, found.most, 0.02 * found.most);
  const std::vector<double>& want = mass.oracle.mean_d_weight;
  const double bound = gradient_bound(s.dtype) * norm(want) + mass.oracle.weight_slack;
  EXPECT_LE(distance(d_weight, want), bound);
  EXPECT_GT(distance(mass.d_weight.values(), want), bound);
  EXPECT_EQ(mass.statistics.far.sampled_lse_error, 0.0);
}

// Masses far above their estimates, like those of entries that differ from their tile: a
// probability counts once for each token at most, `every` times in a sample.
TEST_P(FarSampled, BothWaysEstimatesFarTooLow) {
  const HeadSpec s = FarKernels::spec(12, 9, 61 * 128 + 37, 3);
  FarBothProblem problem(s);
  // Logits of 25 in a tile without targets, which its moments do not include.
  double size = 0;
  for (std::int64_t k = 0; k < s.dim; ++k) size += std::pow(problem.hidden.get(k), 2);
  const std::int64_t vocab_id = problem.order.vocab_ids()[128 + 3];
  for (std::int64_t k = 0; k < s.dim; ++k)
    problem.weight.set(vocab_id * s.dim + k, 25.0 * problem.hidden.get(k) / size);
  problem.refresh_oracle();
  RunSpec r = run();
  r.tau = 0.5f;
  const FarBothResult a = call_far_both(problem, sampled(r, 1, 0));
  EXPECT_GT(a.statistics.far.sampled_most, 100.0);
  const OracleProblem& p = problem.oracle;
  double most = 0;
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    double squared = 0;
    for (std::int64_t k = 0; k < p.dim; ++k) squared += std::pow(p.hidden[i * p.dim + k], 2);
    most += std::sqrt(squared) / static_cast<double>(p.tokens);
  }
  const std::vector<double> got = a.d_weight.values();
  for (std::int64_t j = 0; j < p.vocab; ++j) {
    double squared = 0;
    for (std::int64_t k = 0; k < p.dim; ++k) squared += std::pow(got[j * p.dim + k], 2);
    EXPECT_LE(std::sqrt(squared), 2.0 * most) << "vocabulary entry " << j;
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(FarSampled);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, FarSampled, testing::ValuesIn(far_kernels()),
                         [](const auto& kernel) { return kernel.param; });

TEST(FarSampleRefusals, OfPlans) {
  const HeadShape shape{128, 16, 1 << 17, DType::f32};
  HeadFeatures features;
  features.d_hidden = features.d_weight = true;
  PlanRequest request;
  request.device.threads = 2;
  request.sample_every = 16;
  EXPECT_THROW(plan_head(shape, features, request), InvalidArgument);
  request.accuracy = Accuracy::far_backward;
  const LossPlan plan = plan_head(shape, features, request);
  EXPECT_EQ(plan.kind, PlanKind::far_backward);
  EXPECT_EQ(plan.sample_every, 16);
  EXPECT_NE(plan.explain().find("one block of tokens in 16"), std::string::npos);
  request.sample_every = 0;
  EXPECT_LT(plan_head(shape, features, request).passes, plan.passes);
  request.sample_every = -1;
  EXPECT_THROW(plan_head(shape, features, request), InvalidArgument);
}

}  // namespace
}  // namespace logitless::test
