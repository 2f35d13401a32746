// cross_entropy under the controller of the far field.
#include "head/far/head.h"

#include "core/check.h"
#include "head/far/step.h"

namespace logitless {

FarFieldHead::FarFieldHead(const Context& context, const FarFieldOptions& options)
    : state_(new State{FarController(context, options), {}, {}, {}}) {}
FarFieldHead::~FarFieldHead() = default;
FarFieldHead::FarFieldHead(FarFieldHead&&) noexcept = default;
FarFieldHead& FarFieldHead::operator=(FarFieldHead&&) noexcept = default;

const FarFieldReport& FarFieldHead::report() const { return state_->controller.report(); }
const VocabOrder& FarFieldHead::order() const { return state_->controller.order(); }
std::string FarFieldHead::explain() const { return state_->controller.explain(); }
void FarFieldHead::save(const std::string& path) const { state_->controller.save(path); }
void FarFieldHead::load(const std::string& path) { state_->controller.load(path); }
std::vector<std::byte> FarFieldHead::state() const { return state_->controller.state(); }
void FarFieldHead::set_state(std::span<const std::byte> state) {
  state_->controller.set_state(state);
}

LossStatistics FarFieldHead::step(const CrossEntropyOptions& options, const CrossEntropyInputs& in,
                                  const CrossEntropyOutputs& out) {
  FarController& controller = state_->controller;
  FarPlans& plans = state_->plans;
  const Context& context = controller.context();
  const bool on_gpu = context.device().kind == DeviceKind::cuda;
  state_->last.reset();
  require(out.d_hidden.defined(), "d_hidden: expected one, since audits measure its error");
  const auto plan_of = [&](const FarStep& step) -> const LossPlan& {
    return plans.get(context, shape_of(in), features_of(options, in, out), controller.request(step),
                     [&](const PlanRequest& r) { return plan_cross_entropy(options, in, out, r); });
  };
  const auto run = [&](const FarStep& step, const CrossEntropyInputs& inputs) {
    const LossPlan& plan = plan_of(step);
    state_->last.reset();
    const Workspace& workspace = plans.workspace_for(context, plan);
    state_->last = cross_entropy(context, plan, options, inputs, out, workspace);
    if (on_gpu) state_->last_plan = plan;
    return *state_->last;
  };
  LossStatistics stats;
  bool again = false;  // a dense step after a far one: on a GPU it has been waited for already
  take_far_step(
      controller, {in.hidden, in.weight, in.bias, options.logit_scale, options.softcap},
      /*may_repeat=*/!options.accumulate,  // what has been added to accumulated gradients stays
      plan_of,
      [&](const FarStep& step) -> std::optional<FarFieldStatistics> {
        CrossEntropyInputs far_in = in;
        far_in.order = controller.order();
        far_in.sample_seed = static_cast<std::uint64_t>(controller.report().steps);
        stats = run(step, far_in);
        again = true;
        if (on_gpu && !step.audit) return {};  // not worth waiting for
        if (on_gpu) stats = statistics();
        return stats.far;
      },
      [&] {
        stats = run({}, in);
        if (on_gpu && again) stats = statistics();
      });
  return stats;
}

LossStatistics FarFieldHead::statistics() const {
  const Context& context = state_->controller.context();
  require(state_->last.has_value(), "statistics: expected a step before, which succeeded");
  if (context.device().kind == DeviceKind::cpu) return *state_->last;
  LossStatistics found = device_statistics(context, state_->last_plan,
                                           state_->plans.workspace_for(context, state_->last_plan));
  found.tokens = state_->last->tokens;
  return found;
}

}  // namespace logitless
