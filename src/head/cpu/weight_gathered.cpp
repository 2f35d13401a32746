#include "head/schedule/weight_gathered.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "core/parallel.h"
#include "head/cpu/run.h"
#include "math/lse_state.h"

namespace logitless::cpu {
namespace {

// The verbs of the schedule. There are no streams: each verb returns when it is
// done.
class Slices {
 public:
  static constexpr int kAhead = 0;

  Slices(const Run& run, std::int64_t all_valid)
      : run_(run),
        shard_(run.call.shard),
        features_(run.plan.features),
        layout_(run.layout.gathered),
        parts_(
            slice_parts(run.call.shape, features_, run.plan.slice_rows, shard_.gathered->tables)),
        all_valid_(all_valid) {}

  const SliceParts& parts() const { return parts_; }
  SliceBuffers buffers() const {
    return {.slice = run_.at<std::byte>(layout_.slice),
            .whole = run_.at<std::byte>(layout_.whole),
            .sums = run_.at<std::byte>(layout_.sums),
            .full_sums = run_.at<std::byte>(layout_.full_sums),
            .received = run_.at<std::byte>(layout_.received)};
  }
  bool has_tokens() const { return run_.valid > 0; }
  bool wants_gradients() const { return run_.wants_gradients(); }

  void begin() const;
  const std::byte* put_rows(const SliceRows& own, std::byte* to) const;
  void copy_rows(std::byte* to, std::size_t to_stride, const std::byte* from,
                 std::size_t from_stride, std::size_t row_bytes, std::int64_t rows,
                 CopyWith) const {
    parallel_for(run_.plan.threads, rows, [&](std::int64_t i, int) {
      const auto row = static_cast<std::size_t>(i);
      std::memcpy(to + row * to_stride, from + row * from_stride, row_bytes);
    });
  }
  void clear(std::byte* to, std::size_t count) const { std::memset(to, 0, count); }

  void begin_exchange() const {}
  void all_gather(const std::byte* mine, std::byte* all, std::size_t each) const {
    shard_.calls->all_gather(mine, all, each);
  }
  void all_to_all(const std::byte* slices, std::byte* slices_of_all, std::size_t each) const {
    shard_.calls->all_to_all(slices, slices_of_all, each);
  }
  void slice_sent() const {}
  void wait_for_slice() const {}
  void sums_sent() const {}
  void wait_for_sums() const {}

  std::optional<SliceBlock> block_of_all(std::int64_t, const std::byte*) const { return {}; }
  void forward(const SliceBlock& block, bool) const {
    const Operands operands = operands_of(block);
    each_chunk(
        [&](std::int64_t first, std::int64_t count) { absorb_block(operands, first, count); });
  }
  void finish_forward(TokenFunction function) const;
  void backward(const SliceBlock& block, std::byte* sums, bool first) const {
    const Operands operands = operands_of(block);
    each_chunk([&](std::int64_t first_token, std::int64_t count) {
      backward_block(operands, sums, first_token, count, first);
    });
  }
  void add_sums(const SliceRows& own, std::byte* sums) const;
  void finish_hidden() const {
    if (features_.d_hidden && features_.d_hidden_dtype != DType::f32)
      run_.store_hidden(0, run_.valid, run_.at<float>(layout_.d_hidden));
  }

 private:
  // The operands of a block's rows.
  struct Operands {
    VocabShard vocab{0};
    const std::byte* rows = nullptr;
    const float* bias = nullptr;
    const float* logit_weights = nullptr;
  };

  // Calls body(first, count) for the valid tokens of each chunk.
  template <typename Body>
  void each_chunk(const Body& body) const {
    for (std::int64_t first = 0; first < run_.valid; first += run_.sizes.tokens)
      body(first, std::min(run_.sizes.tokens, run_.valid - first));
  }
  bool by_columns() const { return features_.gathered_columns > 0; }
  Operands operands_of(const SliceBlock& block) const;
  void set_block(ChunkCommon& chunk, const Operands& block, std::int64_t first,
                 std::int64_t count) const;
  void absorb_block(const Operands& block, std::int64_t first, std::int64_t count) const;
  void backward_block(const Operands& block, std::byte* sums, std::int64_t first,
                      std::int64_t count, bool first_block) const;

