#include "head/program_head.h"

#include "head/cuda/calls.h"
#include "head/cuda/engine.h"
#include "kernels/device/index.h"
#include "kernels/device/loss.h"

namespace logitless::cuda {

std::optional<FarFieldStatistics> run_program_head(const ProgramHead& head, const HeadCall& given,
                                                   FarRun far) {
  const std::int64_t tokens = head.call.shape.tokens;
  const bool gradients = head.d_lse != nullptr;
  HeadTargetsCall targets;
  targets.targets = head.targets.data();
  targets.dtype = head.targets.dtype();
  targets.tokens = tokens;
  targets.vocab = head.call.shape.vocab;
  targets.has_ignored = head.ignored.has_value();
  targets.ignored = head.ignored.value_or(0);
  targets.d_logit = head.d_logit;
  targets.vocab_ids = reinterpret_cast<std::int64_t*>(head.scratch);
  targets.deltas = reinterpret_cast<float*>(head.scratch +
                                            program_head_scratch(DeviceKind::cuda, tokens).deltas);
  targets.stream = given.context->stream();
  CotangentCall cotangents;
  cotangents.lse = head.d_lse;
  cotangents.target_logit = gradients ? targets.deltas : nullptr;
  auto coefficients = [&](const ForwardCall& chunk, RowCoefficients* rows, float* delta) {
    if (gradients) token_cotangents(cotangents, chunk, rows, delta);
  };
  HeadCall call = given;
  const auto output = [&](float* to) {
    return to == nullptr ? TensorView() : TensorView(to, DType::f32, {tokens});
  };
  call.out.lse = output(head.lse);
  call.out.target_logit = output(head.logit);
  call.out.log_prob = output(head.log_prob);

  head_targets(targets);
  Engine engine(call);
  engine.run(coefficients);
  if (far != FarRun::none) engine.audit(coefficients);
  clear_missing_logits(targets, head.logit);
  if (head.log_prob != nullptr) clear_missing_logits(targets, head.log_prob);
  if (far != FarRun::audited) return {};  // without an audit there is no reason to wait
  return far_statistics(*call.context, *call.plan, *call.workspace);
}

}  // namespace logitless::cuda
