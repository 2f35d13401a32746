#include "head/workspace.h"

#include "head/far_field.h"
#include "head/plan_contents.h"

namespace logitless {

WorkspaceLayout layout_workspace(const HeadKernel& kernel, const HeadShape& shape,
                                 const HeadFeatures& features, const ChunkSizes& sizes,
                                 std::int64_t audited) {
  WorkspaceLayout out;
  std::size_t top = 0;
  const auto take = [&](std::int64_t bytes) {
    const std::size_t at = top;
    top += static_cast<std::size_t>(round_up(bytes, 64));
    return at;
  };
  const std::int64_t tokens = sizes.tokens;
  const std::int64_t slots = tokens * features.targets_per_token;
  const bool backward = !sizes.forward_only;
  out.rows = take(shape.tokens * 8);

  out.sum = take(tokens * 4);
  // Kernels read coefficients by whole panels: room for the largest panel beyond the last token.
  constexpr std::int64_t kPanelRoom = 64;
  out.exponent = take((tokens + kPanelRoom) * 4);
  out.linear = take(backward ? (tokens + kPanelRoom) * 4 : 0);
  out.slope = take(backward && features.entropy_gradient ? (tokens + kPanelRoom) * 4 : 0);
  out.flat = take(backward && features.label_smoothing ? (tokens + kPanelRoom) * 4 : 0);
  out.entropy = take(features.entropy ? tokens * 8 : 0);
  out.weighted = take(features.label_smoothing ? tokens * 8 : 0);
  out.argmax = take(features.argmax ? tokens * 4 : 0);
  out.target_logit = take(slots * 4);
  out.coefficient = take(backward ? slots * 4 : 0);
  out.words = take(slots * 4);
  out.entries = take(slots * static_cast<std::int64_t>(sizeof(SparseEntry)));
  out.tile_begin = take((ceil_div(shape.vocab, kVocabTile) + 1) * 4);
  out.delta = take(features.targets_per_token * 8);
  out.bias = take(features.bias ? shape.vocab * 4 : 0);
  out.omega = take(features.vocab_weight ? shape.vocab * 4 : 0);
  out.d_bias = take(backward && features.d_bias ? shape.vocab * 4 : 0);
  out.d_weight = take(static_cast<std::int64_t>(weight_sum_bytes(shape, features, sizes)));
  if (sizes.far) {
    const std::int64_t tiles = ceil_div(shape.vocab, kVocabTile);
    out.positions = take(slots * 4);
    out.centroid = take(tiles * shape.dim * static_cast<std::int64_t>(size_of(kernel.far_dtype)));
    out.radius = take(tiles * 4);
    out.centroid_norm = take(tiles * 4);
    out.weighted_total = take(features.label_smoothing ? shape.dim * 4 : 0);
    if (sizes.far_forward) {
      const auto e = static_cast<std::int64_t>(size_of(kernel.far_dtype));
      const std::int64_t narrow = kernel.far_dtype == DType::f32 ? 0 : e;
      out.mean = take(tiles * shape.dim * e);
      out.log2_base = take(tiles * 4);
      out.axes = take(shape.dim * shape.dim * narrow);
      out.variance = take(tiles * shape.dim * narrow);
    }
    out.log2_total = take((tokens + kPanelRoom) * 4);
    out.bound = take(tokens * 4);
    out.norm_squared = take(tokens * 8);
    out.audit_row = take(audited > 0 ? tokens * 4 : 0);
    out.audit = take(audited * shape.dim * 4);
    out.audit_exact = take(audited * shape.dim * 4);
    out.audit_lse = take(audited * 8);
    out.audit_rows = take(2 * audited * 8);
  }
  out.scratch = take(static_cast<std::int64_t>(kernel.scratch_bytes(shape, features, sizes)));
  out.total = top;
  return out;
}

ChunkSizes sizes_of(const LossPlan& plan) {
  return {plan.chunk_tokens,
          plan.slab_vocab,
          plan.stored_vocab,
          plan.threads,
          plan.kind == PlanKind::forward,
          is_far(plan.kind),
          plan.kind == PlanKind::far_both};
}

}  // namespace logitless
