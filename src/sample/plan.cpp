#include <algorithm>

#include "core/check.h"
#include "logitless/head.h"
#include "sample/formula.h"
#include "sample/state.h"
#include "sample/tensor_roles.h"

namespace logitless {
namespace {

constexpr std::size_t kAlignment = 256;  // of the parts of a workspace

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Returns the head's plan for log-probabilities of `per_token` ids, or of one as [N].
LossPlan head_plan(const Context& context, const LogitsForm& form, const ConstTensorView& hidden,
                   const ConstTensorView& weight, const ConstTensorView& bias, DType id_dtype,
                   std::int64_t per_token, std::size_t memory_budget) {
  const std::int64_t rows = form.shape.tokens;
  // Planning reads no data; the ids and log-probabilities have other addresses in a call.
  auto* const data = const_cast<void*>(weight.data());
  HeadInputs in;
  in.hidden = rows_of(hidden, rows, form.shape.dim);
  in.weight = weight;
  in.bias = bias;
  HeadOutputs out;
  if (per_token == 0) {
    in.targets = ConstTensorView(data, id_dtype, {rows});
    out.log_prob = TensorView(data, DType::f32, {rows});
  } else {
    in.targets = ConstTensorView(data, id_dtype, {rows, per_token});
    out.log_prob = TensorView(data, DType::f32, {rows, per_token});
  }
  return plan_head_forward(context, {.softcap = form.softcap, .logit_scale = form.logit_scale}, in,
                           out, {.memory_budget = memory_budget});
}

ConstTensorView without_data(const ConstTensorView& view) {
  if (!view.defined()) return {};
  std::array<std::int64_t, kMaxRank> shape{};
  for (int d = 0; d < view.rank(); ++d) shape[static_cast<std::size_t>(d)] = view.size(d);
  return {nullptr, view.dtype(), std::span(shape.data(), static_cast<std::size_t>(view.rank()))};
}

// Returns the bytes left of a budget; 0: no budget.
std::size_t left_of(std::size_t memory_budget, std::size_t taken) {
  if (memory_budget == 0) return 0;
  require(memory_budget > taken, "memory_budget: expected more than the ", taken,
          " bytes beside programs and head, got ", memory_budget);
  return memory_budget - taken;
}

void finish(SamplePlan::State& s, const Context& context) {
  s.device = context.device();
  std::size_t scratch = s.ids->arena_bytes();
  if (s.order) scratch = std::max(scratch, s.order->arena_bytes());
  if (s.head) scratch = std::max(scratch, s.head->workspace_bytes());
  s.bytes = s.scratch_at + scratch;
}

}  // namespace

std::size_t SamplePlan::workspace_bytes() const { return state_ == nullptr ? 0 : state_->bytes; }

std::string SamplePlan::explain() const {
  if (state_ == nullptr || !state_->ids) return {};
  std::string text = state_->ids->program().explain();
  if (state_->head) text += "\nlog-probabilities:\n" + state_->head->explain();
  return text;
}

SamplePlan plan_sample(const Context& context, const SampleOptions& options, const SampleInputs& in,
                       const SampleOutputs& out, std::size_t memory_budget) {
  auto s = std::make_shared<SamplePlan::State>();
  s->sample = checked_form(context, options, in, out);
  const auto add = [&](const char*, const ConstTensorView& view) {
    s->tensors.push_back(without_data(view));
  };
  each_sample_input(add, in);
  each_sample_output(add, out);
  if (s->sample.logits.shape.tokens > 0) {
    s->scratch_at = aligned(sizeof(SampleNumbers));
    const std::size_t left = left_of(memory_budget, s->scratch_at);
    s->ids = SampleProgram(context, sample_graph(s->sample), left, true);
    if (out.log_prob.defined())
      s->head = head_plan(context, s->sample.logits, in.hidden, in.weight, in.bias,
                          s->sample.token_dtype, 0, left);
    finish(*s, context);
  }
  return SampleAccess::make(std::move(s));
}

SamplePlan plan_top_logprobs(const Context& context, const TopLogProbsOptions& options,
                             const TopLogProbsInputs& in, const TopLogProbsOutputs& out,
                             std::size_t memory_budget) {
  auto s = std::make_shared<SamplePlan::State>();
  s->top = true;
  s->best = checked_form(context, options, in, out);
  const auto add = [&](const char*, const ConstTensorView& view) {
    s->tensors.push_back(without_data(view));
  };
  each_top_input(add, in);
  each_top_output(add, out);
  if (s->best.logits.shape.tokens > 0) {
    const auto count = static_cast<std::size_t>(s->best.logits.shape.tokens * s->best.wanted());
    s->found_at = s->wanted_at + aligned(count * sizeof(std::int64_t));
    s->scratch_at = s->found_at + aligned(count * sizeof(float));
    const std::size_t left = left_of(memory_budget, s->scratch_at);
    s->ids = SampleProgram(context, best_graph(s->best), left, true);
    s->head = head_plan(context, s->best.logits, in.hidden, in.weight, in.bias, DType::i64,
                        s->best.wanted(), left);
    s->order = SampleProgram(context, order_graph(s->best), left, false);
    finish(*s, context);
  }
  return SampleAccess::make(std::move(s));
}

}  // namespace logitless
