#include "logitless/plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "core/check.h"
#include "core/parallel.h"
#include "head/default_plan.h"
#include "head/device_plan.h"
#include "head/far_field.h"
#include "head/plan_contents.h"
#include "head/plan_search.h"
#include "head/validate.h"
#include "head/workspace.h"
#include "kernels/kernels.h"

namespace logitless {

std::string_view name_of(PlanKind kind) {
  switch (kind) {
    case PlanKind::forward:
      return "forward";
    case PlanKind::dense:
      return "dense";
    case PlanKind::recompute:
      return "recompute";
    case PlanKind::stored:
      return "stored";
    case PlanKind::far_backward:
      return "far_backward";
    case PlanKind::far_both:
      return "far_both";
  }
  return "?";
}

std::string_view name_of(Accuracy accuracy) {
  switch (accuracy) {
    case Accuracy::exact:
      return "exact";
    case Accuracy::far_backward:
      return "far_backward";
    case Accuracy::far_both:
      return "far_both";
  }
  return "?";
}

namespace {

constexpr float kDefaultTau = 0.003f;

}  // namespace

// Fills a LossPlan: one candidate for each kind, then the choice.
class PlanBuilder {
 public:
  PlanBuilder(const HeadShape& shape, const HeadFeatures& features, const PlanRequest& request)
      : shape_(shape), features_(features), request_(request) {}

  static void set_threads(LossPlan& plan, int threads) {
    plan.threads = threads;
    const std::int64_t audited = plan.audit != nullptr ? plan.audit->shape.tokens : 0;
    plan.workspace_bytes_ = layout_workspace(find_head_kernel(plan.kernel), plan.shape,
                                             plan.features, sizes_of(plan), audited)
                                .total;
    if (plan.audit == nullptr) return;
    auto audit = std::make_shared<LossPlan>(*plan.audit);
    set_threads(*audit, threads);
    plan.workspace_bytes_ += audit->workspace_bytes();
    plan.audit = std::move(audit);
  }

  // Of a plan for one thread.
  static void set_default_threads(LossPlan& plan, int threads) {
    set_threads(plan, threads);
    plan.predicted_seconds /= threads;
    for (PlanCandidate& c : plan.candidates) {
      c.predicted_seconds /= threads;
      if (c.kind != plan.kind) continue;
      c.workspace_bytes = plan.workspace_bytes();
      c.keeps = describe_contents(find_head_kernel(plan.kernel), plan.shape, plan.features,
                                  sizes_of(plan), c.workspace_bytes);
    }
  }

  // The least plan where none fits, instead of an error.
  PlanBuilder& or_least() {
    least_ = true;
    return *this;
  }

  LossPlan build() {
    check_request();
    plan_.shape = shape_;
    plan_.features = features_;
    plan_.threads = request_.device.threads > 0 ? request_.device.threads : default_threads();
    plan_.memory_budget = request_.memory_budget;
    if (request_.device.kind == DeviceKind::cuda) return build_for_device();
    const HeadKernel& kernel =
        choose_head_kernel(request_.device.kernel, shape_, features_, &plan_.kernel_reasons);
    plan_.kernel = kernel.name;
    std::vector<PlanKind> kinds = {PlanKind::forward, PlanKind::dense, PlanKind::stored,
                                   PlanKind::recompute};
    if (far_wanted()) {
      for (const PlanKind kind : {PlanKind::far_backward, PlanKind::far_both}) {
        if (may_be(kind)) kinds.push_back(kind);
      }
      set_far();
      if (audited() > 0 && features_.d_hidden &&
          far_refusal(PlanKind::far_backward, kernel).empty())
        plan_.audit = plan_audit();
    }
    const PlanSearch search(search_problem(kernel));
    const std::vector<Sized> sized = size_all(kinds, kernel, search);
    choose(sized);
    if (plan_.workspace_bytes_ > plan_.logits_bytes()) plan_.note = why_so_much(search);
    return plan_;
  }

