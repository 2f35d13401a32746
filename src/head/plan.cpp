#include "logitless/plan.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "head/default_plan.h"
#include "head/device_plan.h"
#include "head/far_field.h"
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

// More tokens in a chunk than this gain nothing: what is done once per chunk is amortised.
constexpr std::int64_t kForwardTokens = 2048;
constexpr std::int64_t kMostTokens = 8192;
// The least chunk a plan comes down to: smaller ones repack the weights for little work.
constexpr std::int64_t kLeastTokens = 64;
constexpr std::int64_t kMostSlab = 2048;
// Nanoseconds one element of the weights costs a core per chunk and pass for packing, and one logit
// for its exponential.
constexpr double kPackSeconds = 0.4e-9;
constexpr double kExpSeconds = 0.5e-9;
// One element of d_hidden, read and written in fp32 once for each slab.
constexpr double kSlabSeconds = 0.3e-9;

constexpr float kDefaultTau = 0.003f;
std::int64_t padded_vocab(const HeadShape& shape) { return round_up(shape.vocab, kVocabTile); }

// What a candidate is made of while it is sized.
struct Sized {
  ChunkSizes sizes;
  std::size_t bytes = 0;
};

class Sizer {
 public:
  Sizer(const HeadKernel& kernel, const HeadShape& shape, const HeadFeatures& features, int threads)
      : kernel_(kernel), shape_(shape), features_(features), threads_(threads) {}

  Sized make(std::int64_t tokens, std::int64_t slab, std::int64_t stored, bool forward_only) const {
    Sized out;
    out.sizes = {tokens, slab, stored, threads_, forward_only, false, false};
    out.bytes = layout_workspace(kernel_, shape_, features_, out.sizes).total;
    return out;
  }
  Sized make_far(PlanKind kind, std::int64_t tokens, std::int64_t slab,
                 std::int64_t audited) const {
    Sized out;
    out.sizes = {tokens, slab, 0, threads_, false, true, kind == PlanKind::far_both};
    out.bytes = layout_workspace(kernel_, shape_, features_, out.sizes, audited).total;
    return out;
  }

  // The most tokens a chunk may have, up to `most`, with which `sized(tokens)` fits; what takes the
  // least if none does. Chunks are the tokens divided evenly, so the trial values are tokens / 1,
  // tokens / 2, ...
  template <typename F>
  Sized largest(std::int64_t most, std::size_t budget, F sized) const {
    const std::int64_t tokens = std::max<std::int64_t>(shape_.tokens, 1);
    const std::int64_t least = std::min(tokens, kLeastTokens);
    std::int64_t low = ceil_div(tokens, std::max<std::int64_t>(most, 1));  // number of chunks
    std::int64_t high = ceil_div(tokens, least);
    const Sized fewest = sized(ceil_div(tokens, low));
    if (fewest.bytes <= budget) return fewest;
    const Sized smallest = sized(ceil_div(tokens, high));
    // One chunk may take less than many: a 16-bit d_weight needs no sums beside it then.
    if (smallest.bytes > budget) return fewest.bytes < smallest.bytes ? fewest : smallest;
    while (high - low > 1) {  // low does not fit, high does
      const std::int64_t middle = low + (high - low) / 2;
      (sized(ceil_div(tokens, middle)).bytes <= budget ? high : low) = middle;
    }
    return sized(ceil_div(tokens, high));
  }

  std::int64_t most_slab() const { return std::min(kMostSlab, padded_vocab(shape_)); }

