// Masked data has no effect: ignored tokens, masked vocabulary entries, and rows with NaN.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "support/infinite_logits.h"
#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class MasksTest : public testing::TestWithParam<std::string> {
 protected:
  RunSpec run() const {
    RunSpec r;
    r.kernel = GetParam();
    r.extras = true;
    return r;
  }
  HeadSpec small() const { return small(tested_dtypes(GetParam()).front()); }
  static HeadSpec small(DType dtype) {
    HeadSpec spec;
    spec.tokens = 17;
    spec.dim = 8;
    spec.vocab = 300;
    spec.dtype = dtype;
    spec.weight_scale = 2.0;
    return spec;
  }
};

TEST_P(MasksTest, AllTokensIgnored) {
  HeadSpec spec = small();
  spec.ignored = 1.0;
  spec.bias = true;
  for (const Reduction reduction : {Reduction::mean, Reduction::sum, Reduction::none}) {
    spec.reduction = reduction;
    const HeadProblem problem(spec);
    const HeadResult result = run_head(problem, run());
    EXPECT_EQ(result.statistics.valid_tokens, 0);
    for (const Tensor* output : {&result.loss, &result.d_hidden, &result.d_weight, &result.d_bias,
                                 &result.lse, &result.log_prob, &result.entropy}) {
      for (const double value : output->values()) EXPECT_EQ(value, 0.0);
    }
    for (const double vocab_id : result.argmax.values()) EXPECT_EQ(vocab_id, -1.0);
  }
  spec.reduction = Reduction::mean;
  RunSpec nan = run();
  nan.change = [](CrossEntropyOptions& o, auto&, auto&) { o.nan_if_empty = true; };
  const HeadResult result = run_head(HeadProblem(spec), nan);
  EXPECT_TRUE(std::isnan(result.loss.get(0)));
  for (const double g : result.d_weight.values()) EXPECT_EQ(g, 0.0);
}

// Ignored tokens have no gradient, and the others have the bits of a call without them.
TEST_P(MasksTest, IgnoredTokensLeaveNoTrace) {
  HeadSpec spec = small();
  spec.reduction = Reduction::sum;
  HeadProblem all(spec);
  for (const std::int64_t i : {0, 5, 6, 16}) {
    all.targets.set(i, -100);
    for (std::int64_t k = 0; k < spec.dim; ++k) all.hidden.set(i * spec.dim + k, NAN);
  }
  HeadSpec fewer = spec;
  fewer.tokens = 13;
  HeadProblem rest(fewer);
  rest.weight = all.weight;
  for (std::int64_t i = 0, to = 0; i < spec.tokens; ++i) {
    if (all.targets.get(i) == -100) continue;
    rest.targets.set(to, all.targets.get(i));
    for (std::int64_t k = 0; k < spec.dim; ++k)
      rest.hidden.set(to * spec.dim + k, all.hidden.get(i * spec.dim + k));
    ++to;
  }
  RunSpec recompute = run();
  recompute.plan = PlanKind::recompute;
  if (offers(GetParam(), PlanKind::recompute)) {
    EXPECT_LE(relative_error(run_head(all, recompute).d_weight.values(),
                             run_head(rest, recompute).d_weight.values()),
              1e-6);
  }
  const HeadResult a = run_head(all, run());
  const HeadResult b = run_head(rest, run());
  EXPECT_EQ(a.statistics.valid_tokens, 13);
  const std::string& kernel = GetParam();  // other sizes select other cuBLAS kernels
  if (kernel == "cublas" || kernel == "sm80" || kernel == "sm86") {
    EXPECT_LE(relative_error(a.loss.values(), b.loss.values()), 1e-6);
    EXPECT_LE(relative_error(a.d_weight.values(), b.d_weight.values()), 1e-6);
    for (const std::int64_t i : {0, 5, 6, 16})
      for (std::int64_t k = 0; k < spec.dim; ++k) EXPECT_EQ(a.d_hidden.get(i * spec.dim + k), 0.0);
    return;
  }
  EXPECT_EQ(a.loss.bytes(), b.loss.bytes());
  EXPECT_EQ(a.d_weight.bytes(), b.d_weight.bytes());
  for (std::int64_t i = 0, from = 0; i < spec.tokens; ++i) {
    const bool ignored = all.targets.get(i) == -100;
    EXPECT_EQ(a.argmax.get(i), ignored ? -1.0 : b.argmax.get(from));
    EXPECT_EQ(a.lse.get(i), ignored ? 0.0 : b.lse.get(from));
    for (std::int64_t k = 0; k < spec.dim; ++k) {
      EXPECT_EQ(a.d_hidden.get(i * spec.dim + k),
                ignored ? 0.0 : b.d_hidden.get(from * spec.dim + k));
    }
    if (!ignored) ++from;
  }
}

