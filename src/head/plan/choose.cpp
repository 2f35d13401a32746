#include "head/plan/choose.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "core/check.h"
#include "core/parallel.h"
#include "head/cpu/layout.h"
#include "head/cuda/layout.h"
#include "head/plan/default_plan.h"
#include "head/plan/far_forecast.h"
#include "head/plan/search/search.h"
#include "head/plan/text.h"
#include "head/plan_layout.h"

namespace logitless {
namespace {

constexpr float kDefaultTau = 0.003f;

// Sets the layout of a plan's workspace, and its bytes.
void lay_out(LossPlan& plan, DeviceKind device) {
  if (device == DeviceKind::cpu) return LossPlanAccess::set_layout(plan, cpu::layout_of(plan));
  LossPlanAccess::set_layout(plan, cuda::layout_of(plan));
}

// Builds a LossPlan: sizes one candidate for each kind, then chooses.
class PlanBuilder {
 public:
  PlanBuilder(const HeadShape& shape, const HeadFeatures& features, const PlanRequest& request)
      : shape_(shape), features_(features), request_(request) {}

  // Returns the smallest plan instead of an error if none fits.
  PlanBuilder& or_least() {
    least_ = true;
    return *this;
  }
  // Computes d_weight in the same loop as the other gradients.
  PlanBuilder& with_weight_together() {
    weight_apart_ = false;
    return *this;
  }
  // Takes the fastest plan, even if a smaller one is about as fast.
  PlanBuilder& of_any_size() {
    any_size_ = true;
    return *this;
  }
  PlanBuilder& in_one_chunk() {
    one_chunk_ = true;
    return *this;
  }

  LossPlan build() {
    check_request(shape_, features_, request_);
    plan_.shape = shape_;
    plan_.features = features_;
    plan_.memory_budget = request_.memory_budget;
    plan_.expected_ignored = request_.expected_ignored;
    if (allows_far(request_)) {
      plan_.tau = request_.tau != 0.0f ? request_.tau : kDefaultTau;
      plan_.sample_every = request_.sample_every;
    }
    make_searches();
    std::vector<PlanKind> kinds = {PlanKind::forward, PlanKind::dense, PlanKind::stored,
                                   PlanKind::recompute};
    if (one_chunk_) kinds = {PlanKind::dense};
    bool far = false;
    for (const PlanKind kind : {PlanKind::far_backward, PlanKind::far_both}) {
      if (!allows(request_, kind)) continue;
      kinds.push_back(kind);
      far = far || refusal(kind).empty();
    }
    if (far && audited() > 0 && features_.d_hidden) {
      plan_.audit = plan_audit();
      far_search().search->reserve_audit(plan_.audit->workspace_bytes());
    }
    choose(size_all(kinds));
    if (says_contents() && plan_.workspace_bytes() > plan_.logits_bytes())
      plan_.note = why_so_much();
    return plan_;
  }

 private:
  // The first kernel of a GPU that takes the head may lack the far field, which another has.
  void make_searches() {
    PlanProblem problem = {.shape = shape_,
                           .features = features_,
                           .stored_fraction = request_.stored_fraction,
                           .tau = plan_.tau,
                           .sample_every = plan_.sample_every,
                           .audited = audited(),
                           .expected_ignored = request_.expected_ignored,
                           .interleaved = interleaved(),
                           .one_chunk = one_chunk_,
                           .weight_apart = weight_apart_,
                           .any_size = any_size_};
    exact_ = make_search(problem, request_.device);
    if (!allows_far(request_) || request_.device.kind == DeviceKind::cpu) return;
    problem.far = true;
    KernelSearch far = make_search(problem, request_.device);
    if (far.kernel != exact_.kernel) far_ = std::move(far);
  }
  const KernelSearch& far_search() const { return far_.search != nullptr ? far_ : exact_; }
  const KernelSearch& search_of(PlanKind kind) const {
    return is_far(kind) ? far_search() : exact_;
  }

  // Adds and sizes the candidates.
  std::vector<SizedPlan> size_all(const std::vector<PlanKind>& kinds) {
    std::vector<SizedPlan> sized;
    for (const PlanKind kind : kinds) {
      PlanCandidate candidate;
      candidate.kind = kind;
      candidate.reason = refusal(kind);
      sized.push_back(candidate.reason.empty() ? size(candidate, sized) : SizedPlan());
      plan_.candidates.push_back(std::move(candidate));
    }
    return sized;
  }

