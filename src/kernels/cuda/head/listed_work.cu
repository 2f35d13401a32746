// The order of work of sums over lists of blocks: row blocks with long lists first, so that none of
// them is left when the other CTAs have no more.
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/head/listed_gemm_sm80.cuh"

namespace logitless::cuda::listed {
namespace {

// Row blocks by the length of their lists, in kClasses classes from long to short.
constexpr int kClasses = 256;

// Returns how many contracted blocks a row block lists.
__device__ int listed_blocks(const Product& p, int row_block) {
  const int blocks = (contracted_of(p) + kBlock - 1) / kBlock;
  if (p.lists == nullptr) return blocks;
  const std::uint32_t* const bits = p.lists + static_cast<std::int64_t>(row_block) * p.list_stride;
  int count = 0;
  for (int at = p.first, end = p.first + blocks; at < end;) {
    const int width = min(32 - at % 32, end - at);
    const std::uint32_t rest = bits[at / 32] >> (at % 32);
    count += __popc(width < 32 ? rest & ((1u << width) - 1) : rest);
    at += width;
  }
  return count;
}

// f(class, row block) for each row block of result r with work. Its threads share them.
template <typename F>
__device__ void for_work(const Products& p, int r, const F& f) {
  const Product& of = p.results[r];
  const int most = (of.contracted + kBlock - 1) / kBlock;
  for (int row = static_cast<int>(threadIdx.x) % kClasses; row < of.row_blocks; row += kClasses) {
    const int count = row * kBlock < rows_of(of) ? listed_blocks(of, row) : 0;
    if (count > 0) f(kClasses - 1 - count * (kClasses - 1) / most, row);
  }
}

// One thread block, half of it for each result.
__global__ void __launch_bounds__(2 * kClasses) order_row_blocks(const Products p) {
  __shared__ int places[2][kClasses];
  const int result = static_cast<int>(threadIdx.x) / kClasses;
  const int of = static_cast<int>(threadIdx.x) % kClasses;
  places[result][of] = 0;
  __syncthreads();
  for_work(p, result, [&](int of_row, int) { atomicAdd(&places[result][of_row], 1); });
  __syncthreads();
  const int mine = places[result][of];
  for (int step = 1; step < kClasses; step *= 2) {
    const int before = of >= step ? places[result][of - step] : 0;
    __syncthreads();
    places[result][of] += before;
    __syncthreads();
  }
  if (of == kClasses - 1) p.work->row_blocks[result] = places[result][of];
  if (threadIdx.x == 0) p.work->next = 0;
  __syncthreads();
  places[result][of] -= mine;
  __syncthreads();
  std::int32_t* const order = p.order + (result == 0 ? 0 : p.results[0].row_blocks);
  for_work(p, result,
           [&](int of_row, int row) { order[atomicAdd(&places[result][of_row], 1)] = row; });
}

}  // namespace

void order_work(const Products& p, Stream stream) {
  order_row_blocks<<<1, 2 * kClasses, 0, static_cast<cudaStream_t>(stream)>>>(p);
  require_cuda(cudaGetLastError(), "order of the listed blocks");
}

}  // namespace logitless::cuda::listed
