#include "compiler/exec/head.h"

#include "compiler/exec/head_over_ranks.h"
#include "core/check.h"
#include "head/far/head.h"
#include "head/far/step.h"
#include "head/plan/choose.h"
#include "head/program_head.h"

namespace logitless::ir {
namespace {

TensorView tensor(const View& view, const Frame& frame) {
  if (view.buffer < 0) return {};
  return {frame.address(view), view.dtype, view.shape, view.strides};
}
float* floats(const View& view, const Frame& frame) {
  return view.buffer < 0 ? nullptr : reinterpret_cast<float*>(frame.address(view));
}

ProgramHead program_head(const HeadRun& h, const Frame& frame, const Context& context) {
  ProgramHead head;
  head.call.context = &context;
  head.call.shape = h.plan->shape;
  head.call.features = h.plan->features;
  head.call.in.hidden = tensor(h.x, frame);
  head.call.in.weight = tensor(h.w, frame);
  head.call.in.bias = tensor(h.bias, frame);
  head.call.gradients = {.d_hidden = tensor(h.d_x, frame),
                         .d_weight = tensor(h.d_w, frame),
                         .d_bias = tensor(h.d_bias, frame)};
  head.targets = tensor(h.targets, frame);
  head.ignored = h.ignored;
  head.lse = floats(h.lse, frame);
  head.logit = floats(h.logit, frame);
  head.log_prob = floats(h.log_prob, frame);
  head.d_lse = floats(h.d_lse, frame);
  head.d_logit = floats(h.d_logit, frame);
  head.scratch = frame.address(h.scratch);
  return head;
}

// Programs of a GPU are run in a context that each run names.
DeviceKind device_of(const HeadRun& h) {
  return h.context != nullptr ? DeviceKind::cpu : DeviceKind::cuda;
}

std::int64_t workspace_begin(const HeadRun& h) {
  return program_head_scratch(device_of(h), h.plan->shape.tokens).workspace;
}
std::size_t workspace_bytes(const HeadRun& h) {
  return static_cast<std::size_t>(h.scratch_bytes - workspace_begin(h));
}

// On a CPU a plan is for one thread, as the dense plan is, so that bits do not depend on the
// threads.
LossPlan far_plan_of(const HeadRun& h, PlanRequest request) {
  if (device_of(h) == DeviceKind::cuda) return plan_head(h.plan->shape, h.plan->features, request);
  request.device.threads = 1;
  return with_threads(plan_head(h.plan->shape, h.plan->features, request), h.context->threads());
}

void run_dense(const HeadRun& h, const ProgramHead& head, const Workspace& workspace) {
  HeadCall call = head.call;
  call.plan = h.plan.get();
  call.workspace = &workspace;
  run_program_head(head, call);
}

void run_over_ranks(const ProgramHead& head, const Workspace& of_program,
                    HeadOverRanks::State& ranks) {
  run_call(ranks.plan, ranks.sharding, [&] {
    HeadCall call = head.call;
    call.workspace = &ranks.workspace_for(of_program);
    ranks.set_rows(call);
    run_program_head(head, call);
  });
}

// Runs the controller's far-field step, or the dense step, which overwrites all results of the
// other.
void run_far(const HeadRun& h, const ProgramHead& head, const Workspace& of_program,
             FarFieldAccess::State& far) {
  FarController& controller = far.controller;
  const HeadFeatures& features = h.plan->features;
  const auto plan_of = [&](const FarStep& step) -> const LossPlan& {
    return far.plans.get(controller.context(), h.plan->shape, features, controller.request(step),
                         [&](const PlanRequest& r) { return far_plan_of(h, r); });
  };
  const auto run_far_plan = [&](const FarStep& step) {
    const LossPlan& plan = plan_of(step);
    HeadCall call = head.call;
    call.plan = &plan;
    call.workspace = &far.plans.workspace_for(controller.context(), plan);
    call.far.order = &controller.order();
    call.far.sample_seed = static_cast<std::uint64_t>(controller.report().steps);
    return run_program_head(head, call, step.audit ? FarRun::audited : FarRun::plain);
  };
  const HeadOperands& in = head.call.in;
  take_far_step(controller, {in.hidden, in.weight, in.bias, features.logit_scale, features.softcap},
                /*may_repeat=*/!features.accumulate, plan_of, run_far_plan,
                [&] { run_dense(h, head, of_program); });
}

}  // namespace

void run_head(const HeadRun& h, const Frame& frame, const Context& context,
              const HeadUnder& under) {
  if (under.skipped) return;
  const ProgramHead head = program_head(h, frame, context);
  const Workspace workspace(head.scratch + workspace_begin(h), workspace_bytes(h));
  if (under.ranks != nullptr) return run_over_ranks(head, workspace, *under.ranks);
  if (under.far == nullptr) return run_dense(h, head, workspace);
  context_of(*under.far, device_of(h));
  run_far(h, head, workspace, FarFieldAccess::of(*under.far));
}

const Context& context_of(const FarFieldHead& far, DeviceKind device) {
  const Context& context = FarFieldAccess::of(far).controller.context();
  require(context.device().kind == device, "far: expected a FarFieldHead of a ",
          device == DeviceKind::cpu ? "CPU" : "GPU",
          "'s context, which the program was compiled for");
  return context;
}

LossPlan far_plan(const Program& program, const FarFieldHead& far, DeviceKind device) {
  const HeadRun& head = far_head(program);
  context_of(far, device);
  const FarController& controller = FarFieldAccess::of(far).controller;
  return far_plan_of(head, controller.request({.far = true, .audit = true}));
}

namespace {

void plan_over_cpus(HeadOverRanks::State& ranks, std::size_t memory_budget) {
  PlanRequest request;
  request.memory_budget = memory_budget;
  request.device.threads = 1;  // bits must not depend on threads
  ranks.make_plan({}, request);
  ranks.plan = with_threads(ranks.plan, ranks.head->context->threads());
  ranks.set_scratch(workspace_bytes(*ranks.head));
}

void plan_over_gpus(HeadOverRanks::State& ranks, std::size_t memory_budget) {
  const auto plan = [&](std::size_t budget) {
    PlanRequest request;
    request.memory_budget = budget;
    ranks.make_plan(ranks.context, request);
  };
  std::size_t capacity = 0;  // of any head: the ranks must agree on which one
  for (const Instruction& i : ranks.program->instructions) {
    if (const auto* head = std::get_if<HeadRun>(&i.what)) capacity = workspace_bytes(*head);
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

}  // namespace

void plan_over_ranks(HeadOverRanks::State& ranks, std::size_t memory_budget) {
  ranks.device == DeviceKind::cpu ? plan_over_cpus(ranks, memory_budget)
                                  : plan_over_gpus(ranks, memory_budget);
}

}  // namespace logitless::ir
