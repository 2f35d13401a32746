// The far field of a vocabulary over ranks.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <vector>

#include "core/check.h"
#include "core/parallel.h"
#include "head/cpu/far_field.h"
#include "head/vocab_order_access.h"

namespace logitless::cpu {

// Without a common order, ranks would put different tokens into a chunk.
void FarField::require_common_order() const {
  const VocabOrder& order = *run_.call.far.order;
  require(static_cast<std::int64_t>(order.places().size()) == run_.call.shape.global_vocab,
          "order: expected one of share_order, with the places of the ",
          run_.call.shape.global_vocab, " vocabulary of all ranks, got ",
          order.places().empty() ? std::string("one without places")
                                 : concat("places of ", order.places().size()));
  const std::uint64_t mine = VocabOrderAccess::of(order).common;
  std::vector<std::uint64_t> all(static_cast<std::size_t>(run_.call.shard.ranks()));
  run_.call.shard.calls->all_gather(&mine, all.data(), sizeof(mine));
  for (std::size_t r = 1; r < all.size(); ++r) {
    require(all[r] == all[0], "order: rank ", r,
            " has another one than rank 0; expected those of one share_order");
  }
}

void FarField::sort_by_targets(const ChunkTokens& tokens) const {
  auto* const place = run_.at<std::int64_t>(run_.layout.shard.place);
  const auto* const vocab_ids = run_.at<std::int32_t>(run_.layout.shard.vocab_ids);
  const auto places = run_.call.far.order->places();
  const auto key = [&](std::int64_t at) {
    const std::int32_t vocab_id = vocab_ids[at * run_.plan.features.targets_per_token];
    return vocab_id < 0 ? std::int32_t{-1} : places[static_cast<std::size_t>(vocab_id)];
  };
  std::sort(place, place + tokens.count, [&](std::int64_t a, std::int64_t b) {
    const std::int32_t ka = key(a), kb = key(b);
    return ka != kb ? ka < kb : a < b;
  });
}

// Replaces the totals of the local tiles by those of all ranks' tiles.
void FarField::exchange_estimates(float* log2_total, std::int64_t tokens) const {
  auto* const all = run_.at<float>(run_.layout.shard.far);
  const int ranks = run_.call.shard.ranks();
  float* const mine = all + run_.call.shard.rank() * tokens;
  std::copy_n(log2_total, tokens, mine);
  run_.call.shard.calls->all_gather(mine, all, static_cast<std::size_t>(tokens) * sizeof(float));
  for (std::int64_t t = 0; t < tokens; ++t)
    log2_total[t] = log2_of_sum(ranks, [&](int r) { return all[r * tokens + t]; });
}

// Determines the audited tokens of this rank, if tokens are sharded.
void FarField::choose_audited_of_ranks() {
  const auto* const counts = run_.at<std::int64_t>(run_.layout.shard.counts);
  valid_before_ = 0;
  for (int r = 0; r < run_.call.shard.rank(); ++r) valid_before_ += counts[r];
  if (all_audited_ == 0) return;
  const auto first_of = [&](std::int64_t token) {
    return ceil_div(token * all_audited_, all_valid_);
  };
  first_audited_ = first_of(valid_before_);
  audited_ = first_of(valid_before_ + run_.valid) - first_audited_;
}

void FarField::keep_audited(const ForwardChunk& chunk, const ChunkTokens& tokens) const {
  std::int64_t next = 0;
  for (std::int64_t t = 0; t < tokens.count; ++t) {
    const std::int64_t own = run_.local_of(tokens, t);
    if (own < 0) continue;
    while (next < audited_ && audited_row(next) < tokens.first + own) ++next;
    if (next == audited_) return;
    if (audited_row(next) != tokens.first + own) continue;
    run_.at<double>(run_.layout.audit.lse)[next] = value(LseState{chunk.exponent[t], chunk.sum[t]});
  }
}

void FarField::keep_hidden(const ChunkTokens& tokens, std::span<const float> rows) {
  const std::int64_t dim = run_.call.shape.dim, count = std::ssize(rows) / dim;
  auto* const norms = run_.at<double>(run_.layout.far.norm_squared);
  parallel_for(run_.plan.threads, count, [&](std::int64_t i, int) {
    double sum = 0.0;
    for (std::int64_t k = i * dim; k < (i + 1) * dim; ++k)
      sum += static_cast<double>(rows.data()[k]) * static_cast<double>(rows.data()[k]);
    norms[i] = sum;
  });
  for (std::int64_t i = 0; i < count; ++i) sums_.norm_squared += norms[i];
  for (std::int64_t a = 0; a < audited_; ++a) {
    const std::int64_t i = audited_row(a) - tokens.first;
    if (i < 0 || i >= count) continue;
    std::memcpy(run_.at<float>(run_.layout.audit.far) + a * dim, rows.data() + i * dim,
                static_cast<std::size_t>(dim) * sizeof(float));
  }
}

void FarField::exchange_bounds(const ChunkTokens& tokens) {
  auto* const all = run_.at<float>(run_.layout.shard.far);
  float* const mine = all + run_.call.shard.rank() * tokens.count;
  if (run_.empty()) {
    std::fill_n(mine, tokens.count, 0.0f);
  } else {
    std::copy_n(run_.at<float>(run_.layout.far.bound), tokens.count, mine);
  }
  run_.call.shard.calls->all_gather(mine, all,
                                    static_cast<std::size_t>(tokens.count) * sizeof(float));
  for (std::int64_t t = 0; t < tokens.count; ++t) {
    double bound = 0.0;
    for (int r = 0; r < run_.call.shard.ranks(); ++r)
      bound += static_cast<double>(all[r * tokens.count + t]);
    sums_.bound_squared += bound * bound;
    const std::int64_t own = run_.local_of(tokens, t);
    if (own >= 0) bound_.set(run_.valid_rows()[tokens.first + own], bound);
  }
}

bool FarField::holds_its_part() const {
  return !run_.sharded() ||
         logitless::holds_its_part(ceil_div(run_.vocab.rows(), kVocabTile), run_.call.shard.tiles,
                                   run_.call.shard.ranks());
}

FarFieldStatistics FarField::statistics_of_ranks() const {
  std::vector<FarSums> all(static_cast<std::size_t>(run_.call.shard.ranks()));
  run_.call.shard.calls->all_gather(&sums_, all.data(), sizeof(FarSums));
  return far_statistics_of_ranks(run_.plan, all, kVocabTile);
}

}  // namespace logitless::cpu
