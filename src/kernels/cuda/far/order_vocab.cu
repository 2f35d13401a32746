// Recursive bisection of the vocabulary, all parts of a level at a time. Parts are runs of
// positions with sizes known to the host. Two sorts per level move the entries: by projection
// within a part, and back to ascending ids within its halves.
#include <algorithm>
#include <cub/device/device_radix_sort.cuh>
#include <vector>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/numbers.cuh"
#include "kernels/device/order.h"
#include "math/mix.h"

namespace logitless::cuda {
namespace {

constexpr std::int64_t kTile = 128;
constexpr int kThreads = 256;
constexpr int kDirectionThreads = 512;
// Rows sampled from a part for its principal direction, and steps of the power iteration.
constexpr int kSample = 256;
constexpr int kPowerSteps = 5;
// Parts whose directions are computed at a time.
constexpr int kParts = 256;

std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }
unsigned blocks_of(std::int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

struct OrderLayout {
  OrderLayout(std::int64_t vocab, std::int64_t dim) {
    const auto v = static_cast<std::size_t>(vocab);
    const auto take = [&](std::size_t bytes) {
      const std::size_t at = total;
      total += aligned(bytes);
      return at;
    };
    keys = take(v * 8);
    sorted_keys = take(v * 8);
    other_vocab = take(v * 4);
    begins = take((v / kTile + 2) * 4);  // a part has at least a tile, except the last
    directions = take(3 * kParts * static_cast<std::size_t>(dim) * 4);
    cub::DeviceRadixSort::SortPairs(nullptr, sort_bytes, static_cast<std::uint64_t*>(nullptr),
                                    static_cast<std::uint64_t*>(nullptr),
                                    static_cast<std::int32_t*>(nullptr),
                                    static_cast<std::int32_t*>(nullptr), static_cast<int>(vocab));
    sort = take(sort_bytes);
  }
  std::size_t keys, sorted_keys, other_vocab, begins, directions, sort;
  std::size_t sort_bytes = 0;
  std::size_t total = 0;
};

// Maps a float to bits in the same order; NaN comes last.
__device__ __forceinline__ std::uint32_t ordered_bits(float v) {
  if (isnan(v)) return ~0u;
  const std::uint32_t bits = __float_as_uint(v + 0.0f);  // -0 counts as 0
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Returns the part of a position: the last that begins at or before it.
__device__ __forceinline__ int part_of(const std::int32_t* begins, int parts, int position) {
  int low = 0;
  int high = parts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (begins[middle] <= position ? low : high) = middle;
  }
  return low;
}

// Keys for descending averages; the stable sort keeps ids ascending among equals.
__global__ void __launch_bounds__(kThreads)
    key_averages(const float* average, int vocab, std::uint64_t* keys, std::int32_t* vocab_ids) {
  const int vocab_id = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (vocab_id >= vocab) return;
  keys[vocab_id] = ~ordered_bits(average[vocab_id]);
  vocab_ids[vocab_id] = vocab_id;
}

// Keys by the part of an entry's position, then by ascending id.
__global__ void __launch_bounds__(kThreads)
    key_vocab(const std::int32_t* vocab_ids, int vocab, const std::int32_t* begins, int parts,
              std::uint64_t* keys) {
  const int at = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (at >= vocab) return;
  keys[at] = static_cast<std::uint64_t>(part_of(begins, parts, at)) << 32 |
             static_cast<std::uint32_t>(vocab_ids[at]);
}

struct LevelArguments {
  const void* weight;
  std::int64_t stride;
  std::int64_t dim;
  int vocab;
  const std::int32_t* vocab_ids;
  const std::int32_t* begins;  // [parts + 1]
  int parts;
  int first_part;     // of this launch
  float* directions;  // [kParts, dim], followed by as many means and sums
  std::uint64_t seed;
  std::uint64_t* keys;
};

__device__ __forceinline__ float warp_sum(float v) {
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
}

// Sums over the threads of a block; all threads get the result.
__device__ float block_sum(float v) {
  __shared__ float parts[kDirectionThreads / 32];
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0.0f;
  for (const float part : parts) sum += part;
  return sum;
}

// A thread block for each part: power iteration over evenly spaced rows.
template <typename T>
__global__ void __launch_bounds__(kDirectionThreads) find_directions(const LevelArguments a) {
  __shared__ const T* rows[kSample];
  __shared__ float along[kSample];
  const int part = a.first_part + static_cast<int>(blockIdx.x);
  const int begin = a.begins[part];
  const int count = a.begins[part + 1] - begin;
  if (count <= kTile) return;
  const int sampled = min(count, kSample);
  for (int i = threadIdx.x; i < sampled; i += kDirectionThreads) {
    const std::int64_t at = static_cast<std::int64_t>(i) * count / sampled;
    rows[i] = static_cast<const T*>(a.weight) + a.vocab_ids[begin + at] * a.stride;
  }
  __syncthreads();
  float* const direction = a.directions + blockIdx.x * a.dim;
  float* const mean = direction + kParts * a.dim;
  float* const next = mean + kParts * a.dim;
  for (std::int64_t k = threadIdx.x; k < a.dim; k += kDirectionThreads) {
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < sampled; ++i) sum += as_float(rows[i][k]);
    mean[k] = sum / static_cast<float>(sampled);
    const std::uint64_t random =
        mix64(mix64(a.seed ^ static_cast<std::uint64_t>(begin)) + static_cast<std::uint64_t>(k));
    direction[k] = static_cast<float>(static_cast<double>(random >> 11) * 0x1p-53 - 0.5);
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int step = 0; step < kPowerSteps; ++step) {
    __syncthreads();
    float part_of_mean = 0.0f;
    for (std::int64_t k = threadIdx.x; k < a.dim; k += kDirectionThreads)
      part_of_mean = fmaf(mean[k], direction[k], part_of_mean);
    const float of_mean = block_sum(part_of_mean);
    for (int i = static_cast<int>(threadIdx.x) / 32; i < sampled; i += kDirectionThreads / 32) {
      float sum = 0.0f;
#pragma unroll 4
      for (std::int64_t k = lane; k < a.dim; k += 32)
        sum = fmaf(as_float(rows[i][k]), direction[k], sum);
      sum = warp_sum(sum);
      if (lane == 0) along[i] = sum - of_mean;
    }
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < sampled; ++i) total += along[i];
    float squares = 0.0f;
    for (std::int64_t k = threadIdx.x; k < a.dim; k += kDirectionThreads) {
      float sum = -total * mean[k];
#pragma unroll 8
      for (int i = 0; i < sampled; ++i) sum = fmaf(along[i], as_float(rows[i][k]), sum);
      next[k] = sum;
      squares = fmaf(sum, sum, squares);
    }
    const float norm = sqrtf(block_sum(squares));
    if (!(norm > 0.0f) || !isfinite(norm)) return;  // all rows are equal: any direction serves
    for (std::int64_t k = threadIdx.x; k < a.dim; k += kDirectionThreads)
      direction[k] = next[k] / norm;
  }
}

