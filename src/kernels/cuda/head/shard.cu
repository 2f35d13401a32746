// Merges of values that ranks exchange: a few microseconds each, small beside the GEMMs.
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/head/targets.cuh"
#include "kernels/device/shard.h"
#include "math/log_prob.h"
#include "math/shard_state.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;

unsigned blocks_of(std::int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}
__device__ __forceinline__ std::int64_t place() {
  return static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_of_ranks(const T* all, int ranks, std::int64_t count, T* sums) {
  const std::int64_t i = place();
  if (i >= count) return;
  T sum = all[i];
  for (int r = 1; r < ranks; ++r) sum += all[r * count + i];
  sums[i] = sum;
}

__global__ void __launch_bounds__(kThreads)
    values_of_table(const float* values, const std::int32_t* table, std::int64_t rows,
                    float* values_of_rows) {
  if (const std::int64_t row = place(); row < rows) values_of_rows[row] = values[table[row]];
}

__global__ void __launch_bounds__(kThreads)
    vocab_ids_of_ranks(const VocabBegins vocab_begins, std::int64_t each, std::int32_t* table) {
  const std::int64_t row = place();
  if (row >= vocab_begins.ranks * each) return;
  table[row] = vocab_begins.of[row / each] + static_cast<std::int32_t>(row % each);
}

// A thread block for each row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    round_sums_of_ranks(const float* slices, int ranks, std::int64_t count, std::int64_t columns,
                        const GradientOutput out) {
  const std::int64_t row = blockIdx.x;
  T* const to = static_cast<T*>(out.data) + row * out.stride;
  if (columns % 4 != 0) {  // slices begin anywhere
    for (std::int64_t c = threadIdx.x; c < columns; c += kThreads) {
      float sum = slices[row * columns + c];
      for (int r = 1; r < ranks; ++r) sum += slices[r * count + row * columns + c];
      to[c] = rounded<T>(out.add ? as_float(to[c]) + sum : sum);
    }
    return;
  }
  for (std::int64_t c = threadIdx.x * 4; c < columns; c += kThreads * 4) {
    const float* at = slices + row * columns + c;
    float4 sum = *reinterpret_cast<const float4*>(at);
    for (int r = 1; r < ranks; ++r) {
      at += count;
      const float4 more = *reinterpret_cast<const float4*>(at);
      sum.x += more.x;
      sum.y += more.y;
      sum.z += more.z;
      sum.w += more.w;
    }
    const float values[] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int k = 0; k < 4; ++k)
      to[c + k] = rounded<T>(out.add ? as_float(to[c + k]) + values[k] : values[k]);
  }
}

template <typename T>
void sum_ranks(const T* all, int ranks, std::int64_t count, T* sums, Stream stream) {
  if (count == 0) return;
  sum_of_ranks<<<blocks_of(count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(all, ranks,
                                                                                     count, sums);
  require_cuda(cudaGetLastError(), "sums over ranks");
}

__global__ void __launch_bounds__(kThreads)
    write_merged(const ForwardCall c, const TokenRecord* records, int ranks) {
  const std::int64_t row = place();
  const std::int64_t tokens = c.shape.tokens;
  if (row >= tokens) return;
  const MergedState merged = merge_shards(
      ranks, [&](int r) -> const ShardState& { return records[r * tokens + row].state; });
  ExactSum wide;
  for (int r = 0; r < ranks; ++r) wide.add(records[r * tokens + row].wide);
  const double sum = wide.scaled(merged.exponent);
  const double lse = (merged.exponent + log2(sum)) * kLn2;
  const bool valid_row = has_target(c, row);
  write_lse(c, row, valid_row ? lse : 0.0);
  if (c.entropy != nullptr)
    c.entropy[row] = valid_row ? static_cast<float>(entropy_of(sum, merged.entropy / sum)) : 0.0f;
  if (c.weighted_sum != nullptr)
    c.weighted_sum[row] = valid_row ? static_cast<float>(merged.weighted) : 0.0f;
  if (c.argmax != nullptr) c.argmax[row] = valid_row ? merged.vocab_id : -1;
  const int per_token = c.shape.targets_per_token;
  for (std::int64_t slot = row * per_token; slot < (row + 1) * per_token; ++slot) {
    const std::int64_t vocab_id = target_of(c, slot);
    const bool valid = is_target(c, vocab_id);
    const float z = c.given_logits[slot];
    if (c.target_logit != nullptr) c.target_logit[slot] = valid ? z : 0.0f;
    if (c.log_prob != nullptr)
      c.log_prob[slot] =
          valid ? static_cast<float>(log_prob_of(z, lse)) : without_logit(c, vocab_id);
  }
}

__global__ void __launch_bounds__(kThreads)
    add_records(const ForwardCall c, const float* found, bool first, TokenRecord* states,
                float* logits) {
  const std::int64_t row = place();
  if (row >= c.shape.tokens) return;
  TokenRecord all;
  if (!first) all = states[row];
  all.wide.add(c.records[row].wide);
  merge_into(all.state, c.records[row].state);
  states[row] = all;
  const int per_token = c.shape.targets_per_token;
  for (std::int64_t slot = row * per_token; slot < (row + 1) * per_token; ++slot)
    logits[slot] = first ? found[slot] : logits[slot] + found[slot];
}

__device__ __forceinline__ void note_bad(std::uint64_t* bad_target, std::int64_t position) {
  atomicMin(reinterpret_cast<unsigned long long*>(bad_target),
            static_cast<unsigned long long>(position));
}

__global__ void __launch_bounds__(kThreads) write_neutral(const ForwardCall c) {
  const std::int64_t row = place();
  if (row >= c.shape.tokens) return;
  c.records[row] = TokenRecord();
  const int per_token = c.shape.targets_per_token;
  for (std::int64_t slot = row * per_token; slot < (row + 1) * per_token; ++slot) {
    if (is_bad(c, target_of(c, slot)))
      note_bad(c.bad_target, place_of(c, slot) + (c.sequence > 0 ? 1 : 0));
  }
}

// A thread block for each row.
__global__ void __launch_bounds__(kThreads)
    copy_rows(const ForwardCall all, const LocalTokens own) {
  const std::int64_t row = blockIdx.x;
  const bool is_local = row < own.count;
  const std::int64_t at = own.first + row;
  const std::int64_t token = is_local && own.rows != nullptr ? own.rows[at] : at;
  const std::int64_t dim = all.shape.dim;
  const auto* const from =
      static_cast<const std::uint16_t*>(all.hidden) + token * all.hidden_stride;
  auto* const to = static_cast<std::uint16_t*>(own.hidden) + row * dim;
  const auto starts = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to);
  if (dim % 8 == 0 && starts % 16 == 0) {
    for (std::int64_t k = threadIdx.x * 8; k < dim; k += kThreads * 8)
      *reinterpret_cast<uint4*>(to + k) =
          is_local ? *reinterpret_cast<const uint4*>(from + k) : uint4{0, 0, 0, 0};
  } else {
    for (std::int64_t k = threadIdx.x; k < dim; k += kThreads)
      to[k] = is_local ? from[k] : std::uint16_t{0};
  }
  const int per_token = all.shape.targets_per_token;
  for (int k = threadIdx.x; k < per_token; k += kThreads) {
    const std::int64_t slot = row * per_token + k;
    const std::int64_t position = token * per_token + k;
    const std::int64_t vocab_id = is_local ? target_of(all, position) : all.ignore_index;
    if (is_bad(all, vocab_id))
      note_bad(all.bad_target, place_of(all, position) + (all.sequence > 0 ? 1 : 0));
    own.targets[slot] = vocab_id;
  }
}

}  // namespace

