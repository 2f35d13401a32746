// Argument checks of sample.h.
#include "core/check.h"

#include <cmath>

#include "core/described.h"
#include "head/overlap.h"
#include "head/validate.h"
#include "sample/state.h"
#include "sample/tensor_roles.h"

namespace logitless {
namespace {

void require_contiguous(std::string_view name, const ConstTensorView& view) {
  require(!view.defined() || view.contiguous(), name, ": expected a contiguous tensor, got ",
          described(view));
}

LogitsForm logits_form(const Context& context, const ConstTensorView& hidden,
                       const ConstTensorView& weight, const ConstTensorView& bias, float softcap,
                       float logit_scale) {
  LogitsForm form;
  form.shape = require_head(hidden, weight, bias);
  const bool cpu = context.device().kind == DeviceKind::cpu;
  if (!cpu) require_one_dtype(hidden, weight, "in samples on a GPU");
  form.hidden_dtype = hidden.dtype();
  form.weight_dtype = weight.dtype();
  require(hidden.rank() <= kMaxRank - 1,
          "hidden: expected [..., D] with at most two leading "
          "dimensions, got ",
          described(hidden));
  require_transform(logit_scale, softcap);
  form.bias = bias.defined();
  if (form.bias) form.bias_dtype = bias.dtype();
  require(cpu || form.bias_dtype == DType::f32, "bias: expected f32 on a GPU, got ",
          name_of(form.bias_dtype));
  form.softcap = softcap;
  form.logit_scale = logit_scale;
  return form;
}

void require_number(std::string_view name, double value, bool inside, std::string_view expected) {
  require(inside && std::isfinite(value), name, ": expected ", expected, ", got ", value);
}

// Returns the form of a number that an option or a tensor gives. `unused` is the option's value
// that changes nothing.
Given given(std::string_view name, float option, float standard, bool unused,
            const ConstTensorView& tensor, const ConstTensorView& hidden) {
  require_per_token(name, tensor, hidden, false);
  require(!tensor.defined() || option == standard, name, ": expected the option to be ", standard,
          " beside a tensor, got ", option);
  if (tensor.defined()) return Given::per_token;
  return unused ? Given::none : Given::number;
}

}  // namespace

SampleForm checked_form(const Context& context, const SampleOptions& o, const SampleInputs& in,
                        const SampleOutputs& out) {
  SampleForm form;
  form.logits = logits_form(context, in.hidden, in.weight, in.bias, o.softcap, o.logit_scale);
  require_number("temperature", o.temperature, o.temperature >= 0.0f, "a number from 0");
  require_number("top_p", o.top_p, o.top_p > 0.0f && o.top_p <= 1.0f, "a number above 0 to 1");
  require_number("min_p", o.min_p, o.min_p >= 0.0f && o.min_p <= 1.0f, "a number from 0 to 1");
  require(o.top_k >= 0 && o.top_k <= form.logits.shape.vocab, "top_k: expected 1 to ",
          form.logits.shape.vocab, ", the vocabulary of weight, or 0 for all, got ", o.top_k);
  form.temperature = given("temperature", o.temperature, 1.0f, false, in.temperature, in.hidden);
  form.greedy = form.temperature == Given::number && o.temperature == 0.0f;
  form.top_p = given("top_p", o.top_p, 1.0f, o.top_p == 1.0f, in.top_p, in.hidden);
  form.min_p = given("min_p", o.min_p, 0.0f, o.min_p == 0.0f, in.min_p, in.hidden);
  form.top_k = o.top_k == form.logits.shape.vocab ? 0 : o.top_k;
  require_vector("logit_bias", in.logit_bias, form.logits.shape.vocab, DType::f32);
  form.logit_bias = in.logit_bias.defined();
  require_per_token("counter", in.counter, in.hidden, true);
  form.counter = in.counter.defined();
  if (form.counter) form.counter_dtype = in.counter.dtype();
  require_vector("key", in.key, 2, DType::i64);
  require(out.tokens.defined(), "tokens: expected a tensor [...], got none");
  require_per_token_output("tokens", out.tokens, in.hidden, true);
  form.token_dtype = out.tokens.dtype();
  require_per_token_output("log_prob", out.log_prob, in.hidden, false);
  each_sample_input(require_contiguous, in);
  each_sample_output(require_contiguous, out);
  NamedViews outputs, inputs;
  each_sample_output(outputs.adder(), out);
  each_sample_input(inputs.adder(), in);
  require_apart(outputs, inputs);
  return form;
}

TopForm checked_form(const Context& context, const TopLogProbsOptions& o,
                     const TopLogProbsInputs& in, const TopLogProbsOutputs& out) {
  TopForm form;
  form.logits = logits_form(context, in.hidden, in.weight, in.bias, o.softcap, o.logit_scale);
  require(o.k >= 1 && o.k <= form.logits.shape.vocab, "k: expected 1 to ", form.logits.shape.vocab,
          ", the vocabulary of weight, got ", o.k);
  form.k = o.k;
  require_per_token("targets", in.targets, in.hidden, true);
  form.target = in.targets.defined();
  if (form.target) form.target_dtype = in.targets.dtype();
  require(out.top_log_probs.defined(), "top_log_probs: expected a tensor [..., K], got none");
  require(out.top_ids.defined(), "top_ids: expected a tensor [..., K], got none");
  require(out.log_prob.defined() == form.target, "log_prob: expected ",
          form.target ? "a tensor beside targets, got none" : "none without targets, got a tensor");
  require_per_token_output("top_log_probs", out.top_log_probs, in.hidden, false, o.k);
  require_per_token_output("top_ids", out.top_ids, in.hidden, true, o.k);
  require_per_token_output("log_prob", out.log_prob, in.hidden, false);
  form.id_dtype = out.top_ids.dtype();
  each_top_input(require_contiguous, in);
  each_top_output(require_contiguous, out);
  NamedViews outputs, inputs;
  each_top_output(outputs.adder(), out);
  each_top_input(inputs.adder(), in);
  require_apart(outputs, inputs);
  return form;
}

ConstTensorView rows_of(const ConstTensorView& view, std::int64_t rows, std::int64_t columns) {
  if (columns == 0) return {view.data(), view.dtype(), {rows}};
  return {view.data(), view.dtype(), {rows, columns}};
}

}  // namespace logitless
