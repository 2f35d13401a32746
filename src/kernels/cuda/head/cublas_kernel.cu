// Head by cuBLAS, for every dtype, width and GPU that the other kernels do not support. Strips of
// logits, some tokens x some vocabulary entries, are multiplied into fp32 in the workspace. One
// kernel reads each strip once: it merges the sums of the strip into those of its tokens and stores
// exponentials, or it makes the gradient of the logits. A strip is small enough to stay in L2 until
// then, and no other fp32 logits exist.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/fast_math.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/head/logit_strips.cuh"
#include "kernels/cuda/head/sizes.h"
#include "kernels/cuda/head/stored_logits.cuh"
#include "kernels/cuda/head/targets.cuh"
#include "kernels/device/gradient.h"
#include "math/log_prob.h"
#include "math/lse_state.h"
#include "math/softcap.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kWide = 4;  // adjacent entries that a thread takes at once

using Row = CublasRow;

__device__ __forceinline__ float transformed(float raw, const ForwardCall& c,
                                             std::int64_t vocab_id) {
  if (c.bias != nullptr) raw += c.bias[vocab_id];
  return softcap(raw * c.logit_scale, c.softcap);
}

// Reads kWide logits of a strip's row from entry j of the strip on; -inf past its end.
__device__ __forceinline__ void read_logits(float* to, const float* row, int j, const Strip& s,
                                            const ForwardCall& c) {
  const float4 raw = j < s.vocab_count ? *reinterpret_cast<const float4*>(row + j) : float4{};
  const float values[kWide] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < kWide; ++i)
    to[i] = j + i < s.vocab_count ? transformed(values[i], c, s.vocab_begin + j + i) : -INFINITY;
}

template <typename T>
struct alignas(sizeof(T) * kWide) Pack {
  T values[kWide];
};
template <typename T>
__device__ __forceinline__ void store(T* to, const float* from, float factor) {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < kWide; ++i) pack.values[i] = rounded<T>(from[i] * factor);
  if (reinterpret_cast<std::uintptr_t>(to) % sizeof(Pack<T>) == 0) {
    *reinterpret_cast<Pack<T>*>(to) = pack;
    return;
  }
  // The block lies in a d_weight that starts anywhere.
#pragma unroll
  for (int i = 0; i < kWide; ++i) to[i] = pack.values[i];
}

struct Sum {
  template <typename T>
  __device__ static T of(T a, T b) {
    return a + b;
  }
};
struct Greatest {
  __device__ static float of(float a, float b) { return fmaxf(a, b); }
};
struct Least {
  __device__ static int of(int a, int b) { return min(a, b); }
};
// Combines the values of all threads in a fixed order; all threads get the result. shared [kWarps].
template <class Combine, typename T>
__device__ __forceinline__ T over_block(T mine, T* shared) {
  for (int step = 16; step > 0; step /= 2)
    mine = Combine::of(mine, __shfl_xor_sync(~0u, mine, step));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = mine;
  __syncthreads();
  T all = shared[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) all = Combine::of(all, shared[w]);
  __syncthreads();  // before the next use of `shared`
  return all;
}

// Exponent of 2 of a logit, rounded up; 0 where the logit is not finite.
__device__ __forceinline__ float exponent_of(float logit) {
  const float exponent = ceilf(logit * kLog2EFloat);
  return isfinite(exponent) ? exponent : 0.0f;
}

// Returns the bits of the greatest logit beside its exponent where they are many: numbers of that
// size are far apart, and so are their exponents. 0 otherwise.
__device__ __forceinline__ float rest_of(float top, float exponent) {
  constexpr float kFew = 2.0f;
  const float rest = fmaf(top, kLog2EFloat, -exponent);
  return isfinite(rest) && fabsf(rest) > kFew ? rest : 0.0f;
}

// Range of stored exponentials 2^(z log2e - reference). A reference is set so that the greatest
// one so far is at most 2^kTop, and is set again when one exceeds 2^kMost. In f16, sums of rows are
// brought to 2^kHalfSum in the end, between 2^kLeastHalfSum and 2^kMostHalfSum, which no element
// exceeds.
template <typename T>
struct Range {
  static constexpr float kTop = 0.0f, kMost = 60.0f;
};
template <>
struct Range<__half> {
  static constexpr float kTop = 13.0f, kMost = 15.0f;
};
constexpr float kHalfSum = 12.0f, kLeastHalfSum = 3.0f, kMostHalfSum = 15.0f;

