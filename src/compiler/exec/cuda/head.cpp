#include "head/far/head.h"

#include "compiler/exec/backend.h"
#include "compiler/exec/cuda/steps.h"
#include "compiler/exec/head_over_ranks.h"
#include "compiler/target/cuda.h"
#include "core/check.h"
#include "head/cuda/calls.h"
#include "head/cuda/engine.h"
#include "head/far/step.h"
#include "head/plan/choose.h"
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

// One run of a head: the addresses of its operands, and the results of each token.
class HeadOfProgram {
 public:
  HeadOfProgram(const HeadRun& head, const Frame& frame, void* stream)
      : h_(head), scratch_(frame.address(head.scratch)), parts_(head_scratch(shape().tokens)) {
    targets_.targets = frame.address(h_.targets);
    targets_.dtype = h_.targets.dtype;
    targets_.tokens = shape().tokens;
    targets_.vocab = shape().vocab;
    targets_.has_ignored = h_.ignored.has_value();
    targets_.ignored = h_.ignored.value_or(0);
    targets_.d_logit = floats(h_.d_logit, frame);
    targets_.vocab_ids = reinterpret_cast<std::int64_t*>(scratch_);
    targets_.deltas = reinterpret_cast<float*>(scratch_ + parts_.deltas);
    targets_.stream = stream;
    cotangents_.lse = floats(h_.d_lse, frame);
    cotangents_.target_logit = gradients() ? targets_.deltas : nullptr;
    logit_ = floats(h_.logit, frame);
    log_prob_ = floats(h_.log_prob, frame);
    call_.shape = shape();
    call_.features = h_.plan->features;
    call_.in.hidden = tensor(h_.x, frame);
    call_.in.weight = tensor(h_.w, frame);
    call_.in.bias = tensor(h_.bias, frame);
    call_.in.targets = ConstTensorView(targets_.vocab_ids, DType::i64, {shape().tokens});
    call_.in.ignore_index = -1;
    call_.out.lse = tensor(h_.lse, frame);
    call_.out.target_logit = tensor(h_.logit, frame);
    call_.out.log_prob = tensor(h_.log_prob, frame);
    call_.gradients = {.d_hidden = tensor(h_.d_x, frame),
                       .d_weight = tensor(h_.d_w, frame),
                       .d_bias = tensor(h_.d_bias, frame)};
  }

  void run_dense(const Context& context) const {
    const Workspace workspace = own_workspace();
    HeadCall call = call_;
    call.context = &context;
    call.plan = h_.plan.get();
    call.workspace = &workspace;
    cuda::head_targets(targets_);
    cuda::Engine(call).run(tokens());
    clear_missing();
  }

  void run_over_ranks(const Context& context, HeadOverRanks::State& ranks) const {
    const Workspace own = own_workspace();
    run_call(ranks.plan, ranks.sharding, [&] {
      HeadCall call = call_;
      call.context = &context;
      call.workspace = &ranks.workspace_for(own);
      ranks.set_rows(call);
      cuda::head_targets(targets_);
      cuda::Engine(call).run(tokens());
      clear_missing();
    });
  }

  // Runs the controller's far-field step, or the dense step, which overwrites all results of the
  // other.
  void run_far(FarFieldAccess::State& far) const {
    FarController& controller = far.controller;
    const Context& context = controller.context();
    const HeadFeatures& features = call_.features;
    const auto plan_of = [&](const FarStep& step) -> const LossPlan& {
      return far.plans.get(context, shape(), features, controller.request(step),
                           [&](const PlanRequest& r) { return plan_head(shape(), features, r); });
    };
    const auto run_far_plan = [&](const FarStep& step) -> std::optional<FarFieldStatistics> {
      const LossPlan& plan = plan_of(step);
      HeadCall call = call_;
      call.context = &context;
      call.plan = &plan;
      call.workspace = &far.plans.workspace_for(context, plan);
      call.far.order = &controller.order();
      call.far.sample_seed = static_cast<std::uint64_t>(controller.report().steps);
      cuda::head_targets(targets_);
      cuda::Engine engine(call);
      engine.run(tokens());
      engine.audit(tokens());
      clear_missing();
      if (!step.audit) return {};  // no audit, so no reason to wait
      return cuda::far_statistics(context, plan, *call.workspace);
    };
    take_far_step(
        controller,
        {call_.in.hidden, call_.in.weight, call_.in.bias, features.logit_scale, features.softcap},
        /*may_repeat=*/!features.accumulate, plan_of, run_far_plan, [&] { run_dense(context); });
  }

