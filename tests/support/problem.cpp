#include "support/problem.h"

#include <cmath>
#include <random>
#include <sstream>
#include <utility>

#include "core/element.h"
#include "head/cpu/layout.h"
#include "head/cuda/layout.h"
#include "head/far_work.h"
#include "head/plan/choose.h"
#include "support/mirror.h"
#include "support/recording.h"

namespace logitless::test {

Tensor::Tensor(DType dtype, std::vector<std::int64_t> shape)
    : defined_(true), dtype_(dtype), shape_(std::move(shape)) {
  // Poisoned: an element that is never written is NaN.
  bytes_.assign(static_cast<std::size_t>(numel()) * size_of(dtype), std::byte{0xff});
}

Tensor::Tensor(DType dtype, std::vector<std::int64_t> shape, const std::vector<double>& values)
    : Tensor(dtype, std::move(shape)) {
  for (std::size_t i = 0; i < values.size(); ++i) set(static_cast<std::int64_t>(i), values[i]);
}

std::int64_t Tensor::numel() const {
  std::int64_t n = 1;
  for (const std::int64_t size : shape_) n *= size;
  return n;
}
TensorView Tensor::view() {
  return defined_ ? TensorView(bytes_.data(), dtype_, shape_) : TensorView();
}
ConstTensorView Tensor::view() const {
  return defined_ ? ConstTensorView(bytes_.data(), dtype_, shape_) : ConstTensorView();
}
double Tensor::get(std::int64_t flat) const { return load_element(bytes_.data(), dtype_, flat); }
void Tensor::set(std::int64_t flat, double value) {
  store_element(bytes_.data(), dtype_, flat, value);
}
void Tensor::fill(double value) {
  for (std::int64_t i = 0; i < numel(); ++i) set(i, value);
}
std::vector<double> Tensor::values() const {
  std::vector<double> out;
  if (defined_) {
    for (std::int64_t i = 0; i < numel(); ++i) out.push_back(get(i));
  }
  return out;
}

std::string describe(const HeadSpec& s) {
  std::ostringstream out;
  out << "N=" << s.tokens << " D=" << s.dim << " V=" << s.vocab << " " << name_of(s.dtype)
      << " K=" << s.per_token << " bias=" << s.bias << " cw=" << s.class_weight
      << " tw=" << s.token_weight << " ignored=" << s.ignored << " eps=" << s.label_smoothing
      << " z=" << s.z_loss << " cap=" << s.softcap << " scale=" << s.logit_scale
      << " reduction=" << static_cast<int>(s.reduction);
  return out.str();
}

HeadProblem::HeadProblem(const HeadSpec& s) : spec(s) {
  std::mt19937_64 random(s.seed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  const auto tensor = [&](DType dtype, std::vector<std::int64_t> shape, auto draw,
                          std::vector<double>& values) {
    Tensor t(dtype, std::move(shape));
    for (std::int64_t i = 0; i < t.numel(); ++i) {
      t.set(i, draw());
      values.push_back(t.get(i));
    }
    return t;
  };
  const double weight_scale = s.weight_scale / std::sqrt(static_cast<double>(s.dim));
  hidden = tensor(
      s.hidden_dtype.value_or(s.dtype), {s.tokens, s.dim},
      [&] { return s.hidden_shift + s.hidden_scale * normal(random); }, oracle.hidden);
  weight = tensor(
      s.weight_dtype.value_or(s.dtype), {s.vocab, s.dim},
      [&] { return s.weight_shift + weight_scale * normal(random); }, oracle.weight);
  if (s.bias)
    bias = tensor(
        DType::f32, {s.vocab}, [&] { return normal(random); }, oracle.bias);
  if (s.class_weight)
    class_weight = tensor(
        DType::f32, {s.vocab}, [&] { return 0.5 + uniform(random); }, oracle.class_weight);
  if (s.token_weight)
    token_weight = tensor(
        DType::f32, {s.tokens}, [&] { return 0.25 + uniform(random); }, oracle.token_weight);
  std::vector<std::int64_t> shape = {s.tokens};
  if (s.per_token > 1) {
    shape.push_back(s.per_token);
    target_weight = tensor(
        DType::f32, shape, [&] { return uniform(random) / s.per_token; }, oracle.target_weight);
  }
  targets = Tensor(s.seed % 2 == 0 ? DType::i32 : DType::i64, shape);
  for (std::int64_t i = 0; i < s.tokens; ++i) {
    const bool ignored = uniform(random) < s.ignored;
    for (int k = 0; k < s.per_token; ++k) {
      const std::int64_t vocab_id =
          static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(s.vocab));
      oracle.targets.push_back(ignored ? oracle.ignore_index : vocab_id);
      targets.set(i * s.per_token + k, static_cast<double>(oracle.targets.back()));
    }
  }
  oracle.tokens = s.tokens;
  oracle.dim = s.dim;
  oracle.vocab = s.vocab;
  oracle.per_token = s.per_token;
  oracle.label_smoothing = s.label_smoothing;
  oracle.z_loss = s.z_loss;
  oracle.softcap = s.softcap;
  oracle.logit_scale = s.logit_scale;
}

CrossEntropyInputs HeadProblem::inputs() const {
  CrossEntropyInputs in;
  in.hidden = hidden.view();
  in.weight = weight.view();
  in.targets = targets.view();
  in.bias = bias.view();
  in.class_weight = class_weight.view();
  in.token_weight = token_weight.view();
  in.target_weight = target_weight.view();
  return in;
}

CrossEntropyOptions HeadProblem::options() const {
  CrossEntropyOptions o;
  o.reduction = spec.reduction;
  o.label_smoothing = spec.label_smoothing;
  o.z_loss = spec.z_loss;
  o.softcap = spec.softcap;
  o.logit_scale = spec.logit_scale;
  return o;
}

void HeadProblem::refresh_oracle() {
  oracle.hidden = hidden.values();
  oracle.weight = weight.values();
  oracle.bias = bias.values();
  oracle.class_weight = class_weight.values();
  oracle.token_weight = token_weight.values();
  oracle.target_weight = target_weight.values();
  oracle.targets.clear();
  for (const double y : targets.values()) oracle.targets.push_back(static_cast<std::int64_t>(y));
}

namespace {

// Valid tokens in the order of a far-field plan's blocks.
std::vector<std::int64_t> host_tokens(const LossPlan& plan, const Workspace& workspace,
                                      std::int64_t valid) {
  const auto* const rows =
      reinterpret_cast<const std::int64_t*>(static_cast<const std::byte*>(workspace.data()) +
                                            LossPlanAccess::layout<cpu::Layout>(plan).rows);
  return {rows, rows + valid};
}

// Result of sort_tokens on the GPU.
std::vector<std::int64_t> device_tokens(const LossPlan& plan, const Workspace& workspace) {
  const auto& layout = LossPlanAccess::layout<cuda::Layout>(plan);
  std::vector<std::int32_t> rows(static_cast<std::size_t>(plan.shape.tokens));
  cuda::copy_to_host(rows.data(),
                     static_cast<const std::byte*>(workspace.data()) + layout.far.token_rows,
                     rows.size() * sizeof(std::int32_t), nullptr);
  return {rows.begin(), rows.end()};
}

}  // namespace

CrossEntropyOutputs make_outputs(const HeadSpec& s, const RunSpec& run, HeadResult& a) {
  const DType gradient = run.gradient_dtype.value_or(DType::f32);
  a.loss = s.reduction == Reduction::none ? Tensor(DType::f32, {s.tokens}) : Tensor(DType::f32, {});
  const bool mixed = s.hidden_dtype.has_value() || s.weight_dtype.has_value();
  const auto of = [&](std::optional<DType> own) {
    return mixed && gradient != DType::f32 ? own.value_or(s.dtype) : gradient;
  };
  if (run.gradients && run.d_hidden) a.d_hidden = Tensor(of(s.hidden_dtype), {s.tokens, s.dim});
  if (run.gradients && run.d_weight) a.d_weight = Tensor(of(s.weight_dtype), {s.vocab, s.dim});
  if (run.gradients && run.d_bias && s.bias) a.d_bias = Tensor(DType::f32, {s.vocab});
  a.lse = Tensor(DType::f32, {s.tokens});
  if (s.per_token == 1) {
    a.log_prob = Tensor(DType::f32, {s.tokens});
    a.target_logit = Tensor(DType::f32, {s.tokens});
  }
  if (run.extras) {
    a.entropy = Tensor(DType::f32, {s.tokens});
    a.argmax = Tensor(DType::i64, {s.tokens});
  }
  return {.loss = a.loss.view(),
          .d_hidden = a.d_hidden.view(),
          .d_weight = a.d_weight.view(),
          .d_bias = a.d_bias.view(),
          .lse = a.lse.view(),
          .target_logit = a.target_logit.view(),
          .log_prob = a.log_prob.view(),
          .entropy = a.entropy.view(),
          .argmax = a.argmax.view()};
}

HeadResult run_head(const HeadProblem& problem, const RunSpec& run) {
  const HeadSpec& s = problem.spec;
  HeadResult a;
  CrossEntropyOutputs out = make_outputs(s, run, a);
  CrossEntropyInputs in = problem.inputs();
  in.grad_loss = run.grad_loss;
  Tensor grad_losses;
  if (!run.grad_losses.empty()) {
    grad_losses = Tensor(DType::f32, {s.tokens}, run.grad_losses);
    in.grad_losses = std::as_const(grad_losses).view();
  }
  CrossEntropyOptions options = problem.options();
  if (run.change) run.change(options, in, out);
  const Context context = make_context(run.kernel, run.threads);
  PlanRequest request{.device = context.device(), .memory_budget = run.budget, .kind = run.plan};
  if (run.plan == PlanKind::stored) request.stored_fraction = run.stored_fraction;
  request.expected_ignored = run.expected_ignored;
  request.tau = run.tau;
  request.audit_rows = run.audit_rows;
  request.sample_every = run.sample_every;
  Mirror mirror(run.kernel);
  const CrossEntropyOutputs host_out = out;
  in = mirror.in(in);
  out = mirror.out(out);
  a.plan = plan_cross_entropy(options, in, out, request);
  if (run.chunk_tokens > 0) a.plan = with_chunk(a.plan, run.chunk_tokens, context.device().kind);
  const Workspace workspace(context, a.plan);
  a.statistics = cross_entropy(context, a.plan, options, in, out, workspace);
  mirror.finish();
  if (is_device_kernel(run.kernel)) {
    const std::int64_t tokens = a.statistics.tokens;
    a.statistics = device_statistics(context, a.plan, workspace);
    a.statistics.tokens = tokens;
    if (is_far(a.plan.kind)) a.order_of_tokens = device_tokens(a.plan, workspace);
  } else if (is_far(a.plan.kind)) {
    a.order_of_tokens = host_tokens(a.plan, workspace, a.statistics.valid_tokens);
  }
  record("plan", a.plan.explain());
  record(host_out, a.statistics);
  return a;
}

}  // namespace logitless::test
