#include "head/far/head.h"

#include <vector>

#include "compiler/exec/backend.h"
#include "compiler/exec/cpu/run.h"
#include "compiler/exec/head_over_ranks.h"
#include "core/check.h"
#include "core/element.h"
#include "head/cpu/engine.h"
#include "head/far/step.h"
#include "head/plan/choose.h"

namespace logitless::ir {
namespace {

TensorView tensor(const View& view, const Frame& frame) {
  if (view.buffer < 0) return {};
  return {frame.address(view), view.dtype, view.shape, view.strides};
}
float* floats(const View& view, const Frame& frame) {
  return view.buffer < 0 ? nullptr : reinterpret_cast<float*>(frame.address(view));
}

// Returns a plan for one thread, as the dense plan is, so that bits do not depend on the threads.
LossPlan far_plan_of(const HeadRun& h, PlanRequest request) {
  request.device.threads = 1;
  return with_threads(plan_head(h.plan->shape, h.plan->features, request), h.context->threads());
}

// The scratch holds the engine's targets, int64 [N], followed by its workspace.
std::int64_t targets_bytes(const HeadRun& h) { return (h.plan->shape.tokens * 8 + 63) / 64 * 64; }
std::size_t workspace_bytes(const HeadRun& h) {
  return static_cast<std::size_t>(h.scratch_bytes - targets_bytes(h));
}

// One run of a head: the addresses of its operands, and the results of each token.
class HeadOfProgram {
 public:
  HeadOfProgram(const HeadRun& head, const Frame& frame)
      : h_(head),
        scratch_(frame.address(head.scratch)),
        targets_(tensor(head.targets, frame)),
        at_(targets_),
        lse_(floats(head.lse, frame)),
        logit_(floats(head.logit, frame)),
        log_prob_(floats(head.log_prob, frame)),
        d_lse_(floats(head.d_lse, frame)),
        d_logit_(floats(head.d_logit, frame)) {
    // The engine refuses targets outside the vocabulary. The program gives these no logit: their
    // rows read vocabulary entry 0 and ignore it.
    auto* vocab_ids = reinterpret_cast<std::int64_t*>(scratch_);
    for (std::int64_t row = 0; row < rows(); ++row) {
      const std::int64_t vocab_id = target(row);
      vocab_ids[row] = h_.ignored && vocab_id == *h_.ignored ? -1 : hits(vocab_id) ? vocab_id : 0;
      lse_[row] = logit_[row] = 0.0f;
      if (log_prob_ != nullptr) log_prob_[row] = 0.0f;
    }
    call_.context = h_.context.get();
    call_.shape = h_.plan->shape;
    call_.in.hidden = tensor(h_.x, frame);
    call_.in.weight = tensor(h_.w, frame);
    call_.in.bias = tensor(h_.bias, frame);
    call_.in.targets = ConstTensorView(scratch_, DType::i64, {head.plan->shape.tokens});
    call_.in.ignore_index = -1;
    call_.gradients = {.d_hidden = tensor(h_.d_x, frame),
                       .d_weight = tensor(h_.d_w, frame),
                       .d_bias = tensor(h_.d_bias, frame)};
    call_.features = h_.plan->features;
  }

  void run_dense() const {
    const Workspace workspace = own_workspace();
    HeadCall call = call_;
    call.plan = h_.plan.get();
    call.workspace = &workspace;
    cpu::Engine engine(call);
    engine.run([&](const cpu::TokenResult& r, cpu::TokenCoefficients& token_coefficients) {
      write(r, token_coefficients);
    });
  }

  void run_over_ranks(HeadOverRanks::State& ranks) const {
    const Workspace own = own_workspace();
    run_call(ranks.plan, ranks.sharding, [&] {
      HeadCall call = call_;
      call.workspace = &ranks.workspace_for(own);
      ranks.set_rows(call);
      cpu::Engine engine(call);
      engine.run([&](const cpu::TokenResult& r, cpu::TokenCoefficients& token_coefficients) {
        write(r, token_coefficients);
      });
    });
  }

