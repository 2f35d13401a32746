#include "head/cpu/vocab_parallel.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/parallel.h"

namespace logitless::cpu {
namespace {

std::size_t bytes(std::int64_t count, std::size_t each) {
  return static_cast<std::size_t>(count) * each;
}

// Computes the indices of the tokens in the exchanged buffers.
void set_places(const Run& run, const ChunkTokens& tokens) {
  auto* const place = run.at<std::int64_t>(run.layout.shard.place);
  if (!run.call.shard.tokens_sharded) return std::iota(place, place + tokens.count, 0);
  const auto* const counts = run.at<std::int64_t>(run.layout.shard.counts);
  std::int64_t t = 0;
  for (int r = 0; r < run.call.shard.ranks(); ++r) {
    const std::int64_t count = std::clamp<std::int64_t>(counts[r] - tokens.first, 0, tokens.step);
    for (std::int64_t i = 0; i < count; ++i) place[t++] = r * tokens.step + i;
  }
}

}  // namespace

std::span<const std::int64_t> VocabParallel::gather_counts() const {
  auto* const counts = run_.at<std::int64_t>(run_.layout.shard.counts);
  const ShardOperands& shard = run_.call.shard;
  counts[shard.rank()] = run_.valid;
  shard.calls->all_gather(counts + shard.rank(), counts, sizeof(std::int64_t));
  return {counts, static_cast<std::size_t>(shard.ranks())};
}

void VocabParallel::gather_tokens(const ChunkTokens& tokens) const {
  set_places(run_, tokens);
  if (!run_.call.shard.tokens_sharded) return;
  CollectiveCalls& calls = *run_.call.shard.calls;
  const int rank = run_.call.shard.rank();
  const int per_token = run_.plan.features.targets_per_token;
  const std::int64_t dim = run_.call.shape.dim;
  const std::size_t element = size_of(run_.call.shape.dtype);
  const std::size_t row_bytes = bytes(dim, element);
  auto* const all = run_.at<std::byte>(run_.layout.shard.hidden);
  std::byte* const mine = all + bytes(rank * tokens.step, row_bytes);
  const RowMatrix m = as_rows("hidden", run_.call.in.hidden);
  const auto* const from = static_cast<const std::byte*>(run_.call.in.hidden.data());
  parallel_for(run_.plan.threads, tokens.step, [&](std::int64_t i, int) {
    std::byte* const to = mine + bytes(i, row_bytes);
    if (i >= tokens.local_count) {  // never read
      std::memset(to, 0, row_bytes);
      return;
    }
    const std::int64_t row = run_.valid_rows()[tokens.first + i] * m.row_stride;
    for (std::int64_t k = 0; k < dim; ++k) {
      std::memcpy(to + bytes(k, element),
                  from + (row + k * m.column_stride) * static_cast<std::int64_t>(element), element);
    }
  });
  calls.all_gather(mine, all, bytes(tokens.step, row_bytes));

  auto* const vocab_ids = run_.at<std::int32_t>(run_.layout.shard.vocab_ids);
  std::int32_t* const own = vocab_ids + rank * tokens.step * per_token;
  std::fill_n(own, tokens.step * per_token, -1);
  read_targets(run_.targets, run_.valid_rows() + tokens.first, tokens.local_count, own);
  calls.all_gather(own, vocab_ids, bytes(tokens.step * per_token, sizeof(std::int32_t)));
}

void VocabParallel::copy_targets(const ChunkTokens& tokens, std::int32_t* vocab_ids) const {
  if (!run_.call.shard.tokens_sharded)
    return read_targets(run_.targets, run_.valid_rows() + tokens.first, tokens.count, vocab_ids);
  const int per_token = run_.plan.features.targets_per_token;
  const auto* const place = run_.at<std::int64_t>(run_.layout.shard.place);
  const auto* const all = run_.at<std::int32_t>(run_.layout.shard.vocab_ids);
  for (std::int64_t t = 0; t < tokens.count; ++t)
    std::copy_n(all + place[t] * per_token, per_token, vocab_ids + t * per_token);
}

void forward_nothing(const ForwardChunk& chunk) {
  for (std::int64_t t = 0; t < chunk.tokens; ++t) {
    chunk.exponent[t] = 0.0f;
    chunk.sum[t] = 0.0f;
    if (chunk.wide != nullptr) chunk.wide[t] = ExactSum();
    if (chunk.entropy_sum != nullptr) chunk.entropy_sum[t] = 0.0;
    if (chunk.weighted_sum != nullptr) chunk.weighted_sum[t] = 0.0;
    if (chunk.argmax != nullptr) chunk.best[t] = -INFINITY;
  }
}

void VocabParallel::merge_states(const ForwardChunk& chunk) const {
  const std::int64_t count = chunk.tokens;
  const int per_token = run_.plan.features.targets_per_token;
  const int ranks = run_.call.shard.ranks();
  const std::size_t of_rank =
      bytes(count, sizeof(TokenRecord)) + bytes(count * per_token, sizeof(ShardTarget));
  auto* const all = run_.at<std::byte>(run_.layout.shard.records);
  const auto record_of = [&](int rank, std::int64_t t) -> TokenRecord& {
    return reinterpret_cast<TokenRecord*>(all + bytes(rank, of_rank))[t];
  };
  const auto target_of = [&](int rank, std::int64_t slot) -> ShardTarget& {
    return reinterpret_cast<ShardTarget*>(all + bytes(rank, of_rank) +
                                          bytes(count, sizeof(TokenRecord)))[slot];
  };
  const int rank = run_.call.shard.rank();
  for (std::int64_t t = 0; t < count; ++t) {
    TokenRecord& record = record_of(rank, t);
    record.wide = chunk.wide != nullptr ? chunk.wide[t] : ExactSum();
    record.state = run_.state_of(chunk, t, run_.vocab);
    for (std::int64_t slot = t * per_token; slot < (t + 1) * per_token; ++slot) {
      const bool is_local = chunk.targets.vocab_ids[slot] >= 0;
      target_of(rank, slot) = {is_local ? chunk.target_logit[slot] : 0.0f, is_local ? 1 : 0};
    }
  }
  run_.call.shard.calls->all_gather(all + bytes(rank, of_rank), all, of_rank);

  parallel_for(run_.plan.threads, count, [&](std::int64_t t, int) {
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

// Each rank adds the partial sums of its tokens in the order of ranks. If all ranks have all
// tokens, each adds a part of them, and the sums are all-gathered.
std::span<const float> VocabParallel::reduce_hidden(const ChunkTokens& tokens) const {
  CollectiveCalls& calls = *run_.call.shard.calls;
  const int ranks = run_.call.shard.ranks();
  const int rank = run_.call.shard.rank();
  const std::int64_t dim = run_.call.shape.dim;
  const bool spread = run_.call.shard.tokens_sharded;
  const std::int64_t block = spread ? tokens.step : ceil_div(tokens.count, ranks);
  const std::int64_t mine =
      spread ? tokens.local_count : std::clamp<std::int64_t>(tokens.count - rank * block, 0, block);
  auto* const slices = run_.at<float>(run_.layout.shard.slices);
  auto* const received = run_.at<float>(run_.layout.shard.received);
  if (run_.empty()) std::fill_n(slices, ranks * block * dim, 0.0f);
  const std::size_t block_bytes = bytes(block * dim, sizeof(float));
  calls.all_to_all(slices, received, block_bytes);
  float* const sums = slices + rank * block * dim;
  parallel_for(run_.plan.threads, mine, [&](std::int64_t i, int) {
    for (std::int64_t k = i * dim; k < (i + 1) * dim; ++k) {
      float sum = received[k];
      for (int r = 1; r < ranks; ++r) sum += received[r * block * dim + k];
      sums[k] = sum;
    }
  });
  if (!spread) calls.all_gather(sums, slices, block_bytes);

  const std::int64_t count = spread ? mine : tokens.count;
  return {spread ? sums : slices, static_cast<std::size_t>(count * dim)};
}

}  // namespace logitless::cpu
