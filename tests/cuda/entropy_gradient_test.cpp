// Gradients through the entropy from saved exponentials, in every plan that saves some, against
// float64. A rounded exponential near p = 1 knows little of its logit, so confident tokens are a
// case of their own.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "logitless/saved_head.h"
#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

std::vector<std::int64_t> slots_of(const HeadProblem& problem) {
  if (problem.spec.per_token == 1) return {problem.spec.tokens};
  return {problem.spec.tokens, problem.spec.per_token};
}

// Cotangents of a head: all of them, or of the entropy alone.
struct Upstream {
  Upstream(const HeadProblem& problem, bool alone) : entropy(DType::f32, {problem.spec.tokens}) {
    const auto wave = [](Tensor& t, double size) {
      for (std::int64_t i = 0; i < t.numel(); ++i) t.set(i, size * std::cos(0.7 * double(i)));
    };
    wave(entropy, 1e-3);
    if (alone) return;
    lse = Tensor(DType::f32, {problem.spec.tokens});
    log_prob = Tensor(DType::f32, slots_of(problem));
    wave(lse, 3e-4);
    wave(log_prob, 2e-3);
  }
  HeadCotangents cotangents(Mirror& mirror) const {
    HeadCotangents g;
    g.entropy = mirror.in(entropy.view());
    g.lse = mirror.in(lse.view());
    g.log_prob = mirror.in(log_prob.view());
    return g;
  }
  Tensor entropy, lse, log_prob;
};

OracleGradients exact_gradients(const HeadProblem& problem, const Upstream& g) {
  const OracleProblem& p = problem.oracle;
  const OracleLogits logits = oracle_logits(p);
  std::vector<double> dz(static_cast<std::size_t>(p.tokens * p.vocab), 0.0);
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    if (oracle_ignored(p, i)) continue;
    const double* const z = logits.z.data() + i * p.vocab;
    double* const to = dz.data() + i * p.vocab;
    const auto log_p = [&](std::int64_t j) { return z[j] - logits.lse[i]; };
    double entropy = 0.0;
    for (std::int64_t j = 0; j < p.vocab; ++j) entropy -= std::exp(log_p(j)) * log_p(j);
    double by_lse = g.lse.defined() ? g.lse.get(i) : 0.0;
    for (int k = 0; g.log_prob.defined() && k < p.per_token; ++k) {
      const std::int64_t slot = i * p.per_token + k;
      if (p.targets[slot] == p.ignore_index) continue;
      by_lse -= g.log_prob.get(slot);
      to[p.targets[slot]] += g.log_prob.get(slot);
    }
    for (std::int64_t j = 0; j < p.vocab; ++j)
      to[j] += std::exp(log_p(j)) * (by_lse - g.entropy.get(i) * (entropy + log_p(j)));
  }
  return oracle_chain(p, logits, dz);
}

struct Found {
  Tensor d_hidden, d_weight, d_bias;
};

struct Mode {
  const char* name;
  PlanKind kind;
  double stored_fraction = 0.0;
  double share = 1.0;  // of the memory that the plan without a limit takes
};
const Mode kModes[] = {{"dense", PlanKind::dense},
                       {"dense in less memory", PlanKind::dense, 0.0, 0.85},
                       {"half stored", PlanKind::stored, 0.5},
                       {"recompute", PlanKind::recompute}};