  // Sizes a kind that can serve; `before` are the sizes of the earlier candidates.
  SizedPlan size(PlanCandidate& candidate, const std::vector<SizedPlan>& before) const {
    const std::size_t budget = request_.memory_budget;
    const PlanKind kind = candidate.kind;
    const PlanSearch& search = *search_of(kind).search;
    SizedPlan best = search.best(kind, budget);
    // A stored plan that saves all of exp(z) is the dense plan, which has been sized before.
    const bool is_dense = kind == PlanKind::stored && !request_.kind.has_value() &&
                          best.bytes <= budget && search.stores_all(best.sizes) &&
                          plan_.candidates.back().possible;
    if (is_dense) best = before.back();
    candidate.possible = best.bytes <= budget && !is_dense;
    candidate.workspace_bytes = best.bytes;
    candidate.passes = search.passes(kind, best.sizes);
    candidate.predicted_seconds = search.seconds(kind, best.sizes);
    candidate.keeps = search.contents(kind, best);
    if (is_dense) {
      candidate.reason = "all of exp(z) fits: that is dense";
    } else if (!candidate.possible) {
      candidate.reason = concat("needs at least ", format_bytes(best.bytes), " of workspace",
                                because_of_sums(kind, best.sizes));
    }
    return best;
  }

  // Returns why a kind cannot serve the features or gains nothing; empty if it can.
  std::string refusal(PlanKind kind) const {
    const bool gradients = features_.d_hidden || features_.d_weight || features_.d_bias;
    if (kind == PlanKind::forward) return gradients ? "gradients are wanted" : "";
    if (!gradients) return "no gradient is wanted";
    if (is_far(kind)) {
      for (const std::string& reason :
           {far_search().search->refusal(kind), std::string(far_unsuited(kind, features_))}) {
        if (!reason.empty()) return reason;
      }
      return little_to_gain(kind);
    }
    if (kind == PlanKind::recompute) return {};
    const std::string reason = exact_.search->refusal(kind);
    if (!reason.empty()) return reason;
    if (features_.softcap != 0.0f && features_.label_smoothing)
      return "label smoothing under a softcap needs the logits again";
    return {};
  }

  // Returns why a far-field kind that was not requested gains nothing; empty if it gains.
  std::string little_to_gain(PlanKind kind) const {
    const double kept = predicted_selected(kind, shape_, features_, interleaved(), plan_.tau);
    if (request_.kind.has_value() || kept <= kMaxSelected) return {};
    const bool spread = features_.vocab_ranks > 1;
    return concat("would keep about ", std::llround(kept * 100.0), " % of the tiles of ",
                  spread ? shape_.global_vocab : shape_.vocab, " vocabulary entries",
                  spread && !interleaved() ? " on the first of the ranks, not interleaved" : "",
                  ": nothing to gain");
  }

  // Returns the share of a 16-bit d_weight's fp32 sums in the size of a kind, and the size with an
  // fp32 d_weight. Empty if there are no such sums.
  std::string because_of_sums(PlanKind kind, const PlanSizes& sizes) const {
    const std::size_t sums = search_of(kind).search->weight_sums(kind, sizes);
    if (sums == 0 || sizes.weight_vocab > 0) return {};
    return concat(", ", format_bytes(sums), " of it what ", name_of(features_.d_weight_dtype),
                  " leaves of the sums of d_weight over several chunks (",
                  format_bytes(least_with_f32(kind)), " with d_weight_dtype f32)");
  }
  std::size_t least_with_f32(PlanKind kind) const {
    HeadFeatures features = features_;
    features.d_weight_dtype = DType::f32;
    PlanRequest request;
    if (is_far(kind)) {
      request.tau = request_.tau;
      request.sample_every = request_.sample_every;
      request.audit_rows = request_.audit_rows;
    }
    if (kind == PlanKind::stored) request.stored_fraction = request_.stored_fraction;
    request.memory_budget = 1;
    request.kind = kind;
    request.device = request_.device;
    request.device.threads = search_of(kind).threads;
    request.device.kernel = search_of(kind).kernel;
    return PlanBuilder(shape_, features, request)
        .or_least()
        .with_weight_together()
        .build()
        .workspace_bytes();
  }