// Reference of a row after its first strip: `exponent` is that of the greatest logit, and `sum` of
// the strip is relative to it. The whole row has `share` times as many entries.
template <typename T>
__device__ __forceinline__ float first_reference(float exponent, float sum, float share) {
  if (sum == 0.0f) return kLeastExponent;  // all are masked: the next strip sets it again
  float reference = exponent - Range<T>::kTop;
  if constexpr (std::is_same_v<T, __half>) {
    const float bits = ceilf(log2f(sum * share));
    if (isfinite(bits)) reference = fmaxf(reference, exponent + bits - kHalfSum);
  }
  return reference;
}

// row[j] *= factor for j < count, a multiple of kWide.
template <typename T>
__device__ void scale_row(T* row, std::int64_t count, float factor) {
  for (std::int64_t j = threadIdx.x * kWide; j < count; j += kThreads * kWide) {
    const auto pack = *reinterpret_cast<const Pack<T>*>(row + j);
    float values[kWide];
#pragma unroll
    for (int i = 0; i < kWide; ++i) values[i] = as_float(pack.values[i]);
    store(row + j, values, factor);
  }
}

// Adds the sums of a strip, relative to `exponent`, to those of its row.
__device__ void merge_strip(Row& row, double sum, double entropy, float exponent) {
  if (sum == 0.0) return;
  if (row.sum == 0.0) {
    row.sum = sum;
    row.entropy = entropy;
    row.exponent = exponent;
    return;
  }
  const float top = fmaxf(row.exponent, exponent);
  const auto rebase = [top](double& s, double& e, float from) {
    const double factor = exp2(static_cast<double>(from) - top);
    e = s == 0.0 || factor == 0.0 ? 0.0 : entropy_against(top, from, s, e) * factor;
    s *= factor;
  };
  rebase(row.sum, row.entropy, row.exponent);
  rebase(sum, entropy, exponent);
  row.sum += sum;
  row.entropy += entropy;
  row.exponent = top;
}

// A thread block for each token of the strip. Strips of a token come in ascending order. Sums of a
// strip are fp32 trees of at most kVectors * kWide entries a thread; those of a row are double.
// target_logits [tokens, K].
template <typename T, int kVectors>
__global__ void __launch_bounds__(kThreads, 4)
    sum_strip(const ForwardCall c, const Strip s, Row* rows, float* target_logits) {
  __shared__ float shared[kWarps];
  __shared__ int shared_index[kWarps];
  const std::int64_t row = s.first_token + blockIdx.x;
  if (!has_target(c, row)) return;
  const float* const logits = s.logits + blockIdx.x * s.stride;
  const bool first = s.vocab_begin == 0;
  const bool stores = s.vocab_begin < c.stored_vocab;
  // Read before the barriers below, and written after them.
  const float old_reference = stores && !first ? c.reference[row] : 0.0f;

  float z[kVectors][kWide];
  float top = -INFINITY;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    read_logits(z[v], logits, (v * kThreads + static_cast<int>(threadIdx.x)) * kWide, s, c);
#pragma unroll
    for (const float value : z[v]) top = fmaxf(top, value);
  }
  top = over_block<Greatest>(top, shared);
  const float exponent = exponent_of(top), rest = rest_of(top, exponent);

  int index = INT32_MAX;
  float sum = 0.0f, entropy = 0.0f, weighted = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int j = (v * kThreads + static_cast<int>(threadIdx.x)) * kWide;
    float sum_v = 0.0f, entropy_v = 0.0f;
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const float value = z[v][i];
      const bool exists = j + i < s.vocab_count;
      if (c.shape.argmax && exists && value == top) index = min(index, j + i);
      if (c.shape.weighted_sum && exists)
        weighted +=
            (c.logit_weights == nullptr ? 1.0f : c.logit_weights[s.vocab_begin + j + i]) * value;
      const float bits = fmaf(value, kLog2EFloat, -exponent) - rest;
      const float e = exp2f(bits);
      sum_v += e;
      // A masked entry is 0 * -inf.
      if (c.shape.entropy && e != 0.0f) entropy_v = fmaf(e, bits, entropy_v);
      z[v][i] = e == 0.0f ? 0.0f : e * softcap_slope(value, c.softcap);
    }
    sum += sum_v;
    entropy += entropy_v;
  }
  sum = over_block<Sum>(sum, shared);
  if (c.shape.entropy) entropy = over_block<Sum>(entropy, shared);
  if (c.shape.weighted_sum) weighted = over_block<Sum>(weighted, shared);
  if (c.shape.argmax) index = over_block<Least>(index, shared_index);

  if (stores) {
    T* const stored = static_cast<T*>(c.block.data) + row * c.block.stride;
    float reference = old_reference;
    if (first) {
      reference = first_reference<T>(
          exponent, sum, static_cast<float>(c.shape.vocab) / static_cast<float>(s.vocab_count));
    } else if (sum != 0.0f && exponent - reference > Range<T>::kMost) {
      reference = exponent - Range<T>::kTop;
      scale_row(stored, s.vocab_begin, exp2f(old_reference - reference));
    }
    const float factor = sum == 0.0f ? 0.0f : exp2f(exponent - reference + rest);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int j = (v * kThreads + static_cast<int>(threadIdx.x)) * kWide;
      if (j < s.vocab_count && s.vocab_begin + j < c.stored_vocab)
        store(stored + s.vocab_begin + j, z[v], factor);
    }
    if (threadIdx.x == 0) c.reference[row] = reference;
  }
  const int per_token = c.shape.targets_per_token;
  for (int k = threadIdx.x; k < per_token; k += kThreads) {
    const std::int64_t vocab_id = target_of(c, row * per_token + k);
    const std::int64_t j = row_of_vocab_id(c, vocab_id) - s.vocab_begin;
    if (is_local(c, vocab_id) && j >= 0 && j < s.vocab_count)
      target_logits[row * per_token + k] = transformed(logits[j], c, s.vocab_begin + j);
  }
  if (threadIdx.x > 0) return;
  Row all = first ? Row{0.0, 0.0, 0.0, 0.0f, -INFINITY, INT32_MAX} : rows[row];
  // Beyond a double's exponents the rest is less than the rounding of the logits.
  constexpr float kMostRest = 1000.0f;
  const float shift = fabsf(rest) < kMostRest ? rest : 0.0f;
  const double by = shift == 0.0f ? 1.0 : exp2(static_cast<double>(shift));
  merge_strip(all, by * sum, by * (entropy + static_cast<double>(shift) * sum), exponent);
  all.weighted += weighted;
  if (index != INT32_MAX && (all.index == INT32_MAX || top > all.best)) {
    all.best = top;
    all.index = static_cast<int>(s.vocab_begin) + index;
  }
  rows[row] = all;
}