class EntropyGradient : public testing::TestWithParam<std::string> {
 protected:
  HeadInputs inputs_of(const HeadProblem& problem, Mirror& mirror) const {
    HeadInputs in;
    in.hidden = mirror.in(problem.hidden.view());
    in.weight = mirror.in(problem.weight.view());
    in.targets = mirror.in(problem.targets.view());
    in.bias = mirror.in(problem.bias.view());
    return in;
  }
  static HeadOptions options_of(const HeadProblem& problem) {
    HeadOptions o;
    o.softcap = problem.spec.softcap;
    o.logit_scale = problem.spec.logit_scale;
    return o;
  }
  static HeadGradients outputs_of(const HeadProblem& problem, Found& to, Mirror& mirror) {
    const HeadSpec& s = problem.spec;
    to.d_hidden = Tensor(s.dtype, {s.tokens, s.dim});
    to.d_weight = Tensor(s.dtype, {s.vocab, s.dim});
    if (s.bias) to.d_bias = Tensor(DType::f32, {s.vocab});
    return {mirror.out(to.d_hidden.view()), mirror.out(to.d_weight.view()),
            mirror.out(to.d_bias.view())};
  }
  // Checks that the plan is of the mode.
  Found backward(const HeadProblem& problem, const Upstream& upstream, const Mode& mode) const {
    Found found;
    Mirror mirror(GetParam());
    const HeadInputs in = inputs_of(problem, mirror);
    const HeadCotangents g = upstream.cotangents(mirror);
    const HeadGradients to = outputs_of(problem, found, mirror);
    const HeadOptions options = options_of(problem);
    const Context c = make_context(GetParam());
    PlanRequest request;
    request.device = c.device();
    request.kind = mode.kind;
    request.stored_fraction = mode.stored_fraction;
    request.memory_budget = std::size_t{1} << 30;
    LossPlan plan = plan_head_backward(options, in, g, to, request);
    if (mode.share < 1.0) {
      request.memory_budget =
          static_cast<std::size_t>(mode.share * static_cast<double>(plan.workspace_bytes()));
      plan = plan_head_backward(options, in, g, to, request);
      EXPECT_TRUE(plan.weight_ranges > 0 || plan.chunk_tokens < problem.spec.tokens);
    }
    EXPECT_EQ(plan.kind, mode.kind);
    const Workspace workspace(c, plan);
    head_backward(c, plan, options, in, g, to, workspace);
    mirror.finish();
    return found;
  }
  // The forward saves exponentials and the entropy.
  Found backward_saved(const HeadProblem& problem, const Upstream& upstream) const {
    Found found;
    Tensor entropy(DType::f32, {problem.spec.tokens});
    Mirror mirror(GetParam());
    const HeadInputs in = inputs_of(problem, mirror);
    HeadOutputs out;
    out.entropy = mirror.out(entropy.view());
    const HeadGradients to = outputs_of(problem, found, mirror);
    const HeadOptions options = options_of(problem);
    const Context c = make_context(GetParam());
    PlanRequest request;
    request.device = c.device();
    request.memory_budget = std::size_t{1} << 30;
    const LossPlan plan = plan_head_saved(options, in, out, to, request);
    const Workspace workspace(c, plan);
    head_forward_saved(c, plan, options, in, out, to, workspace);
    head_backward_saved(c, plan, options, in, upstream.cotangents(mirror), to, workspace);
    mirror.finish();
    return found;
  }
};

void expect_near(const Found& found, const OracleGradients& exact, double bound) {
  EXPECT_LE(relative_error(found.d_hidden.values(), exact.d_hidden), bound);
  EXPECT_LE(relative_error(found.d_weight.values(), exact.d_weight), bound);
  if (found.d_bias.defined()) {
    EXPECT_LE(relative_error(found.d_bias.values(), exact.d_bias), bound);
  }
}

std::vector<HeadSpec> specs_of(DType dtype) {
  HeadSpec s;
  s.dtype = dtype;
  s.tokens = 600;
  s.dim = 64;
  s.vocab = 1500;
  s.weight_scale = 3.0;
  s.ignored = 0.1;
  std::vector<HeadSpec> specs(3, s);
  specs[0].bias = true;
  specs[1].per_token = 3;
  specs[1].logit_scale = 0.6f;
  specs[2].weight_scale = 8.0;  // most tokens have an entry with nearly all of the probability
  return specs;
}

