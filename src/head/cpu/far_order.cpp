// Sorts a chunk's tokens by the tiles that they select, so that blocks have similar selections.
// Each rank of a sharded vocabulary has its own order; exchanges use the order of the chunk.
#include <algorithm>
#include <numeric>

#include "head/cpu/engine.h"

namespace logitless::cpu {

template <typename T>
void Engine::move(T* values, std::int64_t tokens, Way way, std::int64_t each) const {
  const auto* const from = at<std::int32_t>(layout_.far.from);
  auto* const old = at<T>(layout_.far.scratch);
  std::copy_n(values, tokens * each, old);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t to = way == Way::to_blocks ? t : from[t];
    const std::int64_t of = way == Way::to_blocks ? from[t] : t;
    std::copy_n(old + of * each, each, values + to * each);
  }
}
template void Engine::move(float*, std::int64_t, Way, std::int64_t) const;
template void Engine::move(double*, std::int64_t, Way, std::int64_t) const;

// Moves the tokens' rows, their token ids, and the targets that follow from these.
void Engine::move_rows(const ChunkCommon& chunk, std::int64_t first, Way way) const {
  if (!call_.shard.tokens_sharded) move(at<std::int64_t>(layout_.rows) + first, chunk.tokens, way);
  if (sharded()) move(at<std::int64_t>(layout_.shard.place), chunk.tokens, way);
  move(at<std::int32_t>(layout_.vocab_ids), chunk.tokens, way, plan_.features.targets_per_token);
  sort_chunk_targets(chunk);
}

// Sorts by masses of the forward, given `alpha`, or by estimates. Moves rows, targets and masses;
// the caller moves other per-token data.
void Engine::sort_by_tiles(const ChunkCommon& chunk, std::int64_t first, const float* alpha,
                           const float* caution) const {
  FarKeys keys;
  static_cast<ChunkCommon&>(keys) = chunk;
  keys.tau = plan_.tau;
  keys.alpha = alpha;
  keys.caution = caution;
  keys.log2_total = at<float>(layout_.far.log2_total);
  keys.keys = at<std::int32_t>(layout_.far.keys);
  kernel_.far_keys(keys);
  auto* const from = at<std::int32_t>(layout_.far.from);
  std::iota(from, from + chunk.tokens, 0);
  std::stable_sort(from, from + chunk.tokens,
                   [&](std::int32_t a, std::int32_t b) { return keys.keys[a] < keys.keys[b]; });
  move_rows(chunk, first, Way::to_blocks);
  FarMove masses;
  static_cast<ChunkCommon&>(masses) = chunk;
  masses.from = from;
  masses.scratch = at<float>(layout_.far.scratch);
  kernel_.far_move(masses);
}

// Orders the blocks before the backward. far_both has chosen them in its forward, but on several
// ranks its tokens are back in the common order.
void Engine::order_blocks(const BackwardChunk& chunk, std::int64_t first) const {
  const bool chosen = plan_.kind == PlanKind::far_both;
  if (chosen && !sharded()) return;
  chosen ? move_rows(chunk, first, Way::to_blocks)
         : sort_by_tiles(chunk, first, chunk.alpha, nullptr);
  for (const std::size_t of :
       {layout_.exponent, layout_.sum, layout_.alpha, layout_.far.log2_total})
    move(at<float>(of), chunk.tokens, Way::to_blocks);
  if (chunk.gamma != nullptr) move(at<float>(layout_.gamma), chunk.tokens, Way::to_blocks);
  for (const std::size_t of : {layout_.target_logit, layout_.coefficient})
    move(at<float>(of), chunk.tokens, Way::to_blocks, plan_.features.targets_per_token);
}

}  // namespace logitless::cpu
