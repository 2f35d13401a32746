#include "head/plan/search/cuda.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "head/plan/far_forecast.h"
#include "kernels/cpu_head.h"
#include "kernels/device/far.h"
#include "kernels/device/gpu_kernels.h"
#include "kernels/device/kernel.h"

namespace logitless {

namespace {

std::string refusal_of(const cuda::DeviceKernel& kernel, const PlanProblem& problem,
                       int compute_capability) {
  if (problem.features.vocab_ranks > 0 && !kernel.takes_shards)
    return "takes no sharded vocabulary";
  std::string reason = cuda::capability_refusal(kernel, compute_capability);
  if (reason.empty() && problem.shape.dtype == DType::bf16 && compute_capability < 80)
    reason = "multiplies bf16 from compute capability 8.0 on";
  const Precision precision = problem.features.precision;
  if (reason.empty() && precision != Precision::ieee && compute_capability < 80)
    reason =
        concat("precision: multiplies ", name_of(precision), " from compute capability 8.0 on");
  if (reason.empty() && kernel.missing != nullptr) reason = kernel.missing();
  if (!reason.empty()) return reason;
  return kernel.unsupported(cuda::forward_shape(problem.shape, problem.features));
}

// Returns why a kernel that takes the head has no far field for it, or empty.
std::string far_refusal_of(const cuda::DeviceKernel& kernel, const PlanProblem& problem) {
  if (kernel.far == nullptr) return "does not have the far field";
  return kernel.far->head_unsupported(cuda::forward_shape(problem.shape, problem.features));
}

}  // namespace

const cuda::DeviceKernel& choose_device_kernel(const PlanProblem& problem,
                                               const DeviceLimits& device, std::string* reasons) {
  if (device.kernel.empty()) {
    for (const cuda::DeviceKernel& kernel : cuda::device_kernels()) {
      const std::string reason = cuda::gpu_kernel_refusal(kernel);
      if (!reason.empty()) *reasons += concat(kernel.name, ": ", reason, "\n");
    }
  }
  const cuda::DeviceKernel* exact = nullptr;  // the first that takes the head
  std::size_t exact_reasons = 0;
  for (const cuda::DeviceKernel* kernel : cuda::wanted_gpu_kernels(device.kernel)) {
    std::string reason = refusal_of(*kernel, problem, device.compute_capability);
    if (reason.empty() && exact == nullptr) {
      exact = kernel;
      exact_reasons = reasons->size();
    }
    if (reason.empty() && problem.far) reason = far_refusal_of(*kernel, problem);
    if (reason.empty()) return *kernel;
    *reasons += concat(kernel->name, ": ", reason, "\n");
  }
  if (exact == nullptr) throw Unsupported(concat("no kernel takes this head:\n", *reasons));
  reasons->resize(exact_reasons);
  return *exact;
}

bool supports_vocab_parallel(const DeviceLimits& device, DType dtype, std::int64_t dim) {
  if (device.kind == DeviceKind::cpu) return dtype != DType::f64;
  PlanProblem problem;
  problem.shape = {.tokens = 1, .dim = dim, .vocab = 1, .dtype = dtype, .global_vocab = 2};
  problem.features.vocab_ranks = 2;
  return std::ranges::any_of(
      cuda::wanted_gpu_kernels(device.kernel), [&](const cuda::DeviceKernel* kernel) {
        return refusal_of(*kernel, problem, device.compute_capability).empty();
      });
}

std::string CudaSearch::refusal(PlanKind kind) const {
  if (!is_far(kind)) {
    return p_.features.entropy_gradient && p_.features.softcap != 0.0f
               ? "a gradient through the entropy under a softcap needs the logits again"
               : "";
  }
  if (kernel_.far == nullptr) return concat("kernel ", kernel_.name, " does not have it");
  const std::string reason =
      kernel_.far->head_unsupported(cuda::forward_shape(p_.shape, p_.features));
  if (!reason.empty()) return concat("kernel ", kernel_.name, ": ", reason);
  if (kind == PlanKind::far_both && !cuda::estimates_unsupported().empty())
    return cuda::estimates_unsupported();
  const std::int64_t vocab_count = cuda::kMostFarGroups * cuda::kFarGroup;
  if (p_.shape.vocab > vocab_count)
    return concat("vocab: expected at most ", vocab_count, " on a GPU, got ", p_.shape.vocab);
  return {};
}

class CudaSearch::Offers {
 public:
  Offers(const CudaSearch& search, PlanKind kind, std::size_t most)
      : budget(most), search_(search), kind_(kind), best_(most) {}
  void add(const PlanSizes& sizes) {
    best_.offer({.sizes = sizes, .bytes = search_.bytes(kind_, sizes)},
                search_.seconds(kind_, sizes));
  }
  const SizedPlan& best() const { return best_.found(); }
  const std::size_t budget;

