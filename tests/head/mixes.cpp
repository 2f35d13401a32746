#include "head/mixes.h"

#include <cstring>
#include <utility>

namespace logitless::test {
namespace {

HeadSpec small() {
  HeadSpec s;
  s.tokens = 150;  // three chunks of the least size
  s.dim = 11;
  s.vocab = 291;
  s.bias = true;
  return s;
}

ContextOptions context_options(const std::string& kernel, int threads) {
  ContextOptions o;
  o.kernel = kernel;
  o.threads = threads;
  return o;
}

HeadSpec with_dtype(HeadSpec spec, DType dtype) {
  spec.dtype = dtype;
  return spec;
}

}  // namespace

std::vector<Mix> mixes() {
  HeadSpec plain = small();
  plain.bias = false;
  HeadSpec weighted = small();
  weighted.class_weight = weighted.token_weight = true;
  weighted.label_smoothing = 0.1f;
  weighted.z_loss = 1e-3f;
  weighted.ignored = 0.3;
  HeadSpec capped = small();
  capped.softcap = 5.0f;
  capped.logit_scale = 0.5f;
  capped.reduction = Reduction::sum;
  HeadSpec smoothed = capped;
  smoothed.label_smoothing = 0.2f;
  HeadSpec several = small();
  several.per_token = 3;
  HeadSpec all_ignored = small();
  all_ignored.ignored = 1.1;
  return {
      {"plain", Entry::loss, plain, false, false, false},
      {"weighted", Entry::loss, weighted, true, false, false},
      {"weighted, gradients of 16 bit", Entry::loss, weighted, false, true, false},
      {"softcap", Entry::loss, capped, false, true, false},
      {"softcap and smoothing", Entry::loss, smoothed, true, false, false},
      {"several targets", Entry::loss, several, true, true, false},
      {"added to", Entry::loss, small(), false, true, true},
      {"all ignored", Entry::loss, all_ignored, true, true, false},
      {"forward, every output", Entry::forward, weighted, true, false, false},
      {"forward, several targets", Entry::forward, several, false, false, false},
      {"backward", Entry::backward, small(), false, true, false},
      {"backward, every cotangent", Entry::backward, weighted, true, true, false},
      {"backward, several targets, softcap", Entry::backward,
       [&] {
         HeadSpec s = several;
         s.softcap = 5.0f;
         return s;
       }(),
       false, false, true},
  };
}

std::vector<PlanKind> kinds_of(Entry entry) {
  if (entry == Entry::forward) return {PlanKind::forward};
  std::vector<PlanKind> kinds = {PlanKind::dense, PlanKind::stored, PlanKind::recompute};
  if (entry == Entry::loss) kinds.insert(kinds.begin(), PlanKind::forward);
  return kinds;
}

MixCall::MixCall(const Mix& mix, DType dtype, const std::string& kernel, int threads, PlanKind kind)
    : mix_(mix),
      context_(context_options(kernel, threads)),
      kind_(kind),
      problem_(with_dtype(mix.spec, dtype)) {
  const HeadSpec& s = problem_.spec;
  std::vector<std::int64_t> slots = {s.tokens};
  if (s.per_token > 1) slots.push_back(s.per_token);
  const DType gradient = mix.low_gradients ? dtype : DType::f32;
  const bool primitive = mix.entry != Entry::loss;
  const bool gradients = mix.entry == Entry::backward || kind != PlanKind::forward;
  if (mix.entry != Entry::backward) {
    lse_ = Tensor(DType::f32, {s.tokens});
    if (primitive || s.per_token == 1) {
      target_logit_ = Tensor(DType::f32, slots);
      log_prob_ = Tensor(DType::f32, slots);
    }
    if (mix.extras) {
      entropy_ = Tensor(DType::f32, {s.tokens});
      argmax_ = Tensor(DType::i32, {s.tokens});
      if (primitive) weighted_ = Tensor(DType::f32, {s.tokens});
    }
  }
  if (!primitive) loss_ = Tensor(DType::f32, {});
  if (gradients) {
    d_hidden_ = Tensor(gradient, {s.tokens, s.dim});
    d_weight_ = Tensor(gradient, {s.vocab, s.dim});
    if (s.bias) d_bias_ = Tensor(DType::f32, {s.vocab});
  }
  options_ = problem_.options();
  options_.accumulate = mix.accumulate;
  in_ = problem_.inputs();
  out_ = {loss_.view(),         d_hidden_.view(), d_weight_.view(), d_bias_.view(), lse_.view(),
          target_logit_.view(), log_prob_.view(), entropy_.view(),  argmax_.view()};

  head_options_ = {options_.ignore_index, s.softcap, s.logit_scale, mix.accumulate};
  head_in_ = {in_.hidden, in_.weight, in_.targets, in_.bias, in_.class_weight};
  head_out_ = {lse_.view(),     target_logit_.view(), log_prob_.view(),
               entropy_.view(), weighted_.view(),     argmax_.view()};
  per_row_ = Tensor(DType::f32, {s.tokens});
  per_row_.fill(0.25);
  per_slot_ = Tensor(DType::f32, slots);
  per_slot_.fill(-0.5);
  const ConstTensorView row = std::as_const(per_row_).view();
  const ConstTensorView slot = std::as_const(per_slot_).view();
  cotangents_.log_prob = slot;
  if (mix.extras) cotangents_ = {row, slot, slot, row, row};
  gradients_ = {d_hidden_.view(), d_weight_.view(), d_bias_.view()};
}

LossPlan MixCall::plan(std::size_t budget) const {
  const PlanRequest request{context_.device(), budget, kind_, 0.0};
  if (mix_.entry == Entry::forward)
    return plan_head_forward(head_options_, head_in_, head_out_, request);
  if (mix_.entry == Entry::backward)
    return plan_head_backward(head_options_, head_in_, cotangents_, gradients_, request);
  return plan_cross_entropy(options_, in_, out_, request);
}

LossPlan MixCall::least_plan() const {
  LossPlan best = plan();
  std::size_t low = 0;  // not enough
  while (best.workspace_bytes() - low > 1) {
    const std::size_t middle = low + (best.workspace_bytes() - low) / 2;
    try {
      best = plan(middle);
    } catch (const Error&) {
      low = middle;
    }
  }
  return best;
}

void MixCall::run(const LossPlan& plan, const Workspace& workspace) {
  if (mix_.entry == Entry::forward) {
    head_forward(context_, plan, head_options_, head_in_, head_out_, workspace);
  } else if (mix_.entry == Entry::backward) {
    head_backward(context_, plan, head_options_, head_in_, cotangents_, gradients_, workspace);
  } else {
    cross_entropy(context_, plan, options_, in_, out_, workspace);
  }
}

std::vector<std::byte> MixCall::inputs() const {
  std::vector<std::byte> all;
  for (const Tensor* t : {&problem_.hidden, &problem_.weight, &problem_.targets, &problem_.bias,
                          &problem_.class_weight, &problem_.token_weight, &problem_.target_weight,
                          &per_row_, &per_slot_})
    all.insert(all.end(), t->bytes().begin(), t->bytes().end());
  return all;
}

std::vector<const Tensor*> MixCall::written() const {
  return {&loss_,     &lse_,    &target_logit_, &log_prob_, &entropy_,
          &weighted_, &argmax_, &d_hidden_,     &d_weight_, &d_bias_};
}

std::vector<std::byte> MixCall::outputs() const {
  std::vector<std::byte> all;
  for (const Tensor* t : written()) all.insert(all.end(), t->bytes().begin(), t->bytes().end());
  return all;
}

void MixCall::fill_outputs(int pattern) {
  for (const Tensor* t : written()) {
    if (!t->defined()) continue;
    auto* tensor = const_cast<Tensor*>(t);
    std::memset(tensor->view().data(), pattern, t->bytes().size());
  }
  if (!mix_.accumulate) return;
  for (Tensor* t : {&d_hidden_, &d_weight_, &d_bias_}) {
    if (t->defined()) t->fill(1.0);
  }
}

}  // namespace logitless::test