  const Run& run_;
  const ShardOperands& shard_;
  const HeadFeatures& features_;
  const GatheredLayout& layout_;
  const SliceParts parts_;
  const std::int64_t all_valid_;
};

void Slices::begin() const {
  if (wants_gradients()) run_.clear_ignored(all_valid_);
  read_targets(run_.targets, run_.valid_rows(), run_.valid,
               run_.at<std::int32_t>(run_.layout.vocab_ids));
  std::fill_n(run_.at<TokenRecord>(layout_.states), run_.valid, TokenRecord());
  if (!wants_gradients() || !features_.d_hidden) return;
  auto* const outside = run_.at<std::int64_t>(layout_.outside);
  for (std::int64_t t = 0; t < run_.sizes.tokens; ++t) outside[t] = t;
}

const std::byte* Slices::put_rows(const SliceRows& own, std::byte* mine) const {
  const std::size_t element = size_of(run_.call.shape.dtype);
  const ConstTensorView& weight = run_.call.in.weight;
  const std::int64_t dim = weight.size(1);
  const auto* const from = static_cast<const std::byte*>(weight.data());
  const auto offset = [&](std::int64_t elements) {
    return elements * static_cast<std::int64_t>(element);
  };
  parallel_for(run_.plan.threads, dim > 0 ? own.count : 0, [&](std::int64_t i, int) {
    std::byte* const to = mine + offset(i * dim);
    const std::byte* const row = from + offset((own.first + i) * weight.stride(0));
    if (weight.stride(1) == 1) {
      std::memcpy(to, row, static_cast<std::size_t>(offset(dim)));
      return;
    }
    for (std::int64_t k = 0; k < dim; ++k)
      std::memcpy(to + offset(k), row + offset(k * weight.stride(1)), element);
  });
  if (features_.bias) {
    const ConstTensorView& bias = run_.call.in.bias;
    auto* const to = reinterpret_cast<float*>(by_columns() ? run_.at<std::byte>(layout_.whole) +
                                                                 parts_.whole.bias
                                                           : mine + parts_.slice.bias);
    for (std::int64_t i = 0; i < own.count; ++i) {
      to[i] = static_cast<float>(
          load_element(bias.data(), bias.dtype(), (own.first + i) * bias.stride(0)));
    }
  }
  if (shard_.gathered->tables) {
    auto* const to = reinterpret_cast<std::int32_t*>(mine + parts_.slice.vocab_ids);
    for (std::int64_t i = 0; i < own.count; ++i)
      to[i] = static_cast<std::int32_t>(run_.vocab.vocab_id(own.first + i));
  }
  return mine;
}

Slices::Operands Slices::operands_of(const SliceBlock& block) const {
  Operands out{.vocab = VocabShard(block.vocab_begin, block.vocab_count, block.vocab_ids),
               .rows = block.rows};
  if (features_.bias) {
    out.bias = reinterpret_cast<const float*>(by_columns() ? block.rows + parts_.whole.bias
                                                           : block.part + parts_.slice.bias);
  }
  if (run_.logit_weights == nullptr) return out;
  out.logit_weights = run_.logit_weights + out.vocab.vocab_id(0);
  if (block.vocab_ids == nullptr) return out;
  auto* const logit_weights = run_.at<float>(layout_.logit_weights);
  for (std::int64_t i = 0; i < block.vocab_count; ++i)
    logit_weights[i] = run_.logit_weights[block.vocab_ids[i]];
  out.logit_weights = logit_weights;
  return out;
}

// Sets the operands of a block's rows and the valid tokens [first, first +
// count).
void Slices::set_block(ChunkCommon& chunk, const Operands& block, std::int64_t first,
                       std::int64_t count) const {
  const int per_token = features_.targets_per_token;
  const RowMatrix hidden = as_rows("hidden", run_.call.in.hidden);
  chunk.shape = run_.plan.shape;
  chunk.shape.vocab = block.vocab.rows();
  chunk.features = &features_;
  chunk.sizes = run_.sizes;
  chunk.tokens = count;
  chunk.threads = run_.plan.threads;
  chunk.hidden = {run_.call.in.hidden.data(), run_.call.shape.dtype, hidden.row_stride,
                  hidden.column_stride, run_.valid_rows() + first};
  chunk.weight = {block.rows, run_.call.shape.dtype, run_.call.shape.dim, 1, nullptr};
  chunk.bias = block.bias;
  chunk.logit_weights = block.logit_weights;
  auto* const places = run_.at<std::int32_t>(layout_.places);
  auto* const entries = run_.at<SparseEntry>(run_.layout.entries);
  auto* const tile_begin = run_.at<std::int32_t>(run_.layout.tile_begin);
  sort_targets({run_.at<std::int32_t>(run_.layout.vocab_ids) + first * per_token, places, entries,
                tile_begin},
               count, per_token, chunk.shape.vocab, LocalRows(block.vocab));
  chunk.targets = {entries, tile_begin, places};
  chunk.scratch = run_.at<std::byte>(run_.layout.scratch);
}

// Computes the forward of a block's rows and merges the results into the
// tokens' states.
void Slices::absorb_block(const Operands& block, std::int64_t first, std::int64_t count) const {
  ForwardChunk chunk;
  set_block(chunk, block, first, count);
  chunk.exponent = run_.at<float>(layout_.exponent);
  chunk.sum = run_.at<float>(layout_.sum);
  chunk.target_logit =
      run_.at<float>(run_.layout.target_logit) + first * features_.targets_per_token;
  if (features_.entropy) chunk.entropy_sum = run_.at<double>(layout_.entropy);
  if (features_.label_smoothing) chunk.weighted_sum = run_.at<double>(layout_.weighted);
  if (features_.argmax) {
    chunk.argmax = run_.at<std::int32_t>(layout_.argmax);
    chunk.best = run_.at<float>(layout_.best);
  }
  chunk.wide = run_.at<ExactSum>(layout_.wide);
  run_.kernel.forward(chunk);
  auto* const states = run_.at<TokenRecord>(layout_.states) + first;
  for (std::int64_t t = 0; t < count; ++t) {
    states[t].wide.add(chunk.wide[t]);
    merge_into(states[t].state, run_.state_of(chunk, t, block.vocab));
  }
}

void Slices::finish_forward(TokenFunction function) const {
  ForwardChunk chunk;
  chunk.shape = run_.plan.shape;
  chunk.features = &features_;
  chunk.tokens = run_.valid;
  chunk.targets.vocab_ids = run_.at<std::int32_t>(run_.layout.vocab_ids);
  run_.set_outputs(chunk);
  const auto* const states = run_.at<TokenRecord>(layout_.states);
  for (std::int64_t t = 0; t < chunk.tokens; ++t) {
    const ShardState& state = states[t].state;
    const double sum = states[t].wide.scaled(state.exponent);
    chunk.exponent[t] = state.exponent;
    chunk.sum[t] = static_cast<float>(sum);
    if (chunk.entropy_sum != nullptr) chunk.entropy_sum[t] = state.entropy / sum;
    if (chunk.weighted_sum != nullptr) chunk.weighted_sum[t] = state.weighted;
    if (chunk.argmax != nullptr) chunk.argmax[t] = state.vocab_id;
  }
  run_.set_coefficients_of_tokens(chunk, {.count = run_.valid, .local_count = run_.valid},
                                  function);
}

// Computes d_hidden, d_weight and d_bias of a block's rows and the valid tokens
// [first, first + count).
void Slices::backward_block(const Operands& block, std::byte* sums, std::int64_t first,
                            std::int64_t count, bool first_block) const {
  BackwardChunk chunk;
  set_block(chunk, block, first, count);
  // Kernels read full panels, so the padding after the last token is 0,
  // including its exponentials.
  const std::int64_t end = std::min(round_up(count, 64), run_.sizes.tokens) + 64;
  const auto part = [&](std::size_t to, std::size_t from, double rest = 0.0) {
    float* const values = run_.at<float>(to);
    std::copy_n(run_.at<float>(from) + first, count, values);
    std::fill(values + count, values + end, static_cast<float>(rest));
    return values;
  };
  chunk.exponent = part(layout_.exponent, run_.layout.exponent, kMostExponent);
  chunk.alpha = part(layout_.alpha, run_.layout.alpha);
  if (features_.entropy_gradient) chunk.beta = part(layout_.beta, run_.layout.beta);
  if (features_.label_smoothing) chunk.gamma = part(layout_.gamma, run_.layout.gamma);
  chunk.coefficient = run_.at<float>(run_.layout.coefficient) + first * features_.targets_per_token;
  chunk.apart = true;

  const std::int64_t dim = run_.call.shape.dim;
  const TensorView& d_hidden = run_.call.gradients.d_hidden;
  if (features_.d_hidden && d_hidden.dtype() == DType::f32) {
    const RowMatrix m = as_rows("d_hidden", d_hidden);
    chunk.d_hidden = {d_hidden.data(), run_.valid_rows() + first,
                      DType::f32,      m.row_stride,
                      m.column_stride, features_.accumulate || !first_block};
  } else if (features_.d_hidden) {
    chunk.d_hidden = {run_.at<float>(layout_.d_hidden) + first * dim,
                      run_.at<std::int64_t>(layout_.outside),
                      DType::f32,
                      dim,
                      1,
                      !first_block};
  }
  if (features_.d_weight) {
    WeightGradientSink& sink = chunk.d_weight;
    sink.data = sums;
    sink.row_stride = dim;
    sink.first_chunk = first == 0;
    sink.last_chunk = first + count == run_.valid;
  }
  if (features_.d_bias) {
    chunk.d_bias = reinterpret_cast<float*>(
        sums + (by_columns() ? parts_.full_sums.d_bias : parts_.sums.d_bias));
    if (first == 0) std::fill_n(chunk.d_bias, block.vocab.rows(), 0.0f);
  }
  run_.kernel.backward(chunk);
}

// Adds the received sums of all ranks in fp32, in their order, and rounds once.
void Slices::add_sums(const SliceRows& own, std::byte*) const {
  const SliceSums& layout = parts_.sums;
  const int ranks = shard_.ranks();
  const auto* const received = run_.at<std::byte>(layout_.received);
  const auto add = [&](const TensorView& to, std::int64_t index, std::size_t offset) {
    float sum = 0.0f;
    for (int r = 0; r < ranks; ++r) {
      float of_rank;
      std::memcpy(&of_rank, received + static_cast<std::size_t>(r) * layout.bytes + offset,
                  sizeof(of_rank));
      sum = r == 0 ? of_rank : sum + of_rank;
    }
    const double old = features_.accumulate ? load_element(to.data(), to.dtype(), index) : 0.0;
    store_element(to.data(), to.dtype(), index, old + static_cast<double>(sum));
  };
  const std::int64_t dim = run_.call.in.weight.size(1);
  const TensorView& d_weight = run_.call.gradients.d_weight;
  const TensorView& d_bias = run_.call.gradients.d_bias;
  parallel_for(run_.plan.threads, own.count, [&](std::int64_t i, int) {
    const std::int64_t row = own.first + i;
    for (std::int64_t k = 0; k < dim && features_.d_weight; ++k) {
      add(d_weight, row * d_weight.stride(0) + k * d_weight.stride(1),
          static_cast<std::size_t>(i * dim + k) * sizeof(float));
    }
    if (features_.d_bias)
      add(d_bias, row * d_bias.stride(0),
          layout.d_bias + static_cast<std::size_t>(i) * sizeof(float));
  });
}

}  // namespace

void run_weight_gathered(const Run& run, std::int64_t all_valid, TokenFunction function) {
  Slices slices(run, all_valid);
  WeightGathered(slices, run.call, run.plan.slice_rows).run(function);
}

}  // namespace logitless::cpu
