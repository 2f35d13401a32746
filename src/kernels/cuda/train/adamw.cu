// Fused AdamW over many tensors, and their gradient norm.
#include <cuda_bf16.h>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/train/adamw_tables.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;       // threads of a block, which updates one cut of a tensor
constexpr int kTotalThreads = 512;  // threads that add up the sums of all cuts

// Sums over the threads of a block by a fixed halving tree; thread 0 gets the result.
template <int kCount>
__device__ double block_sum(double mine) {
  __shared__ double shared[kCount];
  shared[threadIdx.x] = mine;
  __syncthreads();
  for (int half = kCount / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    __syncthreads();
  }
  return shared[0];
}

// The elements of a thread block, as float4 vectors and a tail.
struct Slice {
  AdamWTensor tensor;
  std::int64_t begin, fours, end;
};
__device__ Slice slice_of(const AdamWTensor* tensors, const AdamWCut* cuts) {
  const AdamWCut cut = cuts[blockIdx.x];
  Slice p{tensors[cut.tensor], cut.begin, 0, 0};
  const std::int64_t last = cut.begin + kAdamWBlock;
  p.end = last < p.tensor.count ? last : p.tensor.count;
  p.fours = (p.end - p.begin) / 4;
  return p;
}
__device__ float4* fours(float* data, std::int64_t begin) {
  return reinterpret_cast<float4*>(data + begin);
}
__device__ const float4* fours(const float* data, std::int64_t begin) {
  return reinterpret_cast<const float4*>(data + begin);
}

__device__ void store_rounded(const AdamWTensor& tensor, std::int64_t at, const float4& value) {
  struct alignas(8) Four {
    __nv_bfloat162 low, high;
  };
  *reinterpret_cast<Four*>(static_cast<__nv_bfloat16*>(tensor.rounded) + at) = {
      __floats2bfloat162_rn(value.x, value.y), __floats2bfloat162_rn(value.z, value.w)};
}
__device__ void store_rounded(const AdamWTensor& tensor, std::int64_t at, float value) {
  static_cast<__nv_bfloat16*>(tensor.rounded)[at] = __float2bfloat16_rn(value);
}

__device__ double square(float g) { return static_cast<double>(g) * static_cast<double>(g); }

// partial[cut] = sum of squares of its gradients.
__global__ void __launch_bounds__(kThreads)
    sum_squares(const AdamWTensor* tensors, const AdamWCut* cuts, double* partial) {
  const Slice p = slice_of(tensors, cuts);
  const float4* from = fours(static_cast<const float*>(p.tensor.gradient), p.begin);
  double sums[4] = {};
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < p.fours; i += kThreads) {
    const float4 g = from[i];
    sums[0] += square(g.x);
    sums[1] += square(g.y);
    sums[2] += square(g.z);
    sums[3] += square(g.w);
  }
  const std::int64_t rest = p.begin + 4 * p.fours + threadIdx.x;
  if (rest < p.end) sums[0] += square(p.tensor.gradient[rest]);
  const double sum = block_sum<kThreads>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// Adds up the partial sums; thread 0 gets the result.
__device__ double total_of(const double* partial, std::int64_t blocks) {
  double mine = 0.0;
  for (std::int64_t b = threadIdx.x; b < blocks; b += kTotalThreads) mine += partial[b];
  return block_sum<kTotalThreads>(mine);
}

__device__ void judge(const AdamWTotals& sum, double clip, AdamWState* state, AdamWReport* report) {
  const double norm = sqrt(sum.squares);
  if (!isfinite(sum.loss) || !isfinite(norm)) state->failed = 1;
  state->gradient_scale = static_cast<float>(clip > 0.0 && norm > clip ? clip / norm : 1.0);
  *report = {sum.loss, norm, state->failed, sum.note};
}

__global__ void __launch_bounds__(kTotalThreads)
    judge_own(const double* partial, std::int64_t blocks, double clip, const AdamWRates* rates,
              AdamWState* state, AdamWReport* report) {
  const double squares = total_of(partial, blocks);
  if (threadIdx.x == 0) judge({state->loss, squares, rates->note}, clip, state, report);
}

__global__ void __launch_bounds__(kTotalThreads)
    give_totals(const double* partial, std::int64_t blocks, const AdamWRates* rates,
                const AdamWState* state, AdamWTotals* totals) {
  const double squares = total_of(partial, blocks);
  if (threadIdx.x == 0) *totals = {state->loss, squares, rates->note};
}

__global__ void judge_all(const AdamWTotals* of_all, int ranks, double clip, AdamWState* state,
                          AdamWReport* report) {
  AdamWTotals sum = of_all[0];
  for (int r = 1; r < ranks; ++r) {
    sum.loss += of_all[r].loss;
    sum.squares += of_all[r].squares;
    sum.note = max(static_cast<long long>(sum.note), static_cast<long long>(of_all[r].note));
  }
  judge(sum, clip, state, report);
}

struct Numbers {
  float beta1, beta2, keep1, keep2, epsilon, scale, move, inverse2, decay_factor;
};
__device__ void update(const Numbers& n, float gradient, float& m, float& v, float& value) {
  const float g = gradient * n.scale;
  m = n.beta1 * m + n.keep1 * g;
  v = n.beta2 * v + n.keep2 * (g * g);
  value = n.decay_factor * value - n.move * m / (sqrtf(v * n.inverse2) + n.epsilon);
}

