// Heads of a trained language model, early and late in training, against float64. The files are in
// LOGITLESS_DATA_DIR; the tests are skipped without them.
#include "support/real_head.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>

#include "support/mirror.h"

namespace logitless::test {
namespace {

constexpr std::int64_t kTokens = 32;
constexpr std::int64_t kSpacing = 251;  // takes tokens from all of the text

Tensor copy_rows(const ConstTensorView& view, std::int64_t rows, std::int64_t spacing) {
  const std::int64_t columns = view.rank() == 2 ? view.size(1) : 1;
  Tensor out(view.dtype(), view.rank() == 2 ? std::vector<std::int64_t>{rows, columns}
                                            : std::vector<std::int64_t>{rows});
  const std::size_t row = static_cast<std::size_t>(columns) * size_of(view.dtype());
  for (std::int64_t i = 0; i < rows; ++i) {
    std::memcpy(
        static_cast<std::byte*>(out.view().data()) + static_cast<std::size_t>(i) * row,
        static_cast<const std::byte*>(view.data()) + static_cast<std::size_t>(i * spacing) * row,
        row);
  }
  return out;
}

class RealHead : public testing::TestWithParam<const char*> {};

TEST_P(RealHead, LossAndGradientsAreThoseOfFloat64) {
  const std::string path = real_head_path(GetParam());
  if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is not there";
  const TensorFile file(path);
  HeadSpec spec;
  spec.tokens = kTokens;
  spec.dim = 1;  // replaced below
  spec.vocab = 1;
  spec.dtype = DType::bf16;
  HeadProblem problem(spec);
  problem.hidden = copy_rows(file.tensor("hidden"), kTokens, kSpacing);
  problem.targets = copy_rows(file.tensor("targets"), kTokens, kSpacing);
  problem.weight = dequantised_weight(file);
  problem.spec.dim = problem.oracle.dim = file.tensor("weight_q").size(1);
  problem.spec.vocab = problem.oracle.vocab = file.tensor("weight_q").size(0);
  problem.refresh_oracle();

  const OracleLogits logits = oracle_logits(problem.oracle);
  const OracleGradients exact =
      oracle_gradients(problem.oracle, std::vector<double>(kTokens, 1.0 / kTokens));
  double nll = 0;
  for (std::int64_t i = 0; i < kTokens; ++i) {
    nll += oracle_token_loss(problem.oracle, i, logits.z.data() + i * problem.oracle.vocab) /
           static_cast<double>(kTokens);
  }
  EXPECT_LT(nll, 8.0) << "not what a trained head gives: log V is 11.8";
  std::vector<std::string> kernels = tested_kernels();
  if (kernels.empty()) GTEST_SKIP() << "there is no GPU";
  if (!is_device_kernel(kernels.front())) kernels = {""};  // on the CPU only the best
  for (const std::string& kernel : kernels) {
    if (!kernel.empty() && !accepts(kernel, problem.spec)) continue;
    for (const PlanKind kind : {PlanKind::dense, PlanKind::recompute}) {
      if (!offers(kernel, kind)) continue;
      SCOPED_TRACE(kernel + " " + std::string(name_of(kind)));
      RunSpec run;
      run.kernel = kernel;
      run.plan = kind;
      const HeadResult result = run_head(problem, run);
      EXPECT_LE(relative_error(result.lse.values(), logits.lse), kLseBound);
      EXPECT_NEAR(result.loss.get(0), nll, 1e-5);
      EXPECT_LE(relative_error(result.d_hidden.values(), exact.d_hidden), 4e-3);
      EXPECT_LE(relative_error(result.d_weight.values(), exact.d_weight), 4e-3);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Files, RealHead, testing::Values("early", "late"),
                         [](const auto& head) { return std::string(head.param); });

}  // namespace
}  // namespace logitless::test
