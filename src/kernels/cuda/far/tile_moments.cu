// Moments of tiles on a GPU, as in src/head/far/tile_moments.cpp on the CPU. Axes follow from the
// second moments of tokens and residuals, then each tile's variance along them. Cautions say how
// far the estimated masses fall short of the exact ones. Matrices are row-major; eigenvectors are
// rows.
#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/cuda/cublas.h"
#include "kernels/cuda/cusolver.h"
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/cuda/far/narrow_type.cuh"
#include "kernels/device/order.h"
#include "math/lse_state.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = static_cast<int>(kFarTile);
constexpr std::int64_t kVocabBlock = 8192;  // residuals processed at a time
// The axes are computed from at least this many residuals for each of dim.
constexpr std::int64_t kResiduals = 24;
// Ridge: this part of the tokens' mean second moment is added to the diagonal.
constexpr float kRidge = 1e-2f;

unsigned blocks_of(std::int64_t count, std::int64_t each = kThreads) {
  return static_cast<unsigned>((count + each - 1) / each);
}

// Workspace of a forward and estimates with all tokens in one chunk.
struct MomentsLayout {
  MomentsLayout(const DeviceKernel& kernel, const ForwardShape& shape) {
    const std::int64_t d = shape.dim;
    const std::int64_t tiles = far_tile_count(shape.vocab);
    const std::int64_t groups = far_group_count(shape.vocab);
    const std::int64_t padded = padded_tokens(shape.tokens);
    const std::int64_t blocks = padded / kFarBlock;
    const std::int64_t rows = estimate_rows(shape.tokens);
    const auto take = [&](std::int64_t bytes) {
      const std::size_t at = total;
      total += (static_cast<std::size_t>(bytes) + 255) / 256 * 256;
      return at;
    };
    root = take(d * d * 4);
    inverse = take(d * d * 4);
    moment = take(d * d * 4);
    product = take(d * d * 4);
    along_axes = take(d * d * 2);
    axes = take(d * d * 2);
    values = take(d * 4);
    solver = take(static_cast<std::int64_t>(eigen_workspace_bytes(d)));
    residuals = take(kVocabBlock * d * 2);
    vocab_block = take(kVocabBlock * d * 4);
    variance = take(tiles * d * 2);
    caution = take(tiles * 4);
    constants = take(4 * 4);
    failed = take(4);
    // Same fields as take_far in src/head/cuda/layout.cpp.
    targets = take(shape.tokens * 4);
    lse = take(shape.tokens * 4);
    target_logit = take(shape.tokens * 4);
    log_prob = take(shape.tokens * 4);
    bad_target = take(8);
    reference = take(padded * 4);
    estimated_reference = take(padded * 4);
    active = take((blocks + 1) * 4);
    forward = take(static_cast<std::int64_t>(kernel.workspace_bytes(shape)));
    gathered = take(kVocabBlock * d * 2);
    bias = take(shape.vocab * 4);
    mass = take(2 * groups * padded * 4);
    estimated_mass = take(2 * groups * padded * 4);
    centroid = take(tiles * d * 2);
    mean = take(tiles * d * 2);
    target_weight_sum = take(shape.vocab * 4);
    log2_base = take(tiles * 4);
    along = take(rows * d * 4);
    squares = take(rows * d * 2);
    forms = take(tiles * rows * 4);
    total_mass = take(padded * 4);
    estimate_constants = take(3 * 4);
    products = take(kCublasBytes);
  }
  std::size_t root, inverse, moment, product, along_axes, axes, values, solver, residuals,
      vocab_block;
  std::size_t variance, caution, constants, failed, targets, lse, target_logit, log_prob;
  std::size_t bad_target, reference, estimated_reference, active, forward, gathered, bias, mass;
  std::size_t estimated_mass, centroid, mean;
  std::size_t target_weight_sum, log2_base, along, squares, forms, total_mass, estimate_constants;
  std::size_t products;
  std::size_t total = 0;
};