 private:
  const HeadKernel& kernel_;
  const HeadShape& shape_;
  const HeadFeatures& features_;
  int threads_;
};

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

  // The least plan where none fits, instead of an error.
  PlanBuilder& or_least() {
    least_ = true;
    return *this;
  }

  LossPlan build() {
    check_request();
    plan_.shape = shape_;
    plan_.features = features_;
    plan_.threads = std::max(1, request_.device.threads);
    plan_.memory_budget = request_.memory_budget;
    if (request_.device.kind == DeviceKind::cuda) return build_for_device();
    const HeadKernel& kernel =
        choose_head_kernel(request_.device.kernel, shape_, features_, &plan_.kernel_reasons);
    plan_.kernel = kernel.name;
    const Sizer sizer(kernel, shape_, features_, plan_.threads);
    const std::size_t budget = request_.memory_budget;
    const bool gradients = features_.d_hidden || features_.d_weight || features_.d_bias;
    std::vector<Sized> sized;
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
    for (const PlanKind kind : kinds) {
      PlanCandidate candidate;
      candidate.kind = kind;
      candidate.reason = refusal(kind, kernel, gradients);
      Sized best;
      if (candidate.reason.empty()) {
        best = size(kind, kernel, sizer, budget);
        candidate.possible = best.bytes <= budget;
        candidate.workspace_bytes = best.bytes;
        candidate.passes = passes(kind, best.sizes);
        candidate.predicted_seconds = seconds(kernel, kind, best.sizes);
        if (!candidate.possible) {
          candidate.reason = concat("needs at least ", format_bytes(best.bytes), " of workspace");
        }
      }
      plan_.candidates.push_back(std::move(candidate));
      sized.push_back(best);
    }
    choose(sized, budget);
    return plan_;
  }

 private:
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
    choose(sized, request_.memory_budget);
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

  Sized size(PlanKind kind, const HeadKernel& kernel, const Sizer& sizer,
             std::size_t budget) const {
    const std::int64_t vocab = padded_vocab(shape_);
    if (kind == PlanKind::forward) {
      return sizer.largest(kForwardTokens, budget,
                           [&](std::int64_t tokens) { return sizer.make(tokens, 0, 0, true); });
    }
    const std::int64_t stored = kind == PlanKind::dense ? vocab : 0;
    // The best of each width of slab: the fastest that fits, or else the smallest.
    Sized best;
    const auto offer = [&](const Sized& sized) {
      const bool fits = sized.bytes <= budget;
      const bool best_fits = best.bytes != 0 && best.bytes <= budget;
      if (best.bytes == 0 || (fits && !best_fits) ||
          (fits && best_fits &&
           seconds(kernel, kind, sized.sizes) < seconds(kernel, kind, best.sizes)) ||
          (!fits && !best_fits && sized.bytes < best.bytes))
        best = sized;
    };
    for (std::int64_t slab = sizer.most_slab();; slab = round_up(slab / 2, kVocabTile)) {
      const auto sized = [&](std::int64_t tokens) {
        return is_far(kind) ? with_audit(sizer.make_far(kind, tokens, slab, audited()))
                            : sizer.make(tokens, slab, stored, false);
      };
      if (kind != PlanKind::stored) {
        offer(sizer.largest(kMostTokens, budget, sized));
      } else {
        // Smaller chunks leave more room to store: which is better depends on the budget.
        for (std::int64_t n = ceil_div(std::max<std::int64_t>(shape_.tokens, 1), kMostTokens);;
             n *= 2) {
          const std::int64_t tokens = ceil_div(std::max<std::int64_t>(shape_.tokens, 1), n);
          offer(with_stored(sizer, sized(tokens), budget));
          if (tokens <= kLeastTokens) break;
        }
      }
      if (slab <= kVocabTile) break;
    }
    return best;
  }

  std::int64_t audited() const { return std::min(request_.audit_rows, shape_.tokens); }
  // The exact plan of the audited tokens comes after everything else.
  Sized with_audit(Sized sized) const {
    if (plan_.audit != nullptr) sized.bytes += plan_.audit->workspace_bytes();
    return sized;
  }
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

  // As many stored tiles as asked for, or as fit; one where none does.
  Sized with_stored(const Sizer& sizer, const Sized& least, std::size_t budget) const {
    const std::int64_t tiles = padded_vocab(shape_) / kVocabTile;
    const auto sized = [&](std::int64_t count) {
      return sizer.make(least.sizes.tokens, least.sizes.slab_vocab, count * kVocabTile, false);
    };
    if (request_.kind == PlanKind::stored && request_.stored_fraction > 0.0) {
      return sized(std::clamp<std::int64_t>(
          std::llround(request_.stored_fraction * static_cast<double>(tiles)), 1, tiles));
    }
    std::int64_t low = 1;
    std::int64_t high = tiles + 1;
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (sized(middle).bytes <= budget ? low : high) = middle;
    }
    return sized(low);
  }

  double passes(PlanKind kind, const ChunkSizes& sizes) const {
    if (kind == PlanKind::forward) return 1.0;
    const double gradients = (features_.d_hidden ? 1.0 : 0.0) + (features_.d_weight ? 1.0 : 0.0);
    if (is_far(kind)) {
      const double kept = predicted_kept(kind, shape_.vocab, plan_.tau, on_gpu());
      const double sampled = predicted_sample(kept, plan_.sample_every, features_);
      return far_passes(kind, kept, sampled, shape_, features_);
    }
    const double stored = static_cast<double>(std::min(sizes.stored_vocab, shape_.vocab)) /
                          static_cast<double>(shape_.vocab);
    return 2.0 - stored + gradients;
  }

  double seconds(const HeadKernel& kernel, PlanKind kind, const ChunkSizes& sizes) const {
    const double pass_count = passes(kind, sizes);
    const double logits = static_cast<double>(shape_.tokens) * static_cast<double>(shape_.vocab);
    const double weights = static_cast<double>(shape_.vocab) * static_cast<double>(shape_.dim);
    const double chunks = std::ceil(static_cast<double>(std::max<std::int64_t>(shape_.tokens, 1)) /
                                    static_cast<double>(std::max<std::int64_t>(sizes.tokens, 1)));
    const double work =
        2.0 * pass_count * logits * static_cast<double>(shape_.dim) / kernel.flops_per_second;
    const double slabs =
        features_.d_hidden && kind != PlanKind::forward
            ? std::ceil(static_cast<double>(shape_.vocab) /
                        static_cast<double>(std::max<std::int64_t>(sizes.slab_vocab, 1)))
            : 0.0;
    const double hidden = static_cast<double>(shape_.tokens) * static_cast<double>(shape_.dim);
    return (work + chunks * pass_count * weights * kPackSeconds + logits * kExpSeconds +
            slabs * hidden * kSlabSeconds) /
           plan_.threads;
  }

  void choose(const std::vector<Sized>& sized, std::size_t budget) {
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
    if (chosen < 0) refuse(least, budget);
    PlanCandidate& winner = plan_.candidates[static_cast<std::size_t>(chosen)];
    for (PlanCandidate& c : plan_.candidates) {
      if (&c == &winner || !c.possible) continue;
      c.reason = request_.kind.has_value() ? concat(name_of(winner.kind), " was asked for")
                                           : concat("predicted slower than ", name_of(winner.kind));
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

  [[noreturn]] void refuse(int least, std::size_t budget) const {
    if (least >= 0) {
      const PlanCandidate& c = plan_.candidates[static_cast<std::size_t>(least)];
      throw InvalidArgument(concat("memory_budget: ", format_bytes(budget), " (", budget,
                                   " bytes) is below the least plan, ", name_of(c.kind),
                                   ", which needs ", format_bytes(c.workspace_bytes), " (",
                                   c.workspace_bytes, " bytes)"));
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

LossPlan plan_head(const HeadShape& shape, const HeadFeatures& features,
                   const PlanRequest& request) {
  if (request.memory_budget != 0) return PlanBuilder(shape, features, request).build();
  return default_plan(shape, [&](std::size_t budget) {
    PlanRequest within = request;
    within.memory_budget = budget;
    return PlanBuilder(shape, features, within).or_least().build();
  });
}

LossPlan with_threads(LossPlan plan, int threads) {
  PlanBuilder::set_threads(plan, threads);
  return plan;
}

}  // namespace logitless
