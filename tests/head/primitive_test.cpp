// head_forward and head_backward: each output is compared with float64. Each cotangent, and all of
// them together, are compared with central differences in the logits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "support/mirror.h"
#include "support/problem.h"

namespace logitless::test {
namespace {

struct Values {
  double lse = 0, entropy = 0, weighted = 0;
  std::vector<double> target_logit, log_prob;
  std::int64_t argmax = 0;
};

Values values_of(const OracleProblem& p, std::int64_t token, const double* z) {
  Values v;
  double top = -INFINITY;
  for (std::int64_t j = 0; j < p.vocab; ++j) {
    if (z[j] > top) v.argmax = j;
    top = std::max(top, z[j]);
  }
  double sum = 0;
  for (std::int64_t j = 0; j < p.vocab; ++j) sum += std::exp(z[j] - top);
  v.lse = top + std::log(sum);
  for (std::int64_t j = 0; j < p.vocab; ++j) {
    if (z[j] > -INFINITY) v.entropy -= std::exp(z[j] - v.lse) * (z[j] - v.lse);
    v.weighted += (p.class_weight.empty() ? 1.0 : p.class_weight[j]) * z[j];
  }
  for (int k = 0; k < p.per_token; ++k) {
    const std::int64_t y = p.targets[token * p.per_token + k];
    const bool valid = y != p.ignore_index;
    v.target_logit.push_back(valid ? z[y] : 0.0);
    v.log_prob.push_back(valid ? z[y] - v.lse : 0.0);
  }
  return v;
}

struct Cotangents {
  Tensor lse, entropy, weighted, target_logit, log_prob;
};

// Returns the sum of cotangent times output for one token.
double scalar_of(const OracleProblem& p, const Cotangents& g, std::int64_t token, const double* z) {
  const Values v = values_of(p, token, z);
  const auto at = [](const Tensor& t, std::int64_t i) { return t.defined() ? t.get(i) : 0.0; };
  double total = at(g.lse, token) * v.lse + at(g.entropy, token) * v.entropy +
                 at(g.weighted, token) * v.weighted;
  for (int k = 0; k < p.per_token; ++k) {
    const std::int64_t slot = token * p.per_token + k;
    if (p.targets[slot] == p.ignore_index) continue;
    total += at(g.target_logit, slot) * v.target_logit[k] + at(g.log_prob, slot) * v.log_prob[k];
  }
  return total;
}

OracleGradients differences(const OracleProblem& p, const Cotangents& g) {
  OracleLogits logits = oracle_logits(p);
  std::vector<double> dz(static_cast<std::size_t>(p.tokens * p.vocab), 0.0);
  for (std::int64_t i = 0; i < p.tokens; ++i) {
    if (oracle_ignored(p, i)) continue;
    double* row = logits.z.data() + i * p.vocab;
    for (std::int64_t j = 0; j < p.vocab; ++j) {
      constexpr double kStep = 1e-5;
      const double value = row[j];
      row[j] = value + kStep;
      const double up = scalar_of(p, g, i, row);
      row[j] = value - kStep;
      dz[i * p.vocab + j] = (up - scalar_of(p, g, i, row)) / (2 * kStep);
      row[j] = value;
    }
  }
  return oracle_chain(p, logits, dz);
}

struct Variant {
  const char* name;
  void (*change)(HeadSpec&);
};
const Variant kVariants[] = {
    {"plain", [](HeadSpec&) {}},
    {"bias", [](HeadSpec& s) { s.bias = true; }},
    {"softcap", [](HeadSpec& s) { s.softcap = 2.5f; }},
    {"scale", [](HeadSpec& s) { s.logit_scale = 0.6f; }},
    {"ignored", [](HeadSpec& s) { s.ignored = 0.4; }},
    {"omega", [](HeadSpec& s) { s.class_weight = true; }},
    {"targets", [](HeadSpec& s) { s.per_token = 3; }},
    {"everything",
     [](HeadSpec& s) {
       s.bias = s.class_weight = true;
       s.softcap = 3.0f;
       s.logit_scale = 1.5f;
       s.per_token = 3;
       s.ignored = 0.2;
     }},
};

class PrimitiveTest : public testing::TestWithParam<std::string> {
 protected:
  // Returns a problem of 29 columns, enough numbers for a stable relative error, or of 32 where the
  // kernel takes multiples of 8 alone.
  static HeadProblem problem_of(const Variant& variant, DType dtype) {
    HeadSpec spec;
    spec.tokens = 5;
    spec.dim = 29;
    spec.vocab = 150;
    spec.dtype = dtype;
    if (!accepts(GetParam(), spec)) spec.dim = 32;
    spec.weight_scale = 2.0;
    variant.change(spec);
    HeadProblem problem(spec);
    if (spec.per_token > 1) {  // a repeated target and an ignored one, in valid tokens
      problem.targets.set(1, 3);
      problem.targets.set(0, 3);
      problem.targets.set(2, -100);
      problem.refresh_oracle();
    }
    return problem;
  }
  static HeadInputs inputs_of(const HeadProblem& problem) {
    HeadInputs in;
    in.hidden = problem.hidden.view();
    in.weight = problem.weight.view();
    in.targets = problem.targets.view();
    in.bias = problem.bias.view();
    in.vocab_weight = problem.class_weight.view();
    return in;
  }
  static HeadOptions options_of(const HeadProblem& problem) {
    HeadOptions o;
    o.softcap = problem.spec.softcap;
    o.logit_scale = problem.spec.logit_scale;
    return o;
  }
  Context context() const { return make_context(GetParam()); }
  static HeadInputs inputs_of(const HeadProblem& problem, Mirror& mirror) {
    HeadInputs in = inputs_of(problem);
    for (ConstTensorView* view : {&in.hidden, &in.weight, &in.targets, &in.bias, &in.vocab_weight})
      *view = mirror.in(*view);
    return in;
  }
  // Calls body for each accepted variant in each dtype.
  void each(const std::function<void(const HeadProblem&)>& body) const {
    for (const DType dtype : tested_dtypes(GetParam())) {
      for (const Variant& variant : kVariants) {
        const HeadProblem problem = problem_of(variant, dtype);
        if (!accepts(GetParam(), problem.spec)) continue;
        SCOPED_TRACE(std::string(variant.name) + " " + std::string(name_of(dtype)));
        body(problem);
      }
    }
  }
};

std::vector<std::int64_t> per_slot(const HeadProblem& problem) {
  if (problem.spec.per_token == 1) return {problem.spec.tokens};
  return {problem.spec.tokens, problem.spec.per_token};
}

TEST_P(PrimitiveTest, OutputsAreThoseOfFloat64) {
  each([&](const HeadProblem& problem) {
    const OracleProblem& p = problem.oracle;
    const std::vector<std::int64_t> rows = {p.tokens};
    Tensor lse(DType::f32, rows), entropy(DType::f32, rows), weighted(DType::f32, rows);
    Tensor target_logit(DType::f32, per_slot(problem)), log_prob(DType::f32, per_slot(problem));
    Tensor argmax(DType::i32, rows);
    Mirror mirror(GetParam());
    const HeadInputs in = inputs_of(problem, mirror);
    HeadOutputs out;
    out.lse = mirror.out(lse.view());
    out.entropy = mirror.out(entropy.view());
    out.weighted_logit_sum = mirror.out(weighted.view());
    out.target_logit = mirror.out(target_logit.view());
    out.log_prob = mirror.out(log_prob.view());
    out.argmax = mirror.out(argmax.view());
    const Context c = context();
    const PlanRequest request{c.device(), 0, {}, 0.0};
    const LossPlan plan = plan_head_forward(options_of(problem), in, out, request);
    const Workspace workspace(c, plan);
    head_forward(c, plan, options_of(problem), in, out, workspace);
    mirror.finish();

    const OracleLogits logits = oracle_logits(p);
    for (std::int64_t i = 0; i < p.tokens; ++i) {
      const bool ignored = oracle_ignored(p, i);
      const Values v = ignored ? Values{} : values_of(p, i, logits.z.data() + i * p.vocab);
      EXPECT_NEAR(lse.get(i), v.lse, 1e-6 * (1 + std::abs(v.lse)));
      EXPECT_NEAR(entropy.get(i), v.entropy, 1e-5 * (1 + v.entropy));
      EXPECT_NEAR(weighted.get(i), v.weighted, 1e-3);
      EXPECT_EQ(argmax.get(i), ignored ? -1.0 : static_cast<double>(v.argmax));
      for (int k = 0; k < p.per_token; ++k) {
        const std::int64_t slot = i * p.per_token + k;
        EXPECT_NEAR(target_logit.get(slot), ignored ? 0.0 : v.target_logit[k], 1e-5);
        EXPECT_NEAR(log_prob.get(slot), ignored ? 0.0 : v.log_prob[k], 1e-5);
      }
    }
  });
}

// Entries with all of the probability, whose logits and sums round differently.
TEST_P(PrimitiveTest, NoLogProbabilityIsAboveZero) {
  for (const DType dtype : tested_dtypes(GetParam())) {
    HeadSpec spec;
    spec.tokens = 64;
    spec.dim = 48;
    spec.vocab = 300;
    spec.dtype = dtype;
    spec.weight_scale = 60.0;
    if (!accepts(GetParam(), spec)) continue;
    HeadProblem problem(spec);
    const OracleLogits logits = oracle_logits(problem.oracle);
    for (std::int64_t i = 0; i < spec.tokens; ++i) {
      const double* const z = logits.z.data() + i * spec.vocab;
      problem.targets.set(i, static_cast<double>(std::max_element(z, z + spec.vocab) - z));
    }
    Tensor log_prob(DType::f32, {spec.tokens});
    Mirror mirror(GetParam());
    const HeadInputs in = inputs_of(problem, mirror);
    HeadOutputs out;
    out.log_prob = mirror.out(log_prob.view());
    const Context c = context();
    const LossPlan plan = plan_head_forward(c, HeadOptions{}, in, out);
    const Workspace workspace(c, plan);
    head_forward(c, plan, HeadOptions{}, in, out, workspace);
    mirror.finish();
    int certain = 0;
    for (std::int64_t i = 0; i < spec.tokens; ++i) {
      EXPECT_LE(log_prob.get(i), 0.0) << i;
      certain += log_prob.get(i) > -1e-6 ? 1 : 0;
    }
    EXPECT_GT(certain, 8);
  }
}

TEST_P(PrimitiveTest, EachCotangentAndAllOfThem) {
  each([&](const HeadProblem& problem) {
    const OracleProblem& p = problem.oracle;
    for (int which = 0; which < 6; ++which) {
      SCOPED_TRACE(testing::Message() << "cotangent " << which);
      Cotangents g;
      const auto fill = [&](int index, Tensor& t, const std::vector<std::int64_t>& shape,
                            double size) {
        if (which != index && which != 5) return;
        t = Tensor(DType::f32, shape);
        for (std::int64_t at = 0; at < t.numel(); ++at)
          t.set(at, size * std::sin(1.0 + 2.3 * static_cast<double>(at)));
      };
      fill(0, g.lse, {p.tokens}, 1.0);
      fill(1, g.entropy, {p.tokens}, 1.0);
      fill(2, g.weighted, {p.tokens}, 0.02);
      fill(3, g.target_logit, per_slot(problem), 1.0);
      fill(4, g.log_prob, per_slot(problem), 1.0);
      Mirror mirror(GetParam());
      const HeadInputs in = inputs_of(problem, mirror);
      HeadCotangents cotangents;
      cotangents.lse = mirror.in(std::as_const(g.lse).view());
      cotangents.entropy = mirror.in(std::as_const(g.entropy).view());
      cotangents.weighted_logit_sum = mirror.in(std::as_const(g.weighted).view());
      cotangents.target_logit = mirror.in(std::as_const(g.target_logit).view());
      cotangents.log_prob = mirror.in(std::as_const(g.log_prob).view());
      Tensor d_hidden(DType::f32, {p.tokens, p.dim}), d_weight(DType::f32, {p.vocab, p.dim});
      Tensor d_bias;
      if (problem.spec.bias) d_bias = Tensor(DType::f32, {p.vocab});
      const HeadGradients gradients{mirror.out(d_hidden.view()), mirror.out(d_weight.view()),
                                    mirror.out(d_bias.view())};
      const Context c = context();
      const PlanRequest request{c.device(), 0, {}, 0.0};
      const LossPlan plan =
          plan_head_backward(options_of(problem), in, cotangents, gradients, request);
      const Workspace workspace(c, plan);
      head_backward(c, plan, options_of(problem), in, cotangents, gradients, workspace);
      mirror.finish();
      const OracleGradients exact = differences(p, g);
      const double bound = gradient_bound(problem.spec.dtype);
      EXPECT_LE(relative_error(d_hidden.values(), exact.d_hidden), bound);
      EXPECT_LE(relative_error(d_weight.values(), exact.d_weight), bound);
      if (problem.spec.bias) {
        EXPECT_LE(relative_error(d_bias.values(), exact.d_bias), bound);
      }
    }
  });
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(PrimitiveTest);  // without a GPU
INSTANTIATE_TEST_SUITE_P(AllKernels, PrimitiveTest, testing::ValuesIn(tested_kernels()),
                         [](const auto& kernel) { return kernel.param; });

}  // namespace
}  // namespace logitless::test