// Takes `each` evenly spaced residuals of a tile; 0 where it has fewer. A thread block for each
// residual.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    take_residuals(const T* weight, std::int64_t stride, const std::int32_t* vocab_ids, int vocab,
                   int first_tile, int each, const T* mean, std::int64_t dim, __nv_bfloat16* to) {
  const int tile = first_tile + static_cast<int>(blockIdx.x) / each;
  const int i = static_cast<int>(blockIdx.x) % each;
  const int count = min(kTile, vocab - tile * kTile);
  const int taken = min(each, count);
  const std::int64_t vocab_id = i < taken ? vocab_ids[tile * kTile + i * count / taken] : 0;
  for (std::int64_t k = threadIdx.x; k < dim; k += kThreads) {
    const float off = as_float(weight[vocab_id * stride + k]) - as_float(mean[tile * dim + k]);
    to[blockIdx.x * dim + k] = __float2bfloat16(i < taken ? off : 0.0f);
  }
}

// along [tiles * 128, dim]: residuals along the axes. A thread block for each tile.
__global__ void __launch_bounds__(kThreads)
    sum_variances(const float* along, const float* weights, int vocab, int first_tile,
                  std::int64_t dim, float* variance) {
  const int tile = first_tile + static_cast<int>(blockIdx.x);
  const int count = min(kTile, vocab - tile * kTile);
  for (std::int64_t k = threadIdx.x; k < dim; k += kThreads) {
    float sum = 0.0f;
#pragma unroll 8
    for (int r = 0; r < count; ++r) {
      const float v = along[(static_cast<std::int64_t>(blockIdx.x) * kTile + r) * dim + k];
      sum = fmaf(weights[tile * kTile + r] * v, v, sum);
    }
    variance[tile * dim + k] = isfinite(sum) ? sum : 0.0f;
  }
}

__global__ void set_values(float* to, float rows, float residuals) {
  to[0] = 1.0f;
  to[1] = 0.0f;
  to[2] = 1.0f / rows;
  to[3] = 1.0f / residuals;
}

__global__ void __launch_bounds__(kThreads)
    find_nonfinite(const float* values, std::int64_t count, int* failed) {
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    if (!isfinite(values[i])) *failed = 1;
  }
}
__global__ void note_failure(const int* info, int* failed) {
  if (*info != 0) *failed = 1;
}
// Replaces the matrix by the identity after a failure: non-finite weights or tokens have no axes.
__global__ void __launch_bounds__(kThreads)
    replace_failed(float* matrix, std::int64_t dim, const int* failed) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (*failed == 0 || i >= dim * dim) return;
  matrix[i] = i / dim == i % dim ? 1.0f : 0.0f;
}

__global__ void __launch_bounds__(kThreads) add_ridge(float* matrix, std::int64_t dim) {
  __shared__ double parts[kThreads];
  double sum = 0.0;
  for (std::int64_t k = threadIdx.x; k < dim; k += kThreads)
    sum += static_cast<double>(matrix[k * dim + k]);
  parts[threadIdx.x] = sum;
  __syncthreads();
  sum = 0.0;
  for (const double part : parts) sum += part;
  const float ridge = kRidge * static_cast<float>(sum) / static_cast<float>(dim) + 1.2e-38f;
  for (std::int64_t k = threadIdx.x; k < dim; k += kThreads) matrix[k * dim + k] += ridge;
}

// root: rows times the root of their eigenvalue; inverse: divided by it.
__global__ void __launch_bounds__(kThreads)
    scale_rows(float* root, float* inverse, const float* values, std::int64_t dim) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= dim * dim) return;
  // Rounding may push eigenvalues below the ridge.
  const float size = sqrtf(fmaxf(values[i / dim], 1e-7f * values[dim - 1]));
  const float v = root[i];
  root[i] = v * size;
  inverse[i] = size > 0.0f ? v / size : 0.0f;
}

__global__ void __launch_bounds__(kThreads)
    narrow(const float* from, std::int64_t count, __nv_bfloat16* to) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) to[i] = __float2bfloat16(from[i]);
}

