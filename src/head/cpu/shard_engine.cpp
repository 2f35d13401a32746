// Exchanges of a vocabulary-parallel chunk: tokens if these are sharded, the states of all tokens,
// and partial sums of d_hidden. Everything is merged in the order of ranks, so that all ranks get
// the same bits.
#include <algorithm>
#include <cstring>

#include "core/parallel.h"
#include "head/cpu/engine.h"

namespace logitless::cpu {
namespace {

std::size_t bytes(std::int64_t count, std::size_t each) {
  return static_cast<std::size_t>(count) * each;
}

}  // namespace

void Engine::gather_counts() {
  auto* const counts = at<std::int64_t>(layout_.shard.counts);
  counts[call_.shard.rank()] = valid_;
  call_.shard.calls->all_gather(counts + call_.shard.rank(), counts, sizeof(std::int64_t));
}

// Computes the indices of a chunk's tokens in the exchanged buffers, and their targets.
void Engine::locate_targets(const ChunkTokens& tokens, std::int32_t* vocab_ids) const {
  auto* const place = at<std::int64_t>(layout_.shard.place);
  if (!call_.shard.tokens_sharded) {
    for (std::int64_t t = 0; t < tokens.count; ++t) place[t] = t;
    return read_targets(targets_, valid_rows() + tokens.first, tokens.count, vocab_ids);
  }
  const auto* const counts = at<std::int64_t>(layout_.shard.counts);
  std::int64_t t = 0;
  for (int r = 0; r < call_.shard.ranks(); ++r) {
    const std::int64_t count = std::clamp<std::int64_t>(counts[r] - tokens.first, 0, step_);
    for (std::int64_t i = 0; i < count; ++i) place[t++] = r * step_ + i;
  }
  gather_tokens(tokens);
  if (far()) sort_by_targets(tokens);
  const int per_token = plan_.features.targets_per_token;
  const auto* const all = at<std::int32_t>(layout_.shard.vocab_ids);
  for (t = 0; t < tokens.count; ++t)
    std::copy_n(all + place[t] * per_token, per_token, vocab_ids + t * per_token);
}

// All-gathers the hidden states and targets of a chunk's tokens.
void Engine::gather_tokens(const ChunkTokens& tokens) const {
  CollectiveCalls& calls = *call_.shard.calls;
  const int rank = call_.shard.rank();
  const int per_token = plan_.features.targets_per_token;
  const std::int64_t dim = call_.shape.dim;
  const std::size_t element = size_of(call_.shape.dtype);
  const std::size_t row_bytes = bytes(dim, element);
  auto* const all = at<std::byte>(layout_.shard.hidden);
  std::byte* const mine = all + bytes(rank * step_, row_bytes);
  const RowMatrix m = as_rows("hidden", call_.in.hidden);
  const auto* const from = static_cast<const std::byte*>(call_.in.hidden.data());
  parallel_for(plan_.threads, step_, [&](std::int64_t i, int) {
    std::byte* const to = mine + bytes(i, row_bytes);
    if (i >= tokens.local_count) {  // never read
      std::memset(to, 0, row_bytes);
      return;
    }
    const std::int64_t row = valid_rows()[tokens.first + i] * m.row_stride;
    for (std::int64_t k = 0; k < dim; ++k) {
      std::memcpy(to + bytes(k, element),
                  from + (row + k * m.column_stride) * static_cast<std::int64_t>(element), element);
    }
  });
  calls.all_gather(mine, all, bytes(step_, row_bytes));

  auto* const vocab_ids = at<std::int32_t>(layout_.shard.vocab_ids);
  std::int32_t* const own = vocab_ids + rank * step_ * per_token;
  std::fill_n(own, step_ * per_token, -1);
  read_targets(targets_, valid_rows() + tokens.first, tokens.local_count, own);
  calls.all_gather(own, vocab_ids, bytes(step_ * per_token, sizeof(std::int32_t)));
}

// The forward of a rank without vocabulary entries.
void Engine::forward_nothing(const ForwardChunk& chunk) const {
  for (std::int64_t t = 0; t < chunk.tokens; ++t) {
    chunk.exponent[t] = 0.0f;
    chunk.sum[t] = 0.0f;
    if (chunk.wide != nullptr) chunk.wide[t] = ExactSum();
    if (chunk.entropy_sum != nullptr) chunk.entropy_sum[t] = 0.0;
    if (chunk.weighted_sum != nullptr) chunk.weighted_sum[t] = 0.0;
    if (chunk.argmax != nullptr) chunk.best[t] = -INFINITY;
  }
}

// Returns the state of one token after the forward over `vocab`.
ShardState Engine::state_of(const ForwardChunk& chunk, std::int64_t t,
                            const VocabShard& vocab) const {
  ShardState state;
  state.exponent = chunk.exponent[t];
  state.sum = chunk.sum[t];
  if (chunk.entropy_sum != nullptr && state.sum != 0.0f)
    state.entropy = chunk.entropy_sum[t] * chunk.wide[t].scaled(state.exponent);
  if (chunk.weighted_sum != nullptr) state.weighted = chunk.weighted_sum[t];
  if (chunk.argmax != nullptr && vocab.rows() > 0) {
    state.best = chunk.best[t];
    state.vocab_id = static_cast<std::int32_t>(vocab.vocab_id(row_at(chunk.argmax[t])));
  }
  return state;
}

// Merges the outputs of the forward over the ranks into those of the global vocabulary.
void Engine::exchange_states(const ForwardChunk& chunk) const {
  const std::int64_t count = chunk.tokens;
  const int per_token = plan_.features.targets_per_token;
  const int ranks = call_.shard.ranks();
  const std::size_t of_rank =
      bytes(count, sizeof(TokenRecord)) + bytes(count * per_token, sizeof(ShardTarget));
  auto* const all = at<std::byte>(layout_.shard.records);
  const auto record_of = [&](int rank, std::int64_t t) -> TokenRecord& {
    return reinterpret_cast<TokenRecord*>(all + bytes(rank, of_rank))[t];
  };
  const auto target_of = [&](int rank, std::int64_t slot) -> ShardTarget& {
    return reinterpret_cast<ShardTarget*>(all + bytes(rank, of_rank) +
                                          bytes(count, sizeof(TokenRecord)))[slot];
  };
  const int rank = call_.shard.rank();
  for (std::int64_t t = 0; t < count; ++t) {
    TokenRecord& record = record_of(rank, t);
    record.wide = chunk.wide != nullptr ? chunk.wide[t] : ExactSum();
    record.state = state_of(chunk, t, vocab_);
    for (std::int64_t slot = t * per_token; slot < (t + 1) * per_token; ++slot) {
      const bool is_local = chunk.targets.vocab_ids[slot] >= 0;
      target_of(rank, slot) = {is_local ? chunk.target_logit[slot] : 0.0f, is_local ? 1 : 0};
    }
  }
  call_.shard.calls->all_gather(all + bytes(rank, of_rank), all, of_rank);

  parallel_for(plan_.threads, count, [&](std::int64_t t, int) {
    const MergedState merged =
        merge_shards(ranks, [&](int r) -> const ShardState& { return record_of(r, t).state; });
    ExactSum wide;
    for (int r = 0; r < ranks; ++r) wide.add(record_of(r, t).wide);
    // Estimated masses are not part of the wide sum.
    const double sum = chunk.wide != nullptr ? wide.scaled(merged.exponent) : merged.sum;
    chunk.exponent[t] = static_cast<float>(merged.exponent);
    chunk.sum[t] = static_cast<float>(sum);
    if (chunk.entropy_sum != nullptr) chunk.entropy_sum[t] = merged.entropy / sum;
    if (chunk.weighted_sum != nullptr) chunk.weighted_sum[t] = merged.weighted;
    if (chunk.argmax != nullptr) chunk.argmax[t] = merged.vocab_id;
    for (std::int64_t slot = t * per_token; slot < (t + 1) * per_token; ++slot) {
      for (int r = 0; r < ranks; ++r) {
        const ShardTarget& target = target_of(r, slot);
        if (target.is_local != 0) chunk.target_logit[slot] = target.logit;
      }
    }
  });
}

std::byte* Engine::coefficients_of(std::int64_t place) const {
  const std::size_t each =
      sizeof(TokenCoefficientsRecord) + bytes(plan_.features.targets_per_token, sizeof(double));
  return at<std::byte>(layout_.shard.token_coefficients) + bytes(place, each);
}

void Engine::put_coefficients(std::int64_t own, const TokenCoefficients& token_coefficients) const {
  std::byte* const at = coefficients_of(call_.shard.rank() * step_ + own);
  const TokenCotangent& c = token_coefficients.cotangent;
  *reinterpret_cast<TokenCoefficientsRecord*>(at) = {c.lse, c.entropy, c.weighted_sum};
  std::copy_n(token_coefficients.delta, plan_.features.targets_per_token,
              reinterpret_cast<double*>(at + sizeof(TokenCoefficientsRecord)));
}

// All-gathers the cotangents of sharded tokens from their ranks. Every rank then computes the
// coefficients of all of them.
void Engine::exchange_coefficients(const ForwardChunk& chunk) const {
  std::byte* const all = coefficients_of(0);
  const auto of_rank = static_cast<std::size_t>(coefficients_of(step_) - all);
  call_.shard.calls->all_gather(coefficients_of(call_.shard.rank() * step_), all, of_rank);
  const auto* const place = at<std::int64_t>(layout_.shard.place);
  for (std::int64_t t = 0; t < chunk.tokens; ++t) {
    const std::byte* const from = coefficients_of(place[t]);
    const auto& record = *reinterpret_cast<const TokenCoefficientsRecord*>(from);
    set_coefficients(
        chunk, t,
        {.lse = record.lse, .entropy = record.entropy, .weighted_sum = record.weighted_sum},
        reinterpret_cast<const double*>(from + sizeof(TokenCoefficientsRecord)));
  }
}

// Reduces d_hidden. Each rank adds the partial sums of its tokens in fp32, in the order of ranks,
// and rounds once. If all ranks have all tokens, each adds a part of them, and the sums are
// all-gathered.
void Engine::exchange_hidden(const ChunkTokens& tokens) {
  CollectiveCalls& calls = *call_.shard.calls;
  const int ranks = call_.shard.ranks();
  const int rank = call_.shard.rank();
  const std::int64_t dim = call_.shape.dim;
  const bool spread = call_.shard.tokens_sharded;
  const std::int64_t block = spread ? step_ : ceil_div(tokens.count, ranks);
  const std::int64_t mine =
      spread ? tokens.local_count : std::clamp<std::int64_t>(tokens.count - rank * block, 0, block);
  auto* const slices = at<float>(layout_.shard.slices);
  auto* const received = at<float>(layout_.shard.received);
  if (empty()) std::fill_n(slices, ranks * block * dim, 0.0f);
  const std::size_t block_bytes = bytes(block * dim, sizeof(float));
  calls.all_to_all(slices, received, block_bytes);
  float* const sums = slices + rank * block * dim;
  parallel_for(plan_.threads, mine, [&](std::int64_t i, int) {
    for (std::int64_t k = i * dim; k < (i + 1) * dim; ++k) {
      float sum = received[k];
      for (int r = 1; r < ranks; ++r) sum += received[r * block * dim + k];
      sums[k] = sum;
    }
  });
  if (!spread) calls.all_gather(sums, slices, block_bytes);

  const float* const rows = spread ? sums : slices;
  const std::int64_t count = spread ? mine : tokens.count;
  if (far()) keep_far_hidden(tokens, rows, count);
  store_hidden(tokens.first, count, rows);
}

// Rounds sums [count, D] of the valid rows from `first` on into d_hidden.
void Engine::store_hidden(std::int64_t first, std::int64_t count, const float* sums) const {
  const std::int64_t dim = call_.shape.dim;
  const TensorView& to = call_.gradients.d_hidden;
  const RowMatrix m = as_rows("d_hidden", to);
  const std::int64_t* const to_rows = (chosen_.chosen() ? chosen_.to : valid_rows()) + first;
  parallel_for(plan_.threads, count, [&](std::int64_t i, int) {
    const std::int64_t row = to_rows[i];
    for (std::int64_t k = 0; k < dim; ++k) {
      const std::int64_t index = row * m.row_stride + k * m.column_stride;
      const double old =
          call_.features.accumulate ? load_element(to.data(), to.dtype(), index) : 0.0;
      store_element(to.data(), to.dtype(), index, old + static_cast<double>(sums[i * dim + k]));
    }
  });
}

}  // namespace logitless::cpu