  // Runs the controller's far-field step, or the dense step, which overwrites all results of the
  // other.
  void run_far(FarFieldAccess::State& far) const {
    FarController& controller = far.controller;
    const HeadFeatures& features = h_.plan->features;
    const auto plan_of = [&](const FarStep& step) -> const LossPlan& {
      return far.plans.get(controller.context(), h_.plan->shape, features, controller.request(step),
                           [&](const PlanRequest& r) { return far_plan_of(h_, r); });
    };
    const auto run_far_plan = [&](const FarStep& step) {
      const LossPlan& plan = plan_of(step);
      HeadCall call = call_;
      call.plan = &plan;
      call.workspace = &far.plans.workspace_for(controller.context(), plan);
      call.far.order = &controller.order();
      call.far.sample_seed = static_cast<std::uint64_t>(controller.report().steps);
      cpu::Engine engine(call);
      engine.run([&](const cpu::TokenResult& r, cpu::TokenCoefficients& token_coefficients) {
        write(r, token_coefficients);
      });
      engine.audit([&](const cpu::TokenResult& r, cpu::TokenCoefficients& token_coefficients) {
        give_cotangents(r, token_coefficients);
      });
      return engine.far_statistics();
    };
    take_far_step(
        controller,
        {call_.in.hidden, call_.in.weight, call_.in.bias, features.logit_scale, features.softcap},
        /*may_repeat=*/!features.accumulate, plan_of, run_far_plan, [&] { run_dense(); });
  }

 private:
  Workspace own_workspace() const { return {scratch_ + targets_bytes(h_), workspace_bytes(h_)}; }
  std::int64_t rows() const { return h_.plan->shape.tokens; }
  std::int64_t target(std::int64_t row) const {
    return load_index(targets_.data(), targets_.dtype(), at_(row));
  }
  bool hits(std::int64_t vocab_id) const {
    return vocab_id >= 0 && vocab_id < h_.plan->shape.vocab;
  }

  void write(const cpu::TokenResult& r, cpu::TokenCoefficients& token_coefficients) const {
    lse_[r.row] = static_cast<float>(r.lse);
    logit_[r.row] = hits(target(r.row)) ? r.target_logit[0] : 0.0f;
    if (log_prob_ != nullptr && hits(target(r.row)))
      log_prob_[r.row] = static_cast<float>(r.log_prob(0));
    if (d_lse_ != nullptr) give_cotangents(r, token_coefficients);
  }
  void give_cotangents(const cpu::TokenResult& r,
                       cpu::TokenCoefficients& token_coefficients) const {
    token_coefficients.cotangent.lse = d_lse_[r.row];
    if (hits(target(r.row))) token_coefficients.delta[0] = d_logit_[r.row];
  }

  const HeadRun& h_;
  std::byte* const scratch_;
  TensorView targets_;
  FlatIndex at_;
  float *lse_, *logit_, *log_prob_;
  const float *d_lse_, *d_logit_;
  HeadCall call_;
};

void require_cpu(const FarFieldHead& far) {
  require(FarFieldAccess::of(far).controller.context().device().kind == DeviceKind::cpu,
          "far: expected a FarFieldHead of a CPU's context, which programs run on");
}

}  // namespace

void run_head(const HeadRun& head, const Frame& frame, const HeadUnder& under) {
  const HeadOfProgram call(head, frame);
  if (under.ranks != nullptr) return call.run_over_ranks(*under.ranks);
  if (under.far == nullptr) return call.run_dense();
  require_cpu(*under.far);
  call.run_far(FarFieldAccess::of(*under.far));
}

void plan_over_ranks(HeadOverRanks::State& ranks, std::size_t memory_budget) {
  PlanRequest request;
  request.memory_budget = memory_budget;
  request.device.threads = 1;  // bits must not depend on threads
  ranks.make_plan(request, [](const HeadShape& shape, const HeadFeatures& features,
                              const PlanRequest& r) { return plan_local(shape, features, r); });
  ranks.plan = with_threads(ranks.plan, ranks.head->context->threads());
  ranks.set_scratch(workspace_bytes(*ranks.head));
}

LossPlan audited_plan(const Program& program, const FarFieldHead& far) {
  require_cpu(far);
  const FarController& controller = FarFieldAccess::of(far).controller;
  return far_plan_of(far_head(program), controller.request({.far = true, .audit = true}));
}

}  // namespace logitless::ir
