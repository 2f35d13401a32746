#include "head/plan/search/gathered.h"

#include <algorithm>
#include <cmath>

#include "head/cpu/layout.h"
#include "head/far_work.h"
#include "head/gathered_vocab.h"
#include "head/plan/cpu_costs.h"

namespace logitless {
namespace {

constexpr std::int64_t kMostTokens = 4096;
constexpr double kSameSpeed = 0.01;

}  // namespace

std::string GatheredSearch::refusal(PlanKind kind) const {
  if (kind == PlanKind::forward || kind == PlanKind::recompute) return {};
  return is_far(kind) ? "weights move, and the far field walks those that stay"
                      : "weights move slice by slice, and no exp(z) is saved from one to the next";
}

double GatheredSearch::passes(PlanKind kind, const PlanSizes&) const {
  if (kind == PlanKind::forward) return 1.0;
  return 2.0 + (p_.features.d_hidden ? 1.0 : 0.0) + (p_.features.d_weight ? 1.0 : 0.0);
}

SizedPlan GatheredCpuSearch::sized(PlanKind kind, const PlanSizes& sizes) const {
  const auto bytes_for = [&](int threads) {
    return cpu::layout_of(kernel_, p_.shape, p_.features, cpu::chunk_sizes(kind, sizes, threads))
        .total;
  };
  return {.sizes = sizes, .bytes = bytes_for(threads_), .alone = bytes_for(1)};
}

// Returns the fastest sizes that fit; among those within 1 % of it, the smallest for one thread, so
// that sizes do not depend on the number of threads.
SizedPlan GatheredCpuSearch::best(PlanKind kind, std::size_t budget) const {
  const std::int64_t tokens = std::max<std::int64_t>(p_.shape.tokens, 1);
  const auto offer_all = [&](const auto& offer) {
    for (const std::int64_t slice : slice_sizes(p_.features.gathered_rows)) {
      for (std::int64_t chunks = ceil_div(tokens, kMostTokens);; chunks *= 2) {
        const std::int64_t chunk = ceil_div(tokens, chunks);
        std::int64_t vocab_block =
            kind == PlanKind::forward ? 0 : round_up(std::min(kMaxBlock, slice), kVocabTile);
        for (;; vocab_block = round_up(vocab_block / 2, kVocabTile)) {
          offer(sized(kind,
                      {.chunk_tokens = chunk, .block_vocab = vocab_block, .slice_rows = slice}));
          if (vocab_block <= kVocabTile) break;
        }
        if (chunk <= kLeastTokens) break;
      }
    }
  };
  BestSize fastest(budget);
  offer_all([&](const SizedPlan& s) { fastest.offer(s, seconds(kind, s.sizes)); });
  SizedPlan best = fastest.found();
  if (best.bytes > budget || p_.any_size) return best;
  const double most = seconds(kind, best.sizes) * (1.0 + kSameSpeed);
  offer_all([&](const SizedPlan& s) {
    if (s.bytes <= budget && s.alone < best.alone && seconds(kind, s.sizes) <= most) best = s;
  });
  return best;
}

double GatheredCpuSearch::seconds(PlanKind kind, const PlanSizes& sizes) const {
  const auto n = static_cast<double>(std::max<std::int64_t>(p_.shape.tokens, 1));
  const auto v = static_cast<double>(p_.shape.vocab);
  const auto d = static_cast<double>(p_.shape.dim);
  const double pass_count = passes(kind, sizes);
  const double chunks = std::ceil(n / static_cast<double>(sizes.chunk_tokens));
  const double blocks =
      static_cast<double>(slice_blocks(p_.features)) *
      static_cast<double>(slice_count(p_.features.gathered_rows, sizes.slice_rows));
  double vocab_blocks = 0.0;
  if (p_.features.d_hidden && sizes.block_vocab > 0)
    vocab_blocks = blocks + v / static_cast<double>(sizes.block_vocab);
  return (2.0 * pass_count * n * v * d / kernel_.flops_per_second +
          chunks * pass_count * v * d * kPackSeconds + blocks * pass_count * n * d * kPackSeconds +
          n * v * kExpSeconds + vocab_blocks * n * d * kBlockSeconds) /
         threads_;
}

}  // namespace logitless
