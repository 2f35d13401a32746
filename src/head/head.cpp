#include "logitless/head.h"

#include "core/check.h"
#include "head/device_cross_entropy.h"
#include "head/engine.h"
#include "head/overlap.h"

namespace logitless {
namespace {

// K of targets [..., K], or 1 of targets [...].
int targets_per_token(const HeadInputs& in) {
  return in.targets.rank() == in.hidden.rank()
             ? static_cast<int>(in.targets.size(in.targets.rank() - 1))
             : 1;
}

std::int64_t last_of(const HeadInputs& in) {
  return in.targets.rank() == in.hidden.rank() ? targets_per_token(in) : -1;
}

HeadShape check_inputs(const HeadOptions& options, const HeadInputs& in) {
  const HeadShape shape = require_head(in.hidden, in.weight, in.bias);
  require_transform(options.logit_scale, options.softcap);
  require(in.targets.defined(), "targets: expected a tensor, got none");
  require(last_of(in) != 0, "targets: ", describe(in.targets), " has no entries per token");
  require_per_token("targets", in.targets, in.hidden, true, last_of(in));
  require_vector("vocab_weight", in.vocab_weight, shape.vocab, DType::f32);
  return shape;
}

HeadFeatures base_features(const HeadOptions& options, const HeadInputs& in) {
  HeadFeatures f;
  f.targets_per_token = targets_per_token(in);
  f.bias = in.bias.defined();
  f.logit_scale = options.logit_scale;
  f.softcap = options.softcap;
  f.vocab_weight = in.vocab_weight.defined();
  return f;
}

HeadFeatures forward_features(const HeadOptions& options, const HeadInputs& in,
                              const HeadOutputs& out) {
  require_per_token_output("lse", out.lse, in.hidden, false);
  require_per_token_output("target_logit", out.target_logit, in.hidden, false, last_of(in));
  require_per_token_output("log_prob", out.log_prob, in.hidden, false, last_of(in));
  require_per_token_output("entropy", out.entropy, in.hidden, false);
  require_per_token_output("weighted_logit_sum", out.weighted_logit_sum, in.hidden, false);
  require_per_token_output("argmax", out.argmax, in.hidden, true);
  HeadFeatures f = base_features(options, in);
  f.entropy = out.entropy.defined();
  f.argmax = out.argmax.defined();
  f.label_smoothing = out.weighted_logit_sum.defined();
  return f;
}

HeadFeatures backward_features(const HeadOptions& options, const HeadInputs& in,
                               const HeadCotangents& g, const HeadGradients& to) {
  require_per_token("cotangent of lse", g.lse, in.hidden, false);
  require_per_token("cotangent of target_logit", g.target_logit, in.hidden, false, last_of(in));
  require_per_token("cotangent of log_prob", g.log_prob, in.hidden, false, last_of(in));
  require_per_token("cotangent of entropy", g.entropy, in.hidden, false);
  require_per_token("cotangent of weighted_logit_sum", g.weighted_logit_sum, in.hidden, false);
  require_gradient("d_hidden", to.d_hidden, in.hidden);
  require_gradient("d_weight", to.d_weight, in.weight);
  require(!to.d_bias.defined() || in.bias.defined(), "d_bias: asked for without a bias");
  if (to.d_bias.defined()) require_gradient("d_bias", to.d_bias, in.bias);
  HeadFeatures f = base_features(options, in);
  f.entropy = g.entropy.defined();
  f.entropy_gradient = g.entropy.defined();
  f.label_smoothing = g.weighted_logit_sum.defined();
  f.d_hidden = to.d_hidden.defined();
  f.d_weight = to.d_weight.defined();
  f.d_bias = to.d_bias.defined();
  require(f.d_hidden || f.d_weight || f.d_bias,
          "gradients: expected d_hidden, d_weight or d_bias, got none");
  if (f.d_hidden) f.d_hidden_dtype = to.d_hidden.dtype();
  if (f.d_weight) f.d_weight_dtype = to.d_weight.dtype();
  f.accumulate = options.accumulate;
  return f;
}

void require_own_memory(const HeadInputs& in, const HeadOutputs& out) {
  require_apart({{"lse", out.lse},
                 {"target_logit", out.target_logit},
                 {"log_prob", out.log_prob},
                 {"entropy", out.entropy},
                 {"weighted_logit_sum", out.weighted_logit_sum},
                 {"argmax", out.argmax}},
                {{"hidden", in.hidden},
                 {"weight", in.weight},
                 {"targets", in.targets},
                 {"bias", in.bias},
                 {"vocab_weight", in.vocab_weight}});
}

void require_own_memory(const HeadInputs& in, const HeadCotangents& g, const HeadGradients& to) {
  require_apart({{"d_hidden", to.d_hidden}, {"d_weight", to.d_weight}, {"d_bias", to.d_bias}},
                {{"hidden", in.hidden},
                 {"weight", in.weight},
                 {"targets", in.targets},
                 {"bias", in.bias},
                 {"vocab_weight", in.vocab_weight},
                 {"cotangent of lse", g.lse},
                 {"cotangent of target_logit", g.target_logit},
                 {"cotangent of log_prob", g.log_prob},
                 {"cotangent of entropy", g.entropy},
                 {"cotangent of weighted_logit_sum", g.weighted_logit_sum}});
}

EngineCall make_call(const Context& context, const LossPlan& plan, const HeadShape& shape,
                     const HeadInputs& in, const TargetReader& targets,
                     const Workspace& workspace) {
  EngineCall call{&context,        &plan,    &workspace, shape, in.hidden, in.weight, in.bias,
                  in.vocab_weight, &targets, {},         {},    {},        false};
  return call;
}

}  // namespace

LossPlan plan_head_forward(const HeadOptions& options, const HeadInputs& in, const HeadOutputs& out,
                           const PlanRequest& request) {
  const HeadShape shape = check_inputs(options, in);
  return plan_head(shape, forward_features(options, in, out), request);
}

LossPlan plan_head_backward(const HeadOptions& options, const HeadInputs& in,
                            const HeadCotangents& cotangents, const HeadGradients& gradients,
                            const PlanRequest& request) {
  const HeadShape shape = check_inputs(options, in);
  return plan_head(shape, backward_features(options, in, cotangents, gradients), request);
}

LossPlan plan_head_forward(const Context& context, const HeadOptions& options, const HeadInputs& in,
                           const HeadOutputs& out, const PlanRequest& request) {
  const HeadShape shape = check_inputs(options, in);
  return plan_head(context, shape, forward_features(options, in, out), request);
}

LossPlan plan_head_backward(const Context& context, const HeadOptions& options,
                            const HeadInputs& in, const HeadCotangents& cotangents,
                            const HeadGradients& gradients, const PlanRequest& request) {
  const HeadShape shape = check_inputs(options, in);
  return plan_head(context, shape, backward_features(options, in, cotangents, gradients), request);
}

void head_forward(const Context& context, const LossPlan& plan, const HeadOptions& options,
                  const HeadInputs& in, const HeadOutputs& out, const Workspace& workspace) {
  const HeadShape shape = check_inputs(options, in);
  const HeadFeatures features = forward_features(options, in, out);
  require_own_memory(in, out);
  if (context.device().kind == DeviceKind::cuda)
    return device_head_forward(context, plan, options, in, out, features, workspace);
  const int per_token = features.targets_per_token;
  const TargetReader targets(in.targets, per_token, options.ignore_index, 0);
  Engine engine(make_call(context, plan, shape, in, targets, workspace), features);

  const TokenOutput lse(out.lse), target_logit(out.target_logit), log_prob(out.log_prob),
      entropy(out.entropy), weighted(out.weighted_logit_sum), argmax(out.argmax);
  std::int64_t next = 0;
  for (std::int64_t row = 0; row < shape.tokens; ++row) {
    if (next < engine.valid_tokens() && engine.valid_rows()[next] == row) {
      ++next;
      continue;
    }
    for (const TokenOutput* o : {&lse, &entropy, &weighted}) o->set(row, 0.0);
    argmax.set(row, -1.0);
    for (int k = 0; k < per_token; ++k) {
      target_logit.set(row * per_token + k, 0.0);
      log_prob.set(row * per_token + k, 0.0);
    }
  }
  engine.run([&](const TokenResult& r, TokenAnswer&) {
    lse.set(r.row, r.lse);
    entropy.set(r.row, r.entropy);
    weighted.set(r.row, r.weighted_sum);
    argmax.set(r.row, r.argmax);
    for (int k = 0; k < per_token; ++k) {
      const bool valid = r.words[k] >= 0;
      target_logit.set(r.row * per_token + k, valid ? static_cast<double>(r.target_logit[k]) : 0.0);
      log_prob.set(r.row * per_token + k, valid ? r.log_prob(k) : 0.0);
    }
  });
}

void head_backward(const Context& context, const LossPlan& plan, const HeadOptions& options,
                   const HeadInputs& in, const HeadCotangents& cotangents,
                   const HeadGradients& gradients, const Workspace& workspace) {
  const HeadShape shape = check_inputs(options, in);
  const HeadFeatures features = backward_features(options, in, cotangents, gradients);
  require_own_memory(in, cotangents, gradients);
  if (context.device().kind == DeviceKind::cuda)
    return device_head_backward(context, plan, options, in, cotangents, gradients, features,
                                workspace);
  const int per_token = features.targets_per_token;
  const TargetReader targets(in.targets, per_token, options.ignore_index, 0);
  EngineCall call = make_call(context, plan, shape, in, targets, workspace);
  call.d_hidden = gradients.d_hidden;
  call.d_weight = gradients.d_weight;
  call.d_bias = gradients.d_bias;
  call.accumulate = options.accumulate;
  Engine engine(call, features);

  const TokenFloats g_lse(cotangents.lse), g_target(cotangents.target_logit),
      g_log_prob(cotangents.log_prob), g_entropy(cotangents.entropy),
      g_weighted(cotangents.weighted_logit_sum);
  engine.run([&](const TokenResult& r, TokenAnswer& answer) {
    answer.cotangent.lse = g_lse.get(r.row, 0.0f);
    answer.cotangent.entropy = g_entropy.get(r.row, 0.0f);
    answer.cotangent.weighted_sum = g_weighted.get(r.row, 0.0f);
    for (int k = 0; k < per_token; ++k) {
      if (r.words[k] < 0) continue;
      const double share = g_log_prob.get(r.row * per_token + k, 0.0f);
      answer.cotangent.lse -= share;
      answer.delta[k] = share + g_target.get(r.row * per_token + k, 0.0f);
    }
  });
}

}  // namespace logitless
