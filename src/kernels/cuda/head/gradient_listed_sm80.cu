// Gradient GEMMs of a vocabulary block of the far field, for GPUs from compute capability 8.0 on:
//   d_hidden [tokens, dim]:  a block of tokens sums over the groups of entries that it selects
//   d_weight [entries, dim]: a group sums over the blocks of tokens that select or sample it
#include "core/check.h"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/head/listed_gemm_sm80.cuh"
#include "kernels/device/far.h"

namespace logitless::cuda {

// gradient_sm80.cu
void cublas_gradient_gemms(const GradientGemmsCall& call);

namespace {

// Columns of a thread in a row of results, in pairs.
constexpr int kPairs = 8;

template <typename T>
struct alignas(2 * sizeof(T)) Pair {
  T low, high;
};
template <typename T>
__device__ __forceinline__ float2 load_pair(const T* from) {
  const auto pair = *reinterpret_cast<const Pair<T>*>(from);
  return {as_float(pair.low), as_float(pair.high)};
}
template <typename T>
__device__ __forceinline__ void store_pair(T* to, float2 v) {
  *reinterpret_cast<Pair<T>*>(to) = {rounded<T>(v.x), rounded<T>(v.y)};
}

// A thread's columns of a row of results: those that exist, from `column` of the tile on.
struct Columns {
  int first;
  int end;
  __device__ __forceinline__ bool exists(int n) const { return first + n * 8 < end; }
  template <typename T>
  __device__ __forceinline__ void load(float2 (&v)[kPairs], const T* row) const {
#pragma unroll
    for (int n = 0; n < kPairs; ++n)
      v[n] = exists(n) ? load_pair(row + first + n * 8) : make_float2(0.0f, 0.0f);
  }
  template <typename T>
  __device__ __forceinline__ void store(T* row, const float2 (&v)[kPairs]) const {
#pragma unroll
    for (int n = 0; n < kPairs; ++n)
      if (exists(n)) store_pair(row + first + n * 8, v[n]);
  }
};
__device__ __forceinline__ void add(float2 (&v)[kPairs], float factor,
                                    const float2 (&row)[kPairs]) {
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    v[n].x = fmaf(factor, row[n].x, v[n].x);
    v[n].y = fmaf(factor, row[n].y, v[n].y);
  }
}
// Returns a row of a thread's results.
__device__ __forceinline__ void take_row(float2 (&v)[kPairs], const float (&z)[128], int m,
                                         int half) {
#pragma unroll
  for (int n = 0; n < kPairs; ++n)
    v[n] = {z[m * 32 + n * 4 + half * 2], z[m * 32 + n * 4 + half * 2 + 1]};
}

// Adds the sums to the gradients: d_hidden_i += factor_i sum_i, and at the vocabulary entry of row
// j d_weight (+)= sum_j + share_j tile gradient (+ omega_j hidden_sum) + targets of a 16-bit
// d_weight.
template <typename T>
struct FarGradients {
  int tokens;
  int entries;
  int dim;
  float* d_hidden;
  std::int64_t hidden_stride;
  const float* factor;
  GradientOutput d_weight;
  const std::int32_t* vocab_ids;  // by position, from the block's first on, like the next ones
  const float* share;
  const float* tile_gradient;  // [tiles of 128 entries, dim]
  const float* hidden_sum;     // null: none
  const float* logit_weights;  // null: 1
  TargetEntries targets;       // of the full vocabulary; begin null: added elsewhere
  const float* many;
  const T* hidden;       // rows of the targets
  const float* unscale;  // GradientGemmsCall::weight_unscale, of f16
  std::int64_t target_stride;

  __device__ __forceinline__ void first(const float (&z)[128], int row, int column) const {
    const Columns columns{column + tiles_sm80::column_of(0), dim};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = row + tiles_sm80::row_of(i / 2, i % 2);
      if (r >= tokens) continue;
      float* const to = d_hidden + r * hidden_stride;
      float2 sum[kPairs], v[kPairs];
      columns.load(sum, to);
      take_row(v, z, i / 2, i % 2);
      add(sum, factor[r], v);
      columns.store(to, sum);
    }
  }

  __device__ __forceinline__ void second(const float (&z)[128], int row, int column) const {
    const Columns columns{column + tiles_sm80::column_of(0), dim};
    float2 of_tile[kPairs];
    columns.load(of_tile, tile_gradient + std::int64_t{row / listed::kTile} * dim);
    const float scale = unscale == nullptr ? 1.0f : *unscale;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = row + tiles_sm80::row_of(i / 2, i % 2);
      if (r >= entries) continue;
      const std::int32_t vocab_id = vocab_ids[r];
      float2 v[kPairs];
      take_row(v, z, i / 2, i % 2);
      if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
        for (float2& pair : v) pair = {pair.x * scale, pair.y * scale};
      }
      add(v, share[r], of_tile);
      if (hidden_sum != nullptr)
        add_row(v, columns, logit_weights == nullptr ? 1.0f : logit_weights[r], hidden_sum);
      if (targets.begin != nullptr) add_targets(v, columns, vocab_id);
      const std::int64_t at = vocab_id * d_weight.stride;
      if (d_weight.dtype != DType::f32) {
        columns.store(static_cast<T*>(d_weight.data) + at, v);
        continue;
      }
      float* const to = static_cast<float*>(d_weight.data) + at;
      if (d_weight.add) add_row(v, columns, 1.0f, to);
      columns.store(to, v);
    }
  }

 private:
  template <typename Row>
  static __device__ __forceinline__ void add_row(float2 (&v)[kPairs], const Columns& columns,
                                                 float factor, const Row* row) {
    float2 values[kPairs];
    columns.load(values, row);
    add(v, factor, values);
  }
  __device__ __forceinline__ void add_targets(float2 (&v)[kPairs], const Columns& columns,
                                              std::int32_t vocab_id) const {
    const int begin = targets.begin[vocab_id], end = targets.begin[vocab_id + 1];
    if (end - begin > kFewEntries)
      return add_row(v, columns, 1.0f, many + std::int64_t{begin / (kFewEntries + 1)} * dim);
    for (int e = begin; e < end; ++e) {
      const float coefficient = targets.coefficients[e];  // 0: the row may not exist
      if (coefficient != 0.0f)
        add_row(v, columns, coefficient, hidden + targets.tokens[e] * target_stride);
    }
  }
};

