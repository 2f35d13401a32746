#include "head/cpu/run.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/parallel.h"
#include "math/lse_state.h"

namespace logitless::cpu {
namespace {

// Copies `count` elements of a vector as contiguous floats; element j is read
// at index `place(j)`.
template <typename Place>
const float* as_floats(const ConstTensorView& view, std::int64_t count, const Place& place,
                       float* to) {
  if (!view.defined()) return nullptr;
  for (std::int64_t j = 0; j < count; ++j) {
    to[j] = static_cast<float>(load_element(view.data(), view.dtype(), place(j) * view.stride(0)));
  }
  return to;
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

std::size_t bytes(std::int64_t count, std::size_t each) {
  return static_cast<std::size_t>(count) * each;
}

MatrixRows matrix(std::string_view name, const ConstTensorView& view, const std::int64_t* rows) {
  const RowMatrix m = as_rows(name, view);
  return {view.data(), view.dtype(), m.row_stride, m.column_stride, rows};
}

}  // namespace

Run::Run(const HeadCall& of, const ChosenRows& rows)
    : call(of),
      chosen(rows),
      plan(*call.plan),
      kernel(kernel_of(plan)),
      layout(LossPlanAccess::layout<Layout>(plan)),
      sizes(layout.sizes),
      targets(call.in.targets, call.features.targets_per_token, call.in.ignore_index,
              call.in.sequence),
      vocab(call.shard.sharded() ? call.shard.vocab : VocabShard(call.shape.vocab)) {
  const Support missing = kernel.runnable();
  if (!missing.empty())
    throw Unsupported(concat("plan: kernel ", kernel.name, " cannot run here: ", missing));
  require(plan.threads == call.context->threads(), "plan: made for ", plan.threads,
          plan.threads == 1 ? " thread" : " threads", ", the context has ", call.context->threads(),
          "; plan with this context, or give it as many");
  const HeadShape& made = plan.shape;
  require(made.dim == call.shape.dim && made.vocab == call.shape.vocab &&
              made.dtype == call.shape.dtype && made.global_vocab == call.shape.global_vocab,
          "plan: made for ", name_of(made.dtype), " [*, ", made.dim, "] x [", made.vocab, ", ",
          made.dim, "], called with ", name_of(call.shape.dtype), " [*, ", call.shape.dim, "] x [",
          call.shape.vocab, ", ", call.shape.dim, "]");
  require(call.shape.tokens <= made.tokens, "plan: made for at most ", made.tokens,
          " tokens, called with ", call.shape.tokens);
  require(serves(plan, call.features),
          "plan: made for other options, inputs or outputs than this call's; "
          "plan again with the "
          "same arguments");
  if (far()) {
    require(call.far.order != nullptr && !call.far.order->empty(), "order: plan ",
            name_of(plan.kind), " walks the vocabulary in a VocabOrder, got none");
    require(call.far.order->vocab() == vocab.rows(), "order: made for ", call.far.order->vocab(),
            " vocabulary entries, the weights have ", vocab.rows());
    require(plan.kind != PlanKind::far_both || empty() || call.far.order->dim() == made.dim,
            "order: plan far_both needs the moments of its tiles "
            "(measure_tiles) of dim ",
            made.dim,
            call.far.order->has_moments() ? concat(", got some of ", call.far.order->dim())
                                          : ", got none");
  }
  // The audit's plan has its own workspace behind this one's.
  const std::size_t needed =
      layout.total + (plan.audit != nullptr ? plan.audit->workspace_bytes() : 0);
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
    valid = targets.valid_rows(call.shape.tokens,
                               sharded() ? call.shape.global_vocab : call.shape.vocab,
                               at<std::int64_t>(layout.rows));
  } else {
    valid = static_cast<std::int64_t>(chosen.rows.size());
    std::copy(chosen.rows.begin(), chosen.rows.end(), at<std::int64_t>(layout.rows));
  }
  if (gathered()) {
    const auto same = [](std::int64_t j) { return j; };
    logit_weights =
        as_floats(call.in.logit_weights, call.shape.vocab, same, at<float>(layout.logit_weights));
    return;
  }
  const auto row = [&](std::int64_t j) { return row_at(j); };
  const auto vocab_id = [&](std::int64_t j) { return vocab.vocab_id(row_at(j)); };
  bias = as_floats(call.in.bias, vocab.rows(), row, at<float>(layout.bias));
  logit_weights =
      as_floats(call.in.logit_weights, vocab.rows(), vocab_id, at<float>(layout.logit_weights));
}

std::int64_t Run::local_of(const ChunkTokens& tokens, std::int64_t token) const {
  if (!exchanges_tokens()) return token;
  const std::int64_t own =
      at<std::int64_t>(layout.shard.place)[token] - call.shard.rank() * tokens.step;
  return own >= 0 && own < tokens.step ? own : -1;
}

ChunkTokens Run::chunk_tokens(std::int64_t first, std::int64_t step) const {
  ChunkTokens out;
  out.first = first;
  out.step = step;
  out.local_count = std::clamp<std::int64_t>(valid - first, 0, step);
  out.count = out.local_count;
  if (!call.shard.tokens_sharded) return out;
  out.count = 0;
  const auto* counts = at<std::int64_t>(layout.shard.counts);
  for (int r = 0; r < call.shard.ranks(); ++r) {
    out.count += std::clamp<std::int64_t>(counts[r] - first, 0, step);
  }
  return out;
}

void Run::set_common(ChunkCommon& chunk, const ChunkTokens& tokens) const {
  chunk.shape = plan.shape;
  chunk.features = &plan.features;
  chunk.sizes = sizes;
  chunk.tokens = tokens.count;
  chunk.threads = plan.threads;
  if (call.shard.tokens_sharded) {
    chunk.hidden = {at<std::byte>(layout.shard.hidden), call.shape.dtype, call.shape.dim, 1,
                    at<std::int64_t>(layout.shard.place)};
  } else {
    chunk.hidden = matrix("hidden", call.in.hidden, at<std::int64_t>(layout.rows) + tokens.first);
  }
  chunk.weight =
      matrix("weight", call.in.weight, far() ? call.far.order->vocab_ids().data() : nullptr);
  chunk.bias = bias;
  chunk.logit_weights = logit_weights;
  chunk.targets = {at<SparseEntry>(layout.entries), at<std::int32_t>(layout.tile_begin),
                   at<std::int32_t>(far()       ? layout.far.positions
                                    : sharded() ? layout.shard.rows
                                                : layout.vocab_ids)};
  chunk.scratch = at<std::byte>(layout.scratch);
}

void Run::sort_chunk_targets(const ChunkCommon& chunk) const {
  sort_targets(
      {at<std::int32_t>(layout.vocab_ids), const_cast<std::int32_t*>(chunk.targets.vocab_ids),
       at<SparseEntry>(layout.entries), at<std::int32_t>(layout.tile_begin)},
      chunk.tokens, plan.features.targets_per_token, call.shape.vocab,
      LocalRows(vocab, far() ? call.far.order->positions().data() : nullptr));
}

void Run::set_outputs(ForwardChunk& chunk) const {
  chunk.exponent = at<float>(layout.exponent);
  chunk.sum = at<float>(layout.sum);
  chunk.target_logit = at<float>(layout.target_logit);
  if (plan.features.entropy) chunk.entropy_sum = at<double>(layout.entropy);
  if (plan.features.label_smoothing) chunk.weighted_sum = at<double>(layout.weighted);
  if (plan.features.argmax) chunk.argmax = at<std::int32_t>(layout.argmax);
}

ShardState Run::state_of(const ForwardChunk& chunk, std::int64_t t, const VocabShard& from) const {
  ShardState state;
  state.exponent = chunk.exponent[t];
  state.sum = chunk.sum[t];
  if (chunk.entropy_sum != nullptr && state.sum != 0.0f)
    state.entropy = chunk.entropy_sum[t] * chunk.wide[t].scaled(state.exponent);
  if (chunk.weighted_sum != nullptr) state.weighted = chunk.weighted_sum[t];
  if (chunk.argmax != nullptr && from.rows() > 0) {
    state.best = chunk.best[t];
    state.vocab_id = static_cast<std::int32_t>(from.vocab_id(row_at(chunk.argmax[t])));
  }
  return state;
}

void Run::set_coefficients_of_tokens(const ForwardChunk& chunk, const ChunkTokens& tokens,
                                     TokenFunction function) const {
  const int per_token = plan.features.targets_per_token;
  for (std::int64_t t = 0; t < tokens.count; ++t) {
    const std::int64_t own = local_of(tokens, t);
    if (own < 0) continue;
    TokenResult result;
    result.row = valid_rows()[tokens.first + own];
    result.lse = value(LseState{chunk.exponent[t], chunk.sum[t]});
    result.target_logit = chunk.target_logit + t * per_token;
    result.vocab_ids = at<std::int32_t>(layout.vocab_ids) + t * per_token;
    if (chunk.entropy_sum != nullptr)
      result.entropy = entropy_of(chunk.sum[t], chunk.entropy_sum[t]);
    if (chunk.weighted_sum != nullptr) result.weighted_sum = chunk.weighted_sum[t];
    if (chunk.argmax != nullptr) {
      result.argmax = chunk.argmax[t];
      if (!sharded()) result.argmax = static_cast<std::int32_t>(row_at(result.argmax));
    }
    double* const delta = at<double>(layout.delta);
    std::fill_n(delta, per_token, 0.0);
    TokenCoefficients token_coefficients{{}, delta};
    function(result, token_coefficients);
    if (!wants_gradients()) continue;
    if (exchanges_tokens()) {
      put_coefficients(call.shard.rank() * tokens.step + own, token_coefficients);
    } else {
      set_coefficients(chunk, t, token_coefficients.cotangent, delta);
    }
  }
  if (!wants_gradients()) return;
  if (exchanges_tokens()) exchange_coefficients(chunk, tokens.step);
  // Kernels read full panels, so the padding after the last token has an
  // exponent that makes its exponentials 0.
  float* const alpha = at<float>(layout.alpha);
  float* const beta = plan.features.entropy_gradient ? at<float>(layout.beta) : nullptr;
  float* const gamma = plan.features.label_smoothing ? at<float>(layout.gamma) : nullptr;
  const std::int64_t end = std::min(round_up(chunk.tokens, 64) + 64, sizes.tokens + 64);
  for (std::int64_t t = chunk.tokens; t < end; ++t) {
    chunk.exponent[t] = static_cast<float>(kMostExponent);
    alpha[t] = 0.0f;
    if (beta != nullptr) beta[t] = 0.0f;
    if (gamma != nullptr) gamma[t] = 0.0f;
  }
}

// Computes the gradient coefficients of a token from the cotangents of its
// outputs.
void Run::set_coefficients(const ForwardChunk& chunk, std::int64_t t,
                           const TokenCotangent& cotangent, const double* delta) const {
  const int per_token = plan.features.targets_per_token;
  // The softmax of a token with a logit of +inf is NaN, and so is the token's
  // gradient.
  if (std::isinf(chunk.sum[t])) chunk.exponent[t] = NAN;
  const double scale = plan.features.logit_scale;
  const double cap = plan.features.softcap;
  const double lse = value(LseState{chunk.exponent[t], chunk.sum[t]});
  const double entropy =
      chunk.entropy_sum == nullptr ? 0.0 : entropy_of(chunk.sum[t], chunk.entropy_sum[t]);
  TokenGradient g = token_gradient(cotangent, entropy);
  const double inverse = scale / static_cast<double>(chunk.sum[t]);
  // The kernel multiplies beta by log2 of its exponentials, which stay bounded
  // for large logits.
  const double alpha =
      g.beta == 0.0 ? g.alpha : g.alpha - g.beta * kLn2 * std::log2(double{chunk.sum[t]});
  at<float>(layout.alpha)[t] = static_cast<float>(alpha * inverse);
  if (plan.features.entropy_gradient)
    at<float>(layout.beta)[t] = static_cast<float>(g.beta * kLn2 * inverse);
  if (plan.features.label_smoothing)
    at<float>(layout.gamma)[t] = static_cast<float>(g.gamma * scale);
  if (far()) {
    // The kernel adds gamma to all entries, including targets.
    g.gamma = 0.0;
    at<float>(layout.far.log2_total)[t] = chunk.exponent[t] + std::log2(chunk.sum[t]);
  }
  const std::int32_t* const vocab_ids = at<std::int32_t>(layout.vocab_ids) + t * per_token;
  for (int k = 0; k < per_token; ++k) {
    const std::int32_t place = chunk.targets.vocab_ids[t * per_token + k];
    if (place < 0) continue;
    // The softmax part belongs to an entry once, however often it is among a
    // token's targets.
    const bool repeated = std::find(vocab_ids, vocab_ids + k, vocab_ids[k]) != vocab_ids + k;
    const double z = chunk.target_logit[t * per_token + k];
    const double logit_weight = logit_weights == nullptr ? 1.0 : logit_weights[place];
    at<float>(layout.coefficient)[t * per_token + k] =
        static_cast<float>(repeated ? delta[k] * scale * softcap_slope(z, cap)
                                    : target_coefficient(g, log_prob_of(z, lse), z, logit_weight,
                                                         delta[k], scale, cap));
  }
}

std::byte* Run::coefficients_of(std::int64_t index) const {
  const std::size_t each =
      sizeof(TokenCoefficientsRecord) + bytes(plan.features.targets_per_token, sizeof(double));
  return at<std::byte>(layout.shard.token_coefficients) + bytes(index, each);
}

void Run::put_coefficients(std::int64_t index, const TokenCoefficients& token_coefficients) const {
  std::byte* const to = coefficients_of(index);
  const TokenCotangent& c = token_coefficients.cotangent;
  *reinterpret_cast<TokenCoefficientsRecord*>(to) = {c.lse, c.entropy, c.weighted_sum};
  std::copy_n(token_coefficients.delta, plan.features.targets_per_token,
              reinterpret_cast<double*>(to + sizeof(TokenCoefficientsRecord)));
}

// All-gathers the cotangents of sharded tokens from their ranks. Every rank
// then computes the coefficients of all of them.
void Run::exchange_coefficients(const ForwardChunk& chunk, std::int64_t step) const {
  std::byte* const all = coefficients_of(0);
  const auto of_rank = static_cast<std::size_t>(coefficients_of(step) - all);
  call.shard.calls->all_gather(coefficients_of(call.shard.rank() * step), all, of_rank);
  const auto* const place = at<std::int64_t>(layout.shard.place);
  for (std::int64_t t = 0; t < chunk.tokens; ++t) {
    const std::byte* const from = coefficients_of(place[t]);
    const auto& record = *reinterpret_cast<const TokenCoefficientsRecord*>(from);
    set_coefficients(
        chunk, t,
        {.lse = record.lse, .entropy = record.entropy, .weighted_sum = record.weighted_sum},
        reinterpret_cast<const double*>(from + sizeof(TokenCoefficientsRecord)));
  }
}

void Run::clear_ignored(std::int64_t all_valid) const {
  if (call.features.accumulate) return;
  const int threads = plan.threads;
  if (plan.features.d_hidden && valid < call.shape.tokens) {
    const RowMatrix m = as_rows("d_hidden", call.gradients.d_hidden);
    std::int64_t next = 0;
    for (std::int64_t row = 0; row < call.shape.tokens; ++row) {
      if (next < valid && valid_rows()[next] == row) {
        ++next;
      } else {
        zero_row(call.gradients.d_hidden, m, row);
      }
    }
  }
  if (plan.features.d_weight && all_valid == 0) {
    const TensorView& d_weight = call.gradients.d_weight;
    const RowMatrix m{vocab.rows(), d_weight.size(1), d_weight.stride(0), d_weight.stride(1)};
    parallel_for(threads, m.rows, [&](std::int64_t row, int) { zero_row(d_weight, m, row); });
  }
}

WeightGradientSink Run::weight_sink(bool first_chunk, bool last_chunk) const {
  WeightGradientSink sink;
  sink.data = call.gradients.d_weight.data();
  sink.dtype = call.gradients.d_weight.dtype();
  sink.row_stride = call.gradients.d_weight.stride(0);
  sink.col_stride = call.gradients.d_weight.stride(1);
  sink.accumulate = call.features.accumulate;
  sink.first_chunk = first_chunk;
  sink.last_chunk = last_chunk;
  if (!(first_chunk && last_chunk) && sink.dtype == DType::bf16)
    sink.low = at<std::uint16_t>(layout.d_weight);
  if (!(first_chunk && last_chunk) && sink.dtype == DType::f16)
    sink.accumulator = at<float>(layout.d_weight);
  return sink;
}

void Run::store_hidden(std::int64_t first, std::int64_t count, const float* sums) const {
  const std::int64_t dim = call.shape.dim;
  const TensorView& to = call.gradients.d_hidden;
  const RowMatrix m = as_rows("d_hidden", to);
  const std::int64_t* const to_rows = (chosen.chosen() ? chosen.to : valid_rows()) + first;
  parallel_for(plan.threads, count, [&](std::int64_t i, int) {
    const std::int64_t row = to_rows[i];
    for (std::int64_t k = 0; k < dim; ++k) {
      const std::int64_t index = row * m.row_stride + k * m.column_stride;
      const double old =
          call.features.accumulate ? load_element(to.data(), to.dtype(), index) : 0.0;
      store_element(to.data(), to.dtype(), index, old + static_cast<double>(sums[i * dim + k]));
    }
  });
}

}  // namespace logitless::cpu