void merge_logits(const float* all, int ranks, std::int64_t slots, float* logits, Stream stream) {
  sum_ranks(all, ranks, slots, logits, stream);
}

void take_vocab(const float* values, const std::int32_t* table, std::int64_t rows,
                float* values_of_rows, Stream stream) {
  if (rows == 0) return;
  values_of_table<<<blocks_of(rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      values, table, rows, values_of_rows);
  require_cuda(cudaGetLastError(), "values of a table's vocabulary entries");
}

void fill_vocab_ids(const VocabBegins& vocab_begins, std::int64_t each, std::int32_t* table,
                    Stream stream) {
  if (vocab_begins.ranks == 0 || each == 0) return;
  vocab_ids_of_ranks<<<blocks_of(vocab_begins.ranks * each), kThreads, 0,
                       static_cast<cudaStream_t>(stream)>>>(vocab_begins, each, table);
  require_cuda(cudaGetLastError(), "vocabulary entries of a slice");
}

void round_slices(const float* slices, int ranks, std::int64_t count, std::int64_t rows,
                  std::int64_t columns, const GradientOutput& out, Stream stream) {
  if (rows == 0) return;
  with_type(out.dtype, [&](auto type) {
    round_sums_of_ranks<decltype(type)>
        <<<static_cast<unsigned>(rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            slices, ranks, count, columns, out);
  });
  require_cuda(cudaGetLastError(), "rounded sums over ranks");
}
void add_slices(const float* slices, int ranks, std::int64_t count, float* sums, Stream stream) {
  sum_ranks(slices, ranks, count, sums, stream);
}
void add_slices(const double* slices, int ranks, std::int64_t count, double* sums, Stream stream) {
  sum_ranks(slices, ranks, count, sums, stream);
}

void merge_records(const ForwardCall& c, const TokenRecord* records, int ranks) {
  if (c.shape.tokens == 0) return;
  write_merged<<<blocks_of(c.shape.tokens), kThreads, 0, static_cast<cudaStream_t>(c.stream)>>>(
      c, records, ranks);
  require_cuda(cudaGetLastError(), "merge of the ranks' records");
}

void absorb_records(const ForwardCall& c, const float* found, bool first, TokenRecord* states,
                    float* logits) {
  if (c.shape.tokens == 0) return;
  add_records<<<blocks_of(c.shape.tokens), kThreads, 0, static_cast<cudaStream_t>(c.stream)>>>(
      c, found, first, states, logits);
  require_cuda(cudaGetLastError(), "records of more vocabulary entries");
}

void write_neutral_records(const ForwardCall& c) {
  const auto stream = static_cast<cudaStream_t>(c.stream);
  if (c.first_token == 0)
    require_cuda(cudaMemsetAsync(c.bad_target, 0xff, sizeof(*c.bad_target), stream), "bad_target");
  if (c.shape.tokens == 0) return;
  write_neutral<<<blocks_of(c.shape.tokens), kThreads, 0, stream>>>(c);
  require_cuda(cudaGetLastError(), "records of no vocabulary entries");
}

void copy_local_tokens(const ForwardCall& all, const LocalTokens& own) {
  if (own.padded == 0) return;
  copy_rows<<<static_cast<unsigned>(own.padded), kThreads, 0,
              static_cast<cudaStream_t>(all.stream)>>>(all, own);
  require_cuda(cudaGetLastError(), "tokens of this rank");
}

}  // namespace logitless::cuda