  bool interleaved() const {
    return request_.sharding.interleaved || request_.sharding.vocab_ids.defined();
  }
  // Returns the audited tokens. If tokens are sharded over GPUs, each rank has as many.
  std::int64_t audited() const {
    const std::int64_t tokens = std::min(request_.audit_rows, shape_.tokens);
    const bool spread = features_.tokens_sharded && request_.device.kind != DeviceKind::cpu;
    return spread ? round_up(tokens, std::int64_t{features_.vocab_ranks}) : tokens;
  }
  // Plans d_hidden of the audited tokens with little memory.
  std::shared_ptr<const LossPlan> plan_audit() const {
    HeadShape shape = shape_;
    shape.tokens = audited();
    HeadFeatures features = features_;
    features.d_hidden = true;
    features.d_weight = false;
    features.d_bias = false;
    features.argmax = false;
    features.d_hidden_dtype = DType::f32;
    features.d_weight_dtype = DType::f32;
    features.accumulate = false;
    PlanRequest request;
    request.device = request_.device;
    request.device.kernel = far_search().kernel;
    request.memory_budget = far_search().search->audit_budget();
    request.kind = PlanKind::recompute;
    return std::make_shared<const LossPlan>(
        PlanBuilder(shape, features, request).or_least().with_weight_together().build());
  }

  void choose(const std::vector<SizedPlan>& sized) {
    int chosen = -1;
    int least = -1;
    for (int i = 0; i < static_cast<int>(sized.size()); ++i) {
      const PlanCandidate& c = plan_.candidates[static_cast<std::size_t>(i)];
      if (request_.kind.has_value() && c.kind != *request_.kind) continue;
      // The smallest candidate over the budget is named by the error, or is the default.
      if (c.workspace_bytes > 0 &&
          (least < 0 || c.workspace_bytes < plan_.candidates[least].workspace_bytes))
        least = i;
      if (c.possible &&
          (chosen < 0 || c.predicted_seconds < plan_.candidates[chosen].predicted_seconds))
        chosen = i;
    }
    if (chosen < 0 && least >= 0 && least_) chosen = least;
    if (chosen < 0) refuse(least);
    PlanCandidate& winner = plan_.candidates[static_cast<std::size_t>(chosen)];
    for (PlanCandidate& c : plan_.candidates) {
      if (&c != &winner && c.possible) c.reason = why_not(c, winner);
    }
    winner.possible = true;
    winner.reason = "chosen";
    const PlanSizes& sizes = sized[static_cast<std::size_t>(chosen)].sizes;
    plan_.kind = winner.kind;
    plan_.kernel = search_of(winner.kind).kernel;
    plan_.kernel_reasons = search_of(winner.kind).kernel_reasons;
    plan_.threads = search_of(winner.kind).threads;
    plan_.chunk_tokens = sizes.chunk_tokens;
    plan_.block_vocab = sizes.block_vocab;
    plan_.stored_vocab = sizes.stored_vocab;
    plan_.weight_ranges = sizes.weight_ranges;
    plan_.first_tokens = sizes.first_tokens;
    plan_.slice_rows = sizes.slice_rows;
    plan_.weight_vocab = sizes.weight_vocab;
    plan_.passes = winner.passes;
    plan_.predicted_seconds = winner.predicted_seconds;
    plan_.calibrated = request_.device.card.calibrated;
    if (!is_far(plan_.kind)) {
      plan_.tau = 0.0f;
      plan_.sample_every = 0;
      plan_.audit = nullptr;
    }
    lay_out(plan_, request_.device.kind);
  }