struct CautionArguments {
  const float* mass;  // [T][padded], relative to `reference`
  const float* reference;
  const float* lse;
  const float* estimated;  // likewise, relative to estimated_reference
  const float* estimated_reference;
  const float* total;  // log2
  std::int64_t padded;
  int rows;
  float log2_floor;
};

// A thread block for each tile.
__global__ void __launch_bounds__(kThreads) find_caution(const CautionArguments a, float* caution) {
  __shared__ float parts[kThreads];
  float most = 0.0f;
  const std::int64_t first = blockIdx.x * a.padded;
  for (int row = threadIdx.x; row < a.rows; row += kThreads) {
    const float share =
        log2f(a.mass[first + row]) + a.reference[row] - a.lse[row] * static_cast<float>(kLog2E);
    if (!(share > a.log2_floor)) continue;
    // Clamps an estimate that underflows to the smallest float.
    const float estimate = log2f(fmaxf(a.estimated[first + row], 1.2e-38f)) +
                           a.estimated_reference[row] - a.total[row];
    const float short_by = share - estimate;
    if (isfinite(short_by)) most = fmaxf(most, short_by);
  }
  parts[threadIdx.x] = most;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half)
      parts[threadIdx.x] = fmaxf(parts[threadIdx.x], parts[threadIdx.x + half]);
    __syncthreads();
  }
  if (threadIdx.x == 0) caution[blockIdx.x] = parts[0];
}

class TileMoments {
 public:
  explicit TileMoments(const MomentsCall& call)
      : call_(call),
        head_(call.head),
        layout_(*call.kernel, call.head.shape),
        base_(static_cast<std::byte*>(call.workspace)),
        stream_(static_cast<cudaStream_t>(call.head.stream)),
        dim_(call.head.shape.dim),
        tiles_(far_tile_count(call.head.shape.vocab)),
        each_(std::clamp<std::int64_t>((kResiduals * dim_ + tiles_ - 1) / tiles_, 1, kTile)) {}

  MomentTotals measure() {
    prepare_estimates();
    set_far();
    set_values<<<1, 1, 0, stream_>>>(at<float>(layout_.constants),
                                     static_cast<float>(head_.shape.tokens),
                                     static_cast<float>(tiles_ * each_));
    require_cuda(cudaMemsetAsync(base_ + layout_.targets, 0,
                                 static_cast<std::size_t>(head_.shape.tokens) * 4, stream_),
                 "targets");
    // Exact masses, and bias by position.
    call_.kernel->far->begin(head_);
    gather_vectors(head_);
    call_.kernel->far->all_tiles(head_);
    set_means(head_);
    find_axes();
    find_variances();
    estimate();
    return {head_.lse, estimate_.total};
  }

  void find_cautions() {
    set_far();
    CautionArguments a{};
    a.mass = far_.mass;
    a.reference = head_.reference;
    a.lse = head_.lse;
    a.estimated = at<float>(layout_.estimated_mass);
    a.estimated_reference = at<float>(layout_.estimated_reference);
    a.total = estimate_.total;
    a.padded = padded_tokens(head_.shape.tokens);
    a.rows = static_cast<int>(head_.shape.tokens);
    a.log2_floor = std::log2(call_.tau / 3.0f);
    find_caution<<<static_cast<unsigned>(tiles_), kThreads, 0, stream_>>>(a, call_.caution);
    require_cuda(cudaGetLastError(), "caution");
  }

 private:
  template <typename T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

  void set_far() {
    far_.order = call_.order;
    far_.swept_vocab = kVocabBlock;
    far_.gathered = base_ + layout_.gathered;
    far_.bias = head_.bias == nullptr ? nullptr : at<float>(layout_.bias);
    far_.mass = at<float>(layout_.mass);
    far_.centroid = base_ + layout_.centroid;
    estimate_.moments = {base_ + layout_.axes, base_ + layout_.variance,
                         at<float>(layout_.caution)};
    estimate_.target_weight_sum = at<float>(layout_.target_weight_sum);
    estimate_.log2_base = at<float>(layout_.log2_base);
    estimate_.mean = base_ + layout_.mean;
    estimate_.along = at<float>(layout_.along);
    estimate_.squares = base_ + layout_.squares;
    estimate_.forms = at<float>(layout_.forms);
    estimate_.total = at<float>(layout_.total_mass);
    estimate_.constants = at<float>(layout_.estimate_constants);
    estimate_.products = base_ + layout_.products;
    head_.far = &far_;
    head_.targets = base_ + layout_.targets;
    head_.lse = at<float>(layout_.lse);
    head_.target_logit = at<float>(layout_.target_logit);
    head_.log_prob = at<float>(layout_.log_prob);
    head_.bad_target = at<std::uint64_t>(layout_.bad_target);
    head_.reference = at<float>(layout_.reference);
    head_.active = at<int>(layout_.active);
    head_.workspace = base_ + layout_.forward;
  }

