#include "head/device_plan.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "head/far_field.h"
#include "head/workspace.h"
#include "kernels/device_far.h"

namespace logitless {
namespace {

constexpr std::int64_t kPair = 256;  // tokens of a pair of tiles, words of a tile

// Seconds of the parts of a plan, fitted to an H200 at its sustained clock with bench_head --device
// cuda (docs/benchmarks.md).
struct Rates {
  double forward_flops;
  double product_flops;
  double logit_seconds;     // of each exponential that the products do not hide
  double bytes_per_second;  // of what is written and read beyond the operands, partly hidden
  double sum_seconds;       // of each element of split sums between two chunks, beside their bytes
  double chunk_seconds;     // small kernels and launches
  double slab_seconds;
};
constexpr Rates kHopper = {695e12, 690e12, 0.3e-12, 7.6e12, 1.9e-12, 100e-6, 90e-6};
constexpr Rates kCublasNarrow = {600e12, 600e12, 0.0, 3.5e12, 0.0, 150e-6, 0.0};
constexpr Rates kCublasF32 = {45e12, 45e12, 0.0, 3.0e12, 0.0, 150e-6, 0.0};

// Of the dense products' rate, what those of kept tiles reach.
constexpr double kFarRate = 0.7;

class DevicePlanner {
 public:
  DevicePlanner(const cuda::DeviceKernel& kernel, const LossPlan& plan, const PlanRequest& request)
      : kernel_(kernel),
        shape_(plan.shape),
        features_(plan.features),
        request_(request),
        budget_(request.memory_budget),
        tokens_(std::max<std::int64_t>(plan.shape.tokens, 1)),
        tau_(plan.tau),
        audited_(plan.audit == nullptr ? 0 : plan.audit->shape.tokens),
        audit_bytes_(plan.audit == nullptr ? 0 : plan.audit->workspace_bytes()) {}

  DeviceCandidate candidate(PlanKind kind) {
    DeviceCandidate out;
    out.plan.kind = kind;
    out.plan.reason = refusal(kind);
    if (!out.plan.reason.empty()) return out;
    best_ = {};
    search(kind);
    out.sizes = best_.sizes;
    out.plan.workspace_bytes = best_.bytes;
    out.plan.possible = best_.bytes <= budget_;
    out.plan.passes = passes(best_.sizes);
    out.plan.predicted_seconds = best_.seconds;
    if (!out.plan.possible)
      out.plan.reason = concat("needs at least ", format_bytes(best_.bytes), " of workspace");
    return out;
  }

 private:
  struct Sized {
    DeviceSizes sizes;
    std::size_t bytes = 0;
    double seconds = 0.0;
  };

  std::string refusal(PlanKind kind) const {
    const bool gradients = wants_gradients(features_);
    if (kind == PlanKind::forward) return gradients ? "gradients are wanted" : "";
    if (!gradients) return "no gradient is wanted";
    if (is_far(kind)) return far_refusal(kind);
    if (kernel_.keeps_logits)
      return kind == PlanKind::dense
                 ? ""
                 : concat("kernel ", kernel_.name, " keeps the logits of a chunk");
    if (kind == PlanKind::recompute) return {};
    if (features_.entropy_gradient) return "a gradient through the entropy needs the logits again";
    if (features_.softcap != 0.0f && features_.label_smoothing)
      return "label smoothing under a softcap needs the logits again";
    return {};
  }

  std::string far_refusal(PlanKind kind) const {
    if (!kernel_.far_backward) return concat("kernel ", kernel_.name, " does not have it");
    if (kind == PlanKind::far_both && !cuda::estimates_unsupported().empty())
      return cuda::estimates_unsupported();
    const std::int64_t words = cuda::kMostFarGroups * cuda::kFarGroup;
    if (shape_.vocab > words)
      return concat("vocab: expected at most ", words, " on a GPU, got ", shape_.vocab);
    return far_unsuited(kind, features_);
  }