 private:
  const CudaSearch& search_;
  const PlanKind kind_;
  BestSize best_;
};

SizedPlan CudaSearch::best(PlanKind kind, std::size_t budget) const {
  Offers offers(*this, kind, budget);
  each_size(kind, offers);
  const SizedPlan& found = offers.best();
  if (found.bytes <= budget || !weight_may_be_apart(kind)) return found;
  Offers apart(*this, kind, budget);
  each_chunk([&](std::int64_t, std::int64_t chunk) {
    if (chunk >= tokens_) return;
    each_block([&](std::int64_t vocab_block) {
      vocab_block = std::min(p_.shape.vocab, vocab_block);
      PlanSizes sizes{chunk, vocab_block, 0};
      sizes.weight_vocab = vocab_block;
      apart.add(sizes);
    });
  });
  return apart.best().bytes > 0 && apart.best().bytes < found.bytes ? apart.best() : found;
}

// Separate blocks of d_weight limit the sums of a 16-bit d_weight between chunks to some entries at
// a time.
bool CudaSearch::weight_may_be_apart(PlanKind kind) const {
  const HeadFeatures& f = p_.features;
  return kind == PlanKind::recompute && p_.weight_apart && kernel_.splits_sums && f.d_weight &&
         f.d_weight_dtype != DType::f32 && f.vocab_ranks == 0 && !p_.one_chunk;
}

template <typename Offer>
void CudaSearch::each_block(const Offer& offer) const {
  const std::int64_t vocab_count = cuda::padded_vocab(p_.shape.vocab);
  for (std::int64_t vocab_blocks = 1; vocab_blocks <= vocab_count / kernel_.tile_vocab;
       vocab_blocks += 1 + vocab_blocks / 16)
    offer(round_up(ceil_div(vocab_count, vocab_blocks), kernel_.tile_vocab));
}

template <typename Offer>
void CudaSearch::each_chunk(const Offer& offer) const {
  const std::int64_t least = least_chunk();
  for (std::int64_t n = 1;; n += 1 + n / 16) {
    const std::int64_t chunk =
        n == 1 ? tokens_ : std::min(tokens_, round_up(ceil_div(tokens_, n), least));
    offer(n, chunk);
    if (chunk <= least || p_.one_chunk) return;
  }
}

void CudaSearch::each_size(PlanKind kind, Offers& offers) const {
  const std::int64_t vocab = p_.shape.vocab;
  if (kind == PlanKind::forward) return offer_forward(offers);
  each_chunk([&](std::int64_t n, std::int64_t chunk) {
    if (is_far(kind)) {
      if (chunk <= cuda::kMostFarTokens)
        each_block([&](std::int64_t vocab_block) { offers.add({chunk, vocab_block, 0}); });
    } else if (kind == PlanKind::dense) {
      offers.add({chunk, vocab, vocab});
      if (aliases_weight()) offer_ranges(n, offers);
    } else if (kind == PlanKind::recompute) {
      each_block([&](std::int64_t vocab_block) {
        vocab_block = std::min(vocab, vocab_block);
        offers.add({chunk, vocab_block, 0});
        if (n == 1 && vocab_block < vocab && weight_is_free())
          offers.add({chunk, vocab_block, 0, 1, chunk});
      });
    } else {
      offer_stored(chunk, offers);
      if (n == 1 && p_.stored_fraction == 0.0 && aliases_weight())
        each_block(
            [&](std::int64_t vocab_block) { offer_saved(std::min(vocab, vocab_block), offers); });
    }
  });
}

// Chunks below kForwardChunk tokens read the weight so often that only a budget asks for them.
void CudaSearch::offer_forward(Offers& offers) const {
  constexpr std::int64_t kForwardChunk = 8192;
  offers.add({tokens_, 0, 0});
  if (p_.features.gathered_rows > 0) return;
  each_chunk([&](std::int64_t n, std::int64_t chunk) {
    if (n > 1 && (chunk >= kForwardChunk || offers.best().bytes > offers.budget))
      offers.add({chunk, 0, 0});
  });
}

void CudaSearch::offer_stored(std::int64_t chunk, Offers& offers) const {
  const std::int64_t tiles = cuda::padded_vocab(p_.shape.vocab) / kernel_.tile_vocab;
  const auto sizes = [&](std::int64_t count) {
    const std::int64_t stored = std::min(p_.shape.vocab, count * kernel_.tile_vocab);
    return PlanSizes{chunk, stored, stored};
  };
  if (p_.stored_fraction > 0.0) return offers.add(sizes(stored_tiles(p_.stored_fraction, tiles)));
  // Storing all tiles would be the dense plan.
  offers.add(sizes(last_that(1, tiles, [&](std::int64_t count) {
    return bytes(PlanKind::stored, sizes(count)) <= offers.budget;
  })));
}

// Offers sizes with all tokens in one chunk, where d_weight's memory holds the exponentials of a
// part of the vocabulary.
void CudaSearch::offer_saved(std::int64_t vocab_block, Offers& offers) const {
  PlanSizes sizes{tokens_, vocab_block, vocab_block, 0, tokens_};
  if (vocab_block >= p_.shape.vocab || bytes(PlanKind::stored, sizes) > offers.budget) return;
  for (sizes.weight_ranges = 2; sizes.weight_ranges <= cuda::kMaxVocabRanges;
       ++sizes.weight_ranges) {
    const cuda::VocabRanges vocab_ranges =
        cuda::ranges_of(kernel_, p_.shape, p_.features, cuda::sizes_for(PlanKind::stored, sizes, 0))
            .ranges;
    if (vocab_ranges.count == 0) return;
    sizes.stored_vocab = vocab_ranges.first[vocab_ranges.count];
    offers.add(sizes);
  }
}

// Returns whether d_weight's memory may hold other numbers until its gradients are computed.
bool CudaSearch::weight_is_free() const {
  const HeadFeatures& f = p_.features;
  return f.d_weight && !f.accumulate && !f.d_weight_strided && f.gathered_rows == 0 &&
         f.narrow_weight == DType::f32;  // rows of 16 bits may be misaligned for f32
}

// Returns whether it may hold exponentials of the forward.
bool CudaSearch::aliases_weight() const { return kernel_.takes_ranges && weight_is_free(); }

// Returns the unit of chunk sizes. If tokens are sharded, each rank has as many tokens of a chunk.
std::int64_t CudaSearch::least_chunk() const {
  return kernel_.tile_tokens * (p_.features.tokens_sharded ? p_.features.vocab_ranks : 1);
}

// Offers sizes whose first chunk reuses d_weight's memory, with as many tokens as need the same
// workspace as each of the other chunks.
void CudaSearch::offer_ranges(std::int64_t chunks, Offers& offers) const {
  const std::int64_t vocab = p_.shape.vocab;
  const std::int64_t unit = least_chunk();
  const auto rest = [&](std::int64_t first) {
    return chunks == 1 ? first : round_up(ceil_div(tokens_ - first, chunks - 1), unit);
  };
  std::int64_t least = tokens_ * cuda::padded_vocab(vocab);
  for (int ranges = 2; ranges <= cuda::kMaxVocabRanges; ++ranges) {
    const auto sizes = [&](std::int64_t first) {
      return PlanSizes{rest(first), vocab, vocab, ranges, first};
    };
    const auto aliased = [&](std::int64_t first) {
      return cuda::ranges_of(kernel_, p_.shape, p_.features,
                             cuda::sizes_for(PlanKind::dense, sizes(first), 0))
          .ranges;
    };
    const auto fits_beside = [&](std::int64_t first) {
      const cuda::VocabRanges vocab_ranges = aliased(first);
      return vocab_ranges.count > 0 && first * vocab_ranges.stride(vocab_ranges.count - 1) <=
                                           rest(first) * cuda::padded_vocab(vocab);
    };
    const std::int64_t first =
        chunks == 1 ? tokens_
                    : unit * last_that(1, ceil_div(tokens_, unit), [&](std::int64_t units) {
                        return fits_beside(units * unit);
                      });
    const cuda::VocabRanges vocab_ranges = aliased(first);
    if (first >= rest(first) && vocab_ranges.count > 0) {
      // Another block of d_weight must save enough to pay for its partial round of tiles.
      const std::int64_t block = first * vocab_ranges.stride(vocab_ranges.count - 1);
      if (chunks == 1 && block > least - least / 40) break;
      least = block;
      offers.add(sizes(first));
    }
    // A larger first chunk leaves one unit less for each of the other chunks, and may still take
    // less workspace than the candidate above.
    const std::int64_t more = round_up(tokens_ - (chunks - 1) * (rest(first) - unit), unit);
    if (chunks > 1 && more > first && more < tokens_ && aliased(more).count > 0)
      offers.add(sizes(more));
  }
}

std::size_t CudaSearch::bytes(PlanKind kind, const PlanSizes& sizes) const {
  return cuda::layout_of(kernel_, p_.shape, p_.features,
                         cuda::sizes_for(kind, sizes, audit_bytes_ > 0 ? p_.audited : 0))
             .total +
         (is_far(kind) ? audit_bytes_ : 0);
}

double CudaSearch::kept(PlanKind kind) const {
  return predicted_selected(kind, p_.shape, p_.features, p_.interleaved,
                            static_cast<double>(p_.tau));
}
double CudaSearch::sampled(PlanKind kind) const {
  return predicted_sample(kept(kind), p_.sample_every, p_.features);
}

// Returns the fraction of the logits that the backward recomputes.
double CudaSearch::again(PlanKind kind, const PlanSizes& sizes) const {
  if (is_far(kind)) return kept(kind) + sampled(kind);
  if (sizes.block_vocab == 0) return 0.0;
  return 1.0 - static_cast<double>(sizes.stored_vocab) / static_cast<double>(p_.shape.vocab);
}

// Returns the fraction of the logits that a separate d_weight recomputes once more: no other
// gradient may have needed them.
double CudaSearch::apart(const PlanSizes& sizes) const {
  return sizes.weight_vocab > 0 && (p_.features.d_hidden || p_.features.d_bias) ? 1.0 : 0.0;
}

double CudaSearch::passes(PlanKind kind, const PlanSizes& sizes) const {
  const HeadFeatures& f = p_.features;
  if (is_far(kind)) return far_passes(kind, kept(kind), sampled(kind), p_.shape, f);
  return 1.0 + again(kind, sizes) + apart(sizes) + (f.d_hidden ? 1.0 : 0.0) +
         (f.d_weight ? 1.0 : 0.0);
}

double CudaSearch::far_seconds(PlanKind kind, const PlanSizes& sizes) const {
  const HeadShape& shape = p_.shape;
  const HeadFeatures& f = p_.features;
  const auto n = static_cast<double>(tokens_);
  const auto v = static_cast<double>(shape.vocab);
  const auto d = static_cast<double>(shape.dim);
  const cuda::DeviceRates& r = rates_;
  const cuda::FarRates far = cuda::far_rates_on(kernel_, card_);
  const double pass = 2.0 * n * v * d;
  const double forward = pass / r.forward_flops + n * v * r.logit_seconds;
  const double chunks = std::ceil(n / static_cast<double>(sizes.chunk_tokens));
  const bool both = kind == PlanKind::far_both;
  const double sample = sampled(kind);
  const double groups = std::min(1.0, far.selected_groups * kept(kind));
  // Rows of the selected groups are read and written; their means or radii read them once more.
  double rows = 2.0 + chunks * 4.0 * (both ? groups : 1.0);
  double out = (both ? kept(kind) + 2.0 / 128.0 + d / v : 1.0) * forward +
               chunks * far.chunk_seconds + n * v / 128.0 * far.tile_seconds;
  if (f.d_hidden || f.d_weight || f.d_bias) {
    rows += chunks * 4.0 * (sample > 0.0 ? 1.0 : groups);
    out += again(kind, sizes) * forward +
           chunks * std::ceil(v / static_cast<double>(sizes.block_vocab)) * far.block_seconds;
  }
  const double thin = 2.0 / 128.0 * pass / r.gemm_flops;
  if (f.d_hidden) out += kept(kind) * pass / (r.gemm_flops * far.gemm_fraction) + thin;
  if (f.d_weight) {
    out += again(kind, sizes) * pass / (r.gemm_flops * far.gemm_fraction) + thin;
    if (sample > 0.0) out += thin;
    rows += 4.0 + 12.0 * (chunks - 1.0);  // d_weight, accumulated from the second chunk on
  }
  return out + (rows * v * d + 16.0 * n * d) / far.bytes_per_second;
}

// Returns the tokens that a plan is predicted for. A plan for hardly any would be slow for more.
double CudaSearch::computed_tokens(const cuda::Sizes& sizes) const {
  const auto all = static_cast<double>(tokens_);
  if (!cuda::lists_tokens(kernel_, tokens_, p_.features, sizes)) return all;
  return std::max(static_cast<double>(cuda::expected_tokens(tokens_, p_.expected_ignored)),
                  all / 8.0);
}

// Returns DeviceRates::weight_bytes. A weight of 16 bits that is widened is read, written in fp32,
// and read again.
double CudaSearch::weight_bytes() const {
  const bool widened =
      p_.features.narrow_weight != DType::f32 && p_.features.precision != Precision::bf16x3;
  return widened ? 10.0 : rates_.weight_bytes;
}

double CudaSearch::seconds(PlanKind kind, const PlanSizes& sizes) const {
  if (is_far(kind)) return far_seconds(kind, sizes);
  const HeadShape& shape = p_.shape;
  const cuda::Sizes device = cuda::sizes_for(kind, sizes, 0);
  const auto all = static_cast<double>(tokens_);
  const double n = computed_tokens(device);
  const auto v = static_cast<double>(shape.vocab);
  const auto d = static_cast<double>(shape.dim);
  const double pass = 2.0 * n * v * d;
  const bool ranged = sizes.weight_ranges > 0;
  const auto first = static_cast<double>(ranged ? sizes.first_tokens : sizes.chunk_tokens);
  const double chunks =
      1.0 + std::ceil(std::max(all - first, 0.0) / static_cast<double>(sizes.chunk_tokens));
  const cuda::DeviceRates& r = rates_;
  const double forward = pass / r.forward_flops + n * v * r.logit_seconds;
  double out = forward + chunks * r.chunk_seconds;
  const double computed = 1.0 + again(kind, sizes) + apart(sizes);  // times
  double bytes = r.logit_bytes * computed * n * v;
  const double strips =
      chunks * std::ceil(std::min(first, all) / static_cast<double>(cuda::kStripTokens));
  const double read = computed + (sizes.block_vocab > 0 && p_.features.d_hidden ? 1.0 : 0.0);
  bytes += weight_bytes() * strips * read * v * d;
  if (sizes.block_vocab > 0) {
    double vocab_blocks = sizes.stored_vocab > 0 ? 1.0 : 0.0;
    for (std::int64_t vocab_id = sizes.stored_vocab; vocab_id < shape.vocab; vocab_blocks += 1.0)
      vocab_id += cuda::vocab_block_of(shape, p_.features, device, vocab_id).vocab_count;
    out += (again(kind, sizes) + apart(sizes)) * forward +
           (1.0 + apart(sizes)) * chunks * vocab_blocks * r.block_seconds;
    bytes += 3.0 * n * v * (shape.dtype == DType::f32 ? 4.0 : 2.0);  // the vocabulary block
    if (p_.features.d_hidden) {
      out += pass / r.gemm_flops;
      bytes += (vocab_blocks - 1.0) * n * d * 8.0;
    }
    if (p_.features.d_weight) {
      out += pass / r.gemm_flops;
      const bool split = cuda::splits_weight(kernel_, tokens_, p_.features, device);
      bytes += (chunks - 1.0) * v * d * (split ? 6.0 : 8.0);  // sums read and written
      if (split) out += (chunks - 1.0) * v * d * r.sum_seconds;
      // Each block of d_weight except one ends in half a round of tiles.
      if (ranged) out += (sizes.weight_ranges - 1.0) * first * r.round_flops / 2 / r.gemm_flops;
      if (cuda::sums_weight(kernel_, tokens_, p_.features, device)) bytes += v * d * 10.0;
    }
  }
  // scale_by_logits reads and writes the saved exponentials, and hides behind nothing.
  if (p_.features.entropy_gradient) {
    const auto stored = static_cast<double>(std::min(sizes.stored_vocab, shape.vocab));
    out += 2.0 * n * stored * (shape.dtype == DType::f32 ? 4.0 : 2.0) / card_.copy_bytes_per_second;
  }
  return out + bytes / r.bytes_per_second;
}

}  // namespace logitless
