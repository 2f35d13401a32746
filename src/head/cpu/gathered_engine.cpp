// Weight-gathered calls: every rank computes its local tokens against the full vocabulary. Rows of
// the weight arrive slice by slice in the forward. They arrive once more in the backward in reverse
// order, where the last slice is still present. One kernel call takes one rank's rows of a slice.
// Its per-token results are merged in the order of slices and ranks. Gradients of the rows return
// to their rank, which adds the sums of all ranks' tokens.
//
// If the weight is sharded by columns, each rank contributes its columns of a slice's rows, and one
// kernel call takes the slice.
#include <algorithm>
#include <cstring>

#include "core/parallel.h"
#include "head/cpu/engine.h"
#include "head/gathered_vocab.h"
#include "math/lse_state.h"

namespace logitless::cpu {

// The rows of one rank in a slice.
struct Engine::SliceBlock {
  int rank = 0;
  VocabShard vocab{0};
  const std::byte* rows = nullptr;  // [rows of the block, D]
  const float* bias = nullptr;
  const float* logit_weights = nullptr;
};

void Engine::gather_slice(std::int64_t slice) const {
  const ShardOperands& shard = call_.shard;
  const SliceLayout layout =
      slice_layout(call_.shape, plan_.features, plan_.slice_rows, shard.gathered->tables);
  const SliceRows own = rows_in_slice(slice, plan_.slice_rows, vocab_.rows());
  auto* const all = at<std::byte>(layout_.gathered.slice);
  std::byte* const mine = all + static_cast<std::size_t>(shard.rank()) * layout.bytes;
  const std::size_t element = size_of(call_.shape.dtype);
  const std::int64_t dim = call_.in.weight.size(1);
  const ConstTensorView& weight = call_.in.weight;
  const auto* const from = static_cast<const std::byte*>(weight.data());
  const auto offset = [&](std::int64_t elements) {
    return elements * static_cast<std::int64_t>(element);
  };
  parallel_for(plan_.threads, dim > 0 ? own.count : 0, [&](std::int64_t i, int) {
    std::byte* const to = mine + offset(i * dim);
    const std::byte* const row = from + offset((own.first + i) * weight.stride(0));
    if (weight.stride(1) == 1) {
      std::memcpy(to, row, static_cast<std::size_t>(offset(dim)));
      return;
    }
    for (std::int64_t k = 0; k < dim; ++k)
      std::memcpy(to + offset(k), row + offset(k * weight.stride(1)), element);
  });
  const bool by_columns = plan_.features.gathered_columns > 0;
  auto* const whole = at<std::byte>(layout_.gathered.whole);
  const std::size_t full_bias = full_slice(call_.shape, plan_.features, plan_.slice_rows).bias;
  if (plan_.features.bias) {
    const ConstTensorView& bias = call_.in.bias;
    auto* const to = reinterpret_cast<float*>(by_columns ? whole + full_bias : mine + layout.bias);
    for (std::int64_t i = 0; i < own.count; ++i) {
      to[i] = static_cast<float>(
          load_element(bias.data(), bias.dtype(), (own.first + i) * bias.stride(0)));
    }
  }
  if (shard.gathered->tables) {
    auto* const to = reinterpret_cast<std::int32_t*>(mine + layout.vocab_ids);
    for (std::int64_t i = 0; i < own.count; ++i)
      to[i] = static_cast<std::int32_t>(vocab_.vocab_id(own.first + i));
  }
  shard.calls->all_gather(mine, all, layout.bytes);
  shard.gathered->each_columns([&](int rank, std::int64_t first, std::int64_t count) {
    const std::byte* const part = all + static_cast<std::size_t>(rank) * layout.bytes;
    parallel_for(plan_.threads, own.count, [&](std::int64_t i, int) {
      std::memcpy(whole + offset(i * call_.shape.dim + first), part + offset(i * count),
                  static_cast<std::size_t>(offset(count)));
    });
  });
}

// Calls function(block) for the ranks that have rows in the slice, in their order.
template <typename F>
void Engine::each_block(std::int64_t slice, const F& function) const {
  for (int r = 0; r < call_.shard.ranks(); ++r) {
    const SliceBlock block = block_of(r, slice);
    if (block.vocab.rows() > 0) function(block);
  }
}

Engine::SliceBlock Engine::block_of(int rank, std::int64_t slice) const {
  const GatheredVocab& all = *call_.shard.gathered;
  const GatheredVocab::Of& of_rank = all.ranks[static_cast<std::size_t>(rank)];
  const SliceLayout layout =
      slice_layout(call_.shape, plan_.features, plan_.slice_rows, all.tables);
  const SliceRows rows = rows_in_slice(slice, plan_.slice_rows, of_rank.rows);
  const std::byte* const data =
      at<std::byte>(layout_.gathered.slice) + static_cast<std::size_t>(rank) * layout.bytes;
  const auto* const table =
      all.tables ? reinterpret_cast<const std::int32_t*>(data + layout.vocab_ids) : nullptr;
  SliceBlock block{.rank = rank,
                   .vocab = VocabShard(of_rank.first + rows.first, rows.count, table),
                   .rows = data};
  if (plan_.features.bias) block.bias = reinterpret_cast<const float*>(data + layout.bias);
  if (plan_.features.gathered_columns > 0) {
    block.rows = at<std::byte>(layout_.gathered.whole);
    const SliceLayout whole = full_slice(call_.shape, plan_.features, plan_.slice_rows);
    if (plan_.features.bias) block.bias = reinterpret_cast<const float*>(block.rows + whole.bias);
  }
  if (logit_weights_ == nullptr || rows.count == 0) return block;
  block.logit_weights = logit_weights_ + block.vocab.vocab_id(0);
  if (table == nullptr) return block;
  auto* const logit_weights = at<float>(layout_.gathered.logit_weights);
  for (std::int64_t i = 0; i < rows.count; ++i) logit_weights[i] = logit_weights_[table[i]];
  block.logit_weights = logit_weights;
  return block;
}

// Sets the operands of a block's rows and the valid tokens [first, first + count).
void Engine::set_block(ChunkCommon& chunk, const SliceBlock& block, std::int64_t first,
                       std::int64_t count) const {
  const int per_token = plan_.features.targets_per_token;
  const RowMatrix hidden = as_rows("hidden", call_.in.hidden);
  chunk.shape = plan_.shape;
  chunk.shape.vocab = block.vocab.rows();
  chunk.features = &plan_.features;
  chunk.sizes = sizes_;
  chunk.tokens = count;
  chunk.threads = plan_.threads;
  chunk.hidden = {call_.in.hidden.data(), call_.shape.dtype, hidden.row_stride,
                  hidden.column_stride, valid_rows() + first};
  chunk.weight = {block.rows, call_.shape.dtype, call_.shape.dim, 1, nullptr};
  chunk.bias = block.bias;
  chunk.logit_weights = block.logit_weights;
  auto* const places = at<std::int32_t>(layout_.gathered.places);
  auto* const entries = at<SparseEntry>(layout_.entries);
  auto* const tile_begin = at<std::int32_t>(layout_.tile_begin);
  sort_targets(
      {at<std::int32_t>(layout_.vocab_ids) + first * per_token, places, entries, tile_begin}, count,
      per_token, chunk.shape.vocab, LocalRows(block.vocab));
  chunk.targets = {entries, tile_begin, places};
  chunk.scratch = at<std::byte>(layout_.scratch);
}

// Computes the forward of a block's rows and merges the results into the tokens' states.
void Engine::absorb_block(const SliceBlock& block, std::int64_t first, std::int64_t count) const {
  const GatheredLayout& layout = layout_.gathered;
  ForwardChunk chunk;
  set_block(chunk, block, first, count);
  chunk.exponent = at<float>(layout.exponent);
  chunk.sum = at<float>(layout.sum);
  chunk.target_logit = at<float>(layout_.target_logit) + first * plan_.features.targets_per_token;
  if (plan_.features.entropy) chunk.entropy_sum = at<double>(layout.entropy);
  if (plan_.features.label_smoothing) chunk.weighted_sum = at<double>(layout.weighted);
  if (plan_.features.argmax) {
    chunk.argmax = at<std::int32_t>(layout.argmax);
    chunk.best = at<float>(layout.best);
  }
  chunk.wide = at<ExactSum>(layout.wide);
  kernel_.forward(chunk);
  auto* const states = at<TokenRecord>(layout.states) + first;
  for (std::int64_t t = 0; t < count; ++t) {
    states[t].wide.add(chunk.wide[t]);
    merge_into(states[t].state, state_of(chunk, t, block.vocab));
  }
}

// Returns all tokens as one chunk over the full vocabulary.
ForwardChunk Engine::all_tokens() const {
  ForwardChunk chunk;
  chunk.shape = plan_.shape;
  chunk.features = &plan_.features;
  chunk.tokens = valid_;
  chunk.targets.vocab_ids = at<std::int32_t>(layout_.vocab_ids);
  set_outputs(chunk);
  return chunk;
}

void Engine::finish_states(const ForwardChunk& chunk) const {
  const auto* const states = at<TokenRecord>(layout_.gathered.states);
  for (std::int64_t t = 0; t < chunk.tokens; ++t) {
    const ShardState& state = states[t].state;
    const double sum = states[t].wide.scaled(state.exponent);
    chunk.exponent[t] = state.exponent;
    chunk.sum[t] = static_cast<float>(sum);
    if (chunk.entropy_sum != nullptr) chunk.entropy_sum[t] = state.entropy / sum;
    if (chunk.weighted_sum != nullptr) chunk.weighted_sum[t] = state.weighted;
    if (chunk.argmax != nullptr) chunk.argmax[t] = state.vocab_id;
  }
}

// Computes d_hidden, d_weight and d_bias of a block's rows and the valid tokens [first, first +
// count).
void Engine::backward_block(const SliceBlock& block, std::int64_t first, std::int64_t count,
                            bool first_block) const {
  const HeadFeatures& features = plan_.features;
  const GatheredLayout& layout = layout_.gathered;
  BackwardChunk chunk;
  set_block(chunk, block, first, count);
  // Kernels read full panels, so the padding after the last token is 0, including its exponentials.
  const std::int64_t end = std::min(round_up(count, 64), sizes_.tokens) + 64;
  const auto part = [&](std::size_t to, std::size_t from, double rest = 0.0) {
    float* const values = at<float>(to);
    std::copy_n(at<float>(from) + first, count, values);
    std::fill(values + count, values + end, static_cast<float>(rest));
    return values;
  };
  chunk.exponent = part(layout.exponent, layout_.exponent, kMostExponent);
  chunk.alpha = part(layout.alpha, layout_.alpha);
  if (features.entropy_gradient) chunk.beta = part(layout.beta, layout_.beta);
  if (features.label_smoothing) chunk.gamma = part(layout.gamma, layout_.gamma);
  chunk.coefficient = at<float>(layout_.coefficient) + first * features.targets_per_token;
  chunk.apart = true;

  const std::int64_t dim = call_.shape.dim;
  const TensorView& d_hidden = call_.gradients.d_hidden;
  if (features.d_hidden && d_hidden.dtype() == DType::f32) {
    const RowMatrix m = as_rows("d_hidden", d_hidden);
    chunk.d_hidden = {d_hidden.data(), valid_rows() + first, DType::f32,
                      m.row_stride,    m.column_stride,      features.accumulate || !first_block};
  } else if (features.d_hidden) {
    chunk.d_hidden = {at<float>(layout.d_hidden) + first * dim,
                      at<std::int64_t>(layout.outside),
                      DType::f32,
                      dim,
                      1,
                      !first_block};
  }
  const bool by_columns = features.gathered_columns > 0;
  const SliceSums sums = by_columns ? full_sums(call_.shape, features, plan_.slice_rows)
                                    : slice_sums(call_.shape, features, plan_.slice_rows);
  std::byte* const to =
      by_columns ? at<std::byte>(layout.full_sums)
                 : at<std::byte>(layout.sums) + static_cast<std::size_t>(block.rank) * sums.bytes;
  if (features.d_weight) {
    WeightGradientSink& sink = chunk.d_weight;
    sink.data = to;
    sink.row_stride = dim;
    sink.first_chunk = first == 0;
    sink.last_chunk = first + count == valid_;
  }
  if (features.d_bias) {
    chunk.d_bias = reinterpret_cast<float*>(to + sums.d_bias);
    if (first == 0) std::fill_n(chunk.d_bias, block.vocab.rows(), 0.0f);
  }
  kernel_.backward(chunk);
}

// Splits the sums of a weight sharded by columns: each rank's part gets its columns, and all of
// d_bias.
void Engine::exchange_sums(std::int64_t rows) const {
  const HeadFeatures& features = plan_.features;
  const SliceSums whole = full_sums(call_.shape, features, plan_.slice_rows);
  const SliceSums part = slice_sums(call_.shape, features, plan_.slice_rows);
  const auto* const from = at<std::byte>(layout_.gathered.full_sums);
  const auto floats = [](std::int64_t count) {
    return static_cast<std::size_t>(count) * sizeof(float);
  };
  auto* const sums = at<std::byte>(layout_.gathered.sums);
  call_.shard.gathered->each_columns([&](int rank, std::int64_t first, std::int64_t count) {
    std::byte* const to = sums + static_cast<std::size_t>(rank) * part.bytes;
    parallel_for(plan_.threads, features.d_weight ? rows : 0, [&](std::int64_t i, int) {
      std::memcpy(to + floats(i * count), from + floats(i * call_.shape.dim + first),
                  floats(count));
    });
  });
  if (!features.d_bias) return;
  for (int r = 0; r < call_.shard.ranks(); ++r)
    std::memcpy(sums + static_cast<std::size_t>(r) * part.bytes + part.d_bias, from + whole.d_bias,
                floats(rows));
}

// Sends the sums of a slice to the ranks of its rows or columns. They add those of all ranks in
// fp32, in the order of ranks, and round once.
void Engine::add_sums(std::int64_t slice) const {
  const SliceSums layout = slice_sums(call_.shape, plan_.features, plan_.slice_rows);
  if (layout.bytes == 0) return;
  const ShardOperands& shard = call_.shard;
  const int ranks = shard.ranks();
  auto* const sums = at<std::byte>(layout_.gathered.sums);
  auto* const received = at<std::byte>(layout_.gathered.received);
  const SliceRows own = rows_in_slice(slice, plan_.slice_rows, vocab_.rows());
  if (valid_ == 0) {
    std::memset(sums, 0, static_cast<std::size_t>(ranks) * layout.bytes);
  } else if (plan_.features.gathered_columns > 0) {
    exchange_sums(own.count);
  }
  shard.calls->all_to_all(sums, received, layout.bytes);
  const auto add = [&](const TensorView& to, std::int64_t index, std::size_t offset) {
    float sum = 0.0f;
    for (int r = 0; r < ranks; ++r) {
      float of_rank;
      std::memcpy(&of_rank, received + static_cast<std::size_t>(r) * layout.bytes + offset,
                  sizeof(of_rank));
      sum = r == 0 ? of_rank : sum + of_rank;
    }
    const double old = plan_.features.accumulate ? load_element(to.data(), to.dtype(), index) : 0.0;
    store_element(to.data(), to.dtype(), index, old + static_cast<double>(sum));
  };
  const std::int64_t dim = call_.in.weight.size(1);
  const TensorView& d_weight = call_.gradients.d_weight;
  const TensorView& d_bias = call_.gradients.d_bias;
  parallel_for(plan_.threads, own.count, [&](std::int64_t i, int) {
    const std::int64_t row = own.first + i;
    for (std::int64_t k = 0; k < dim && plan_.features.d_weight; ++k) {
      add(d_weight, row * d_weight.stride(0) + k * d_weight.stride(1),
          static_cast<std::size_t>(i * dim + k) * sizeof(float));
    }
    if (plan_.features.d_bias)
      add(d_bias, row * d_bias.stride(0),
          layout.d_bias + static_cast<std::size_t>(i) * sizeof(float));
  });
}

void Engine::run_gathered(TokenFunction function) {
  count_tokens();
  const bool backward_wanted = plan_.kind != PlanKind::forward;
  if (backward_wanted) clear_ignored();
  read_targets(targets_, valid_rows(), valid_, at<std::int32_t>(layout_.vocab_ids));
  std::fill_n(at<TokenRecord>(layout_.gathered.states), valid_, TokenRecord());
  const std::int64_t slices = slice_count(plan_.features.gathered_rows, plan_.slice_rows);
  const auto each_chunk = [&](const auto& body) {
    for (std::int64_t first = 0; first < valid_; first += sizes_.tokens)
      body(first, std::min(sizes_.tokens, valid_ - first));
  };
  for (std::int64_t slice = 0; slice < slices; ++slice) {
    gather_slice(slice);
    each_block(slice, [&](const SliceBlock& block) {
      each_chunk(
          [&](std::int64_t first, std::int64_t count) { absorb_block(block, first, count); });
    });
  }
  const ForwardChunk chunk = all_tokens();
  finish_states(chunk);
  set_coefficients_of_tokens(chunk, {.count = valid_, .local_count = valid_}, backward_wanted,
                             function);
  if (!backward_wanted) return;

  if (plan_.features.d_hidden) {
    auto* const outside = at<std::int64_t>(layout_.gathered.outside);
    for (std::int64_t t = 0; t < sizes_.tokens; ++t) outside[t] = t;
  }
  bool first_block = true;
  for (std::int64_t slice = slices - 1; slice >= 0; --slice) {
    if (slice + 1 < slices) gather_slice(slice);
    each_block(slice, [&](const SliceBlock& block) {
      each_chunk([&](std::int64_t first, std::int64_t count) {
        backward_block(block, first, count, first_block);
      });
      first_block = false;
    });
    add_sums(slice);
  }
  if (plan_.features.d_hidden && plan_.features.d_hidden_dtype != DType::f32)
    store_hidden(0, valid_, at<float>(layout_.gathered.d_hidden));
}

}  // namespace logitless::cpu