  // Tries all sizes of a kind; best_ is the fastest that fits, or else the smallest.
  void search(PlanKind kind) {
    if (kind == PlanKind::forward && !kernel_.keeps_logits) return offer({tokens_, 0, 0});
    const std::int64_t words = cuda::padded_words(shape_.vocab);
    for (std::int64_t n = 1;; n += 1 + n / 16) {
      const std::int64_t chunk = n == 1 ? tokens_ : round_up(ceil_div(tokens_, n), kPair);
      if (is_far(kind)) {
        if (chunk > cuda::kMostFarTokens) continue;
        for (std::int64_t slabs = 1; slabs <= words / kPair; slabs += 1 + slabs / 16)
          offer({chunk, round_up(ceil_div(words, slabs), kPair), 0, true,
                 kind == PlanKind::far_both, audited_});
      } else if (kind == PlanKind::forward) {
        offer({chunk, 0, 0});
      } else if (kind == PlanKind::dense) {
        offer({chunk, shape_.vocab, kernel_.keeps_logits ? 0 : shape_.vocab});
      } else if (kind == PlanKind::recompute) {
        for (std::int64_t slabs = 1; slabs <= words / kPair; slabs += 1 + slabs / 16)
          offer({chunk, std::min(shape_.vocab, round_up(ceil_div(words, slabs), kPair)), 0});
      } else {
        offer_stored(chunk, words);
      }
      if (chunk <= kPair) return;
    }
  }

  void offer_stored(std::int64_t chunk, std::int64_t words) {
    const std::int64_t tiles = words / kPair;
    const auto sizes = [&](std::int64_t count) {
      const std::int64_t stored = std::min(shape_.vocab, count * kPair);
      return DeviceSizes{chunk, stored, stored};
    };
    if (request_.stored_fraction > 0.0) {
      return offer(sizes(std::clamp<std::int64_t>(
          std::llround(request_.stored_fraction * static_cast<double>(tiles)), 1, tiles)));
    }
    std::int64_t low = 1;
    std::int64_t high = tiles;  // all of them would be the dense plan
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (bytes(sizes(middle)) <= budget_ ? low : high) = middle;
    }
    offer(sizes(low));
  }

  std::size_t bytes(const DeviceSizes& sizes) const {
    return layout_device(kernel_, shape_, features_, sizes).total + (sizes.far ? audit_bytes_ : 0);
  }

  void offer(const DeviceSizes& sizes) {
    const Sized sized{sizes, bytes(sizes), seconds(sizes)};
    const bool fits = sized.bytes <= budget_;
    const bool best_fits = best_.bytes != 0 && best_.bytes <= budget_;
    if (best_.bytes == 0 || (fits && !best_fits) ||
        (fits && best_fits && sized.seconds < best_.seconds) ||
        (!fits && !best_fits && sized.bytes < best_.bytes))
      best_ = sized;
  }

  double kept(const DeviceSizes& sizes) const {
    return predicted_kept(kind_of(sizes), shape_.vocab, static_cast<double>(tau_), true);
  }
  static PlanKind kind_of(const DeviceSizes& sizes) {
    return sizes.both ? PlanKind::far_both : PlanKind::far_backward;
  }
  double sampled(const DeviceSizes& sizes) const {
    return predicted_sample(kept(sizes), request_.sample_every, features_);
  }
  double again(const DeviceSizes& sizes) const {  // fraction of the words multiplied again
    if (sizes.far) return kept(sizes) + sampled(sizes);
    if (sizes.slab == 0 || kernel_.keeps_logits) return 0.0;
    return 1.0 - static_cast<double>(sizes.stored) / static_cast<double>(shape_.vocab);
  }
  double passes(const DeviceSizes& sizes) const {
    if (sizes.far)
      return far_passes(kind_of(sizes), kept(sizes), sampled(sizes), shape_, features_);
    return 1.0 + again(sizes) + (features_.d_hidden ? 1.0 : 0.0) + (features_.d_weight ? 1.0 : 0.0);
  }