TEST_P(EntropyGradient, OfSavedExponentialsIsThatOfFloat64) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const HeadSpec& spec : specs_of(dtype)) {
      if (!accepts(GetParam(), spec)) continue;
      SCOPED_TRACE(describe(spec));
      const HeadProblem problem(spec);
      for (const bool alone : {false, true}) {
        SCOPED_TRACE(alone ? "of the entropy alone" : "of all outputs");
        const Upstream upstream(problem, alone);
        const OracleGradients exact = exact_gradients(problem, upstream);
        for (const Mode& mode : kModes) {
          SCOPED_TRACE(mode.name);
          const Found found = backward(problem, upstream, mode);
          expect_near(found, exact, gradient_bound(dtype));
          const Found again = backward(problem, upstream, mode);
          EXPECT_EQ(found.d_hidden.bytes(), again.d_hidden.bytes());
          EXPECT_EQ(found.d_weight.bytes(), again.d_weight.bytes());
        }
        const Found saved = backward_saved(problem, upstream);
        expect_near(saved, exact, gradient_bound(dtype));
      }
    }
  }
}

// Each token has its own accuracy, however confident it is: a few times 2^-9, as of all 16-bit
// numbers, and that of an fp32 logit (saved_head_test.cpp), which counts where p is near 1. Results
// of f16 are multiples of 2^-24 at best.
TEST_P(EntropyGradient, OfEachTokenIsThatOfFloat64) {
  const HeadSpec spec = specs_of(narrow_dtype(GetParam()))[2];
  const HeadProblem problem(spec);
  const Upstream upstream(problem, true);
  const double of_result =
      spec.dtype == DType::f16 ? std::ldexp(std::sqrt(static_cast<double>(spec.dim)), -25) : 0.0;
  const std::vector<double> exact = exact_gradients(problem, upstream).d_hidden;
  const OracleLogits logits = oracle_logits(problem.oracle);
  for (const Mode& mode : kModes) {
    SCOPED_TRACE(mode.name);
    const std::vector<double> found = backward(problem, upstream, mode).d_hidden.values();
    int confident = 0;
    for (std::int64_t i = 0; i < spec.tokens; ++i) {
      if (oracle_ignored(problem.oracle, i)) continue;
      const double* const z = logits.z.data() + i * spec.vocab;
      const std::int64_t top = std::max_element(z, z + spec.vocab) - z;
      confident += z[top] - logits.lse[i] > std::log(0.99);
      double error = 0.0, size = 0.0, row_of_top = 0.0;
      for (std::int64_t k = 0; k < spec.dim; ++k) {
        error += std::pow(found[i * spec.dim + k] - exact[i * spec.dim + k], 2);
        size += std::pow(exact[i * spec.dim + k], 2);
        row_of_top += std::pow(problem.oracle.weight[top * spec.dim + k], 2);
      }
      const double of_logit = 4e-6 * (1.0 + std::abs(z[top])) * std::abs(upstream.entropy.get(i));
      EXPECT_LE(std::sqrt(error),
                7e-3 * std::sqrt(size) + of_logit * std::sqrt(row_of_top) + of_result)
          << i;
    }
    EXPECT_GT(confident, 20);
  }
}

TEST_P(EntropyGradient, UnderASoftcapIsRecomputed) {
  HeadSpec spec = specs_of(narrow_dtype(GetParam()))[0];
  spec.softcap = 20.0f;
  const HeadProblem problem(spec);
  Mirror mirror(GetParam());
  Found found;
  const Upstream upstream(problem, true);
  const HeadInputs in = inputs_of(problem, mirror);
  const HeadGradients to = outputs_of(problem, found, mirror);
  const Context c = make_context(GetParam());
  PlanRequest request;
  request.device = c.device();
  EXPECT_EQ(
      plan_head_backward(options_of(problem), in, upstream.cotangents(mirror), to, request).kind,
      PlanKind::recompute);
  expect_near(backward(problem, upstream, kModes[3]), exact_gradients(problem, upstream),
              gradient_bound(spec.dtype));
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(EntropyGradient);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, EntropyGradient, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test
