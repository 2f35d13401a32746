#include "head/plan/search/cpu.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "head/cpu/layout.h"
#include "head/plan/cpu_costs.h"
#include "head/plan/far_forecast.h"
#include "head/plan/text.h"

namespace logitless {
namespace {

// Largest useful chunks: beyond these sizes the work per chunk is amortised.
constexpr std::int64_t kForwardTokens = 2048;
constexpr std::int64_t kMostTokens = 8192;

std::int64_t padded_vocab(const HeadShape& shape) { return round_up(shape.vocab, kVocabTile); }

std::int64_t most_tokens(PlanKind kind) {
  return kind == PlanKind::forward ? kForwardTokens : kMostTokens;
}

// The possible numbers of chunks; tokens are divided evenly among them.
struct ChunkCounts {
  ChunkCounts(const HeadShape& shape, PlanKind kind)
      : tokens(std::max<std::int64_t>(shape.tokens, 1)),
        fewest(ceil_div(tokens, most_tokens(kind))),
        most(ceil_div(tokens, std::min(tokens, kLeastTokens))) {}
  std::int64_t tokens, fewest, most;
  std::int64_t chunk(std::int64_t count) const { return ceil_div(tokens, count); }
};

// Relative difference below which predicted times count as equal; their accuracy is lower than
// that.
constexpr double kSameSpeed = 0.01;

// Calls the function with each vocabulary block size; the forward plan has none.
template <typename F>
void each_block(PlanKind kind, const HeadShape& shape, F function) {
  if (kind == PlanKind::forward) return function(std::int64_t{0});
  for (std::int64_t vocab_block = std::min(kMaxBlock, padded_vocab(shape));;
       vocab_block = round_up(vocab_block / 2, kVocabTile)) {
    function(vocab_block);
    if (vocab_block <= kVocabTile) return;
  }
}

}  // namespace

SizedPlan CpuSearch::sized(PlanKind kind, const PlanSizes& sizes) const {
  const bool far = is_far(kind);
  const auto bytes_for = [&](int threads) {
    return cpu::layout_of(kernel_, p_.shape, p_.features, cpu::chunk_sizes(kind, sizes, threads),
                          far ? p_.audited : 0)
               .total +
           (far ? audit_bytes_ : 0);
  };
  return {.sizes = sizes, .bytes = bytes_for(threads_), .alone = bytes_for(1)};
}

SizedPlan CpuSearch::sized(PlanKind kind, std::int64_t tokens, std::int64_t vocab_block) const {
  return sized(kind, {.chunk_tokens = tokens,
                      .block_vocab = vocab_block,
                      .stored_vocab = kind == PlanKind::dense ? padded_vocab(p_.shape) : 0});
}

// Returns the largest chunks that fit with vocabulary blocks of this size, or the smallest sizes if
// none fit.
SizedPlan CpuSearch::largest(PlanKind kind, std::int64_t vocab_block, std::size_t budget,
                             std::int64_t weight_vocab) const {
  const ChunkCounts counts(p_.shape, kind);
  const auto with = [&](std::int64_t count) {
    SizedPlan out = sized(kind, counts.chunk(count), vocab_block);
    if (weight_vocab == 0) return out;
    out.sizes.weight_vocab = weight_vocab;
    return sized(kind, out.sizes);
  };
  const SizedPlan fewest = with(counts.fewest);
  if (fewest.bytes <= budget) return fewest;
  const SizedPlan smallest = with(counts.most);
  // One chunk may take less than many, because a 16-bit d_weight then needs no fp32 sums.
  if (smallest.bytes > budget) return fewest.bytes < smallest.bytes ? fewest : smallest;
  return with(last_that(counts.fewest, counts.most,
                        [&](std::int64_t count) { return with(count).bytes > budget; }) +
              1);
}

// Returns sizes with the requested number of stored tiles, or as many as fit; one if none fits.
SizedPlan CpuSearch::with_stored(std::int64_t tokens, std::int64_t vocab_block,
                                 std::size_t budget) const {
  const std::int64_t tiles = padded_vocab(p_.shape) / kVocabTile;
  const auto with = [&](std::int64_t count) {
    return sized(
        PlanKind::stored,
        {.chunk_tokens = tokens, .block_vocab = vocab_block, .stored_vocab = count * kVocabTile});
  };
  if (p_.stored_fraction > 0.0) return with(stored_tiles(p_.stored_fraction, tiles));
  return with(
      last_that(1, tiles + 1, [&](std::int64_t count) { return with(count).bytes <= budget; }));
}

// Returns the best sizes over all vocabulary block sizes.
SizedPlan CpuSearch::fastest(PlanKind kind, std::size_t budget) const {
  BestSize best(budget);
  const auto offer = [&](const SizedPlan& sized) { best.offer(sized, seconds(kind, sized.sizes)); };
  each_block(kind, p_.shape, [&](std::int64_t vocab_block) {
    if (kind != PlanKind::stored) return offer(largest(kind, vocab_block, budget));
    // Smaller chunks leave more memory for stored tiles; which is better depends on the budget.
    const ChunkCounts counts(p_.shape, kind);
    for (std::int64_t count = counts.fewest;; count *= 2) {
      offer(with_stored(counts.chunk(count), vocab_block, budget));
      if (counts.chunk(count) <= kLeastTokens) break;
    }
  });
  return best.found();
}

// Separate blocks of d_weight limit the fp32 sums of a 16-bit d_weight to some entries at a time.
// With sharded tokens, they would have to be exchanged once more for each block.
bool CpuSearch::weight_may_be_apart(PlanKind kind) const {
  const HeadFeatures& f = p_.features;
  return kind == PlanKind::recompute && p_.weight_apart && f.d_weight &&
         f.d_weight_dtype != DType::f32 && !f.tokens_sharded;
}

SizedPlan CpuSearch::with_weight_apart(PlanKind kind, std::size_t budget) const {
  BestSize best(budget);
  for (std::int64_t vocab_count = round_up(padded_vocab(p_.shape) / 2, kVocabTile);;
       vocab_count = round_up(vocab_count / 2, kVocabTile)) {
    each_block(kind, p_.shape, [&](std::int64_t vocab_block) {
      const SizedPlan sized = largest(kind, vocab_block, budget, vocab_count);
      best.offer(sized, seconds(kind, sized.sizes));
    });
    if (vocab_count <= kVocabTile) return best.found();
  }
}

// Returns the smallest sizes that are about as fast as the fastest.
SizedPlan CpuSearch::leanest(PlanKind kind, const SizedPlan& fastest, std::size_t budget) const {
  const double most = seconds(kind, fastest.sizes) * (1.0 + kSameSpeed);
  const auto fast = [&](const SizedPlan& sized) { return seconds(kind, sized.sizes) <= most; };
  SizedPlan best = fastest;
  const auto offer = [&](const SizedPlan& sized) {
    if (sized.bytes <= budget && sized.alone < best.alone && fast(sized)) best = sized;
  };
  const ChunkCounts counts(p_.shape, kind);
  each_block(kind, p_.shape, [&](std::int64_t vocab_block) {
    const auto with = [&](std::int64_t count) {
      return sized(kind, counts.chunk(count), vocab_block);
    };
    offer(with(counts.fewest));
    // More chunks are slower, so the condition is monotone.
    offer(with(last_that(counts.fewest, counts.most + 1,
                         [&](std::int64_t count) { return fast(with(count)); })));
  });
  return best;
}

SizedPlan CpuSearch::best(PlanKind kind, std::size_t budget) const {
  const SizedPlan found = fastest(kind, budget);
  if (weight_may_be_apart(kind)) {
    const SizedPlan apart = with_weight_apart(kind, budget);
    const bool better =
        found.bytes > budget
            ? apart.bytes < found.bytes
            : apart.bytes <= budget && seconds(kind, apart.sizes) < seconds(kind, found.sizes);
    if (better) return apart;
  }
  // A stored plan should fill the budget, and the far field selects fewer tiles with large chunks.
  const bool keeps_size = kind == PlanKind::stored || is_far(kind) || p_.any_size;
  if (found.bytes > budget || keeps_size) return found;
  return leanest(kind, found, budget);
}

std::string CpuSearch::refusal(PlanKind kind) const {
  if (is_far(kind))
    return kernel_.far_backward == nullptr ? concat("kernel ", kernel_.name, " has no far field")
                                           : "";
  if ((kind == PlanKind::dense || kind == PlanKind::stored) &&
      kernel_.stored_element_bytes(p_.shape.dtype) == 0)
    return concat("kernel ", kernel_.name, " does not store exp(z)");
  if (p_.features.entropy_gradient) return "a gradient through the entropy needs the logits again";
  return {};
}

std::string CpuSearch::contents(PlanKind kind, const SizedPlan& sized) const {
  return describe_contents(kernel_, p_.shape, p_.features,
                           cpu::chunk_sizes(kind, sized.sizes, threads_), sized.bytes);
}
std::size_t CpuSearch::weight_sums(PlanKind kind, const PlanSizes& sizes) const {
  return cpu::weight_sum_bytes(p_.shape, p_.features, cpu::chunk_sizes(kind, sizes, threads_));
}

bool CpuSearch::stores_all(const PlanSizes& sizes) const {
  return sizes.stored_vocab >= padded_vocab(p_.shape);
}

double CpuSearch::passes(PlanKind kind, const PlanSizes& sizes) const {
  if (kind == PlanKind::forward) return 1.0;
  const HeadFeatures& f = p_.features;
  if (is_far(kind)) {
    const double kept = predicted_selected(kind, p_.shape, f, p_.interleaved, p_.tau);
    const double sampled = predicted_sample(kept, p_.sample_every, f);
    return far_passes(kind, kept, sampled, p_.shape, f);
  }
  const double stored = static_cast<double>(std::min(sizes.stored_vocab, p_.shape.vocab)) /
                        static_cast<double>(p_.shape.vocab);
  // Separate d_weight recomputes the logits, unless no other gradient used the first ones.
  const double again = sizes.weight_vocab > 0 && (f.d_hidden || f.d_bias) ? 1.0 : 0.0;
  return 2.0 - stored + again + (f.d_hidden ? 1.0 : 0.0) + (f.d_weight ? 1.0 : 0.0);
}

double CpuSearch::seconds(PlanKind kind, const PlanSizes& sizes) const {
  const HeadShape& shape = p_.shape;
  const double pass_count = passes(kind, sizes);
  const double logits = static_cast<double>(shape.tokens) * static_cast<double>(shape.vocab);
  const double weights = static_cast<double>(shape.vocab) * static_cast<double>(shape.dim);
  const double chunks =
      std::ceil(static_cast<double>(std::max<std::int64_t>(shape.tokens, 1)) /
                static_cast<double>(std::max<std::int64_t>(sizes.chunk_tokens, 1)));
  const double work =
      2.0 * pass_count * logits * static_cast<double>(shape.dim) / kernel_.flops_per_second;
  const double vocab_blocks =
      p_.features.d_hidden && kind != PlanKind::forward
          ? std::ceil(static_cast<double>(shape.vocab) /
                      static_cast<double>(std::max<std::int64_t>(sizes.block_vocab, 1)))
          : 0.0;
  const double hidden = static_cast<double>(shape.tokens) * static_cast<double>(shape.dim);
  const double calls =  // each block packs hidden twice
      sizes.weight_vocab > 0 ? 2.0 * std::ceil(static_cast<double>(shape.vocab) /
                                               static_cast<double>(sizes.weight_vocab))
                             : 0.0;
  return (work + calls * hidden * kPackSeconds + chunks * pass_count * weights * kPackSeconds +
          logits * kExpSeconds + vocab_blocks * hidden * kBlockSeconds) /
         threads_;
}

}  // namespace logitless