  // Explains a plan larger than the fp32 logits by the workspace of the fastest plan that is
  // smaller.
  std::string why_so_much() const {
    const std::size_t logits = plan_.logits_bytes();
    const PlanCandidate* found = nullptr;
    SizedPlan least;
    double least_seconds = 0.0;
    for (const PlanCandidate& c : plan_.candidates) {
      if (c.workspace_bytes == 0 || (request_.kind.has_value() && c.kind != *request_.kind))
        continue;
      const PlanSearch& search = *search_of(c.kind).search;
      const SizedPlan sized = search.best(c.kind, logits);
      if (sized.bytes > logits) continue;
      const double seconds = search.seconds(c.kind, sized.sizes);
      if (found == nullptr || seconds < least_seconds) {
        found = &c;
        least = sized;
        least_seconds = seconds;
      }
    }
    if (found == nullptr)
      return concat("the fp32 logits would be less: any ",
                    request_.kind.has_value() ? concat(name_of(*request_.kind), " ") : "",
                    "plan of this head holds more");
    const double times = least_seconds / plan_.predicted_seconds;
    char text[32];
    std::snprintf(text, sizeof(text), "%.2f", times);
    return concat("the fp32 logits would be less; with a memory_budget below them ",
                  name_of(found->kind), " takes ", format_bytes(least.bytes), " and ", text,
                  " times as long");
  }

  std::string why_not(const PlanCandidate& c, const PlanCandidate& winner) const {
    if (request_.kind.has_value()) return concat(name_of(winner.kind), " was asked for");
    return concat("predicted ",
                  c.predicted_seconds > winner.predicted_seconds ? "slower" : "no faster", " than ",
                  name_of(winner.kind));
  }

  // Returns whether the chosen plan describes its contents.
  bool says_contents() const {
    return std::any_of(
        plan_.candidates.begin(), plan_.candidates.end(),
        [&](const PlanCandidate& c) { return c.kind == plan_.kind && !c.keeps.empty(); });
  }

  [[noreturn]] void refuse(int least) const {
    const std::size_t budget = request_.memory_budget;
    if (least >= 0) {
      const PlanCandidate& c = plan_.candidates[static_cast<std::size_t>(least)];
      // The candidate's reason already explains its sums.
      constexpr std::string_view kBefore = " of workspace";
      const std::size_t at = c.reason.find(kBefore);
      const std::string sums = at == std::string::npos ? "" : c.reason.substr(at + kBefore.size());
      throw InvalidArgument(concat("memory_budget: ", format_bytes(budget), " (", budget,
                                   " bytes) is below the least plan, ", name_of(c.kind),
                                   ", which needs ", format_bytes(c.workspace_bytes), " (",
                                   c.workspace_bytes, " bytes)", sums));
    }
    std::string reasons;
    for (const PlanCandidate& c : plan_.candidates) {
      if (!request_.kind.has_value() || c.kind == *request_.kind) {
        reasons += concat(reasons.empty() ? "" : "; ", name_of(c.kind), ": ", c.reason);
      }
    }
    throw Unsupported(concat("no plan: ", reasons));
  }