TEST_P(MasksTest, MaskedVocab) {
  for (const DType dtype : tested_dtypes(GetParam())) {
    HeadSpec spec = small(dtype);
    spec.bias = true;
    if (!accepts(GetParam(), spec)) continue;
    HeadProblem problem(spec);
    const auto masked = [](std::int64_t j) { return j % 3 == 0 || (j >= 128 && j < 256); };
    for (std::int64_t j = 0; j < spec.vocab; ++j) {
      if (masked(j)) problem.bias.set(j, -kInfinity);
    }
    for (std::int64_t i = 0; i < spec.tokens; ++i)
      problem.targets.set(i, static_cast<double>(1 + 3 * i));
    problem.refresh_oracle();
    for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute}) {
      if (!offers(GetParam(), kind)) continue;
      RunSpec r = run();
      r.plan = kind;
      expect_matches_oracle(problem, r);
      const HeadResult result = run_head(problem, r);
      for (std::int64_t i = 0; i < spec.tokens; ++i) {
        EXPECT_TRUE(std::isfinite(result.entropy.get(i)));
        EXPECT_GT(result.entropy.get(i), 0.0);
        EXPECT_FALSE(masked(static_cast<std::int64_t>(result.argmax.get(i))));
      }
      for (std::int64_t j = 0; j < spec.vocab; ++j) {
        if (!masked(j)) continue;
        EXPECT_EQ(result.d_bias.get(j), 0.0);
        for (std::int64_t k = 0; k < spec.dim; ++k)
          EXPECT_EQ(result.d_weight.get(j * spec.dim + k), 0.0);
      }
    }
  }
}

TEST_P(MasksTest, MaskedTargetHasInfiniteLoss) {
  HeadSpec spec = small();
  spec.bias = true;
  spec.reduction = Reduction::none;
  HeadProblem problem(spec);
  problem.bias.set(7, -kInfinity);
  for (std::int64_t i = 0; i < spec.tokens; ++i) problem.targets.set(i, i == 2 ? 7 : 8);
  RunSpec r = run();
  r.gradients = false;
  const HeadResult result = run_head(problem, r);
  for (std::int64_t i = 0; i < spec.tokens; ++i)
    EXPECT_EQ(std::isinf(result.loss.get(i)), i == 2) << i;
}

// Masks are often written as large negative biases: they have the same bits as -inf, also in a full
// tile.
TEST_P(MasksTest, HugeNegativeBiasesAreMasks) {
  HeadSpec spec = small();
  spec.bias = true;
  const auto result = [&](double mask) {
    HeadProblem problem(spec);
    for (std::int64_t i = 0; i < spec.tokens; ++i)
      problem.targets.set(i, static_cast<double>(7 * i % 120));
    for (std::int64_t j = 120; j < 290; ++j) problem.bias.set(j, mask);
    return run_head(problem, run());
  };
  const HeadResult masked = result(-kInfinity);
  EXPECT_TRUE(std::isfinite(masked.loss.get(0)));
  for (const double mask :
       {-1e12, -1e30, -static_cast<double>(std::numeric_limits<float>::max())}) {
    SCOPED_TRACE(mask);
    const HeadResult a = result(mask);
    EXPECT_EQ(a.loss.values(), masked.loss.values());
    EXPECT_EQ(a.lse.values(), masked.lse.values());
    EXPECT_EQ(a.entropy.values(), masked.entropy.values());
    EXPECT_EQ(a.argmax.values(), masked.argmax.values());
    EXPECT_EQ(a.d_hidden.values(), masked.d_hidden.values());
    EXPECT_EQ(a.d_weight.values(), masked.d_weight.values());
    EXPECT_EQ(a.d_bias.values(), masked.d_bias.values());
  }
}

