#include "head/cpu/layout.h"

#include <algorithm>

#include "head/far_work.h"
#include "head/gathered_vocab.h"

namespace logitless::cpu {

ChunkSizes chunk_sizes(PlanKind kind, const PlanSizes& sizes, int threads) {
  return {.tokens = sizes.chunk_tokens,
          .block_vocab = sizes.block_vocab,
          .stored_vocab = sizes.stored_vocab,
          .threads = threads,
          .forward_only = kind == PlanKind::forward,
          .far = is_far(kind),
          .far_forward = kind == PlanKind::far_both,
          .slice_rows = sizes.slice_rows,
          .weight_vocab = sizes.weight_vocab};
}

ChunkSizes chunk_sizes(const LossPlan& plan) {
  return chunk_sizes(plan.kind, plan_sizes(plan), plan.threads);
}

std::size_t weight_sum_bytes(const HeadShape& shape, const HeadFeatures& features,
                             const ChunkSizes& sizes) {
  const bool apart = !sizes.forward_only && features.d_weight && features.gathered_rows == 0 &&
                     features.d_weight_dtype != DType::f32 && sizes.tokens < shape.tokens;
  if (!apart) return 0;
  const std::int64_t bytes = features.d_weight_dtype == DType::bf16 ? 2 : 4;
  const std::int64_t vocab_count = sizes.weight_vocab > 0 ? sizes.weight_vocab : shape.vocab;
  return static_cast<std::size_t>(round_up(vocab_count * shape.dim * bytes, 64));
}

namespace {

// Padding of per-token arrays after the last token, since kernels read coefficients by full panels:
// the size of the largest panel.
constexpr std::int64_t kPanelPadding = 64;

template <typename Take>
GatheredLayout gathered_layout(const HeadShape& shape, const HeadFeatures& features,
                               const ChunkSizes& sizes, const Take& take) {
  const std::int64_t tokens = sizes.tokens;
  const bool backward = !sizes.forward_only;
  const auto floats = [&](bool wanted) { return take(wanted ? (tokens + kPanelPadding) * 4 : 0); };
  GatheredLayout out;
  out.states = take(shape.tokens * static_cast<std::int64_t>(sizeof(TokenRecord)));
  out.places = take(tokens * features.targets_per_token * 4);
  out.outside = take(backward && features.d_hidden ? tokens * 8 : 0);
  out.exponent = floats(true);
  out.sum = floats(true);
  out.alpha = floats(backward);
  out.beta = floats(backward && features.entropy_gradient);
  out.gamma = floats(backward && features.label_smoothing);
  out.entropy = take(features.entropy ? tokens * 8 : 0);
  out.weighted = take(features.label_smoothing ? tokens * 8 : 0);
  out.argmax = take(features.argmax ? tokens * 4 : 0);
  out.best = take(features.argmax ? tokens * 4 : 0);
  out.wide = take(tokens * static_cast<std::int64_t>(sizeof(ExactSum)));
  out.logit_weights = take(features.vocab_weight ? sizes.slice_rows * 4 : 0);
  const auto ranks = static_cast<std::int64_t>(features.vocab_ranks);
  const auto of_slice =
      static_cast<std::int64_t>(slice_layout(shape, features, sizes.slice_rows, true).bytes);
  const auto of_sums =
      static_cast<std::int64_t>(slice_sums(shape, features, sizes.slice_rows).bytes);
  out.slice = take(ranks * std::max(of_slice, backward ? of_sums : 0));
  out.received = out.slice;
  out.sums = take(backward ? ranks * of_sums : 0);
  out.whole = take(static_cast<std::int64_t>(full_slice(shape, features, sizes.slice_rows).bytes));
  out.full_sums = take(
      backward ? static_cast<std::int64_t>(full_sums(shape, features, sizes.slice_rows).bytes) : 0);
  const bool apart = backward && features.d_hidden && features.d_hidden_dtype != DType::f32;
  out.d_hidden = take(apart ? shape.tokens * shape.dim * 4 : 0);
  return out;
}

}  // namespace

Layout layout_of(const HeadKernel& kernel, const HeadShape& shape, const HeadFeatures& features,
                 const ChunkSizes& sizes, std::int64_t audited) {
  Layout out;
  out.sizes = sizes;
  std::size_t top = 0;
  const auto take = [&](std::int64_t bytes) {
    const std::size_t at = top;
    top += static_cast<std::size_t>(round_up(bytes, 64));
    return at;
  };
  const bool gathered = features.gathered_rows > 0;
  const std::int64_t tokens = gathered ? shape.tokens : sizes.tokens;
  const std::int64_t slots = tokens * features.targets_per_token;
  const std::int64_t chunk_slots = sizes.tokens * features.targets_per_token;
  const std::int64_t vocab_count = gathered ? sizes.slice_rows : shape.vocab;  // of one kernel call
  const bool backward = !sizes.forward_only;
  out.rows = take(shape.tokens * 8);

  out.sum = take(tokens * 4);
  out.exponent = take((tokens + kPanelPadding) * 4);
  out.alpha = take(backward ? (tokens + kPanelPadding) * 4 : 0);
  out.beta = take(backward && features.entropy_gradient ? (tokens + kPanelPadding) * 4 : 0);
  out.gamma = take(backward && features.label_smoothing ? (tokens + kPanelPadding) * 4 : 0);
  out.entropy = take(features.entropy ? tokens * 8 : 0);
  out.weighted = take(features.label_smoothing ? tokens * 8 : 0);
  out.argmax = take(features.argmax ? tokens * 4 : 0);
  out.target_logit = take(slots * 4);
  out.coefficient = take(backward ? slots * 4 : 0);
  out.vocab_ids = take(slots * 4);
  out.entries = take(chunk_slots * static_cast<std::int64_t>(sizeof(SparseEntry)));
  out.tile_begin = take((ceil_div(vocab_count, kVocabTile) + 1) * 4);
  out.delta = take(features.targets_per_token * 8);
  out.bias = take(features.bias && !gathered ? shape.vocab * 4 : 0);
  out.logit_weights = take(features.vocab_weight ? shape.vocab * 4 : 0);
  out.d_bias = take(backward && features.d_bias && !gathered ? shape.vocab * 4 : 0);
  out.d_weight = take(static_cast<std::int64_t>(weight_sum_bytes(shape, features, sizes)));
  if (sizes.weight_vocab > 0) {
    const std::int64_t all = shape.tokens * features.targets_per_token;
    out.saved.exponent = take(shape.tokens * 4);
    out.saved.alpha = take(shape.tokens * 4);
    out.saved.beta = take(features.entropy_gradient ? shape.tokens * 4 : 0);
    out.saved.gamma = take(features.label_smoothing ? shape.tokens * 4 : 0);
    out.saved.coefficient = take(all * 4);
    out.saved.vocab_ids = take(all * 4);
    out.saved.places = take(chunk_slots * 4);
  }
  if (sizes.far) {
    const std::int64_t tiles = ceil_div(shape.vocab, kVocabTile);
    out.far.positions = take(slots * 4);
    out.far.centroid =
        take(tiles * shape.dim * static_cast<std::int64_t>(size_of(kernel.far_dtype)));
    out.far.radius = take(tiles * 4);
    out.far.centroid_norm = take(tiles * 4);
    out.far.weighted_total = take(features.label_smoothing ? shape.dim * 4 : 0);
    if (sizes.far_forward) {
      const auto e = static_cast<std::int64_t>(size_of(kernel.far_dtype));
      const std::int64_t narrow = kernel.far_dtype == DType::f32 ? 0 : e;
      out.far.mean = take(tiles * shape.dim * e);
      out.far.log2_base = take(tiles * 4);
      out.far.axes = take(shape.dim * shape.dim * narrow);
      out.far.variance = take(tiles * shape.dim * narrow);
    }
    out.far.log2_total = take((tokens + kPanelPadding) * 4);
    out.far.bound = take(tokens * 4);
    out.far.norm_squared = take(tokens * 8);
    out.far.keys = take(tokens * 4);
    out.far.from = take(tokens * 4);
    out.far.scratch = take(std::max({sizes.threads * tokens * 4, slots * 4, tokens * 8}));
    out.audit.row = take(audited > 0 ? tokens * 4 : 0);
    out.audit.far = take(audited * shape.dim * 4);
    out.audit.exact = take(audited * shape.dim * 4);
    out.audit.lse = take(audited * 8);
    out.audit.rows = take(2 * audited * 8);
  }
  if (gathered) {
    out.shard.counts = take(features.vocab_ranks * 8);
    out.gathered = gathered_layout(shape, features, sizes, take);
  } else if (features.vocab_ranks > 0) {
    const std::int64_t ranks = features.vocab_ranks;
    const std::int64_t of_rank = ceil_div(tokens, ranks);
    const std::int64_t all = ranks * of_rank;
    const std::int64_t per_token = features.targets_per_token;
    out.shard.counts = take(ranks * 8);
    out.shard.place = take(tokens * 8);
    out.shard.rows = take(slots * 4);
    out.shard.best = take(features.argmax ? tokens * 4 : 0);
    out.shard.wide = take(tokens * static_cast<std::int64_t>(sizeof(ExactSum)));
    out.shard.records = take(ranks * (tokens * static_cast<std::int64_t>(sizeof(TokenRecord)) +
                                      slots * static_cast<std::int64_t>(sizeof(ShardTarget))));
    if (features.tokens_sharded) {
      out.shard.hidden = take(all * shape.dim * static_cast<std::int64_t>(size_of(shape.dtype)));
      out.shard.vocab_ids = take(all * per_token * 4);
      out.shard.token_coefficients = take(
          backward
              ? all * (static_cast<std::int64_t>(sizeof(TokenCoefficientsRecord)) + per_token * 8)
              : 0);
    }
    out.shard.far = take(sizes.far ? ranks * tokens * 4 : 0);
    const bool d_hidden = backward && features.d_hidden;
    out.shard.slices = take(d_hidden ? all * shape.dim * 4 : 0);
    out.shard.received = take(d_hidden ? all * shape.dim * 4 : 0);
  }
  HeadShape call = shape;
  call.vocab = vocab_count;
  out.scratch = take(static_cast<std::int64_t>(kernel.scratch_bytes(call, features, sizes)));
  out.total = top;
  return out;
}

Layout layout_of(const LossPlan& plan) {
  return layout_of(find_head_kernel(plan.kernel), plan.shape, plan.features, chunk_sizes(plan),
                   plan.audit != nullptr ? plan.audit->shape.tokens : 0);
}

}  // namespace logitless::cpu