// A warp for each position of the launch's parts: keys by part, then by projection. Entries of
// parts that are not split keep their order.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    project_vocab(const LevelArguments a, int first_position, int end_position) {
  const int at = first_position + static_cast<int>((blockIdx.x * kThreads + threadIdx.x) / 32);
  if (at >= end_position) return;
  const int part = part_of(a.begins, a.parts, at);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t place = 0;
  if (a.begins[part + 1] - a.begins[part] > kTile) {
    const T* const row = static_cast<const T*>(a.weight) + a.vocab_ids[at] * a.stride;
    const float* const direction = a.directions + (part - a.first_part) * a.dim;
    float sum = 0.0f;
#pragma unroll 4
    for (std::int64_t k = lane; k < a.dim; k += 32) sum = fmaf(as_float(row[k]), direction[k], sum);
    place = ordered_bits(warp_sum(sum));
  }
  if (lane == 0) a.keys[at] = static_cast<std::uint64_t>(part) << 32 | place;
}

class Bisection {
 public:
  explicit Bisection(const OrderCall& call)
      : call_(call),
        layout_(call.vocab, call.dim),
        base_(static_cast<std::byte*>(call.workspace)),
        stream_(static_cast<cudaStream_t>(call.stream)),
        vocab_(static_cast<int>(call.vocab)) {}