TEST_P(MasksTest, AllVocabMasked) {
  HeadSpec spec = small();
  spec.bias = true;
  HeadProblem problem(spec);
  problem.bias.fill(-kInfinity);
  const HeadResult result = run_head(problem, run());
  for (std::int64_t i = 0; i < spec.tokens; ++i) {
    EXPECT_FALSE(std::isfinite(result.lse.get(i)));
  }
  EXPECT_FALSE(std::isfinite(result.loss.get(0)));
}

TEST_P(MasksTest, NanStaysInItsRow) {
  for (const DType dtype : tested_dtypes(GetParam())) {
    for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute}) {
      HeadSpec spec = small(dtype);
      spec.reduction = Reduction::none;
      if (!accepts(GetParam(), spec)) continue;
      if (!offers(GetParam(), kind)) continue;
      HeadProblem problem(spec);
      RunSpec r = run();
      r.plan = kind;
      const HeadResult clean = run_head(problem, r);
      problem.hidden.set(4 * spec.dim + 1, NAN);
      const HeadResult result = run_head(problem, r);
      for (std::int64_t i = 0; i < spec.tokens; ++i) {
        EXPECT_EQ(std::isnan(result.lse.get(i)), i == 4);
        EXPECT_EQ(std::isnan(result.loss.get(i)), i == 4);
        EXPECT_EQ(std::isnan(result.log_prob.get(i)), i == 4);
        for (std::int64_t k = 0; k < spec.dim; ++k) {
          const std::int64_t at = i * spec.dim + k;
          if (i == 4) {
            EXPECT_TRUE(std::isnan(result.d_hidden.get(at)));
          } else {
            EXPECT_EQ(result.d_hidden.get(at), clean.d_hidden.get(at));
          }
        }
      }
      EXPECT_TRUE(std::isnan(result.d_weight.get(0)));  // every entry's gradient sums over the row
    }
  }
}

// Chunks, segments of threads, tiles and plans all merge the state of a logit of +inf.
TEST_P(MasksTest, ALogitOfInfinityIsThatOfPyTorch) {
  for (const DType dtype : {DType::f32, DType::bf16}) {  // products of f16 stay finite
    for (const bool nan : {false, true}) {
      const HeadProblem problem = infinite_problem(dtype, nan);
      if (!accepts(GetParam(), problem.spec)) continue;
      for (const PlanKind kind : {PlanKind::forward, PlanKind::dense, PlanKind::stored,
                                  PlanKind::recompute, PlanKind::far_backward}) {
        if (kind != PlanKind::forward && !offers(GetParam(), kind)) continue;
        const bool far = kind == PlanKind::far_backward;
        if (far && is_device_kernel(GetParam())) continue;
        for (const std::int64_t chunk : {0, 8}) {
          SCOPED_TRACE(testing::Message() << name_of(kind) << ' ' << chunk << ' ' << nan);
          RunSpec r = run();
          r.plan = kind;
          r.gradients = kind != PlanKind::forward;
          r.chunk_tokens = chunk;
          if (far) {
            std::vector<std::int64_t> ids(300);
            std::iota(ids.begin(), ids.end(), 0);
            const VocabOrder order(ids, std::vector<float>(300, 1.0f / 300.0f));
            r.tau = 1e-3f;
            r.extras = false;
            r.change = [order](auto&, CrossEntropyInputs& in, auto&) { in.order = order; };
          }
          expect_infinite(problem, r, run_head(problem, r));
        }
      }
    }
  }
}

TEST_P(MasksTest, InfiniteHiddenDoesNotCrash) {
  HeadProblem problem(small());
  problem.hidden.set(0, kInfinity);
  problem.hidden.set(7, -kInfinity);
  const HeadResult result = run_head(problem, run());
  EXPECT_FALSE(std::isfinite(result.lse.get(0)));
  EXPECT_TRUE(std::isfinite(result.lse.get(3)));
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MasksTest);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, MasksTest, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test
