#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/tensor/copy_lines.h"

namespace logitless::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWide = 8;  // elements of a thread, 16 bytes

// A thread for kWide elements of the copy; thread blocks share the lines.
__global__ void __launch_bounds__(kThreads) copy_padded(const CopyLines c) {
  const std::int64_t first = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWide;
  if (first >= c.to_stride) return;
  for (std::int64_t line = blockIdx.y; line < c.lines; line += gridDim.y) {
    const std::uint16_t* const from =
        static_cast<const std::uint16_t*>(c.from) + line * c.from_stride + first;
    std::uint32_t words[kWide / 2];
#pragma unroll
    for (int i = 0; i < kWide / 2; ++i) {
      const std::uint32_t low = first + 2 * i < c.length ? from[2 * i] : 0u,
                          high = first + 2 * i + 1 < c.length ? from[2 * i + 1] : 0u;
      words[i] = low | high << 16;
    }
    auto* const to = static_cast<std::uint16_t*>(c.to) + line * c.to_stride + first;
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace

void copy_lines(const CopyLines& c, Stream stream) {
  if (c.lines == 0 || c.to_stride == 0) return;
  constexpr std::int64_t kMostLines = 65535, kPerBlock = kThreads * kWide;
  const dim3 grid(static_cast<unsigned>((c.to_stride + kPerBlock - 1) / kPerBlock),
                  static_cast<unsigned>(std::min(c.lines, kMostLines)));
  copy_padded<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(c);
  require_cuda(cudaGetLastError(), "aligned copy of an operand");
}

}  // namespace logitless::cuda