 private:
  // The candidates, with their sizes.
  std::vector<Sized> size_all(const std::vector<PlanKind>& kinds, const HeadKernel& kernel,
                              const PlanSearch& search) {
    const std::size_t budget = request_.memory_budget;
    const bool gradients = features_.d_hidden || features_.d_weight || features_.d_bias;
    std::vector<Sized> sized;
    plan_.candidates.clear();
    for (const PlanKind kind : kinds) {
      PlanCandidate candidate;
      candidate.kind = kind;
      candidate.reason = refusal(kind, kernel, gradients);
      Sized best;
      if (candidate.reason.empty()) {
        best = search.best(kind, budget);
        // All of exp(z) fits: what dense holds, which is sized before it.
        const bool is_dense = kind == PlanKind::stored && !request_.kind.has_value() &&
                              best.bytes <= budget && search.stores_all(best.sizes) &&
                              plan_.candidates.back().possible;
        if (is_dense) best = sized.back();
        candidate.possible = best.bytes <= budget && !is_dense;
        candidate.workspace_bytes = best.bytes;
        candidate.passes = search.passes(kind, best.sizes);
        candidate.predicted_seconds = search.seconds(kind, best.sizes);
        candidate.keeps = describe_contents(kernel, shape_, features_, best.sizes, best.bytes);
        if (is_dense) {
          candidate.reason = "all of exp(z) fits: that is dense";
        } else if (!candidate.possible) {
          candidate.reason = concat("needs at least ", format_bytes(best.bytes), " of workspace",
                                    because_of_sums(kind, kernel, best.sizes));
        }
      }
      plan_.candidates.push_back(std::move(candidate));
      sized.push_back(best);
    }
    return sized;
  }

  bool far_wanted() const { return may_be(PlanKind::far_backward) || may_be(PlanKind::far_both); }
  bool on_gpu() const { return request_.device.kind == DeviceKind::cuda; }
  void set_far() {
    plan_.tau = request_.tau != 0.0f ? request_.tau : kDefaultTau;
    plan_.sample_every = request_.sample_every;
  }
  // Of the far field's kinds: whether the request allows it.
  bool may_be(PlanKind kind) const {
    if (request_.kind.has_value()) return *request_.kind == kind;
    return request_.accuracy == Accuracy::far_both ||
           (request_.accuracy == Accuracy::far_backward && kind == PlanKind::far_backward);
  }

  LossPlan build_for_device() {
    std::vector<PlanKind> far;
    for (const PlanKind kind : {PlanKind::far_backward, PlanKind::far_both}) {
      if (may_be(kind)) far.push_back(kind);
    }
    if (far_wanted()) set_far();
    std::vector<Sized> sized;
    std::vector<DeviceCandidate> candidates = device_candidates(request_, far, plan_);
    const bool possible = std::any_of(candidates.begin(), candidates.end(), [](const auto& c) {
      return is_far(c.plan.kind) && c.plan.workspace_bytes > 0;
    });
    if (audited() > 0 && features_.d_hidden && possible) {
      plan_.audit = plan_audit();
      plan_.kernel_reasons.clear();
      candidates = device_candidates(request_, far, plan_);
    }
    for (DeviceCandidate& c : candidates) {
      if (is_far(c.plan.kind) && c.plan.possible) {
        c.plan.reason = little_to_gain(c.plan.kind);
        c.plan.possible = c.plan.reason.empty();
      }
      Sized out;
      out.bytes = c.plan.workspace_bytes;
      out.sizes = {c.sizes.chunk, c.sizes.slab, c.sizes.stored, 1, c.sizes.slab == 0};
      sized.push_back(out);
      plan_.candidates.push_back(std::move(c.plan));
    }
    choose(sized);
    return plan_;
  }

  void check_request() const {
    require(shape_.tokens >= 0, "tokens: expected 0 or more, got ", shape_.tokens);
    require(shape_.dim >= 1, "dim: expected 1 or more, got ", shape_.dim);
    require(shape_.vocab >= 1 && shape_.vocab <= INT32_MAX - kVocabTile, "vocab: expected 1 to ",
            INT32_MAX - kVocabTile, ", got ", shape_.vocab);
    require(is_head_float(shape_.dtype), "dtype: expected f32, bf16 or f16, got ",
            name_of(shape_.dtype));
    require(features_.targets_per_token >= 1 && features_.targets_per_token <= 65536,
            "targets_per_token: expected 1 to 65536, got ", features_.targets_per_token);
    std::int64_t product = 0;
    const bool small =
        !__builtin_mul_overflow(std::max(shape_.tokens, shape_.vocab), shape_.dim, &product) &&
        product < (INT64_MAX >> 8) && shape_.tokens < (std::int64_t{1} << 31);
    require(small, "tokens, dim, vocab: ", shape_.tokens, ", ", shape_.dim, ", ", shape_.vocab,
            " overflow the address space");
    require(!features_.d_bias || features_.bias, "d_bias: asked for without a bias");
    require_transform(features_.logit_scale, features_.softcap);
    for (const auto& [name, dtype] :
         {std::pair<std::string_view, DType>{"d_hidden_dtype", features_.d_hidden_dtype},
          {"d_weight_dtype", features_.d_weight_dtype}}) {
      require(dtype == DType::f32 || dtype == shape_.dtype, name, ": expected f32",
              shape_.dtype == DType::f32 ? "" : concat(" or ", name_of(shape_.dtype)), ", got ",
              name_of(dtype));
    }
    require(!request_.kind.has_value() || *request_.kind <= PlanKind::far_both,
            "kind: ", static_cast<int>(request_.kind.value_or(PlanKind::forward)),
            " is no PlanKind");
    require(request_.stored_fraction >= 0.0 && request_.stored_fraction <= 1.0,
            "stored_fraction: expected 0 to 1, got ", request_.stored_fraction);
    require(request_.stored_fraction == 0.0 || request_.kind == PlanKind::stored,
            "stored_fraction: only PlanKind::stored takes one, got ", request_.stored_fraction);
    require(request_.accuracy <= Accuracy::far_both,
            "accuracy: ", static_cast<int>(request_.accuracy), " is no Accuracy");
    require(request_.tau == 0.0f || (request_.tau > 0.0f && request_.tau < 1.0f),
            "tau: expected a number in (0, 1), or 0 for the default, got ", request_.tau);
    require(request_.audit_rows >= 0, "audit_rows: expected 0 or more, got ", request_.audit_rows);
    require(request_.audit_rows == 0 || features_.d_hidden,
            "audit_rows: an audit measures the error of d_hidden, which is not asked for");
    require(request_.sample_every >= 0, "sample_every: expected 0 or more, got ",
            request_.sample_every);
    require(far_wanted() ||
                (request_.tau == 0.0f && request_.audit_rows == 0 && request_.sample_every == 0),
            "tau, audit_rows, sample_every: only the far field has them; ask for it by accuracy or "
            "kind");
    require(request_.device.threads >= 0, "threads: expected 0 or more, got ",
            request_.device.threads);
  }