 private:
  Workspace own_workspace() const {
    return {scratch_ + parts_.workspace,
            static_cast<std::size_t>(h_.scratch_bytes - parts_.workspace)};
  }
  const HeadShape& shape() const { return h_.plan->shape; }
  bool gradients() const { return h_.d_lse.buffer >= 0; }
  void clear_missing() const {
    cuda::clear_missing_logits(targets_, logit_);
    if (log_prob_ != nullptr) cuda::clear_missing_logits(targets_, log_prob_);
  }
  struct Tokens {
    const HeadOfProgram& head;
    void operator()(const cuda::ForwardCall& chunk, cuda::RowCoefficients* rows,
                    float* delta) const {
      if (head.gradients()) cuda::token_cotangents(head.cotangents_, chunk, rows, delta);
    }
  };
  Tokens tokens() const { return {*this}; }

  const HeadRun& h_;
  std::byte* const scratch_;
  const HeadScratch parts_;
  cuda::HeadTargetsCall targets_;
  cuda::CotangentCall cotangents_;
  float *logit_, *log_prob_;
  HeadCall call_;
};

const FarController& controller_of(const FarFieldHead& far) {
  const FarController& controller = FarFieldAccess::of(far).controller;
  require(controller.context().device().kind == DeviceKind::cuda,
          "far: expected a FarFieldHead of a GPU's context, which the program was compiled for");
  return controller;
}

}  // namespace

void enqueue_head(const HeadRun& head, const Frame& frame, const Context& context,
                  const HeadUnder& under) {
  if (under.skipped) return;
  const HeadOfProgram call(head, frame, context.stream());
  if (under.ranks != nullptr) return call.run_over_ranks(context, *under.ranks);
  if (under.far == nullptr) return call.run_dense(context);
  call.run_far(FarFieldAccess::of(*under.far));
}

const Context& context_of(const FarFieldHead& far) { return controller_of(far).context(); }

LossPlan far_plan_of(const HeadRun& head, const FarFieldHead& far) {
  return plan_head(head.plan->shape, head.plan->features,
                   controller_of(far).request({.far = true, .audit = true}));
}

void plan_over_gpus(HeadOverRanks::State& ranks, std::size_t memory_budget) {
  const auto plan = [&](std::size_t budget) {
    PlanRequest request;
    request.memory_budget = budget;
    ranks.make_plan(request, [&](const HeadShape& s, const HeadFeatures& f, const PlanRequest& r) {
      return plan_local(ranks.context, s, f, r);
    });
  };
  std::size_t capacity = 0;  // of any head: the ranks must agree on which one
  for (const Instruction& i : ranks.program->instructions) {
    const auto* head = std::get_if<HeadRun>(&i.what);
    if (head == nullptr) continue;
    capacity = static_cast<std::size_t>(head->scratch_bytes -
                                        head_scratch(head->plan->shape.tokens).workspace);
  }
  // Tries the workspace in the arena first, then the allowed memory beside it.
  if (capacity > 0) {
    try {
      plan(capacity);
      ranks.set_scratch(capacity);
      if (memory_budget == 0 || ranks.plan.exchange_bytes <= memory_budget) return;
    } catch (const InvalidArgument&) {
      // All ranks fail alike. Invalid arguments are reported by the second attempt below.
    }
  }
  plan(memory_budget);
  ranks.set_scratch(capacity);
}

}  // namespace logitless::ir
