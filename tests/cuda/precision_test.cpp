// Products of f32 tensors in TF32 and in bf16x3 on a GPU, against float64: bounds of
// docs/explain/losses.md.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "kernels/device/kernel.h"
#include "logitless/error.h"
#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

// Relative error of a product whose factors are cut to 10 bits after the binary point.
constexpr double kTf32Product = 0x1p-9;

class PrecisionTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = cuda::device_missing(0);
    if (!reason.empty()) GTEST_SKIP() << reason;
    if (cuda::compute_capability(0) < 80) GTEST_SKIP() << "a GPU without TF32";
  }
  static HeadSpec spec() {
    HeadSpec s;
    s.tokens = 300;
    s.dim = 256;
    s.vocab = 5001;
    s.bias = true;
    return s;
  }
  static RunSpec run(PlanKind kind, Precision precision) {
    RunSpec r;
    r.kernel = precision == Precision::bf16x3 ? "cublas_bf16x3" : "cublas";
    r.plan = kind;
    r.change = [=](CrossEntropyOptions& o, auto&, auto&) { o.precision = precision; };
    return r;
  }
  static double norm_of_row(const std::vector<double>& rows, std::int64_t row, std::int64_t dim) {
    double sum = 0.0;
    for (std::int64_t k = 0; k < dim; ++k) sum += rows[row * dim + k] * rows[row * dim + k];
    return std::sqrt(sum);
  }
};

TEST_F(PrecisionTest, Tf32IsWithinItsBounds) {
  const HeadProblem problem(spec());
  const OracleProblem& p = problem.oracle;
  const OracleLogits logits = oracle_logits(p);
  const std::vector<double> upstream(static_cast<std::size_t>(p.tokens),
                                     1.0 / static_cast<double>(p.tokens));
  const OracleGradients g = oracle_gradients(p, upstream);
  const std::vector<double> x = problem.hidden.values(), w = problem.weight.values();
  double widest = 0.0;
  for (std::int64_t j = 0; j < p.vocab; ++j)
    widest = std::max(widest, norm_of_row(w, j, spec().dim));
  for (const PlanKind kind : {PlanKind::dense, PlanKind::stored, PlanKind::recompute}) {
    SCOPED_TRACE(std::string(name_of(kind)));
    expect_matches_oracle(problem, run(kind, Precision::ieee));
    const HeadResult found = run_head(problem, run(kind, Precision::tf32));
    EXPECT_NE(found.plan.explain().find("GEMMs in tf32"), std::string::npos);
    for (std::int64_t i = 0; i < p.tokens; ++i) {
      const double bound = kTf32Product * norm_of_row(x, i, spec().dim) * widest;
      EXPECT_LE(std::abs(found.lse.get(i) - logits.lse[i]), bound) << i;
    }
    const double hidden = relative_error(found.d_hidden.values(), g.d_hidden);
    const double weight = relative_error(found.d_weight.values(), g.d_weight);
    const double bias = relative_error(found.d_bias.values(), g.d_bias);
    for (const double error : {hidden, weight, bias}) EXPECT_LE(error, 4e-3);
    EXPECT_GE(weight, 5e-6);  // else it is not TF32: fp32 is within 1e-6
  }
}

// Widths that are no multiple of the stretches or of 8, few tokens, and f32 beside 16 bits, which
// are split as they are.
TEST_F(PrecisionTest, Bf16x3IsWithinItsBounds) {
  struct Case {
    std::int64_t tokens, dim, vocab;
    std::optional<DType> hidden = {}, weight = {};
  };
  for (const auto& [tokens, dim, vocab, hidden, weight] :
       {Case{300, 256, 5001}, Case{7, 1031, 700}, Case{300, 2056, 900, {}, DType::bf16},
        Case{300, 37, 900, {}, DType::f16}, Case{300, 256, 900, DType::bf16},
        Case{530, 2100, 9001}}) {
    HeadSpec s = spec();
    s.tokens = tokens;
    s.dim = dim;
    s.vocab = vocab;
    s.hidden_dtype = hidden;
    s.weight_dtype = weight;
    s.softcap = 20.0f;
    const HeadProblem problem(s);
    const OracleProblem& p = problem.oracle;
    const OracleLogits logits = oracle_logits(p);
    const std::vector<double> upstream(static_cast<std::size_t>(tokens),
                                       1.0 / static_cast<double>(tokens));
    const OracleGradients g = oracle_gradients(p, upstream);
    const std::vector<double> x = problem.hidden.values(), w = problem.weight.values();
    double widest = 0.0;
    for (std::int64_t j = 0; j < vocab; ++j) widest = std::max(widest, norm_of_row(w, j, dim));
    for (const PlanKind kind : {PlanKind::dense, PlanKind::stored, PlanKind::recompute}) {
      SCOPED_TRACE(std::string(name_of(kind)));
      const HeadResult found = run_head(problem, run(kind, Precision::bf16x3));
      for (std::int64_t i = 0; i < tokens; ++i) {
        const double bound = 0x1p-16 * norm_of_row(x, i, dim) * widest + 1e-6;
        EXPECT_LE(std::abs(found.lse.get(i) - logits.lse[i]), bound) << i;
      }
      EXPECT_LE(relative_error(found.d_hidden.values(), g.d_hidden), 1e-5);
      EXPECT_LE(relative_error(found.d_weight.values(), g.d_weight), 1e-5);
      EXPECT_LE(relative_error(found.d_bias.values(), g.d_bias), 1e-5);
    }
  }
}

TEST_F(PrecisionTest, Tf32IsRefusedFor16Bits) {
  HeadSpec s = spec();
  s.dtype = DType::f16;
  try {
    run_head(HeadProblem(s), run(PlanKind::dense, Precision::tf32));
    FAIL();
  } catch (const InvalidArgument& e) {
    EXPECT_STREQ(e.what(), "precision: tf32 rounds f32 tensors, hidden and weight are f16");
  }
}

}  // namespace
}  // namespace logitless::test
