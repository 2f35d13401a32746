#include "head/far_work.h"

#include <algorithm>
#include <cmath>

namespace logitless {
namespace {

// Estimates the error from the sampled tiles: all skipped tiles of a token are assumed to have
// their mean squared error, independently.
void publish_sampled(const LossPlan& plan, const FarSums& sums, std::int64_t tile_vocab,
                     FarFieldStatistics& out) {
  const FarSampled& s = sums.of_sample;
  if (s.tokens == 0.0) return;
  const std::int64_t vocab_count =
      plan.features.vocab_ranks > 0 ? plan.shape.global_vocab : plan.shape.vocab;
  const double far =
      (1.0 - out.selected) * static_cast<double>((vocab_count + tile_vocab - 1) / tile_vocab);
  out.sampled_lse_error = std::sqrt(far * s.error_squared / s.tokens);
  out.sampled_most = s.most;
}

}  // namespace

FarFieldStatistics far_statistics(const LossPlan& plan, const FarSums& sums,
                                  std::int64_t tile_vocab) {
  FarFieldStatistics out;
  if (sums.pairs > 0) {
    out.selected = static_cast<double>(sums.selected) / static_cast<double>(sums.pairs);
    out.sampled = static_cast<double>(sums.sampled) / static_cast<double>(sums.pairs);
  }
  HeadShape shape = plan.shape;
  const int ranks = plan.features.vocab_ranks;
  if (ranks > 0) shape.vocab = std::max<std::int64_t>(shape.global_vocab / ranks, 1);
  out.passes = far_passes(plan.kind, out.selected, out.sampled, shape, plan.features);
  out.dense_fallback = sums.fallback != 0;
  if (sums.norm_squared > 0.0) out.bound = std::sqrt(sums.bound_squared / sums.norm_squared);
  if (plan.kind == PlanKind::far_both) out.bound = -1.0;
  publish_sampled(plan, sums, tile_vocab, out);
  if (plan.audit == nullptr || sums.audited == 0) return out;
  out.audited_tokens = sums.audited;
  out.audited_error = sums.audit_norm_squared == 0.0  // a NaN norm stays NaN
                          ? 0.0
                          : std::sqrt(sums.audit_error_squared / sums.audit_norm_squared);
  out.audited_lse_error = std::sqrt(sums.lse_error_squared / static_cast<double>(sums.audited));
  out.audited_lse_error_max = sums.lse_error_max;
  return out;
}

namespace {

// Adds the sums over tokens of ranks with sharded tokens. An audited token is weighted by the
// number of tokens that it represents.
void add_tokens(std::span<const FarSums> ranks, FarSums& sums) {
  sums.norm_squared = sums.audit_error_squared = sums.audit_norm_squared = 0.0;
  sums.lse_error_squared = sums.lse_error_max = 0.0;
  sums.audited = 0;
  double tokens = 0.0;
  for (const FarSums& of_rank : ranks) {
    const double share = of_rank.audit_share > 0.0 ? of_rank.audit_share : 1.0;
    sums.norm_squared += of_rank.norm_squared;
    sums.audited += of_rank.audited;
    tokens += share * static_cast<double>(of_rank.audited);
    sums.audit_error_squared += share * of_rank.audit_error_squared;
    sums.audit_norm_squared += share * of_rank.audit_norm_squared;
    sums.lse_error_squared += share * of_rank.lse_error_squared;
    const bool worse = of_rank.lse_error_max > sums.lse_error_max;
    if (worse || std::isnan(of_rank.lse_error_max)) sums.lse_error_max = of_rank.lse_error_max;
  }
  if (tokens > 0.0) sums.lse_error_squared *= static_cast<double>(sums.audited) / tokens;
}

}  // namespace

FarFieldStatistics far_statistics_of_ranks(const LossPlan& plan, std::span<const FarSums> ranks,
                                           std::int64_t tile_vocab) {
  FarSums sums = ranks.front();
  std::int64_t most = sums.selected;
  for (const FarSums& of_rank : ranks.subspan(1)) {
    sums.selected += of_rank.selected;
    sums.sampled += of_rank.sampled;
    sums.pairs += of_rank.pairs;
    sums.fallback += of_rank.fallback;
    sums.of_sample.add(of_rank.of_sample);
    most = std::max(most, of_rank.selected);
  }
  if (plan.features.tokens_sharded) add_tokens(ranks, sums);
  FarFieldStatistics out = far_statistics(plan, sums, tile_vocab);
  if (sums.selected > 0) {
    const auto count = static_cast<double>(ranks.size());
    out.imbalance = static_cast<double>(most) * count / static_cast<double>(sums.selected);
  }
  return out;
}

}  // namespace logitless