  // GEMM: c [m, n] = alpha op(a) op(b) + beta c.
  struct Operand {
    const void* data;
    std::int64_t stride;
    bool transposed;
  };
  void multiply(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k, const Operand& a,
                const Operand& b, float* c, int alpha, int beta) const {
    Gemm g;
    g.dtype = dtype;
    g.m = m;
    g.n = n;
    g.k = k;
    g.a = a.data;
    g.a_stride = a.stride;
    g.a_transposed = a.transposed;
    g.b = b.data;
    g.b_stride = b.stride;
    g.b_transposed = b.transposed;
    g.c = c;
    g.c_stride = n;
    g.alpha = at<float>(layout_.constants) + alpha;
    g.beta = at<float>(layout_.constants) + beta;
    cublas_multiply(g, base_ + layout_.products, head_.stream);
  }
  void multiply_squares(const float* a, const float* b, bool b_transposed, float* c) const {
    multiply(DType::f32, dim_, dim_, dim_, {a, dim_, false}, {b, dim_, b_transposed}, c, 0, 1);
  }

  void check(const float* matrix) const {
    find_nonfinite<<<512, kThreads, 0, stream_>>>(matrix, dim_ * dim_, at<int>(layout_.failed));
    require_cuda(cudaGetLastError(), "axes");
  }
  void replace(float* matrix) const {
    replace_failed<<<blocks_of(dim_ * dim_), kThreads, 0, stream_>>>(matrix, dim_,
                                                                     at<int>(layout_.failed));
    require_cuda(cudaGetLastError(), "axes");
  }
  void eigen(float* matrix) const {
    check(matrix);
    replace(matrix);  // the solver always gets finite numbers
    symmetric_eigen(matrix, dim_, at<float>(layout_.values), base_ + layout_.solver, head_.stream);
    note_failure<<<1, 1, 0, stream_>>>(at<int>(layout_.solver), at<int>(layout_.failed));
    require_cuda(cudaGetLastError(), "axes");
  }

  // Calls f(first tile, tiles) for runs of tiles, with `each` residuals of each tile.
  template <typename F>
  void for_residuals(std::int64_t each, const F& f) const {
    const std::int64_t step = kVocabBlock / each;
    for (std::int64_t first = 0; first < tiles_; first += step) {
      const std::int64_t tiles = std::min(step, tiles_ - first);
      with_narrow_type(head_.shape.dtype, [&](auto type) {
        using T = decltype(type);
        take_residuals<<<static_cast<unsigned>(tiles * each), kThreads, 0, stream_>>>(
            static_cast<const T*>(head_.weight), head_.weight_stride, far_.order.vocab_ids,
            static_cast<int>(head_.shape.vocab), static_cast<int>(first), static_cast<int>(each),
            static_cast<const T*>(estimate_.mean), dim_, at<__nv_bfloat16>(layout_.residuals));
      });
      require_cuda(cudaGetLastError(), "residuals");
      f(first, tiles);
    }
  }

