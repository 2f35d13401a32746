// Properties of softmax cross entropy that hold for all numbers, on every kernel.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

class PropertiesTest : public testing::TestWithParam<std::string> {
 protected:
  HeadSpec small() const {
    HeadSpec spec;
    spec.dtype = tested_dtypes(GetParam()).front();
    spec.tokens = 23;
    spec.dim = 8;
    spec.vocab = 290;
    spec.weight_scale = 3.0;
    return spec;
  }
  HeadResult result(const HeadProblem& problem, RunSpec run = {}) const {
    run.kernel = GetParam();
    return run_head(problem, run);
  }
};

TEST_P(PropertiesTest, ShiftOfAllLogitsChangesNothingButLse) {
  HeadSpec spec = small();
  spec.bias = true;
  HeadProblem problem(spec);
  const HeadResult before = result(problem);
  constexpr double kShift = 12.5;
  for (std::int64_t j = 0; j < spec.vocab; ++j) problem.bias.set(j, problem.bias.get(j) + kShift);
  const HeadResult after = result(problem);
  EXPECT_NEAR(after.loss.get(0), before.loss.get(0), 1e-5);
  const double bound = gradient_bound(spec.dtype);
  EXPECT_LE(relative_error(after.d_hidden.values(), before.d_hidden.values()), bound);
  EXPECT_LE(relative_error(after.d_weight.values(), before.d_weight.values()), bound);
  for (std::int64_t i = 0; i < spec.tokens; ++i)
    EXPECT_NEAR(after.lse.get(i) - before.lse.get(i), kShift, 2e-5);
}

TEST_P(PropertiesTest, EqualLogitsCostLogV) {
  for (const std::int64_t vocab : {1, 2, 127, 128, 1000}) {
    HeadSpec spec = small();
    spec.vocab = vocab;
    HeadProblem problem(spec);
    problem.weight.fill(0.0);
    RunSpec run;
    run.extras = true;
    const HeadResult a = result(problem, run);
    const double log_v = std::log(static_cast<double>(vocab));
    EXPECT_NEAR(a.loss.get(0), log_v, 1e-6 * (1 + log_v));
    for (std::int64_t i = 0; i < spec.tokens; ++i) {
      EXPECT_NEAR(a.entropy.get(i), log_v, 1e-5 * (1 + log_v));
      EXPECT_EQ(a.argmax.get(i), 0.0);  // the lowest among equal ones
    }
  }
}

// sum_j dz_ij = 0, measured by d_bias, which sums dz over the tokens.
TEST_P(PropertiesTest, GradientOfLogitsSumsToZero) {
  HeadSpec spec = small();
  spec.bias = true;
  spec.reduction = Reduction::sum;
  const auto total = [&](const HeadSpec& s) {
    const std::vector<double> d_bias = result(HeadProblem(s)).d_bias.values();
    return std::accumulate(d_bias.begin(), d_bias.end(), 0.0);
  };
  //
  // dz
  // sums to at most 2 N; 16-bit kernels round each entry by up to 2^-8 of itself.
  const double bound = spec.dtype == DType::f32 ? 1e-4 : 46 * std::ldexp(1.0, -8) / 10;
  EXPECT_NEAR(total(spec), 0.0, bound);
  spec.class_weight = spec.token_weight = true;
  EXPECT_NEAR(total(spec), 0.0, bound);
  spec.label_smoothing = 0.2f;
  EXPECT_NEAR(total(spec), 0.0, bound);
  spec.z_loss = 0.1f;  // a penalty without this property: the test can fail
  EXPECT_GT(std::abs(total(spec)), 0.1);
}