  double seconds(const DeviceSizes& sizes) const {
    const auto n = static_cast<double>(tokens_);
    const auto v = static_cast<double>(shape_.vocab);
    const auto d = static_cast<double>(shape_.dim);
    const double pass = 2.0 * n * v * d;
    const double chunks = std::ceil(n / static_cast<double>(sizes.chunk));
    const Rates& r = !kernel_.keeps_logits        ? kHopper
                     : shape_.dtype == DType::f32 ? kCublasF32
                                                  : kCublasNarrow;
    const double forward = pass / r.forward_flops + n * v * r.logit_seconds;
    const double estimated =
        sizes.both ? kept(sizes) + 2.0 / 128.0 + d / v : 1.0;  // of the forward
    double out = estimated * forward + chunks * r.chunk_seconds;
    double bytes = kernel_.keeps_logits ? 4.0 * 4.0 * n * v : 0.0;  // fp32 logits, four times
    if (sizes.slab > 0) {
      const double slabs = (sizes.stored > 0 ? 1.0 : 0.0) +
                           std::ceil(static_cast<double>(shape_.vocab - sizes.stored) /
                                     static_cast<double>(sizes.slab));
      out += again(sizes) * forward + chunks * slabs * r.slab_seconds;
      const double products = sizes.far ? kept(sizes) / kFarRate : 1.0;
      const double of_words = sizes.far ? again(sizes) / kFarRate : 1.0;
      bytes += 3.0 * of_words * n * v * (shape_.dtype == DType::f32 ? 4.0 : 2.0);  // the block
      if (sizes.far) bytes += chunks * v * d * (2.0 * 2.0 * 2.0 + 4.0);  // rows gathered twice
      if (features_.d_hidden) {
        out += products * pass / r.product_flops;
        bytes += (slabs - 1.0) * n * d * 8.0;
      }
      if (features_.d_weight) {
        out += of_words * pass / r.product_flops;
        const bool split = splits_weight(kernel_, tokens_, features_, sizes);
        bytes += (chunks - 1.0) * v * d * (split ? 6.0 : 8.0);  // sums read and written
        if (split) out += (chunks - 1.0) * v * d * r.sum_seconds;
        if (sums_weight(kernel_, tokens_, features_, sizes)) bytes += v * d * 10.0;
      }
    }
    return out + bytes / r.bytes_per_second;
  }

  const cuda::DeviceKernel& kernel_;
  const HeadShape& shape_;
  const HeadFeatures& features_;
  const PlanRequest& request_;
  std::size_t budget_;
  std::int64_t tokens_;
  float tau_;
  std::int64_t audited_;
  std::size_t audit_bytes_;
  Sized best_;
};

template <typename Take>
void take_far(const HeadShape& shape, const HeadFeatures& f, const DeviceSizes& sizes,
              const Take& take, DeviceLayout& out) {
  const std::int64_t tokens = std::max<std::int64_t>(shape.tokens, 1);
  const std::int64_t chunk = std::min(sizes.chunk, tokens);
  const std::int64_t padded = cuda::padded_tokens(chunk);
  const std::int64_t tiles = cuda::far_tiles(shape.vocab);
  const std::int64_t groups = cuda::far_groups(shape.vocab);
  const std::int64_t blocks = padded / cuda::kFarBlock;
  out.far_sums = take(sizeof(cuda::FarSums));
  out.far_partial = take(cuda::kFarPartials * 8);
  out.token_keys = take(tokens * 4);
  out.token_rows = take(tokens * 4);
  out.token_places = take(tokens * 4);
  out.token_counts =
      take(2 * (cuda::token_keys(shape.vocab, tokens) + 2) * 4, tokens > cuda::kFewTargets);
  out.chunk_keys = take(chunk * 4);
  out.chunk_rows = take(chunk * 4);
  out.chunk_places = take(chunk * 4);
  out.chunk_counts = take(2 * (cuda::chunk_keys(chunk) + 2) * 4, chunk > cuda::kFewTargets);
  out.hidden_rows = take(chunk * shape.dim * 2);
  out.gathered = take(std::min(sizes.slab, shape.vocab) * shape.dim * 2);
  out.bias = take(shape.vocab * 4, f.bias);
  out.omega = take(shape.vocab * 4, f.vocab_weight);
  out.mass = take(2 * groups * padded * 4);
  out.centroid = take(tiles * shape.dim * 2);
  out.radius = take(tiles * 4);
  out.distance = take(tiles * 4);
  out.block_groups = take(blocks * cuda::far_bits(groups) * 4);
  out.group_blocks = take(groups * cuda::far_bits(blocks) * 4);
  out.list = take(groups * blocks * 4);
  out.list_begin = take((groups + 1) * 4);
  out.far_block = take(chunk * cuda::padded_words(tiles) * 2);
  out.tile_gradient = take(tiles * shape.dim * 4, f.d_weight);
  out.tile_sum = take(tiles * 4, f.d_bias);
  out.bound = take(padded * 4);
  if (sizes.both) {
    const std::int64_t rows = cuda::estimate_rows(chunk);
    out.word_weight = take(shape.vocab * 4);
    out.log2_base = take(tiles * 4);
    out.mean = take(tiles * shape.dim * 2);
    out.along = take(rows * shape.dim * 4);
    out.squares = take(rows * shape.dim * 2);
    out.forms = take(tiles * rows * 4);
    out.total_mass = take(padded * 4);
    out.far_sum = take(padded * 4);
    out.constants = take(3 * 4);
    out.products = take(cuda::kEstimateBytes);
  }
  if (sizes.audited == 0) return;
  out.audit_rows = take(sizes.audited * 4);
  out.audit_valid = take(4);
  out.audit_tokens = take(sizes.audited * shape.dim * 2);
  out.audit_lse = take(sizes.audited * 4);
  out.audit_partial = take(sizes.audited * 16);
  out.audit_hidden = take(sizes.audited * shape.dim * 4);
  out.audit_exact = take(sizes.audited * shape.dim * 4);
  out.audit_exact_lse = take(sizes.audited * 4);
}

}  // namespace

