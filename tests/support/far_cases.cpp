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

std::vector<FarOption> far_options(bool softcap) {
  std::vector<FarOption> options = {
      {"bias", [](HeadSpec& s) { s.bias = true; }},
      {"token_weight", [](HeadSpec& s) { s.token_weight = true; }},
      {"class_weight", [](HeadSpec& s) { s.class_weight = true; }},
      {"ignored", [](HeadSpec& s) { s.ignored = 0.4; }},
      {"label_smoothing", [](HeadSpec& s) { s.label_smoothing = 0.1f; }},
      {"smoothing_of_classes",
       [](HeadSpec& s) {
         s.label_smoothing = 0.2f;
         s.class_weight = s.token_weight = s.bias = true;
       }},
      {"z_loss", [](HeadSpec& s) { s.z_loss = 0.01f; }},
      {"logit_scale", [](HeadSpec& s) { s.logit_scale = 0.7f; }},
      {"scale_bias",
       [](HeadSpec& s) {
         s.logit_scale = 1.3f;
         s.bias = true;
       }},
      {"several_targets", [](HeadSpec& s) { s.per_token = 4; }},
      {"several_targets_all",
       [](HeadSpec& s) {
         s.per_token = 3;
         s.bias = s.token_weight = s.class_weight = true;
         s.label_smoothing = 0.1f;
         s.z_loss = 0.01f;
         s.ignored = 0.3;
       }},
      {"reduction_sum", [](HeadSpec& s) { s.reduction = Reduction::sum; }},
      {"reduction_none", [](HeadSpec& s) { s.reduction = Reduction::none; }},
  };
  if (!softcap) return options;
  options.push_back({"softcap", [](HeadSpec& s) { s.softcap = 5.0f; }});
  options.push_back({"softcap_scale_bias", [](HeadSpec& s) {
                       s.softcap = 4.0f;
                       s.logit_scale = 1.3f;
                       s.bias = true;
                       s.z_loss = 0.01f;
                     }});
  options.push_back({"several_targets_softcap", [](HeadSpec& s) {
                       s.per_token = 3;
                       s.softcap = 5.0f;
                     }});
  return options;
}

void predict_next_tokens(HeadProblem& problem, RunSpec& run, std::int64_t batch,
                         std::int64_t time) {
  const std::vector<std::int64_t> vocab_ids = problem.oracle.targets;
  for (std::int64_t i = 0; i < batch * time; ++i)
    problem.oracle.targets[i] = i % time == time - 1 ? -100 : vocab_ids[i + 1];
  const std::int64_t dim = problem.spec.dim;
  run.change = [=](CrossEntropyOptions& o, CrossEntropyInputs& in, CrossEntropyOutputs& out) {
    o.next_token = true;
    in.hidden = ConstTensorView(in.hidden.data(), in.hidden.dtype(), {batch, time, dim});
    in.targets = ConstTensorView(in.targets.data(), in.targets.dtype(), {batch, time});
    out.d_hidden = TensorView(out.d_hidden.data(), out.d_hidden.dtype(), {batch, time, dim});
    for (TensorView* view : {&out.lse, &out.log_prob, &out.target_logit, &out.d_hidden_bound})
      if (view->defined()) *view = TensorView(view->data(), view->dtype(), {batch, time});
  };
}

void add_to_gradients(RunSpec& run) {
  run.change = [](CrossEntropyOptions& o, auto&, CrossEntropyOutputs& out) {
    o.accumulate = true;
    for (const TensorView& view : {out.d_hidden, out.d_weight, out.d_bias})
      std::fill_n(static_cast<float*>(view.data()), view.numel(), 0.5f);
  };
}

void expect_added(const HeadResult& added, const HeadResult& plain) {
  for (Tensor HeadResult::*field :
       {&HeadResult::d_hidden, &HeadResult::d_weight, &HeadResult::d_bias}) {
    // The sums begin at 0.5 and round with every product added: some 300 times by 3e-8.
    for (std::int64_t i = 0; i < (plain.*field).numel(); ++i)
      ASSERT_NEAR((added.*field).get(i), 0.5 + (plain.*field).get(i), 2e-6) << i;
  }
}

std::vector<double> some_upstream(std::int64_t tokens) {
  std::vector<double> upstream;
  for (std::int64_t i = 0; i < tokens; ++i)
    upstream.push_back(i % 3 == 0 ? 0.0 : static_cast<double>(i % 7) - 3.0);
  return upstream;
}

void set_wanted(RunSpec& run, int wanted) {
  run.d_hidden = (wanted & 1) != 0;
  run.d_weight = (wanted & 2) != 0;
  run.d_bias = (wanted & 4) != 0;
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