// Writes the outputs of the tokens. A warp for each token.
__global__ void __launch_bounds__(kThreads)
    write_outputs(const ForwardCall c, const Row* rows, const float* target_logits) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= c.shape.tokens) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const bool valid = has_target(c, row);
  const Row all = valid ? rows[row] : Row{};
  const double lse = (all.exponent + log2(all.sum)) * kLn2;
  const int per_token = c.shape.targets_per_token;
  for (int k = lane; k < per_token; k += 32) {
    const std::int64_t slot = row * per_token + k;
    const std::int64_t vocab_id = target_of(c, slot);
    const bool named = is_local(c, vocab_id);
    const float z = named ? target_logits[slot] : 0.0f;
    if (c.target_logit != nullptr) c.target_logit[slot] = z;
    if (c.log_prob != nullptr)
      c.log_prob[slot] =
          named ? static_cast<float>(log_prob_of(z, lse)) : without_logit(c, vocab_id);
    if (is_bad(c, vocab_id)) {
      const std::int64_t position = place_of(c, slot) + (c.sequence > 0 ? 1 : 0);
      atomicMin(reinterpret_cast<unsigned long long*>(c.bad_target),
                static_cast<unsigned long long>(position));
    }
  }
  if (lane > 0) return;
  write_lse(c, row, valid ? lse : 0.0);
  if (c.entropy != nullptr)
    c.entropy[row] = valid ? static_cast<float>(entropy_of(all.sum, all.entropy / all.sum)) : 0.0f;
  if (c.weighted_sum != nullptr)
    c.weighted_sum[row] = valid ? static_cast<float>(all.weighted) : 0.0f;
  if (c.argmax != nullptr)
    c.argmax[row] = !valid                   ? -1
                    : all.index == INT32_MAX ? 0  // all logits are NaN
                                             : vocab_id_of_row(c, all.index);
}