  // Why a kind cannot serve the features at all; empty if it can.
  std::string refusal(PlanKind kind, const HeadKernel& kernel, bool gradients) const {
    if (kind == PlanKind::forward) return gradients ? "gradients are wanted" : "";
    if (!gradients) return "no gradient is wanted";
    if (kind == PlanKind::recompute) return {};
    if (is_far(kind)) return far_refusal(kind, kernel);
    if (kernel.stored_element_bytes(shape_.dtype) == 0)
      return concat("kernel ", kernel.name, " does not store exp(z)");
    if (features_.entropy_gradient) return "a gradient through the entropy needs the logits again";
    if (features_.softcap != 0.0f && features_.label_smoothing) {
      return "label smoothing under a softcap needs the logits again";
    }
    return {};
  }

  std::string far_refusal(PlanKind kind, const HeadKernel& kernel) const {
    if (kernel.far_backward == nullptr) return concat("kernel ", kernel.name, " has no far field");
    const std::string unsuited = far_unsuited(kind, features_);
    if (!unsuited.empty()) return unsuited;
    return little_to_gain(kind);
  }

  // Of kinds that may be chosen but were not asked for.
  std::string little_to_gain(PlanKind kind) const {
    const double kept = predicted_kept(kind, shape_.vocab, plan_.tau, on_gpu());
    if (!request_.kind.has_value() && kept > kMostKept) {
      return concat("would keep about ", std::llround(kept * 100.0), " % of the tiles of ",
                    shape_.vocab, " words: nothing to gain");
    }
    return {};
  }

  SearchProblem search_problem(const HeadKernel& kernel) const {
    SearchProblem problem;
    problem.kernel = &kernel;
    problem.shape = shape_;
    problem.features = features_;
    problem.threads = plan_.threads;
    problem.stored_fraction = request_.stored_fraction;
    problem.tau = plan_.tau;
    problem.sample_every = plan_.sample_every;
    problem.audited = audited();
    if (plan_.audit != nullptr) problem.audit_bytes = plan_.audit->workspace_bytes();
    return problem;
  }

  // Where a 16-bit d_weight makes a kind as large as that: so much, and what f32 would need.
  std::string because_of_sums(PlanKind kind, const HeadKernel& kernel,
                              const ChunkSizes& sizes) const {
    const std::size_t sums = weight_sum_bytes(shape_, features_, sizes);
    if (sums == 0) return {};
    return concat(", ", format_bytes(sums), " of it what ", name_of(features_.d_weight_dtype),
                  " leaves of the sums of d_weight over several chunks (",
                  format_bytes(least_with_f32(kind, kernel)), " with d_weight_dtype f32)");
  }
  std::size_t least_with_f32(PlanKind kind, const HeadKernel& kernel) const {
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
    request.device.threads = plan_.threads;
    request.device.kernel = kernel.name;
    PlanBuilder builder(shape_, features, request);
    builder.least_ = true;
    return builder.build().workspace_bytes();
  }