listed::Products products_of(const GradientGemmsCall& c) {
  const FarCall& far = *c.far.call;
  const auto blocks = static_cast<int>(padded_tokens(c.tokens) / kFarBlock);
  const auto groups = static_cast<int>(far_group_count(c.block_vocab));
  const auto first_group = static_cast<int>(c.far.first_position / kFarGroup);
  listed::Products p;
  listed::Product& hidden = p.results[0];
  hidden.row_blocks = c.d_hidden.data == nullptr ? 0 : blocks;
  hidden.rows = static_cast<int>(c.tokens);
  hidden.columns = static_cast<int>(c.dim);
  hidden.contracted = static_cast<int>(c.block_vocab);
  hidden.left = c.block.data;
  hidden.left_stride = c.block.stride;
  hidden.right = c.weight;
  hidden.right_stride = c.weight_stride;
  hidden.lists = far.block_groups;
  hidden.list_stride = static_cast<int>(far_bits(far_group_count(c.far.vocab)));
  hidden.first = first_group;
  listed::Product& weight = p.results[1];
  weight.row_blocks = c.d_weight.data == nullptr ? 0 : groups;
  weight.rows = static_cast<int>(c.block_vocab);
  weight.columns = static_cast<int>(c.dim);
  weight.contracted = static_cast<int>(c.tokens);
  weight.left = c.block.data;
  weight.left_stride = c.block.stride;
  weight.left_width = static_cast<int>(c.block.stride);
  weight.right = c.factored_hidden;
  weight.right_stride = c.factored_stride;
  weight.list_stride = static_cast<int>(far_bits(blocks));
  weight.lists = far.group_blocks + std::int64_t{first_group} * weight.list_stride;
  p.work = static_cast<listed::Work*>(c.kernel_workspace);
  p.order = reinterpret_cast<std::int32_t*>(p.work + 1);
  // A strip of cuBLAS's products is larger.
  if (listed::work_bytes(blocks + groups) > c.kernel_workspace_bytes)
    throw InternalError("the lists of a vocabulary block do not fit into the kernel's workspace");
  return p;
}

template <typename T>
FarGradients<T> gradients_of(const GradientGemmsCall& c) {
  const FarCall& far = *c.far.call;
  const std::int64_t position = c.far.first_position;
  FarGradients<T> g{};
  g.tokens = static_cast<int>(c.tokens);
  g.entries = static_cast<int>(c.block_vocab);
  g.dim = static_cast<int>(c.dim);
  g.d_hidden = static_cast<float*>(c.d_hidden.data);
  g.hidden_stride = c.d_hidden.stride;
  g.factor = c.factor;
  g.d_weight = c.d_weight;
  g.vocab_ids = far.order.vocab_ids + position;
  g.share = far.order.share + position;
  g.tile_gradient = c.far.tile_gradient + position / kFarTile * c.dim;
  g.hidden_sum = c.hidden_sum;
  g.logit_weights = c.logit_weights;
  if (c.d_weight.dtype != DType::f32) g.targets = c.entries;
  g.unscale = c.weight_unscale;
  g.many = c.entries.many;
  g.hidden = static_cast<const T*>(c.hidden);
  g.target_stride = c.hidden_stride;
  return g;
}

void require_rows(const char* name, const GradientOutput& out) {
  const std::int64_t bytes = out.stride * static_cast<std::int64_t>(size_of(out.dtype));
  if (reinterpret_cast<std::uintptr_t>(out.data) % 16 != 0 || bytes % 16 != 0)
    throw Unsupported(concat("far field: ", name,
                             ": expected an address and rows that are multiples of 16 bytes"));
}

template <typename T>
void multiply_listed(const GradientGemmsCall& c) {
  listed::launch_products<T>(products_of(c), gradients_of<T>(c), c.stream);
}

}  // namespace

void sm80_gradient_gemms(const GradientGemmsCall& c) {
  if (c.far.call == nullptr) return cublas_gradient_gemms(c);
  if (c.tokens == 0 || (c.d_hidden.data == nullptr && c.d_weight.data == nullptr)) return;
  if (c.d_hidden.data != nullptr && !(c.d_hidden.dtype == DType::f32 && c.d_hidden.add))
    throw InternalError("the far field adds d_hidden of selected tiles in fp32");
  if (c.d_weight.data != nullptr) require_rows("d_weight", c.d_weight);
  c.dtype == DType::f16 ? multiply_listed<__half>(c) : multiply_listed<__nv_bfloat16>(c);
}

}  // namespace logitless::cuda