// Brings the sums of an f16 block's rows into the range above. A thread block for each token.
__global__ void __launch_bounds__(kThreads) level_rows(const ForwardCall c, const Row* rows) {
  const std::int64_t row = blockIdx.x;
  if (!has_target(c, row)) return;
  const float reference = c.reference[row];
  const auto bits = static_cast<float>(rows[row].exponent - reference + log2(rows[row].sum));
  if (!isfinite(bits) || (bits >= kLeastHalfSum && bits <= kMostHalfSum)) return;
  const float by = ceilf(bits) - kHalfSum;
  __half* const stored = static_cast<__half*>(c.block.data) + row * c.block.stride;
  scale_row(stored, (c.stored_vocab + kWide - 1) / kWide * kWide, exp2f(-by));
  __syncthreads();  // all threads have read the reference
  if (threadIdx.x == 0) c.reference[row] = reference + by;
}

// Writes the gradients of a strip's logits into the block. A thread block for each token.
template <typename T>
__global__ void __launch_bounds__(kThreads) fill_strip(const BlockCall b, const Strip s) {
  const ForwardCall& c = b.chunk;
  const std::int64_t row = s.first_token + blockIdx.x;
  if (!has_target(c, row)) return;  // prepare_block clears the row
  const float* const logits = s.logits + blockIdx.x * s.stride;
  T* const to =
      static_cast<T*>(b.block.data) + row * b.block.stride + s.vocab_begin - b.vocab_begin;
  const float scale = b.scales == nullptr ? 1.0f : b.scales[0];
  const RowCoefficients r = b.rows[row];
  const float rest = exp2f(-r.lse_rest);  // p = rest 2^(z log2e - lse_log2)
  const float slope_of_bits = r.beta * static_cast<float>(kLn2);
  const float alpha = rest * fmaf(-slope_of_bits, r.lse_rest, r.alpha);
  const float beta = rest * slope_of_bits;
  const bool softmax = r.alpha != 0.0f || r.beta != 0.0f;
  const float gamma = b.smoothing_apart ? 0.0f : r.gamma;
  for (int j = threadIdx.x * kWide; j < s.vocab_count; j += kThreads * kWide) {
    float z[kWide];
    read_logits(z, logits, j, s, c);
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const float bits = fmaf(z[i], kLog2EFloat, -r.lse_log2);
      const float e = softmax ? exp2f(bits) : 0.0f;
      float dz = alpha * e;
      if (beta != 0.0f && e != 0.0f) dz = fmaf(beta * e, bits, dz);
      if (gamma != 0.0f && j + i < s.vocab_count)
        dz = fmaf(gamma, c.logit_weights == nullptr ? 1.0f : c.logit_weights[s.vocab_begin + j + i],
                  dz);
      z[i] = dz == 0.0f ? 0.0f : dz * softcap_slope(z[i], c.softcap);
    }
    store(to + j, z, scale);
  }
}

// Copies a strip's results to those of all entries [tokens, stride], with zeros up to the end of a
// tile. A thread block for each token.
__global__ void __launch_bounds__(kThreads)
    keep_strip(const Strip s, float* results, std::int64_t stride) {
  const float* const from = s.logits + blockIdx.x * s.stride;
  float* const to = results + (s.first_token + blockIdx.x) * stride + s.vocab_begin;
  const int end = (s.vocab_count + kTileColumns - 1) / kTileColumns * kTileColumns;
  for (int j = static_cast<int>(threadIdx.x) * kWide; j < end; j += kThreads * kWide) {
    const float4 raw = j < s.vocab_count ? *reinterpret_cast<const float4*>(from + j) : float4{};
    const auto kept = [&](int i, float value) { return j + i < s.vocab_count ? value : 0.0f; };
    *reinterpret_cast<float4*>(to + j) =
        make_float4(kept(0, raw.x), kept(1, raw.y), kept(2, raw.z), kept(3, raw.w));
  }
}

// tops [vocabulary tiles][padded tokens]: the greatest logit of each tile. A thread block for each
// token.
template <bool kGeneral>
__global__ void __launch_bounds__(kThreads) find_tile_tops(const StoredRows rows, float* tops) {
  const std::int64_t row = blockIdx.x;
  const LogitReader<kGeneral> reader(rows, row);
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int tile = static_cast<int>(threadIdx.x / 32); tile < rows.vocab_tiles; tile += kWarps) {
    float top = -INFINITY;
    for (int first = lane * kReadEntries; first < kTileColumns; first += 32 * kReadEntries) {
      float v[kReadEntries];
      reader.read(v, rows, tile * kTileColumns + first);
#pragma unroll
      for (const float value : v) top = fmaxf(top, value);
    }
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    if (lane == 0) tops[tile * rows.padded_tokens + row] = top;
  }
}