  const HeadShape& shape_;
  const HeadFeatures& features_;
  const PlanRequest& request_;
  bool least_ = false;      // take the smallest plan, whatever the budget
  bool one_chunk_ = false;  // dense plan of all tokens at once
  bool weight_apart_ = true;
  bool any_size_ = false;
  LossPlan plan_;
  KernelSearch exact_;
  KernelSearch far_;  // with a kernel of its own; else exact_ serves the far field too
};

// Scales a plan for one thread to `threads`.
LossPlan with_default_threads(LossPlan plan, int threads) {
  plan = with_threads(std::move(plan), threads);
  plan.predicted_seconds /= threads;
  for (PlanCandidate& c : plan.candidates) {
    c.predicted_seconds /= threads;
    if (c.kind != plan.kind) continue;
    c.workspace_bytes = plan.workspace_bytes();
    c.keeps = describe_contents(find_head_kernel(plan.kernel), plan.shape, plan.features,
                                cpu::chunk_sizes(plan), c.workspace_bytes);
  }
  return plan;
}

// Returns the additional limit for exchange buffers of large chunks, including sums of d_hidden,
// beyond the limit of a local plan.
std::size_t exchange_limit(const HeadShape& shape, const HeadFeatures& features) {
  constexpr std::int64_t kLarge = 16384;  // tokens with which GEMMs and exchanges run near their
                                          // full throughput
  const std::int64_t tokens = std::clamp<std::int64_t>(shape.tokens, 1, kLarge);
  const bool sends = features.vocab_ranks > 0 && features.gathered_rows == 0 && features.d_hidden;
  const std::int64_t sums = sends ? tokens * shape.dim * 4 : 0;  // received sums are exchanged
  return cuda::exchange_bytes(shape, features, {.chunk = kLarge}) + static_cast<std::size_t>(sums);
}

bool is_far_wanted(const PlanRequest& request) {
  return request.accuracy != Accuracy::exact || (request.kind.has_value() && is_far(*request.kind));
}

LossPlan plan_without_budget(const HeadShape& shape, const HeadFeatures& features,
                             const PlanRequest& request) {
  const bool on_cpu = request.device.kind == DeviceKind::cpu;
  std::size_t limit = default_limit(shape, is_far_wanted(request), on_cpu);
  if (!on_cpu) limit += exchange_limit(shape, features);
  const double slack = default_slack(features, on_cpu);
  LossPlan plan = default_plan(limit, slack, [&](std::size_t budget) {
    PlanRequest within = request;
    within.memory_budget = budget;
    // Chunk sizes determine the bits of sums, so they must not depend on the threads.
    if (on_cpu && request.device.threads >= 0) within.device.threads = 1;
    return PlanBuilder(shape, features, within).or_least().with_weight_together().build();
  });
  if (on_cpu) {
    const int threads = request.device.threads;
    plan = with_default_threads(std::move(plan), threads > 0 ? threads : default_threads());
  }
  return plan;
}

// Makes the plans of one request for any number of threads, for default_plan.h.
class BudgetPlans {
 public:
  BudgetPlans(const HeadShape& shape, const HeadFeatures& features, const PlanRequest& request,
              bool one_chunk)
      : shape_(shape), features_(features), request_(request), one_chunk_(one_chunk) {}

  // Returns the least workspace below `limit` that is worth its time, or more than `limit` if no
  // plan is that small.
  LossPlan below(std::size_t limit, int threads) {
    request_.device.threads = threads;
    LossPlan fastest = build(limit, false);
    if (fastest.workspace_bytes() > limit || has_its_size()) return fastest;
    const double best = build(limit, true).predicted_seconds;
    LossPlan plan = least_worth_its_time(fastest, best,
                                         [&](std::size_t budget) { return build(budget, false); });
    keep_reasons(fastest, plan, kBudgetSlack);
    return plan;
  }

 private:
  // A requested kind takes the fastest sizes. So does the far field: predictions do not model that
  // it selects fewer tiles with larger chunks.
  bool has_its_size() const {
    return !one_chunk_ && (request_.kind.has_value() || request_.accuracy != Accuracy::exact);
  }
  LossPlan build(std::size_t budget, bool any_size) {
    request_.memory_budget = budget;
    PlanBuilder builder(shape_, features_, request_);
    builder.or_least();
    if (one_chunk_) builder.in_one_chunk();
    if (any_size) builder.of_any_size();
    return builder.build();
  }