__global__ void __launch_bounds__(kThreads)
    step(const AdamWTensor* tensors, const AdamWCut* cuts, const AdamWState* state,
         const AdamWRates* rates, Numbers n) {
  if (state->failed != 0) return;
  const Slice p = slice_of(tensors, cuts);
  n.scale = state->gradient_scale;
  n.move = rates->move;
  n.inverse2 = rates->inverse2;
  n.decay_factor = p.tensor.decay ? rates->decay_factor : 1.0f;
  const float4* gradients = fours(static_cast<const float*>(p.tensor.gradient), p.begin);
  float4* const ms = fours(p.tensor.m, p.begin);
  float4* const vs = fours(p.tensor.v, p.begin);
  float4* const values = fours(p.tensor.value, p.begin);
#pragma unroll 2
  for (std::int64_t i = threadIdx.x; i < p.fours; i += kThreads) {
    const float4 g = __ldcs(gradients + i);
    float4 m = __ldcs(ms + i), v = __ldcs(vs + i), value = __ldcs(values + i);
    update(n, g.x, m.x, v.x, value.x);
    update(n, g.y, m.y, v.y, value.y);
    update(n, g.z, m.z, v.z, value.z);
    update(n, g.w, m.w, v.w, value.w);
    __stcs(ms + i, m);
    __stcs(vs + i, v);
    __stcs(values + i, value);
    if (p.tensor.rounded != nullptr) store_rounded(p.tensor, p.begin + 4 * i, value);
  }
  const std::int64_t rest = p.begin + 4 * p.fours + threadIdx.x;
  if (rest >= p.end) return;
  update(n, p.tensor.gradient[rest], p.tensor.m[rest], p.tensor.v[rest], p.tensor.value[rest]);
  if (p.tensor.rounded != nullptr) store_rounded(p.tensor, rest, p.tensor.value[rest]);
}

__global__ void __launch_bounds__(kThreads)
    round_values(const AdamWTensor* tensors, const AdamWCut* cuts) {
  const Slice p = slice_of(tensors, cuts);
  if (p.tensor.rounded == nullptr) return;
  const float4* const values = fours(static_cast<const float*>(p.tensor.value), p.begin);
  for (std::int64_t i = threadIdx.x; i < p.fours; i += kThreads)
    store_rounded(p.tensor, p.begin + 4 * i, __ldcs(values + i));
  const std::int64_t rest = p.begin + 4 * p.fours + threadIdx.x;
  if (rest < p.end) store_rounded(p.tensor, rest, p.tensor.value[rest]);
}

__global__ void set_loss(AdamWState* state, const float* loss, bool add) {
  state->loss = (add ? state->loss : 0.0) + static_cast<double>(*loss);
}

// Pointers to the parts of the optimizer's memory.
struct Parts {
  const AdamWTensor* tensors;
  const AdamWCut* cuts;
  double* partial;
  AdamWState* state;
  unsigned blocks;
  cudaStream_t stream;
};
Parts parts_of(const AdamWCall& call) {
  auto* const memory = static_cast<std::byte*>(call.memory);
  return {reinterpret_cast<const AdamWTensor*>(memory + call.places.tensors),
          reinterpret_cast<const AdamWCut*>(memory + call.places.cuts),
          reinterpret_cast<double*>(memory + call.places.partial),
          reinterpret_cast<AdamWState*>(memory + call.places.state),
          static_cast<unsigned>(call.places.blocks),
          static_cast<cudaStream_t>(call.stream)};
}

void add_squares(const Parts& p) {
  if (p.blocks > 0) sum_squares<<<p.blocks, kThreads, 0, p.stream>>>(p.tensors, p.cuts, p.partial);
}

void move(const AdamWCall& call, const Parts& p, const AdamWRates* rates) {
  const Numbers n{call.beta1, call.beta2, call.keep1, call.keep2, call.epsilon, 0, 0, 0, 0};
  if (p.blocks > 0) step<<<p.blocks, kThreads, 0, p.stream>>>(p.tensors, p.cuts, p.state, rates, n);
  require_cuda(cudaGetLastError(), "AdamW");
}

}  // namespace

void adamw_reset(const AdamWCall& call) {
  const Parts p = parts_of(call);
  require_cuda(cudaMemsetAsync(p.state, 0, sizeof(AdamWState), p.stream), "AdamW");
}

void adamw_loss(const AdamWCall& call, const float* loss, bool add) {
  const Parts p = parts_of(call);
  set_loss<<<1, 1, 0, p.stream>>>(p.state, loss, add);
  require_cuda(cudaGetLastError(), "AdamW");
}

void adamw_step(const AdamWCall& call, const AdamWRates* rates, AdamWReport* report) {
  const Parts p = parts_of(call);
  add_squares(p);
  judge_own<<<1, kTotalThreads, 0, p.stream>>>(p.partial, call.places.blocks, call.clip, rates,
                                               p.state, report);
  move(call, p, rates);
}

void adamw_totals(const AdamWCall& call, const AdamWRates* rates, AdamWTotals* totals) {
  const Parts p = parts_of(call);
  add_squares(p);
  give_totals<<<1, kTotalThreads, 0, p.stream>>>(p.partial, call.places.blocks, rates, p.state,
                                                 totals);
  require_cuda(cudaGetLastError(), "AdamW");
}

void adamw_step_of_ranks(const AdamWCall& call, const AdamWRates* rates, const AdamWTotals* of_all,
                         int ranks, AdamWReport* report) {
  const Parts p = parts_of(call);
  judge_all<<<1, 1, 0, p.stream>>>(of_all, ranks, call.clip, p.state, report);
  move(call, p, rates);
}

void adamw_round(const AdamWCall& call) {
  const Parts p = parts_of(call);
  if (p.blocks > 0) round_values<<<p.blocks, kThreads, 0, p.stream>>>(p.tensors, p.cuts);
  require_cuda(cudaGetLastError(), "AdamW");
}

}  // namespace logitless::cuda