DeviceSizes device_sizes(const LossPlan& plan) {
  return {plan.chunk_tokens,
          plan.slab_vocab,
          plan.stored_vocab,
          is_far(plan.kind),
          plan.kind == PlanKind::far_both,
          plan.audit == nullptr ? 0 : plan.audit->shape.tokens};
}

cuda::ForwardShape forward_shape(const HeadShape& shape, const HeadFeatures& features) {
  return {shape.tokens,
          shape.dim,
          shape.vocab,
          shape.dtype,
          features.targets_per_token,
          features.entropy,
          features.label_smoothing,
          features.argmax,
          wants_gradients(features)};
}

DeviceLayout layout_device(const cuda::DeviceKernel& kernel, const HeadShape& shape,
                           const HeadFeatures& f, const DeviceSizes& sizes) {
  DeviceLayout out;
  const auto take = [&](std::int64_t bytes, bool wanted = true) {
    const std::size_t at = out.total;
    if (wanted) out.total += (static_cast<std::size_t>(bytes) + 255) / 256 * 256;
    return at;
  };
  const std::int64_t tokens = std::max<std::int64_t>(shape.tokens, 1);
  const std::int64_t chunk = std::min(sizes.chunk, tokens);
  const std::int64_t padded = cuda::padded_tokens(chunk);
  const std::int64_t slots = chunk * f.targets_per_token;
  const std::int64_t element = shape.dtype == DType::f32 ? 4 : 2;
  const bool gradients = wants_gradients(f);
  out.statistics = take(sizeof(cuda::DeviceStatistics));
  out.loss = take(static_cast<std::int64_t>(cuda::loss_workspace_bytes(tokens)));
  out.lse = take(chunk * 4);
  out.log_prob = take(slots * 4);
  out.target_logit = take(slots * 4, gradients);
  out.weighted_sum = take(chunk * 4, f.label_smoothing);
  out.entropy = take(chunk * 4, f.entropy);
  out.argmax = take(chunk * 4, f.argmax);
  HeadShape of_chunk = shape;
  of_chunk.tokens = chunk;
  auto of_kernel = static_cast<std::int64_t>(kernel.workspace_bytes(forward_shape(of_chunk, f)));
  out.many = out.total;
  if (adds_entries(kernel, tokens, f, sizes)) {  // in what the forward alone needs, if it fits
    const auto products =
        static_cast<std::int64_t>(kernel.products_bytes(chunk, shape.dim, shape.vocab));
    out.many += static_cast<std::size_t>(round_up(products, 256));
    of_kernel =
        std::max(of_kernel, round_up(products, 256) + cuda::many_rows(slots) * shape.dim * 4);
  }
  out.forward = take(of_kernel);
  if (!gradients) return out;
  out.rows = take(padded * static_cast<std::int64_t>(sizeof(cuda::RowCoefficients)));
  out.delta = take(slots * 4);
  out.factor = take(padded * 4);
  out.coefficient = take(slots * 4);
  out.words = take(slots * 4);
  out.slots = take(slots * 4);
  out.places = take(slots * 4);
  out.counts = take(2 * (shape.vocab + 2) * 4, slots > cuda::kFewTargets);
  out.entry_begin = take(((sizes.far ? shape.vocab : sizes.slab) + 1) * 4);
  out.entry_words = take(slots * 4);
  out.entry_tokens = take(slots * 4);
  out.entry_values = take(slots * 4);
  out.reference = take(padded * 4);
  out.active = take((padded / kPair + 1) * 4);
  out.block = take(chunk * cuda::padded_words(sizes.slab) * element);
  out.scaled_hidden = take(chunk * shape.dim * element, scales_hidden(kernel, f, sizes));
  out.d_hidden = take(chunk * shape.dim * 4, sums_hidden(kernel, shape.vocab, f, sizes));
  out.d_weight = take(shape.vocab * shape.dim * 4, sums_weight(kernel, tokens, f, sizes));
  out.weight_low = take(cuda::running_sum_bytes(shape.vocab, shape.dim),
                        splits_weight(kernel, tokens, f, sizes));
  out.d_bias = take(shape.vocab * 4, f.d_bias);
  out.weight_sum = take(shape.dim * 4, smooths_apart(f));
  out.hidden_sum = take(shape.dim * 4, smooths_apart(f));
  if (sizes.far) take_far(shape, f, sizes, take, out);
  std::int64_t columns = 0;
  if (f.d_bias) columns = sizes.far ? cuda::far_tiles(shape.vocab) : sizes.slab;
  if (smooths_apart(f)) columns = std::max(columns, shape.dim);
  std::int64_t sums = 0;
  for (const std::int64_t count : {columns, f.d_bias && !sizes.far ? sizes.slab : 0, shape.dim})
    sums = std::max(sums, static_cast<std::int64_t>(cuda::column_sum_workspace_bytes(count)));
  out.column_sums = take(sums, columns > 0);
  return out;
}

