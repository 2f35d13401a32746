// Sorts a chunk's tokens by the tiles that they select, so that blocks have similar selections.
// Each rank of a sharded vocabulary has its own order; exchanges use the order of the chunk.
#include <algorithm>
#include <numeric>

#include "head/cpu/far_field.h"

namespace logitless::cpu {

template <typename T>
void FarField::move(T* values, std::int64_t tokens, Way way, std::int64_t each) const {
  const auto* const from = run_.at<std::int32_t>(run_.layout.far.from);
  auto* const old = run_.at<T>(run_.layout.far.scratch);
  std::copy_n(values, tokens * each, old);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t to = way == Way::to_blocks ? t : from[t];
    const std::int64_t of = way == Way::to_blocks ? from[t] : t;
    std::copy_n(old + of * each, each, values + to * each);
  }
}
template void FarField::move(float*, std::int64_t, Way, std::int64_t) const;
template void FarField::move(double*, std::int64_t, Way, std::int64_t) const;

// Moves the tokens' rows, their token ids, and the targets that follow from these.
void FarField::move_rows(const ChunkCommon& chunk, std::int64_t first, Way way) const {
  if (!run_.call.shard.tokens_sharded)
    move(run_.at<std::int64_t>(run_.layout.rows) + first, chunk.tokens, way);
  if (run_.sharded()) move(run_.at<std::int64_t>(run_.layout.shard.place), chunk.tokens, way);
  move(run_.at<std::int32_t>(run_.layout.vocab_ids), chunk.tokens, way,
       run_.plan.features.targets_per_token);
  run_.sort_chunk_targets(chunk);
}

// Sorts by masses of the forward, given `alpha`, or by estimates. Moves rows, targets and masses;
// the caller moves other per-token data.
void FarField::sort_by_tiles(const ChunkCommon& chunk, std::int64_t first, const float* alpha,
                             const float* caution) const {
  FarKeys keys;
  static_cast<ChunkCommon&>(keys) = chunk;
  keys.tau = run_.plan.tau;
  keys.alpha = alpha;
  keys.caution = caution;
  keys.log2_total = run_.at<float>(run_.layout.far.log2_total);
  keys.keys = run_.at<std::int32_t>(run_.layout.far.keys);
  run_.kernel.far_keys(keys);
  auto* const from = run_.at<std::int32_t>(run_.layout.far.from);
  std::iota(from, from + chunk.tokens, 0);
  std::stable_sort(from, from + chunk.tokens,
                   [&](std::int32_t a, std::int32_t b) { return keys.keys[a] < keys.keys[b]; });
  move_rows(chunk, first, Way::to_blocks);
  FarMove masses;
  static_cast<ChunkCommon&>(masses) = chunk;
  masses.from = from;
  masses.scratch = run_.at<float>(run_.layout.far.scratch);
  run_.kernel.far_move(masses);
}

// Orders the blocks before the backward. far_both has chosen them in its forward, but on several
// ranks its tokens are back in the common order.
void FarField::order_blocks(const BackwardChunk& chunk, std::int64_t first) const {
  const bool chosen = run_.plan.kind == PlanKind::far_both;
  if (chosen && !run_.sharded()) return;
  chosen ? move_rows(chunk, first, Way::to_blocks)
         : sort_by_tiles(chunk, first, chunk.alpha, nullptr);
  for (const std::size_t of :
       {run_.layout.exponent, run_.layout.sum, run_.layout.alpha, run_.layout.far.log2_total})
    move(run_.at<float>(of), chunk.tokens, Way::to_blocks);
  if (chunk.gamma != nullptr) move(run_.at<float>(run_.layout.gamma), chunk.tokens, Way::to_blocks);
  for (const std::size_t of : {run_.layout.target_logit, run_.layout.coefficient})
    move(run_.at<float>(of), chunk.tokens, Way::to_blocks, run_.plan.features.targets_per_token);
}

}  // namespace logitless::cpu