  void run() {
    key_averages<<<blocks_of(vocab_), kThreads, 0, stream_>>>(call_.average, vocab_, keys(),
                                                              call_.vocab_ids);
    require_cuda(cudaGetLastError(), "vocabulary entries by average");
    sort(32);
    std::vector<std::int32_t> begins;
    for (std::int64_t at = 0; at < call_.vocab; at += call_.per_stratum)
      begins.push_back(static_cast<std::int32_t>(at));
    begins.push_back(vocab_);
    set_parts(begins);
    while (true) {
      const std::vector<std::int32_t> halves = split(begins);
      if (halves.size() == begins.size()) return;
      project(begins);
      sort(32 + bits_of(begins.size()));
      set_parts(halves);
      begins = halves;
    }
  }

 private:
  std::uint64_t* keys() const { return reinterpret_cast<std::uint64_t*>(base_ + layout_.keys); }
  std::int32_t* begins() const { return reinterpret_cast<std::int32_t*>(base_ + layout_.begins); }

  static int bits_of(std::size_t count) {
    int bits = 0;
    while ((std::size_t{1} << bits) < count) ++bits;
    return bits;
  }

  // Splits parts of more than a tile in the middle, at a tile boundary.
  static std::vector<std::int32_t> split(const std::vector<std::int32_t>& begins) {
    std::vector<std::int32_t> out;
    for (std::size_t p = 0; p + 1 < begins.size(); ++p) {
      out.push_back(begins[p]);
      const std::int64_t count = begins[p + 1] - begins[p];
      if (count > kTile)
        out.push_back(begins[p] +
                      static_cast<std::int32_t>(std::max(count / 2 / kTile * kTile, kTile)));
    }
    out.push_back(begins.back());
    return out;
  }

  // Sorts entries by keys; stable.
  void sort(int bits) {
    std::size_t bytes = layout_.sort_bytes;
    auto* const other = reinterpret_cast<std::int32_t*>(base_ + layout_.other_vocab);
    require_cuda(cub::DeviceRadixSort::SortPairs(
                     base_ + layout_.sort, bytes, keys(),
                     reinterpret_cast<std::uint64_t*>(base_ + layout_.sorted_keys), call_.vocab_ids,
                     other, vocab_, 0, bits, stream_),
                 "sort");
    require_cuda(cudaMemcpyAsync(call_.vocab_ids, other, static_cast<std::size_t>(vocab_) * 4,
                                 cudaMemcpyDeviceToDevice, stream_),
                 "sorted vocabulary entries");
  }

  // Copies the parts to the device and sorts the entries of each part by id.
  void set_parts(const std::vector<std::int32_t>& parts) {
    copy_to_device(begins(), parts.data(), parts.size() * 4, call_.stream);
    key_vocab<<<blocks_of(vocab_), kThreads, 0, stream_>>>(
        call_.vocab_ids, vocab_, begins(), static_cast<int>(parts.size()) - 1, keys());
    require_cuda(cudaGetLastError(), "vocabulary entries of the parts");
    sort(32 + bits_of(parts.size()));
  }

  void project(const std::vector<std::int32_t>& parts) {
    LevelArguments a{};
    a.weight = call_.weight;
    a.stride = call_.stride;
    a.dim = call_.dim;
    a.vocab = vocab_;
    a.vocab_ids = call_.vocab_ids;
    a.begins = begins();
    a.parts = static_cast<int>(parts.size()) - 1;
    a.directions = reinterpret_cast<float*>(base_ + layout_.directions);
    a.seed = call_.seed;
    a.keys = keys();
    for (a.first_part = 0; a.first_part < a.parts; a.first_part += kParts) {
      const int end = std::min(a.parts, a.first_part + kParts);
      const int first = parts[static_cast<std::size_t>(a.first_part)];
      const int last = parts[static_cast<std::size_t>(end)];
      with_type(call_.dtype, [&](auto type) {
        using T = decltype(type);
        find_directions<T>
            <<<static_cast<unsigned>(end - a.first_part), kDirectionThreads, 0, stream_>>>(a);
        project_vocab<T>
            <<<blocks_of(std::int64_t{last - first} * 32), kThreads, 0, stream_>>>(a, first, last);
      });
      require_cuda(cudaGetLastError(), "principal directions");
    }
  }

  const OrderCall& call_;
  OrderLayout layout_;
  std::byte* base_;
  cudaStream_t stream_;
  int vocab_;
};

}  // namespace

std::size_t order_workspace_bytes(std::int64_t vocab, std::int64_t dim) {
  return OrderLayout(vocab, dim).total;
}

void order_vocab(const OrderCall& call) { Bisection(call).run(); }

}  // namespace logitless::cuda