std::vector<DeviceCandidate> device_candidates(const PlanRequest& request,
                                               const std::vector<PlanKind>& far, LossPlan& plan) {
  const cuda::DeviceKernel* chosen = nullptr;
  const std::string& wanted = request.device.kernel;
  if (!wanted.empty()) cuda::find_device_kernel(wanted);
  for (const cuda::DeviceKernel& kernel : cuda::device_kernels()) {
    if (!wanted.empty() && wanted != kernel.name) continue;
    const int capability = request.device.compute_capability;
    const std::string reason =
        capability < kernel.least_capability || capability > kernel.most_capability
            ? concat("runs on compute capability ", kernel.least_capability / 10, ".",
                     kernel.least_capability % 10,
                     kernel.most_capability > 990 ? " and up" : " alone", ", the GPU has ",
                     capability / 10, ".", capability % 10)
            : kernel.unsupported(forward_shape(plan.shape, plan.features));
    if (reason.empty()) {
      chosen = &kernel;
      break;
    }
    plan.kernel_reasons += concat(kernel.name, ": ", reason, "\n");
  }
  if (chosen == nullptr) {
    throw Unsupported(plan.kernel_reasons.empty()
                          ? "no kernel runs on a GPU: the build has no CUDA"
                          : concat("no kernel takes this head:\n", plan.kernel_reasons));
  }
  plan.kernel = chosen->name;
  plan.threads = 0;
  DevicePlanner planner(*chosen, plan, request);
  std::vector<DeviceCandidate> out;
  for (const PlanKind kind :
       {PlanKind::forward, PlanKind::dense, PlanKind::stored, PlanKind::recompute})
    out.push_back(planner.candidate(kind));
  for (const PlanKind kind : far) out.push_back(planner.candidate(kind));
  return out;
}

}  // namespace logitless
