#include "head/cpu/engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/check.h"
#include "core/parallel.h"
#include "math/lse_state.h"

namespace logitless::cpu {
namespace {

// Copies `count` elements of a vector as contiguous floats; element j is read at index `place(j)`.
template <typename Place>
const float* as_floats(const ConstTensorView& view, std::int64_t count, const Place& place,
                       float* to) {
  if (!view.defined()) return nullptr;
  for (std::int64_t j = 0; j < count; ++j) {
    to[j] = static_cast<float>(load_element(view.data(), view.dtype(), place(j) * view.stride(0)));
  }
  return to;
}

MatrixRows matrix(std::string_view name, const ConstTensorView& view, const std::int64_t* rows) {
  const RowMatrix m = as_rows(name, view);
  return {view.data(), view.dtype(), m.row_stride, m.column_stride, rows};
}

void zero_row(const TensorView& view, const RowMatrix& m, std::int64_t row) {
  for (std::int64_t k = 0; k < m.columns; ++k) {
    store_element(view.data(), view.dtype(), row * m.row_stride + k * m.column_stride, 0.0);
  }
}

const HeadKernel& kernel_of(const LossPlan& plan) {
  require(!plan.kernel.empty(),
          "plan: expected one made by plan_head or the like, got an empty one");
  return find_head_kernel(plan.kernel);
}

}  // namespace

Engine::Engine(const HeadCall& call, const ChosenRows& chosen)
    : call_(call),
      chosen_(chosen),
      plan_(*call.plan),
      kernel_(kernel_of(plan_)),
      layout_(LossPlanAccess::layout<Layout>(plan_)),
      sizes_(layout_.sizes),
      targets_(call.in.targets, call.features.targets_per_token, call.in.ignore_index,
               call.in.sequence),
      vocab_(call.shard.sharded() ? call.shard.vocab : VocabShard(call.shape.vocab)),
      bound_(call.far.d_hidden_bound) {
  const Support missing = kernel_.runnable();
  if (!missing.empty())
    throw Unsupported(concat("plan: kernel ", kernel_.name, " cannot run here: ", missing));
  require(plan_.threads == call.context->threads(), "plan: made for ", plan_.threads,
          plan_.threads == 1 ? " thread" : " threads", ", the context has ",
          call.context->threads(), "; plan with this context, or give it as many");
  const HeadShape& made = plan_.shape;
  require(made.dim == call.shape.dim && made.vocab == call.shape.vocab &&
              made.dtype == call.shape.dtype && made.global_vocab == call.shape.global_vocab,
          "plan: made for ", name_of(made.dtype), " [*, ", made.dim, "] x [", made.vocab, ", ",
          made.dim, "], called with ", name_of(call.shape.dtype), " [*, ", call.shape.dim, "] x [",
          call.shape.vocab, ", ", call.shape.dim, "]");
  require(call.shape.tokens <= made.tokens, "plan: made for at most ", made.tokens,
          " tokens, called with ", call.shape.tokens);
  require(serves(plan_, call.features),
          "plan: made for other options, inputs or outputs than this call's; plan again with the "
          "same arguments");
  if (far()) {
    require(call.far.order != nullptr && !call.far.order->empty(), "order: plan ",
            name_of(plan_.kind), " walks the vocabulary in a VocabOrder, got none");
    require(call.far.order->vocab() == vocab_.rows(), "order: made for ", call.far.order->vocab(),
            " vocabulary entries, the weights have ", vocab_.rows());
    require(plan_.kind != PlanKind::far_both || empty() || call.far.order->dim() == made.dim,
            "order: plan far_both needs the moments of its tiles (measure_tiles) of dim ", made.dim,
            call.far.order->has_moments() ? concat(", got some of ", call.far.order->dim())
                                          : ", got none");
  }
  // The audit's plan has its own workspace behind this one's.
  const std::size_t needed =
      layout_.total + (plan_.audit != nullptr ? plan_.audit->workspace_bytes() : 0);
  require(call.workspace->bytes() >= needed, "workspace: ", call.workspace->bytes(),
          " bytes, the plan needs ", needed);
  require(reinterpret_cast<std::uintptr_t>(call.workspace->data()) % 64 == 0,
          "workspace: expected an address aligned to 64 bytes");
  // Strides are checked before anything is written.
  for (const auto& [name, view] :
       {std::pair<std::string_view, ConstTensorView>{"hidden", call.in.hidden},
        {"d_hidden", call.gradients.d_hidden}}) {
    if (view.defined()) as_rows(name, view);
  }
  if (!chosen.chosen()) {
    valid_ = targets_.valid_rows(call.shape.tokens,
                                 sharded() ? call.shape.global_vocab : call.shape.vocab,
                                 at<std::int64_t>(layout_.rows));
  } else {
    valid_ = static_cast<std::int64_t>(chosen.rows.size());
    std::copy(chosen.rows.begin(), chosen.rows.end(), at<std::int64_t>(layout_.rows));
  }
  if (gathered()) {
    const auto same = [](std::int64_t j) { return j; };
    logit_weights_ =
        as_floats(call.in.logit_weights, call.shape.vocab, same, at<float>(layout_.logit_weights));
    return;
  }
  const auto row = [&](std::int64_t j) { return row_at(j); };
  const auto vocab_id = [&](std::int64_t j) { return vocab_.vocab_id(row_at(j)); };
  bias_ = as_floats(call.in.bias, vocab_.rows(), row, at<float>(layout_.bias));
  logit_weights_ =
      as_floats(call.in.logit_weights, vocab_.rows(), vocab_id, at<float>(layout_.logit_weights));
}

void Engine::set_common(ChunkCommon& chunk, const ChunkTokens& tokens) const {
  chunk.shape = plan_.shape;
  chunk.features = &plan_.features;
  chunk.sizes = sizes_;
  chunk.tokens = tokens.count;
  chunk.threads = plan_.threads;
  if (call_.shard.tokens_sharded) {
    chunk.hidden = {at<std::byte>(layout_.shard.hidden), call_.shape.dtype, call_.shape.dim, 1,
                    at<std::int64_t>(layout_.shard.place)};
  } else {
    chunk.hidden = matrix("hidden", call_.in.hidden, at<std::int64_t>(layout_.rows) + tokens.first);
  }
  chunk.weight =
      matrix("weight", call_.in.weight, far() ? call_.far.order->vocab_ids().data() : nullptr);
  chunk.bias = bias_;
  chunk.logit_weights = logit_weights_;
  chunk.targets = {at<SparseEntry>(layout_.entries), at<std::int32_t>(layout_.tile_begin),
                   at<std::int32_t>(far()       ? layout_.far.positions
                                    : sharded() ? layout_.shard.rows
                                                : layout_.vocab_ids)};
  chunk.scratch = at<std::byte>(layout_.scratch);
}

std::int64_t Engine::count_tokens() {
  all_valid_ = valid_;
  if (!call_.shard.tokens_sharded) return valid_;
  gather_counts();
  const auto* counts = at<std::int64_t>(layout_.shard.counts);
  all_valid_ = std::accumulate(counts, counts + call_.shard.ranks(), std::int64_t{0});
  return *std::max_element(counts, counts + call_.shard.ranks());
}

void Engine::run(TokenFunction function) {
  if (gathered()) return run_gathered(function);
  const bool backward_wanted = plan_.kind != PlanKind::forward;
  const std::int64_t most = count_tokens();
  if (backward_wanted && !chosen_.chosen()) clear_ignored();
  if (backward_wanted && plan_.features.d_bias) {
    std::fill_n(at<float>(layout_.d_bias), call_.shape.vocab, 0.0f);
  }
  if (far()) start_far();
  // Chunks have equal sizes: a short last one would waste the fixed work of a chunk.
  const std::int64_t capacity =
      call_.shard.tokens_sharded ? sizes_.tokens / call_.shard.ranks() : sizes_.tokens;
  const std::int64_t chunks = ceil_div(std::max<std::int64_t>(most, 1), capacity);
  step_ = ceil_div(most, chunks);
  for (std::int64_t first = 0; first < most; first += step_)
    run_chunk(chunk_tokens(first), first == 0, first + step_ >= most, function);
  if (backward_wanted && plan_.features.d_bias) finish_bias();
  if (weight_apart()) run_weight_pass();
}

Engine::ChunkTokens Engine::chunk_tokens(std::int64_t first) const {
  ChunkTokens out;
  out.first = first;
  out.local_count = std::clamp<std::int64_t>(valid_ - first, 0, step_);
  out.count = out.local_count;
  if (!call_.shard.tokens_sharded) return out;
  out.count = 0;
  const auto* counts = at<std::int64_t>(layout_.shard.counts);
  for (int r = 0; r < call_.shard.ranks(); ++r) {
    out.count += std::clamp<std::int64_t>(counts[r] - first, 0, step_);
  }
  return out;
}

// Sorts the chunk's targets, whose token ids are already read.
void Engine::sort_chunk_targets(const ChunkCommon& chunk) const {
  sort_targets(
      {at<std::int32_t>(layout_.vocab_ids), const_cast<std::int32_t*>(chunk.targets.vocab_ids),
       at<SparseEntry>(layout_.entries), at<std::int32_t>(layout_.tile_begin)},
      chunk.tokens, plan_.features.targets_per_token, call_.shape.vocab,
      LocalRows(vocab_, far() ? call_.far.order->positions().data() : nullptr));
}

void Engine::set_outputs(ForwardChunk& chunk) const {
  chunk.exponent = at<float>(layout_.exponent);
  chunk.sum = at<float>(layout_.sum);
  chunk.target_logit = at<float>(layout_.target_logit);
  if (plan_.features.entropy) chunk.entropy_sum = at<double>(layout_.entropy);
  if (plan_.features.label_smoothing) chunk.weighted_sum = at<double>(layout_.weighted);
  if (plan_.features.argmax) chunk.argmax = at<std::int32_t>(layout_.argmax);
}

void Engine::run_chunk(const ChunkTokens& tokens, bool first_chunk, bool last_chunk,
                       TokenFunction function) {
  const bool backward_wanted = plan_.kind != PlanKind::forward;
  ForwardChunk chunk;
  set_common(chunk, tokens);
  auto* vocab_ids = at<std::int32_t>(layout_.vocab_ids);
  if (sharded()) {
    locate_targets(tokens, vocab_ids);
  } else {
    read_targets(targets_, valid_rows() + tokens.first, tokens.count, vocab_ids);
  }
  sort_chunk_targets(chunk);
  set_outputs(chunk);
  if (sharded()) {
    if (plan_.kind != PlanKind::far_both) chunk.wide = at<ExactSum>(layout_.shard.wide);
    if (plan_.features.argmax) chunk.best = at<float>(layout_.shard.best);
  }
  chunk.store = sizes_.stored_vocab > 0;
  chunk.tile_mass = plan_.kind == PlanKind::far_backward;
  if (plan_.kind == PlanKind::far_both) {
    far_forward(chunk, tokens.first);
  } else if (empty()) {
    forward_nothing(chunk);
  } else {
    kernel_.forward(chunk);
  }
  if (sharded()) {
    exchange_states(chunk);
    if (audited_ > 0) keep_audited(chunk, tokens);
  }
  set_coefficients_of_tokens(chunk, tokens, backward_wanted, function);
  if (!backward_wanted) return;
  backward(chunk, tokens, first_chunk, last_chunk);
  if (!sharded()) return;
  if (plan_.features.d_hidden) exchange_hidden(tokens);
  if (plan_.kind == PlanKind::far_backward) exchange_bounds(tokens);
}

void Engine::set_coefficients_of_tokens(const ForwardChunk& chunk, const ChunkTokens& tokens,
                                        bool backward, TokenFunction function) const {
  const int per_token = plan_.features.targets_per_token;
  for (std::int64_t t = 0; t < tokens.count; ++t) {
    const std::int64_t own = local_of(t);
    if (own < 0) continue;
    TokenResult result;
    result.row = valid_rows()[tokens.first + own];
    result.lse = value(LseState{chunk.exponent[t], chunk.sum[t]});
    result.target_logit = chunk.target_logit + t * per_token;
    result.vocab_ids = at<std::int32_t>(layout_.vocab_ids) + t * per_token;
    if (chunk.entropy_sum != nullptr)
      result.entropy = entropy_of(chunk.sum[t], chunk.entropy_sum[t]);
    if (chunk.weighted_sum != nullptr) result.weighted_sum = chunk.weighted_sum[t];
    if (chunk.argmax != nullptr) {
      result.argmax = chunk.argmax[t];
      if (!sharded()) result.argmax = static_cast<std::int32_t>(row_at(result.argmax));
    }
    double* const delta = at<double>(layout_.delta);
    std::fill_n(delta, per_token, 0.0);
    TokenCoefficients token_coefficients{{}, delta};
    function(result, token_coefficients);
    if (!backward) continue;
    if (exchanges_tokens()) {
      put_coefficients(own, token_coefficients);
    } else {
      set_coefficients(chunk, t, token_coefficients.cotangent, delta);
    }
  }
  if (!backward) return;
  if (exchanges_tokens()) exchange_coefficients(chunk);
  // Kernels read full panels, so the padding after the last token has an exponent that makes its
  // exponentials 0.
  float* const alpha = at<float>(layout_.alpha);
  float* const beta = plan_.features.entropy_gradient ? at<float>(layout_.beta) : nullptr;
  float* const gamma = plan_.features.label_smoothing ? at<float>(layout_.gamma) : nullptr;
  const std::int64_t end = std::min(round_up(chunk.tokens, 64) + 64, sizes_.tokens + 64);
  for (std::int64_t t = chunk.tokens; t < end; ++t) {
    chunk.exponent[t] = static_cast<float>(kMostExponent);
    alpha[t] = 0.0f;
    if (beta != nullptr) beta[t] = 0.0f;
    if (gamma != nullptr) gamma[t] = 0.0f;
  }
}

// Computes the gradient coefficients of a token from the cotangents of its outputs.
void Engine::set_coefficients(const ForwardChunk& chunk, std::int64_t t,
                              const TokenCotangent& cotangent, const double* delta) const {
  const int per_token = plan_.features.targets_per_token;
  // The softmax of a token with a logit of +inf is NaN, and so is the token's gradient.
  if (std::isinf(chunk.sum[t])) chunk.exponent[t] = NAN;
  const double scale = plan_.features.logit_scale;
  const double cap = plan_.features.softcap;
  const double lse = value(LseState{chunk.exponent[t], chunk.sum[t]});
  const double entropy =
      chunk.entropy_sum == nullptr ? 0.0 : entropy_of(chunk.sum[t], chunk.entropy_sum[t]);
  TokenGradient g = token_gradient(cotangent, entropy);
  const double inverse = scale / static_cast<double>(chunk.sum[t]);
  // The kernel multiplies beta by log2 of its exponentials, which stay bounded for large logits.
  const double alpha =
      g.beta == 0.0 ? g.alpha : g.alpha - g.beta * kLn2 * std::log2(double{chunk.sum[t]});
  at<float>(layout_.alpha)[t] = static_cast<float>(alpha * inverse);
  if (plan_.features.entropy_gradient)
    at<float>(layout_.beta)[t] = static_cast<float>(g.beta * kLn2 * inverse);
  if (plan_.features.label_smoothing)
    at<float>(layout_.gamma)[t] = static_cast<float>(g.gamma * scale);
  if (far()) {
    // The kernel adds gamma to all entries, including targets.
    g.gamma = 0.0;
    at<float>(layout_.far.log2_total)[t] = chunk.exponent[t] + std::log2(chunk.sum[t]);
  }
  const std::int32_t* const vocab_ids = at<std::int32_t>(layout_.vocab_ids) + t * per_token;
  for (int k = 0; k < per_token; ++k) {
    const std::int32_t place = chunk.targets.vocab_ids[t * per_token + k];
    if (place < 0) continue;
    // The softmax part belongs to an entry once, however often it is among a token's targets.
    const bool repeated = std::find(vocab_ids, vocab_ids + k, vocab_ids[k]) != vocab_ids + k;
    const double z = chunk.target_logit[t * per_token + k];
    const double logit_weight = logit_weights_ == nullptr ? 1.0 : logit_weights_[place];
    at<float>(layout_.coefficient)[t * per_token + k] =
        static_cast<float>(repeated ? delta[k] * scale * softcap_slope(z, cap)
                                    : target_coefficient(g, log_prob_of(z, lse), z, logit_weight,
                                                         delta[k], scale, cap));
  }
}

void Engine::backward(const ForwardChunk& forward, const ChunkTokens& tokens, bool first_chunk,
                      bool last_chunk) {
  if (empty()) return;
  const std::int64_t first = tokens.first;
  BackwardChunk chunk;
  static_cast<ChunkCommon&>(chunk) = forward;
  chunk.exponent = forward.exponent;
  chunk.alpha = at<float>(layout_.alpha);
  if (plan_.features.entropy_gradient) chunk.beta = at<float>(layout_.beta);
  if (plan_.features.label_smoothing) chunk.gamma = at<float>(layout_.gamma);
  chunk.coefficient = at<float>(layout_.coefficient);
  chunk.stored = forward.store;
  if (plan_.features.d_hidden && sharded()) {
    chunk.d_hidden = {at<float>(layout_.shard.slices),
                      at<std::int64_t>(layout_.shard.place),
                      DType::f32,
                      call_.shape.dim,
                      1,
                      false};
  } else if (plan_.features.d_hidden) {
    const RowMatrix m = as_rows("d_hidden", call_.gradients.d_hidden);
    chunk.d_hidden = {call_.gradients.d_hidden.data(),
                      at<std::int64_t>(layout_.rows) + first,
                      call_.gradients.d_hidden.dtype(),
                      m.row_stride,
                      m.column_stride,
                      call_.features.accumulate};
    if (chosen_.chosen()) chunk.d_hidden.rows = chosen_.to + first;
  }
  if (weight_apart()) {
    keep_coefficients(forward, first);
  } else if (plan_.features.d_weight) {
    chunk.d_weight = weight_sink(first_chunk, last_chunk);
    chunk.d_weight.rows = chunk.weight.rows;
  }
  if (plan_.features.d_bias) chunk.d_bias = at<float>(layout_.d_bias);
  if (far()) return far_backward(chunk, first);
  if (weight_apart() && chunk.d_hidden.data == nullptr && chunk.d_bias == nullptr) return;
  kernel_.backward(chunk);
}

WeightGradientSink Engine::weight_sink(bool first_chunk, bool last_chunk) const {
  WeightGradientSink sink;
  sink.data = call_.gradients.d_weight.data();
  sink.dtype = call_.gradients.d_weight.dtype();
  sink.row_stride = call_.gradients.d_weight.stride(0);
  sink.col_stride = call_.gradients.d_weight.stride(1);
  sink.accumulate = call_.features.accumulate;
  sink.first_chunk = first_chunk;
  sink.last_chunk = last_chunk;
  if (!(first_chunk && last_chunk) && sink.dtype == DType::bf16)
    sink.low = at<std::uint16_t>(layout_.d_weight);
  if (!(first_chunk && last_chunk) && sink.dtype == DType::f16)
    sink.accumulator = at<float>(layout_.d_weight);
  return sink;
}

// Clears gradients that no chunk writes: rows of ignored tokens, and d_weight if there is no valid
// token.
void Engine::clear_ignored() const {
  if (call_.features.accumulate) return;
  const int threads = plan_.threads;
  if (plan_.features.d_hidden && valid_ < call_.shape.tokens) {
    const RowMatrix m = as_rows("d_hidden", call_.gradients.d_hidden);
    std::int64_t next = 0;
    for (std::int64_t row = 0; row < call_.shape.tokens; ++row) {
      if (next < valid_ && valid_rows()[next] == row) {
        ++next;
      } else {
        zero_row(call_.gradients.d_hidden, m, row);
      }
    }
  }
  if (plan_.features.d_weight && all_valid_ == 0) {
    const TensorView& d_weight = call_.gradients.d_weight;
    const RowMatrix m{vocab_.rows(), d_weight.size(1), d_weight.stride(0), d_weight.stride(1)};
    parallel_for(threads, m.rows, [&](std::int64_t row, int) { zero_row(d_weight, m, row); });
  }
}

void Engine::finish_bias() const {
  const float* sums = at<float>(layout_.d_bias);
  const TensorView& to = call_.gradients.d_bias;
  for (std::int64_t j = 0; j < vocab_.rows(); ++j) {
    const std::int64_t index = row_at(j) * to.stride(0);
    const double old = call_.features.accumulate ? load_element(to.data(), to.dtype(), index) : 0.0;
    store_element(to.data(), to.dtype(), index, old + static_cast<double>(sums[j]));
  }
}

}  // namespace logitless::cpu