  const HeadShape& shape_;
  const HeadFeatures& features_;
  PlanRequest request_;
  const bool one_chunk_;
};

// Plans within a budget, which is a ceiling: a plan takes no more memory than its speed is worth.
// It stays below the fp32 logits or the default's limit unless no plan is that small.
LossPlan plan_within(const HeadShape& shape, const HeadFeatures& features,
                     const PlanRequest& request, bool one_chunk) {
  check_request(shape, features, request);
  const std::size_t budget = request.memory_budget;
  const bool on_cpu = request.device.kind == DeviceKind::cpu;
  std::size_t ceiling = budget_ceiling(shape, is_far_wanted(request), on_cpu, budget);
  if (!on_cpu) ceiling = std::min(budget, ceiling + exchange_limit(shape, features));
  const int wanted = request.device.threads;
  const int threads = on_cpu && wanted == 0 ? default_threads() : wanted;
  BudgetPlans plans(shape, features, request, one_chunk);
  for (const std::size_t limit : {ceiling, budget}) {
    // Chunk sizes determine the bits of sums, so they depend on the threads only if the scratch of
    // all threads does not fit.
    LossPlan plan = plans.below(limit, on_cpu ? 1 : threads);
    if (on_cpu && threads > 1) {
      plan = with_default_threads(std::move(plan), threads);
      if (plan.workspace_bytes() > limit) plan = plans.below(limit, threads);
    }
    if (plan.workspace_bytes() > limit) continue;
    plan.memory_budget = budget;
    if (!request.kind.has_value() || one_chunk) plan.default_limit = limit;
    return plan;
  }
  PlanBuilder refusing(shape, features, request);
  if (one_chunk) refusing.in_one_chunk();
  return refusing.build();
}

LossPlan plan_for(const HeadShape& shape, const HeadFeatures& features,
                  const PlanRequest& request) {
  const std::size_t budget = request.memory_budget;
  if (budget == 0) return plan_without_budget(shape, features, request);
  LossPlan plan = plan_within(shape, features, request, false);
  const bool large = plan.workspace_bytes() > plan.logits_bytes();
  if (request.kind.has_value() || (!large && plan.logits_bytes() > kFewLogits)) return plan;
  LossPlan less = plan_without_budget(shape, features, request);
  const double most = (1.0 + kFewLogitsSlack) * plan.predicted_seconds;
  if (less.workspace_bytes() >= plan.workspace_bytes()) return plan;
  if (!large && less.predicted_seconds > most) return plan;
  less.memory_budget = budget;
  less.budget_is_plenty = true;
  return less;
}

// Takes the device of the context, with the card of the request if it names one: plans of several
// ranks take rank 0's.
PlanRequest for_context(const Context& context, PlanRequest request) {
  DeviceLimits device = context.device();
  if (!request.device.card.name.empty()) device.card = request.device.card;
  request.device.card = {};
  DeviceLimits named = request.device;
  named.card = device.card;
  require(
      request.device == DeviceLimits{} || named == device,
      "device: set to another one than the context's, which the plan is for; leave it alone, or "
      "plan without a context");
  request.device = std::move(device);
  return request;
}

}  // namespace

PlanRequest LocalPlanner::for_device(const PlanRequest& request) const {
  if (context_ != nullptr) return for_context(*context_, request);
  return request.device == DeviceLimits{} ? for_context(Context(), request) : request;
}

LossPlan LocalPlanner::plan(const HeadShape& shape, const HeadFeatures& features,
                            const PlanRequest& request) const {
  return plan_for(shape, features, for_device(request));
}

LossPlan LocalPlanner::plan_in_one_chunk(const HeadShape& shape, const HeadFeatures& features,
                                         const PlanRequest& wanted) const {
  const PlanRequest request = for_device(wanted);
  if (request.device.kind != DeviceKind::cuda)
    throw Unsupported(
        "plan_head_saved: exp(z) is saved from forward to backward on a GPU; on the CPU use "
        "head_forward and head_backward");
  require(!allows_far(request) && request.kind.value_or(PlanKind::dense) == PlanKind::dense,
          "kind: expected dense or none, with exact accuracy, of what is kept from forward to "
          "backward");
  PlanRequest within = request;
  within.kind = PlanKind::dense;
  const auto build = [&](std::size_t budget, bool least) {
    within.memory_budget = budget;
    PlanBuilder builder(shape, features, within);
    builder.in_one_chunk();
    return (least ? builder.or_least() : builder).build();
  };
  if (request.memory_budget != 0) return plan_within(shape, features, within, true);
  LossPlan plan = default_plan(default_limit(shape, false, false), default_slack(features, false),
                               [&](std::size_t budget) { return build(budget, true); });
  // If no plan is within the default's limit, a default would be the smallest plan; this throws
  // instead.
  return plan.default_limit != 0 ? plan : build(default_limit(shape, false, false) / 5 * 6, false);
}

LossPlan with_chunk(LossPlan plan, std::int64_t tokens, DeviceKind device) {
  plan.chunk_tokens = tokens;
  lay_out(plan, device);
  return plan;
}

LossPlan with_slice(LossPlan plan, std::int64_t rows, DeviceKind device) {
  plan.slice_rows = rows;
  lay_out(plan, device);
  return plan;
}

LossPlan with_threads(LossPlan plan, int threads) {
  plan.threads = threads;
  if (plan.audit != nullptr)
    plan.audit = std::make_shared<const LossPlan>(with_threads(*plan.audit, threads));
  lay_out(plan, DeviceKind::cpu);
  return plan;
}

}  // namespace logitless