// Calls finish(strip, tokens) for the strips of LogitStrips over the vocabulary, with results in
// the memory of c.block.
template <typename Finish>
void each_stored_strip(const ForwardCall& c, const Finish& finish) {
  const CublasLayout layout(c.shape);
  const auto* const results = static_cast<const float*>(c.block.data);
  const std::int64_t stride = padded_vocab(c.shape.vocab);
  for (std::int64_t token = 0; token < c.shape.tokens; token += layout.strip_tokens) {
    const std::int64_t tokens = std::min(layout.strip_tokens, c.shape.tokens - token);
    for (std::int64_t entry = 0; entry < c.shape.vocab; entry += layout.strip_vocab) {
      const std::int64_t count = std::min(layout.strip_vocab, c.shape.vocab - entry);
      finish(Strip{results + token * stride + entry, stride, token, entry, static_cast<int>(count)},
             static_cast<unsigned>(tokens));
      require_cuda(cudaGetLastError(), "stored strip of logits");
    }
  }
}

// each(finish) calls finish(strip, tokens) for the strips of logits.
template <typename Each>
void forward_of_strips(const ForwardCall& c, const Each& each) {
  const auto stream = static_cast<cudaStream_t>(c.stream);
  if (c.first_token == 0)
    require_cuda(cudaMemsetAsync(c.bad_target, 0xff, sizeof(*c.bad_target), stream), "bad_target");
  if (c.shape.tokens == 0) return;
  const CublasLayout layout(c.shape);
  auto* const rows = at<Row>(c.workspace, layout.rows);
  auto* const targets = at<float>(c.workspace, layout.targets);
  constexpr int kLong = kMostStripVocab / (kThreads * kWide),
                kShort = kMostSplitStripVocab / (kThreads * kWide);
  const bool is_short = layout.strip_vocab <= kMostSplitStripVocab;
  each([&](const Strip& strip, unsigned tokens) {
    with_type(c.shape.dtype, [&](auto type) {
      const auto kernel =
          is_short ? sum_strip<decltype(type), kShort> : sum_strip<decltype(type), kLong>;
      kernel<<<tokens, kThreads, 0, stream>>>(c, strip, rows, targets);
    });
  });
  const auto tokens = static_cast<unsigned>(c.shape.tokens);
  write_outputs<<<(tokens + kWarps - 1) / kWarps, kThreads, 0, stream>>>(c, rows, targets);
  require_cuda(cudaGetLastError(), "outputs");
  if (c.stored_vocab == 0 || c.shape.dtype != DType::f16) return;
  level_rows<<<tokens, kThreads, 0, stream>>>(c, rows);
  require_cuda(cudaGetLastError(), "range of an f16 block");
}

}  // namespace

void cublas_forward(const ForwardCall& c) {
  forward_of_strips(c, [&](const auto& finish) { LogitStrips(c, 0, c.shape.vocab).each(finish); });
}

void cublas_store(const ForwardCall& c, const float* logit_bias, float* results, float* tile_tops) {
  if (c.shape.tokens == 0) return;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  const StoredRows rows = stored_rows(c, tile_tops, results, logit_bias);
  LogitStrips(c, 0, c.shape.vocab).each([&](const Strip& strip, unsigned tokens) {
    keep_strip<<<tokens, kThreads, 0, stream>>>(strip, results, rows.stride);
  });
  (rows.general()
       ? find_tile_tops<true>
       : find_tile_tops<false>)<<<static_cast<unsigned>(c.shape.tokens), kThreads, 0, stream>>>(
      rows, tile_tops);
  require_cuda(cudaGetLastError(), "greatest logits of tiles");
}

void cublas_forward_stored(const ForwardCall& c) {
  forward_of_strips(c, [&](const auto& finish) { each_stored_strip(c, finish); });
}

void cublas_gradient_block(const BlockCall& b) {
  const ForwardCall& c = b.chunk;
  if (c.shape.tokens == 0) return;
  const auto stream = static_cast<cudaStream_t>(c.stream);
  LogitStrips(c, b.vocab_begin, b.vocab_count).each([&](const Strip& strip, unsigned tokens) {
    with_type(c.shape.dtype, [&](auto type) {
      fill_strip<decltype(type)><<<tokens, kThreads, 0, stream>>>(b, strip);
    });
  });
}

}  // namespace logitless::cuda
