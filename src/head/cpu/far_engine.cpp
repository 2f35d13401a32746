#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "head/cpu/engine.h"
#include "kernels/cpu_tensor.h"
#include "math/lse_state.h"

namespace logitless::cpu {

TilePoints Engine::tile_points() const {
  TilePoints points;
  points.share = call_.far.order->share().data();
  points.centroid = at<std::byte>(layout_.far.centroid);
  points.radius = at<float>(layout_.far.radius);
  points.centroid_norm = at<float>(layout_.far.centroid_norm);
  if (plan_.features.label_smoothing) points.weighted_total = at<float>(layout_.far.weighted_total);
  if (plan_.kind != PlanKind::far_both) return points;
  points.mean = at<std::byte>(layout_.far.mean);
  points.log2_base = at<float>(layout_.far.log2_base);
  const VocabOrder& order = *call_.far.order;
  const bool narrow = kernel_.far_dtype != DType::f32;
  points.axes =
      narrow ? static_cast<const void*>(at<std::byte>(layout_.far.axes)) : order.axes().data();
  points.variance = narrow ? static_cast<const void*>(at<std::byte>(layout_.far.variance))
                           : order.variance().data();
  points.log2_caution = order.log2_caution().data();
  return points;
}

// Prepares data shared by all chunks: tile centroids and the tokens to audit.
void Engine::start_far() {
  far_sums_ = {};
  if (sharded()) require_common_order();
  if (!empty()) {
    FarPrepare prepare;
    set_common(prepare, {});
    prepare.points = tile_points();
    kernel_.far_prepare(prepare);
  }
  if (plan_.kind == PlanKind::far_both && kernel_.far_dtype != DType::f32) {
    const VocabOrder& order = *call_.far.order;
    from_f32(kernel_.far_dtype, order.axes().data(), at<std::byte>(layout_.far.axes),
             static_cast<std::int64_t>(order.axes().size()));
    from_f32(kernel_.far_dtype, order.variance().data(), at<std::byte>(layout_.far.variance),
             static_cast<std::int64_t>(order.variance().size()));
  }
  // Tokens with the same target are similar, and blocks of similar tokens select fewer tiles (8.1 %
  // instead of 9.4 % for a real head; docs/far_field.md). Several ranks use the concatenation of
  // their orders.
  const auto places = sharded() ? call_.far.order->places() : call_.far.order->positions();
  const auto place = [&](std::int64_t row) {
    const std::int64_t vocab_id = targets_.vocab_id(row, 0);
    return vocab_id < 0 ? std::int32_t{-1} : places[vocab_id];
  };
  auto* valid = at<std::int64_t>(layout_.rows);
  std::sort(valid, valid + valid_, [&](std::int64_t a, std::int64_t b) {
    const std::int32_t at = place(a), bt = place(b);
    return at != bt ? at < bt : a < b;
  });
  if (plan_.audit == nullptr) return;
  all_audited_ = std::min(plan_.audit->shape.tokens, all_valid_);
  audited_ = all_audited_;
  if (call_.shard.tokens_sharded) choose_audited_of_ranks();
}

// Audited tokens are evenly spaced over the valid tokens of all ranks, concatenated by rank.
std::int64_t Engine::audited_row(std::int64_t i) const {
  return (first_audited_ + i) * all_valid_ / all_audited_ - valid_before_;
}

void Engine::far_forward(const ForwardChunk& forward, std::int64_t first) const {
  FarForwardChunk chunk;
  static_cast<ForwardChunk&>(chunk) = forward;
  chunk.log2_total = at<float>(layout_.far.log2_total);
  chunk.tau = plan_.tau;
  chunk.most_selected = kMaxSelected;
  if (!empty()) {
    chunk.points = tile_points();
    kernel_.far_estimate(chunk);
  } else {
    std::fill_n(chunk.log2_total, chunk.tokens, -INFINITY);
  }
  if (sharded()) exchange_estimates(chunk.log2_total, chunk.tokens);
  if (empty()) return forward_nothing(forward);
  sort_by_tiles(forward, first, nullptr, chunk.points.log2_caution);
  move(chunk.log2_total, chunk.tokens, Way::to_blocks);
  kernel_.far_forward(chunk);
  if (!sharded()) return;
  // Ranks exchange data of tokens in their common order.
  move_rows(forward, first, Way::back);
  for (float* const of : {chunk.exponent, chunk.sum, chunk.log2_total})
    move(of, chunk.tokens, Way::back);
  move(chunk.target_logit, chunk.tokens, Way::back, plan_.features.targets_per_token);
  if (chunk.weighted_sum != nullptr) move(chunk.weighted_sum, chunk.tokens, Way::back);
}

void Engine::far_backward(const BackwardChunk& backward, std::int64_t first) {
  FarBackwardChunk chunk;
  static_cast<BackwardChunk&>(chunk) = backward;
  chunk.points = tile_points();
  chunk.preselected = plan_.kind == PlanKind::far_both;
  chunk.tau = plan_.tau;
  chunk.log2_total = at<float>(layout_.far.log2_total);
  chunk.target_logit = at<float>(layout_.target_logit);
  if (plan_.features.d_weight || plan_.features.d_bias) {
    chunk.sample = FarSample(plan_.sample_every, call_.far.sample_seed, first);
    chunk.sample.first_tile = call_.shard.first_tile;
  }
  chunk.most_selected = kMaxSelected;
  chunk.bound = at<float>(layout_.far.bound);
  chunk.norm_squared = at<double>(layout_.far.norm_squared);
  std::int64_t selected = 0, sampled = 0, pairs = 0;
  chunk.selected = &selected;
  chunk.sampled = &sampled;
  chunk.pairs = &pairs;
  chunk.of_sample = &far_sums_.of_sample;
  order_blocks(backward, first);
  if (audited_ > 0 && !sharded()) {
    auto* audit_row = at<std::int32_t>(layout_.audit.row);
    std::fill_n(audit_row, chunk.tokens, -1);
    for (std::int64_t i = 0; i < audited_; ++i) {
      const std::int64_t token = audited_row(i) - first;
      if (token < 0 || token >= chunk.tokens) continue;
      audit_row[token] = static_cast<std::int32_t>(i);
      // The audit compares lse in double, as the token function receives it.
      at<double>(layout_.audit.lse)[i] =
          value(LseState{chunk.exponent[token], at<float>(layout_.sum)[token]});
    }
    chunk.audit_row = audit_row;
    chunk.audit = at<float>(layout_.audit.far);
  }
  kernel_.far_backward(chunk);
  far_sums_.selected += selected;
  far_sums_.sampled += sampled;
  far_sums_.pairs += pairs;
  if (selected == pairs && holds_its_part()) ++far_sums_.fallback;
  if (sharded()) {
    move_rows(backward, first, Way::back);
    move(chunk.bound, chunk.tokens, Way::back);
    return;
  }
  for (std::int64_t t = 0; t < chunk.tokens; ++t) {
    const double bound = static_cast<double>(chunk.bound[t]);
    far_sums_.bound_squared += bound * bound;
    if (chunk.d_hidden.data != nullptr) far_sums_.norm_squared += chunk.norm_squared[t];
    bound_.set(valid_rows()[first + t], bound);
  }
}

FarFieldStatistics Engine::far_statistics() const {
  if (!far()) return {};
  return sharded() ? statistics_of_ranks()
                   : logitless::far_statistics(plan_, far_sums_, kVocabTile);
}

void Engine::audit(TokenFunction function) {
  if (all_audited_ == 0) return;
  const std::int64_t dim = call_.shape.dim;
  const std::int64_t capacity = plan_.audit->shape.tokens;
  // The audited rows are those of the order that all chunks have now.
  auto* rows = at<std::int64_t>(layout_.audit.rows);
  for (std::int64_t i = 0; i < audited_; ++i) {
    rows[i] = valid_rows()[audited_row(i)];
    rows[capacity + i] = i;
  }
  const std::int64_t sizes[] = {capacity, dim};
  auto* exact = at<float>(layout_.audit.exact);
  const Workspace workspace(at<std::byte>(layout_.total), plan_.audit->workspace_bytes());
  HeadCall call = call_;
  call.plan = plan_.audit.get();
  call.workspace = &workspace;
  call.shape.tokens = audited_;
  call.features = plan_.audit->features;
  call.gradients = {};
  call.gradients.d_hidden = TensorView(exact, DType::f32, sizes);
  call.far = {};
  auto* lse = at<double>(layout_.audit.lse);
  std::int64_t next = 0;
  FarSums& sums = far_sums_;
  Engine(call, {{rows, static_cast<std::size_t>(audited_)}, rows + capacity})
      .run([&](const TokenResult& r, TokenCoefficients& token_coefficients) {
        const double off = lse[next++] - r.lse;
        sums.lse_error_squared += off * off;
        const double size = std::fabs(off);
        if (size > sums.lse_error_max || std::isnan(size)) sums.lse_error_max = size;
        function(r, token_coefficients);
      });

  const float* far = at<float>(layout_.audit.far);
  for (std::int64_t i = 0; i < audited_ * dim; ++i) {
    const double e = static_cast<double>(exact[i]);
    const double difference = static_cast<double>(far[i]) - e;
    sums.audit_error_squared += difference * difference;
    sums.audit_norm_squared += e * e;
  }
  sums.audited = audited_;
}

}  // namespace logitless::cpu