TEST_P(PropertiesTest, PermutingTheVocabularyPermutesTheGradient) {
  HeadSpec spec = small();
  spec.bias = true;
  spec.class_weight = true;
  spec.label_smoothing = 0.1f;
  const HeadProblem problem(spec);
  HeadProblem permuted(spec);
  std::vector<std::int64_t> place(static_cast<std::size_t>(spec.vocab));
  std::iota(place.begin(), place.end(), 0);
  std::shuffle(place.begin(), place.end(), std::mt19937_64(3));
  for (std::int64_t j = 0; j < spec.vocab; ++j) {
    permuted.bias.set(place[j], problem.bias.get(j));
    permuted.class_weight.set(place[j], problem.class_weight.get(j));
    for (std::int64_t k = 0; k < spec.dim; ++k)
      permuted.weight.set(place[j] * spec.dim + k, problem.weight.get(j * spec.dim + k));
  }
  for (std::int64_t i = 0; i < spec.tokens; ++i) {
    permuted.targets.set(
        i, static_cast<double>(place[static_cast<std::size_t>(problem.targets.get(i))]));
  }
  RunSpec run;
  run.extras = true;
  const HeadResult a = result(problem, run);
  const HeadResult b = result(permuted, run);
  std::vector<double> back;
  std::vector<double> bias_back;
  for (std::int64_t j = 0; j < spec.vocab; ++j) {
    bias_back.push_back(b.d_bias.get(place[j]));
    for (std::int64_t k = 0; k < spec.dim; ++k)
      back.push_back(b.d_weight.get(place[j] * spec.dim + k));
  }
  EXPECT_NEAR(a.loss.get(0), b.loss.get(0), 1e-5);
  EXPECT_LE(relative_error(back, a.d_weight.values()), 1e-5);
  EXPECT_LE(relative_error(bias_back, a.d_bias.values()), 1e-5);
  EXPECT_LE(relative_error(b.d_hidden.values(), a.d_hidden.values()), 1e-5);
  for (std::int64_t i = 0; i < spec.tokens; ++i) {
    EXPECT_EQ(place[static_cast<std::size_t>(a.argmax.get(i))],
              static_cast<std::int64_t>(b.argmax.get(i)));
  }
}

TEST_P(PropertiesTest, GradientsAreLinearInTheUpstream) {
  HeadSpec spec = small();
  spec.label_smoothing = 0.1f;
  const HeadProblem problem(spec);
  RunSpec run;
  const HeadResult one = result(problem, run);
  run.grad_loss = 4.0;  // a power of two changes only the exponent
  const HeadResult four = result(problem, run);
  EXPECT_EQ(one.loss.bytes(), four.loss.bytes());
  for (std::int64_t at = 0; at < spec.tokens * spec.dim; ++at)
    EXPECT_NEAR(four.d_hidden.get(at), 4 * one.d_hidden.get(at), 1e-8);
  EXPECT_LE(relative_error(four.d_weight.values(),
                           [&] {
                             std::vector<double> v = one.d_weight.values();
                             for (double& x : v) x *= 4;
                             return v;
                           }()),
            1e-6);
}

// Two halves of a batch with the normalizer of the full batch add up to the full batch, as in
// gradient accumulation.
TEST_P(PropertiesTest, HalvesAddUpToTheWhole) {
  HeadSpec spec = small();
  spec.tokens = 40;
  spec.bias = true;
  spec.ignored = 0.3;
  const HeadProblem problem(spec);
  const HeadResult whole = result(problem);
  HeadResult parts;
  parts.d_weight = Tensor(DType::f32, {spec.vocab, spec.dim});
  parts.d_bias = Tensor(DType::f32, {spec.vocab});
  parts.d_weight.fill(0.0);
  parts.d_bias.fill(0.0);
  double loss = 0;
  std::vector<double> d_hidden;
  for (const std::int64_t begin : {0, 20}) {
    const auto rows = [&](const Tensor& t, std::int64_t columns) {
      Tensor out(t.view().dtype(), columns > 1 ? std::vector<std::int64_t>{20, columns}
                                               : std::vector<std::int64_t>{20});
      for (std::int64_t at = 0; at < 20 * columns; ++at) out.set(at, t.get(begin * columns + at));
      return out;
    };
    HeadProblem half(spec);
    half.spec.tokens = 20;
    half.hidden = rows(problem.hidden, spec.dim);
    half.targets = rows(problem.targets, 1);
    RunSpec run;
    run.change = [&](CrossEntropyOptions& o, auto&, CrossEntropyOutputs& out) {
      o.normalizer = whole.statistics.normalizer;
      o.accumulate = true;
      out.d_weight = parts.d_weight.view();
      out.d_bias = parts.d_bias.view();
      std::fill_n(static_cast<float*>(out.d_hidden.data()), 20 * spec.dim, 0.0f);
    };
    const HeadResult a = result(half, run);
    loss += a.loss.get(0);
    const std::vector<double> some = a.d_hidden.values();
    d_hidden.insert(d_hidden.end(), some.begin(), some.end());
  }
  EXPECT_NEAR(loss, whole.loss.get(0), 1e-5);
  EXPECT_LE(relative_error(d_hidden, whole.d_hidden.values()), 1e-6);
  EXPECT_LE(relative_error(parts.d_weight.values(), whole.d_weight.values()), 1e-5);
  EXPECT_LE(relative_error(parts.d_bias.values(), whole.d_bias.values()), 1e-5);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(PropertiesTest);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, PropertiesTest, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test