  // A diagonal form fits best where the tokens are isotropic. So the axes are those of the
  // residuals in coordinates that make the tokens' second moment the identity.
  void find_axes() const {
    float* const root = at<float>(layout_.root);
    float* const inverse = at<float>(layout_.inverse);
    float* const moment = at<float>(layout_.moment);
    float* const product = at<float>(layout_.product);
    require_cuda(cudaMemsetAsync(base_ + layout_.failed, 0, sizeof(int), stream_), "axes");
    multiply(head_.shape.dtype, dim_, dim_, head_.shape.tokens,
             {head_.hidden, head_.hidden_stride, true}, {head_.hidden, head_.hidden_stride, false},
             root, 2, 1);
    add_ridge<<<1, kThreads, 0, stream_>>>(root, dim_);
    eigen(root);
    scale_rows<<<blocks_of(dim_ * dim_), kThreads, 0, stream_>>>(root, inverse,
                                                                 at<float>(layout_.values), dim_);
    require_cuda(cudaGetLastError(), "axes of the tokens");
    const void* const residuals = base_ + layout_.residuals;
    for_residuals(each_, [&](std::int64_t first, std::int64_t tiles) {
      multiply(DType::bf16, dim_, dim_, tiles * each_, {residuals, dim_, true},
               {residuals, dim_, false}, moment, 3, first == 0 ? 1 : 0);
    });
    multiply_squares(root, moment, false, product);
    multiply_squares(product, root, true, moment);
    eigen(moment);
    multiply_squares(moment, inverse, false, call_.axes);
    multiply_squares(moment, root, false, product);
    check(call_.axes);
    check(product);
    replace(call_.axes);
    replace(product);
    narrow<<<blocks_of(dim_ * dim_), kThreads, 0, stream_>>>(call_.axes, dim_ * dim_,
                                                             at<__nv_bfloat16>(layout_.axes));
    narrow<<<blocks_of(dim_ * dim_), kThreads, 0, stream_>>>(product, dim_ * dim_,
                                                             at<__nv_bfloat16>(layout_.along_axes));
    require_cuda(cudaGetLastError(), "axes of the residuals");
  }

  void find_variances() const {
    float* const along = at<float>(layout_.vocab_block);
    for_residuals(kTile, [&](std::int64_t first, std::int64_t tiles) {
      multiply(DType::bf16, tiles * kTile, dim_, dim_, {base_ + layout_.residuals, dim_, false},
               {base_ + layout_.along_axes, dim_, true}, along, 0, 1);
      sum_variances<<<static_cast<unsigned>(tiles), kThreads, 0, stream_>>>(
          along, estimate_.target_weight_sum, static_cast<int>(head_.shape.vocab),
          static_cast<int>(first), dim_, call_.variance);
      require_cuda(cudaGetLastError(), "variances");
    });
    narrow<<<blocks_of(tiles_ * dim_), kThreads, 0, stream_>>>(call_.variance, tiles_ * dim_,
                                                               at<__nv_bfloat16>(layout_.variance));
    require_cuda(cudaGetLastError(), "variances");
  }

  void estimate() {
    require_cuda(
        cudaMemsetAsync(base_ + layout_.caution, 0, static_cast<std::size_t>(tiles_) * 4, stream_),
        "caution");
    far_.estimate = &estimate_;
    ForwardCall c = head_;
    FarCall far = far_;
    far.mass = at<float>(layout_.estimated_mass);
    c.far = &far;
    c.reference = at<float>(layout_.estimated_reference);
    estimate_masses(c);
  }

  // Weights and means as the estimates use them.
  void set_means(ForwardCall c) {
    FarCall far = far_;
    far.estimate = &estimate_;
    c.far = &far;
    prepare_means(c);
  }

  const MomentsCall& call_;
  ForwardCall head_;
  MomentsLayout layout_;
  std::byte* base_;
  cudaStream_t stream_;
  std::int64_t dim_, tiles_, each_;
  FarCall far_;
  FarEstimate estimate_;
};

}  // namespace

std::string moments_unsupported() {
  return cublas_missing().empty() ? cusolver_missing() : cublas_missing();
}

std::size_t moments_workspace_bytes(const DeviceKernel& kernel, const ForwardShape& shape) {
  return MomentsLayout(kernel, shape).total;
}

MomentTotals measure_moments(const MomentsCall& call) { return TileMoments(call).measure(); }
void find_cautions(const MomentsCall& call) { TileMoments(call).find_cautions(); }

}  // namespace logitless::cuda