  std::int64_t audited() const { return std::min(request_.audit_rows, shape_.tokens); }
  // d_hidden of the audited tokens, with the least memory.
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
    request.device.kernel = plan_.kernel;
    // On a GPU slabs of few words would take longer than the rest of the call.
    request.memory_budget = request_.device.kind == DeviceKind::cuda ? 64_MiB : 1;
    request.kind = PlanKind::recompute;
    return std::make_shared<const LossPlan>(
        PlanBuilder(shape, features, request).or_least().build());
  }

  void choose(const std::vector<Sized>& sized) {
    int chosen = -1;
    int least = -1;
    for (int i = 0; i < static_cast<int>(sized.size()); ++i) {
      const PlanCandidate& c = plan_.candidates[static_cast<std::size_t>(i)];
      if (request_.kind.has_value() && c.kind != *request_.kind) continue;
      // Sized but over the budget: the least of them is what an error names, or the default takes.
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
    const ChunkSizes& sizes = sized[static_cast<std::size_t>(chosen)].sizes;
    plan_.kind = winner.kind;
    plan_.chunk_tokens = sizes.tokens;
    plan_.slab_vocab = sizes.slab_vocab;
    plan_.stored_vocab = sizes.stored_vocab;
    plan_.passes = winner.passes;
    plan_.predicted_seconds = winner.predicted_seconds;
    plan_.workspace_bytes_ = winner.workspace_bytes;
    if (!is_far(plan_.kind)) {
      plan_.tau = 0.0f;
      plan_.sample_every = 0;
      plan_.audit = nullptr;
    }
  }

  // Of a plan that holds more than the fp32 logits would: what the fastest that does not takes.
  std::string why_so_much(const PlanSearch& search) const {
    const std::size_t logits = plan_.logits_bytes();
    const PlanCandidate* found = nullptr;
    Sized least;
    for (const PlanCandidate& c : plan_.candidates) {
      if (c.workspace_bytes == 0 || (request_.kind.has_value() && c.kind != *request_.kind))
        continue;
      const Sized sized = search.best(c.kind, logits);
      if (sized.bytes > logits) continue;
      if (found == nullptr ||
          search.seconds(c.kind, sized.sizes) < search.seconds(found->kind, least.sizes)) {
        found = &c;
        least = sized;
      }
    }
    if (found == nullptr)
      return concat("the fp32 logits would be less: any ",
                    request_.kind.has_value() ? concat(name_of(*request_.kind), " ") : "",
                    "plan of this head holds more");
    const double times = search.seconds(found->kind, least.sizes) / plan_.predicted_seconds;
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

  [[noreturn]] void refuse(int least) const {
    const std::size_t budget = request_.memory_budget;
    if (least >= 0) {
      const PlanCandidate& c = plan_.candidates[static_cast<std::size_t>(least)];
      // What its own reason says of them.
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
  bool least_ = false;  // the least plan, whatever the budget
  LossPlan plan_;
};

namespace {

LossPlan plan_for(const HeadShape& shape, const HeadFeatures& features,
                  const PlanRequest& request) {
  if (request.memory_budget != 0) return PlanBuilder(shape, features, request).build();
  const bool far =
      request.accuracy != Accuracy::exact || (request.kind.has_value() && is_far(*request.kind));
  const bool on_cpu = request.device.kind == DeviceKind::cpu;
  LossPlan plan = default_plan(default_limit(shape, far), [&](std::size_t budget) {
    PlanRequest within = request;
    within.memory_budget = budget;
    // The bits of sums go by chunks, and these not by threads.
    if (on_cpu && request.device.threads >= 0) within.device.threads = 1;
    return PlanBuilder(shape, features, within).or_least().build();
  });
  if (on_cpu) {
    const int threads = request.device.threads;
    PlanBuilder::set_default_threads(plan, threads > 0 ? threads : default_threads());
  }
  return plan;
}

PlanRequest for_context(const Context& context, PlanRequest request) {
  require(
      request.device == DeviceLimits{} || request.device == context.device(),
      "device: set to another one than the context's, which the plan is for; leave it alone, or "
      "plan without a context");
  request.device = context.device();
  return request;
}

}  // namespace

LossPlan plan_head(const HeadShape& shape, const HeadFeatures& features,
                   const PlanRequest& request) {
  if (request.device == DeviceLimits{}) return plan_head(Context(), shape, features, request);
  return plan_for(shape, features, request);
}

LossPlan plan_head(const Context& context, const HeadShape& shape, const HeadFeatures& features,
                   const PlanRequest& request) {
  return plan_for(shape, features, for_context(context, request));
}

LossPlan with_threads(LossPlan plan, int threads) {
  PlanBuilder::set_threads(plan, threads);
  return plan;
}

}  // namespace logitless
