#include "head/cpu/far_field.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "head/cpu/engine.h"
#include "kernels/cpu_tensor.h"
#include "math/lse_state.h"

namespace logitless::cpu {

TilePoints FarField::tile_points() const {
  TilePoints points;
  points.share = run_.call.far.order->share().data();
  points.centroid = run_.at<std::byte>(run_.layout.far.centroid);
  points.radius = run_.at<float>(run_.layout.far.radius);
  points.centroid_norm = run_.at<float>(run_.layout.far.centroid_norm);
  if (run_.plan.features.label_smoothing)
    points.weighted_total = run_.at<float>(run_.layout.far.weighted_total);
  if (run_.plan.kind != PlanKind::far_both) return points;
  points.mean = run_.at<std::byte>(run_.layout.far.mean);
  points.log2_base = run_.at<float>(run_.layout.far.log2_base);
  const VocabOrder& order = *run_.call.far.order;
  const bool narrow = run_.kernel.far_dtype != DType::f32;
  points.axes = narrow ? static_cast<const void*>(run_.at<std::byte>(run_.layout.far.axes))
                       : order.axes().data();
  points.variance = narrow ? static_cast<const void*>(run_.at<std::byte>(run_.layout.far.variance))
                           : order.variance().data();
  points.log2_caution = order.log2_caution().data();
  return points;
}

void FarField::begin(std::int64_t all_valid) {
  sums_ = {};
  all_valid_ = all_valid;
  if (run_.sharded()) require_common_order();
  if (!run_.empty()) {
    FarPrepare prepare;
    run_.set_common(prepare, {});
    prepare.points = tile_points();
    run_.kernel.far_prepare(prepare);
  }
  if (run_.plan.kind == PlanKind::far_both && run_.kernel.far_dtype != DType::f32) {
    const VocabOrder& order = *run_.call.far.order;
    from_f32(run_.kernel.far_dtype, order.axes().data(), run_.at<std::byte>(run_.layout.far.axes),
             static_cast<std::int64_t>(order.axes().size()));
    from_f32(run_.kernel.far_dtype, order.variance().data(),
             run_.at<std::byte>(run_.layout.far.variance),
             static_cast<std::int64_t>(order.variance().size()));
  }
  // Tokens with the same target are similar, and blocks of similar tokens select fewer tiles (8.1 %
  // instead of 9.4 % for a real head; docs/use/far_field.md). Several ranks use the concatenation
  // of their orders.
  const auto places =
      run_.sharded() ? run_.call.far.order->places() : run_.call.far.order->positions();
  const auto place = [&](std::int64_t row) {
    const std::int64_t vocab_id = run_.targets.vocab_id(row, 0);
    return vocab_id < 0 ? std::int32_t{-1} : places[vocab_id];
  };
  auto* valid = run_.at<std::int64_t>(run_.layout.rows);
  std::sort(valid, valid + run_.valid, [&](std::int64_t a, std::int64_t b) {
    const std::int32_t at = place(a), bt = place(b);
    return at != bt ? at < bt : a < b;
  });
  if (run_.plan.audit == nullptr) return;
  all_audited_ = std::min(run_.plan.audit->shape.tokens, all_valid_);
  audited_ = all_audited_;
  if (run_.call.shard.tokens_sharded) choose_audited_of_ranks();
}

// Audited tokens are evenly spaced over the valid tokens of all ranks, concatenated by rank.
std::int64_t FarField::audited_row(std::int64_t i) const {
  return (first_audited_ + i) * all_valid_ / all_audited_ - valid_before_;
}

void FarField::forward(const ForwardChunk& forward, std::int64_t first) const {
  FarForwardChunk chunk;
  static_cast<ForwardChunk&>(chunk) = forward;
  chunk.log2_total = run_.at<float>(run_.layout.far.log2_total);
  chunk.tau = run_.plan.tau;
  chunk.most_selected = kMaxSelected;
  if (!run_.empty()) {
    chunk.points = tile_points();
    run_.kernel.far_estimate(chunk);
  } else {
    std::fill_n(chunk.log2_total, chunk.tokens, -INFINITY);
  }
  if (run_.sharded()) exchange_estimates(chunk.log2_total, chunk.tokens);
  if (run_.empty()) return forward_nothing(forward);
  sort_by_tiles(forward, first, nullptr, chunk.points.log2_caution);
  move(chunk.log2_total, chunk.tokens, Way::to_blocks);
  run_.kernel.far_forward(chunk);
  if (!run_.sharded()) return;
  // Ranks exchange data of tokens in their common order.
  move_rows(forward, first, Way::back);
  for (float* const of : {chunk.exponent, chunk.sum, chunk.log2_total})
    move(of, chunk.tokens, Way::back);
  move(chunk.target_logit, chunk.tokens, Way::back, run_.plan.features.targets_per_token);
  if (chunk.weighted_sum != nullptr) move(chunk.weighted_sum, chunk.tokens, Way::back);
}

void FarField::backward(const BackwardChunk& backward, std::int64_t first) {
  FarBackwardChunk chunk;
  static_cast<BackwardChunk&>(chunk) = backward;
  chunk.points = tile_points();
  chunk.preselected = run_.plan.kind == PlanKind::far_both;
  chunk.tau = run_.plan.tau;
  chunk.log2_total = run_.at<float>(run_.layout.far.log2_total);
  chunk.target_logit = run_.at<float>(run_.layout.target_logit);
  if (run_.plan.features.d_weight || run_.plan.features.d_bias) {
    chunk.sample = FarSample(run_.plan.sample_every, run_.call.far.sample_seed, first);
    chunk.sample.first_tile = run_.call.shard.first_tile;
  }
  chunk.most_selected = kMaxSelected;
  chunk.bound = run_.at<float>(run_.layout.far.bound);
  chunk.norm_squared = run_.at<double>(run_.layout.far.norm_squared);
  std::int64_t selected = 0, sampled = 0, pairs = 0;
  chunk.selected = &selected;
  chunk.sampled = &sampled;
  chunk.pairs = &pairs;
  chunk.of_sample = &sums_.of_sample;
  order_blocks(backward, first);
  if (audited_ > 0 && !run_.sharded()) {
    auto* audit_row = run_.at<std::int32_t>(run_.layout.audit.row);
    std::fill_n(audit_row, chunk.tokens, -1);
    for (std::int64_t i = 0; i < audited_; ++i) {
      const std::int64_t token = audited_row(i) - first;
      if (token < 0 || token >= chunk.tokens) continue;
      audit_row[token] = static_cast<std::int32_t>(i);
      // The audit compares lse in double, as the token function receives it.
      run_.at<double>(run_.layout.audit.lse)[i] =
          value(LseState{chunk.exponent[token], run_.at<float>(run_.layout.sum)[token]});
    }
    chunk.audit_row = audit_row;
    chunk.audit = run_.at<float>(run_.layout.audit.far);
  }
  run_.kernel.far_backward(chunk);
  sums_.selected += selected;
  sums_.sampled += sampled;
  sums_.pairs += pairs;
  if (selected == pairs && holds_its_part()) ++sums_.fallback;
  if (run_.sharded()) {
    move_rows(backward, first, Way::back);
    move(chunk.bound, chunk.tokens, Way::back);
    return;
  }
  for (std::int64_t t = 0; t < chunk.tokens; ++t) {
    const double bound = static_cast<double>(chunk.bound[t]);
    sums_.bound_squared += bound * bound;
    if (chunk.d_hidden.data != nullptr) sums_.norm_squared += chunk.norm_squared[t];
    bound_.set(run_.valid_rows()[first + t], bound);
  }
}

FarFieldStatistics FarField::statistics() const {
  return run_.sharded() ? statistics_of_ranks()
                        : logitless::far_statistics(run_.plan, sums_, kVocabTile);
}

void FarField::audit(TokenFunction function) {
  if (all_audited_ == 0) return;
  const std::int64_t dim = run_.call.shape.dim;
  const std::int64_t capacity = run_.plan.audit->shape.tokens;
  // The audited rows are those of the order that all chunks have now.
  auto* rows = run_.at<std::int64_t>(run_.layout.audit.rows);
  for (std::int64_t i = 0; i < audited_; ++i) {
    rows[i] = run_.valid_rows()[audited_row(i)];
    rows[capacity + i] = i;
  }
  const std::int64_t sizes[] = {capacity, dim};
  auto* exact = run_.at<float>(run_.layout.audit.exact);
  const Workspace workspace(run_.at<std::byte>(run_.layout.total),
                            run_.plan.audit->workspace_bytes());
  HeadCall call = run_.call;
  call.plan = run_.plan.audit.get();
  call.workspace = &workspace;
  call.shape.tokens = audited_;
  call.features = run_.plan.audit->features;
  call.gradients = {};
  call.gradients.d_hidden = TensorView(exact, DType::f32, sizes);
  call.far = {};
  auto* lse = run_.at<double>(run_.layout.audit.lse);
  std::int64_t next = 0;
  Engine(call, {{rows, static_cast<std::size_t>(audited_)}, rows + capacity})
      .run([&](const TokenResult& r, TokenCoefficients& token_coefficients) {
        const double off = lse[next++] - r.lse;
        sums_.lse_error_squared += off * off;
        const double size = std::fabs(off);
        if (size > sums_.lse_error_max || std::isnan(size)) sums_.lse_error_max = size;
        function(r, token_coefficients);
      });

  const float* far = run_.at<float>(run_.layout.audit.far);
  for (std::int64_t i = 0; i < audited_ * dim; ++i) {
    const double e = static_cast<double>(exact[i]);
    const double difference = static_cast<double>(far[i]) - e;
    sums_.audit_error_squared += difference * difference;
    sums_.audit_norm_squared += e * e;
  }
  sums_.audited = audited_;
}

}  // namespace logitless::cpu
