#include "support/far_cases.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "support/mirror.h"

namespace logitless::test {

RunSpec FarKernels::run() const {
  RunSpec r;
  r.kernel = GetParam();
  return r;
}

HeadSpec FarKernels::spec(std::int64_t tokens, std::int64_t dim, std::int64_t vocab,
                          std::uint64_t seed) const {
  HeadSpec s;
  s.tokens = tokens;
  s.dim = dim;
  s.vocab = vocab;
  s.seed = seed;
  if (!accepts_far(GetParam(), s)) s.dtype = DType::bf16;
  if (!accepts_far(GetParam(), s)) s.dim = (dim + 7) / 8 * 8;
  return s;
}

void expect_same_bits(const HeadResult& a, const HeadResult& b) {
  EXPECT_EQ(a.loss.bytes(), b.loss.bytes());
  EXPECT_EQ(a.lse.bytes(), b.lse.bytes());
  EXPECT_EQ(a.d_hidden.bytes(), b.d_hidden.bytes());
  EXPECT_EQ(a.d_weight.bytes(), b.d_weight.bytes());
  EXPECT_EQ(a.d_bias.bytes(), b.d_bias.bytes());
  const FarFieldStatistics &s = a.statistics.far, &t = b.statistics.far;
  EXPECT_EQ(s.selected, t.selected);
  EXPECT_EQ(s.bound, t.bound);
  EXPECT_EQ(s.audited_error, t.audited_error);
  EXPECT_EQ(s.audited_lse_error, t.audited_lse_error);
}

void expect_everything_selected(const HeadResult& a, const OracleGradients& exact, DType dtype) {
  const double contract = gradient_bound(dtype);
  EXPECT_EQ(a.statistics.far.selected, 1.0);
  EXPECT_TRUE(a.statistics.far.dense_fallback);
  EXPECT_LE(a.statistics.far.audited_error, contract);
  EXPECT_LE(relative_error(a.d_hidden.values(), exact.d_hidden), contract);
  EXPECT_LE(relative_error(a.d_weight.values(), exact.d_weight), contract);
  EXPECT_LE(relative_error(a.d_bias.values(), exact.d_bias), contract);
}

void expect_zeros(const HeadResult& a) {
  EXPECT_EQ(a.loss.get(0), 0.0);
  for (const Tensor* t : {&a.d_hidden, &a.d_weight, &a.d_bias, &a.lse})
    for (const double v : t->values()) ASSERT_EQ(v, 0.0);
  EXPECT_EQ(a.statistics.far.audited_tokens, 0);
  EXPECT_EQ(a.statistics.far.audited_error, -1.0);
}

std::vector<std::int64_t> audited_tokens(const std::vector<std::int64_t>& valid,
                                         std::int64_t rows) {
  const auto all = static_cast<std::int64_t>(valid.size());
  const std::int64_t audited = std::min(rows, all);
  std::vector<std::int64_t> tokens;
  for (std::int64_t i = 0; i < audited; ++i) tokens.push_back(valid[i * all / audited]);
  return tokens;
}

void expect_audited_error(const HeadResult& a, const HeadResult& exact,
                          const std::vector<std::int64_t>& tokens, std::int64_t dim) {
  ASSERT_EQ(a.statistics.far.audited_tokens, static_cast<std::int64_t>(tokens.size()));
  double error = 0, size = 0;
  for (const std::int64_t token : tokens) {
    for (std::int64_t k = token * dim; k < (token + 1) * dim; ++k) {
      error += std::pow(a.d_hidden.get(k) - exact.d_hidden.get(k), 2);
      size += std::pow(exact.d_hidden.get(k), 2);
    }
  }
  ASSERT_GT(error, 0.0);
  // Both sum the same numbers in different orders.
  const double measured = std::sqrt(error / size);
  EXPECT_NEAR(a.statistics.far.audited_error, measured, 1e-3 * measured + 1e-6);
}

void expect_memory_as_planned(const FarProblem& problem, const std::string& kernel,
                              PlanRequest request, bool with_lse) {
  constexpr std::size_t kGuard = 4096;
  const HeadSpec& s = problem.spec;
  Tensor loss(DType::f32, {}), lse(DType::f32, {s.tokens}), d_bias(DType::f32, {s.vocab});
  Tensor d_hidden(DType::f32, {s.tokens, s.dim}), d_weight(DType::f32, {s.vocab, s.dim});
  CrossEntropyInputs in = problem.inputs();
  in.order = problem.order;
  CrossEntropyOutputs out;
  out.loss = loss.view();
  if (with_lse) out.lse = lse.view();
  out.d_hidden = d_hidden.view();
  out.d_weight = d_weight.view();
  out.d_bias = d_bias.view();
  const Context context = make_context(kernel);
  request.device = context.device();
  const LossPlan plan = plan_cross_entropy(problem.options(), in, out, request);
  if (request.memory_budget != 0) {
    EXPECT_LE(plan.workspace_bytes(), request.memory_budget);
  }
  EXPECT_EQ(plan.audit != nullptr, request.audit_rows > 0);
  EXPECT_EQ(plan.tau, request.tau);
  {
    const Workspace workspace(context, plan);
    EXPECT_EQ(context.memory().current_bytes(), plan.workspace_bytes());
    cross_entropy(context, plan, problem.options(), in, out, workspace);
    EXPECT_EQ(context.memory().peak_bytes(), plan.workspace_bytes());
  }
  const std::vector<std::byte> weight = d_weight.bytes(), hidden = d_hidden.bytes();
  const std::vector<std::byte> sums = lse.bytes();
  const Buffer memory(kGuard + plan.workspace_bytes() + kGuard);
  auto* bytes = memory.as<unsigned char>();
  for (const int pattern : {0xff, 0x7f, 0x5a}) {
    std::memset(bytes, pattern, memory.bytes());
    cross_entropy(context, plan, problem.options(), in, out,
                  Workspace(bytes + kGuard, plan.workspace_bytes()));
    EXPECT_EQ(d_weight.bytes(), weight) << pattern;
    EXPECT_EQ(d_hidden.bytes(), hidden) << pattern;
    EXPECT_EQ(lse.bytes(), sums) << pattern;
    for (std::size_t at = 0; at < kGuard; ++at) {
      ASSERT_EQ(bytes[at], pattern) << "before";
      ASSERT_EQ(bytes[kGuard + plan.workspace_bytes() + at], pattern) << "after";
    }
  }
  EXPECT_THROW(cross_entropy(context, plan, problem.options(), in, out,
                             Workspace(bytes + kGuard, plan.workspace_bytes() - 1)),
               InvalidArgument);
}

}  // namespace logitless::test
