#include "compiler/exec/cuda/steps.h"
#include "compiler/target/cuda.h"
#include "head/cuda/engine.h"
#include "kernels/device_index.h"
#include "kernels/device_loss.h"

namespace logitless::ir {
namespace {

TensorView tensor(const View& view, const Frame& frame) {
  if (view.buffer < 0) return {};
  return {frame.address(view), view.dtype, view.shape, view.strides};
}
float* floats(const View& view, const Frame& frame) {
  return view.buffer < 0 ? nullptr : reinterpret_cast<float*>(frame.address(view));
}

}  // namespace

void enqueue_head(const HeadRun& h, const Frame& frame, void* stream) {
  const HeadShape& shape = h.plan->shape;
  const HeadScratch parts = head_scratch(shape.tokens);
  std::byte* const scratch = frame.address(h.scratch);
  const bool gradients = h.d_lse.buffer >= 0;

  cuda::HeadTargetsCall targets;
  targets.targets = frame.address(h.targets);
  targets.dtype = h.targets.dtype;
  targets.tokens = shape.tokens;
  targets.vocab = shape.vocab;
  targets.has_ignored = h.ignored.has_value();
  targets.ignored = h.ignored.value_or(0);
  targets.d_logit = floats(h.d_logit, frame);
  targets.words = reinterpret_cast<std::int64_t*>(scratch);
  targets.deltas = reinterpret_cast<float*>(scratch + parts.deltas);
  targets.stream = stream;
  cuda::head_targets(targets);

  ContextOptions options;
  options.device = DeviceKind::cuda;
  options.device_index = cuda::current_device();
  options.stream = stream;
  const Context context(options);
  const Workspace workspace(scratch + parts.workspace,
                            static_cast<std::size_t>(h.scratch_bytes - parts.workspace));
  HeadCall call;
  call.context = &context;
  call.plan = h.plan.get();
  call.workspace = &workspace;
  call.shape = shape;
  call.features = h.plan->features;
  call.in.hidden = tensor(h.x, frame);
  call.in.weight = tensor(h.w, frame);
  call.in.bias = tensor(h.bias, frame);
  call.in.targets = ConstTensorView(targets.words, DType::i64, {shape.tokens});
  call.in.ignore_index = -1;
  call.out.lse = tensor(h.lse, frame);
  call.out.target_logit = tensor(h.logit, frame);
  call.gradients = {.d_hidden = tensor(h.d_x, frame),
                    .d_weight = tensor(h.d_w, frame),
                    .d_bias = tensor(h.d_bias, frame)};
  cuda::CotangentCall cotangents;
  cotangents.lse = floats(h.d_lse, frame);
  cotangents.target_logit = gradients ? targets.deltas : nullptr;
  cuda::Engine(call).run(
      [&](const cuda::ForwardCall& chunk, cuda::RowCoefficients* rows, float* delta) {
        if (gradients) cuda::token_cotangents(cotangents, chunk, rows, delta);
      });
  cuda::clear_missing_logits(targets, floats(h.logit, frame));
}

}  // namespace logitless::ir
