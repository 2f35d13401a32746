#include <algorithm>

#include "core/check.h"
#include "logitless/error.h"
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

// Returns the head's plan for log-probabilities of the targets.
LossPlan head_plan(const Context& context, const LogitsForm& form, const HeadInputs& in,
                   const HeadOutputs& out, std::size_t memory_budget) {
  return plan_head_forward(context, {.softcap = form.softcap, .logit_scale = form.logit_scale}, in,
                           out, {.memory_budget = memory_budget});
}

// Views of a call's tensors that the head reads. Planning reads no data: ids and outputs, which
// have other addresses in a call, get that of the weight.
template <typename Inputs>
HeadInputs planned_inputs(const LogitsForm& form, const Inputs& in, DType id_dtype,
                          std::int64_t per_token) {
  const std::int64_t rows = form.shape.tokens;
  return {.hidden = rows_of(in.hidden, rows, form.shape.dim),
          .weight = in.weight,
          .targets = rows_of({in.weight.data(), id_dtype, {rows}}, rows, per_token),
          .bias = in.bias};
}
TensorView planned_output(const ConstTensorView& like, DType dtype) {
  std::array<std::int64_t, kMaxRank> shape{};
  for (int d = 0; d < like.rank(); ++d) shape[static_cast<std::size_t>(d)] = like.size(d);
  return {const_cast<void*>(like.data()), dtype,
          std::span(shape.data(), static_cast<std::size_t>(like.rank()))};
}

// Returns the plan of the head's forward on a GPU without a budget; none on a CPU, and where no
// kernel serves, which tokens alone do not need.
template <typename Inputs>
std::optional<LossPlan> gpu_head_plan(const Context& context, const LogitsForm& form,
                                      const Inputs& in, DType id_dtype, std::int64_t per_token) {
  if (context.device().kind != DeviceKind::cuda) return std::nullopt;
  try {
    const HeadInputs head = planned_inputs(form, in, id_dtype, per_token);
    return head_plan(context, form, head, {.log_prob = planned_output(head.targets, DType::f32)},
                     0);
  } catch (const Unsupported&) {
    return std::nullopt;
  }
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
  std::size_t scratch = s.stored.bytes;
  if (s.ids) scratch = std::max(scratch, s.ids->arena_bytes());
  if (s.order) scratch = std::max(scratch, s.order->arena_bytes());
  if (s.largest) scratch = std::max(scratch, s.largest->workspace_bytes());
  if (s.head) scratch = std::max(scratch, s.head->workspace_bytes());
  s.bytes = s.scratch_at + scratch;
}

}  // namespace

std::size_t SamplePlan::workspace_bytes() const { return state_ == nullptr ? 0 : state_->bytes; }

std::string SamplePlan::explain() const {
  if (state_ == nullptr) return {};
  if (state_->stored) return explain_stored(state_->stored, state_->logits());
  if (!state_->ids) return {};
  std::string text = state_->ids->program().explain();
  if (state_->largest) text += "\nlargest entries:\n" + state_->largest->explain();
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
    const LogitsForm& logits = s->sample.logits;
    s->scratch_at = aligned(sizeof(SampleNumbers));
    if (const auto head = gpu_head_plan(context, logits, in, s->sample.token_dtype, 0))
      s->stored = plan_stored(s->sample, *head, out.log_prob.defined(),
                              left_of(memory_budget, s->scratch_at));
    if (s->stored) {
      finish(*s, context);
      return SampleAccess::make(std::move(s));
    }
    if (s->sample.of_head()) {
      const std::size_t ids = static_cast<std::size_t>(logits.shape.tokens) * sizeof(std::int32_t);
      s->found_at = s->wanted_at + aligned(ids);
      s->scratch_at = s->found_at + aligned(ids);
    }
    const std::size_t left = left_of(memory_budget, s->scratch_at);
    if (s->sample.of_head()) {
      const HeadInputs head = planned_inputs(logits, in, DType::i32, 0);
      s->largest = head_plan(context, logits, head,
                             {.argmax = planned_output(head.targets, DType::i32)}, left);
    }
    s->ids = SampleProgram(context, sample_graph(s->sample), left, true);
    if (out.log_prob.defined()) {
      const HeadInputs head = planned_inputs(logits, in, s->sample.token_dtype, 0);
      s->head = head_plan(context, logits, head,
                          {.log_prob = planned_output(head.targets, DType::f32)}, left);
    }
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
    const LogitsForm& logits = s->best.logits;
    if (const auto head = gpu_head_plan(context, logits, in, DType::i64, s->best.wanted()))
      s->stored = plan_stored(s->best, *head, left);
    if (!s->stored) {
      s->ids = SampleProgram(context, best_graph(s->best), left, true);
      const HeadInputs head = planned_inputs(logits, in, DType::i64, s->best.wanted());
      s->head = head_plan(context, logits, head,
                          {.log_prob = planned_output(head.targets, DType::f32)}, left);
    }
    s->order = SampleProgram(context, order_graph(s->best), left, false);
    finish(*s, context);
  }
  return SampleAccess::make(std::move(s));
}

}  // namespace logitless
