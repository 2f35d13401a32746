// cross_entropy steps under the far field's controller.
#include "head/far/head.h"

#include <array>
#include <string>

#include "comm/digest.h"
#include "core/check.h"
#include "core/hash.h"
#include "head/far/shared_order.h"
#include "head/far/step.h"
#include "head/shard_plan.h"

namespace logitless {
namespace {

void require_step(const CrossEntropyOutputs& out) {
  require(out.d_hidden.defined(), "d_hidden: expected one, since audits measure its error");
}

// Returns a description of this rank's vocabulary shard.
std::string layout_of(const Sharding& sharding, std::int64_t rows) {
  const Communicator& vocab_group = *sharding.vocab_group;
  std::string out = concat("rank ", vocab_group.rank(), " of ", vocab_group.size(), ": ", rows,
                           " of ", sharding.vocab, " vocabulary entries");
  const ConstTensorView& table = sharding.vocab_ids;
  if (!table.defined()) return out + concat(" from ", sharding.vocab_begin, " on");
  return out + concat(", table ", content_name({static_cast<const char*>(table.data()),
                                                static_cast<std::size_t>(rows) * 4}));
}

// Prepares a step of a sharded vocabulary, collectively. All ranks agree on the step, on the plans
// to be made, and to drop orders that on some rank are of another shard. Returns whether all ranks
// have the workspace for their plans.
bool agree(FarController& controller, FarPlans& plans, const CrossEntropyOptions& options,
           const CrossEntropyInputs& in, const CrossEntropyOutputs& out, OrderSource& source) {
  std::string layout;
  const Agreement agreed = agree(*in.sharding.vocab_group, [&](PlanDigest& digest) {
    require_step(out);
    if (in.sharding.replicas != nullptr)
      throw Unsupported(
          "sharding: replicas: groups of ranks would decide apart when to take the far field; "
          "FarFieldHead takes one group");
    const HeadShape shape = shape_of(in);
    require_sharding(in.sharding, shape.vocab);
    layout = layout_of(in.sharding, shape.vocab);
    const bool same = controller.has_layout(layout);
    if (same) controller.require_head(shape.vocab, shape.dim);
    const std::array<PlanRequest, 3> requests = {controller.request({}),
                                                 controller.request({.far = true}),
                                                 controller.request({.far = true, .audit = true})};
    for (const auto& [name, text] : controller.common()) digest.same(name, text);
    digest.own("same vocabulary entries", same);
    digest.own("tokens", shape.tokens);
    digest.own("plans", plans.missing(shape, features_of(options, in, out), requests, in.sharding));
    digest.own("workspaces", plans.has_capacity());
  });
  bool same = true, capacity = true;
  unsigned missing = 0;
  for (int r = 0; r < in.sharding.vocab_group->size(); ++r) {
    same = same && agreed.value_of(r, "same vocabulary entries") != 0;
    capacity = capacity && agreed.value_of(r, "workspaces") != 0;
    missing |= static_cast<unsigned>(agreed.value_of(r, "plans"));
    source.tokens_elsewhere = source.tokens_elsewhere || agreed.value_of(r, "tokens") > 0;
  }
  plans.drop(missing);
  controller.set_layout(layout, same);
  return capacity;
}

}  // namespace

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
  OrderSource source{in.hidden,           in.weight,       in.bias,
                     options.logit_scale, options.softcap, in.sharding};
  const bool sharded = is_sharded(in.sharding);
  bool capacity = true;
  if (sharded) {
    require(
        controller.options().replicas == nullptr,
        "sharding: expected none for a head with replicas, which have the full vocabulary each");
    capacity = agree(controller, plans, options, in, out, source);
  } else {
    require_step(out);
  }
  const std::int64_t made = plans.made();
  const auto plan_of = [&](const FarStep& step) -> const LossPlan& {
    return plans.get(context, shape_of(in), features_of(options, in, out), controller.request(step),
                     [&](const PlanRequest& r) { return plan_cross_entropy(options, in, out, r); });
  };
  const auto run = [&](const FarStep& step, const CrossEntropyInputs& inputs) {
    const LossPlan& plan = plan_of(step);
    state_->last.reset();
    if (step.audit && plans.borrows()) plan_of({});  // a repeated step has the same workspace
    const Workspace* workspace = nullptr;
    const auto reserve = [&] { workspace = &plans.workspace_for(context, plan); };
    const bool may_fail = sharded && !(capacity && plans.made() == made);  // on one rank alone
    may_fail ? together(in.sharding, reserve) : reserve();
    state_->last = cross_entropy(context, plan, options, inputs, out, *workspace);
    if (on_gpu) state_->last_plan = plan;
    return *state_->last;
  };
  LossStatistics stats;
  bool again = false;  // this is a dense step after a far one; a GPU has already waited for that
  take_far_step(
      controller, source,
      /*may_repeat=*/!options.accumulate,  // values added to accumulated gradients cannot be
                                           // removed
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
