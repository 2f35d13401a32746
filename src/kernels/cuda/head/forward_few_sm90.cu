// Launches of the forward kernel of Hopper for at most 128 tokens.
#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/tensor_map.cuh"
#include "kernels/cuda/head/forward_sm90.cuh"

namespace logitless::cuda {
namespace {

template <typename T, ForwardMode kMode>
void launch(const CUtensorMap& hidden, const CUtensorMap& rows, const ForwardArguments& a,
            cudaStream_t stream) {
  const auto kernel = forward_tiles<T, kMode, false, true>;
  allow_shared(kernel, kTileShared);
  const int most = processor_count() / kClusterCtas;
  const int clusters = std::min(most, static_cast<int>(ceil_div(a.vocab_tiles, kClusterCtas)));
  kernel<<<clusters * kClusterCtas, kTileThreads, kTileShared, stream>>>(hidden, rows, BlockMaps{},
                                                                         a);
  require_cuda(cudaGetLastError(), "forward kernel of few tokens");
}

template <typename T>
auto launch_of(ForwardMode mode) {
  switch (mode) {
    case ForwardMode::kPlain:
      return launch<T, ForwardMode::kPlain>;
    case ForwardMode::kPlainEntropy:
      return launch<T, ForwardMode::kPlainEntropy>;
    case ForwardMode::kPlainBest:
      return launch<T, ForwardMode::kPlainBest>;
    case ForwardMode::kReference:
      return launch<T, ForwardMode::kReference>;
    case ForwardMode::kLogits:
      return launch<T, ForwardMode::kLogits>;
    default:
      return launch<T, ForwardMode::kGeneral>;
  }
}

}  // namespace

bool takes_few(ForwardMode mode, bool store, const TileOperands& o, const ForwardArguments& a) {
  const bool gradient = mode == ForwardMode::kGradient || mode == ForwardMode::kPlainGradient;
  return !store && !gradient && o.tokens <= kTileRows && a.list == nullptr && a.masses == nullptr;
}

void launch_few(ForwardMode mode, const TileOperands& o, const ForwardArguments& arguments,
                Stream stream) {
  // To TMA all types of 16 bits are one.
  const CUtensorMap hidden =
      matrix_map(o.hidden, DType::bf16, o.tokens, o.dim, o.hidden_stride, kTileRows / 2);
  const CUtensorMap rows =
      matrix_map(o.rows, DType::bf16, o.vocab, o.dim, o.row_stride, kTileColumns / 2);
  ForwardArguments a = arguments;
  a.steps = static_cast<int>(ceil_div(o.dim, kStep));
  a.first_pair = 0;
  a.launch_pairs = 1;
  a.group = 1;
  const auto of = o.dtype == DType::f16 ? launch_of<__half> : launch_of<__nv_bfloat16>;
  of(mode)(hidden, rows, a, static_cast<cudaStream_t>(stream));
}

}  // namespace logitless::cuda
