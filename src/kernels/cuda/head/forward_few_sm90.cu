// Launches of the forward kernel of Hopper for at most 192 tokens.
#include <algorithm>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/tensor_map.cuh"
#include "kernels/cuda/head/forward_sm90.cuh"

namespace logitless::cuda {
namespace {

template <typename T, ForwardMode kMode, int kFew>
void launch(const CUtensorMap& hidden, const CUtensorMap& rows, const ForwardArguments& a,
            cudaStream_t stream) {
  using Layout = ForwardLayout<kFew>;
  const auto kernel = forward_tiles<T, kMode, false, kFew>;
  allow_shared(kernel, Layout::kShared);
  const int most = processor_count() / kClusterCtas;
  const int clusters = std::min(most, static_cast<int>(ceil_div(a.vocab_tiles, kClusterCtas)));
  kernel<<<clusters * kClusterCtas, Layout::kThreads, Layout::kShared, stream>>>(hidden, rows,
                                                                                 BlockMaps{}, a);
  require_cuda(cudaGetLastError(), "forward kernel of few tokens");
}

template <typename T, ForwardMode kMode>
auto launch_of(int consumers) {
  return consumers == 1   ? launch<T, kMode, 1>
         : consumers == 2 ? launch<T, kMode, 2>
                          : launch<T, kMode, kMostFew>;
}
template <typename T>
auto launch_of(ForwardMode mode, int consumers) {
  switch (mode) {
    case ForwardMode::kPlain:
      return launch_of<T, ForwardMode::kPlain>(consumers);
    case ForwardMode::kPlainEntropy:
      return launch_of<T, ForwardMode::kPlainEntropy>(consumers);
    case ForwardMode::kPlainBest:
      return launch_of<T, ForwardMode::kPlainBest>(consumers);
    case ForwardMode::kReference:
      return launch_of<T, ForwardMode::kReference>(consumers);
    case ForwardMode::kLogits:
      return launch_of<T, ForwardMode::kLogits>(consumers);
    default:
      return launch_of<T, ForwardMode::kGeneral>(consumers);
  }
}

}  // namespace

std::int64_t few_tokens(ForwardMode mode, bool store, const TileOperands& o,
                        const ForwardArguments& a) {
  const bool gradient = mode == ForwardMode::kGradient || mode == ForwardMode::kPlainGradient;
  if (store || gradient || a.list != nullptr || a.masses != nullptr) return 0;
  const std::int64_t few = o.tokens % kClusterRows, pairs = o.tokens / kClusterRows;
  if (few == 0 || few > kMostFew * kConsumerTokens) return 0;
  if (pairs == 0) return few;
  // A round of pairs of vocabulary tiles takes up to 1.5 of a round of pairs of token tiles.
  const int clusters = processor_count() / kClusterCtas;
  const auto rounds = [&](std::int64_t tiles) { return ceil_div(tiles, clusters); };
  const std::int64_t spared = rounds((pairs + 1) * a.vocab_tiles) - rounds(pairs * a.vocab_tiles);
  return 2 * spared > 3 * rounds(ceil_div(a.vocab_tiles, kClusterCtas)) ? few : 0;
}

void launch_few(ForwardMode mode, const TileOperands& o, std::int64_t tokens,
                const ForwardArguments& arguments, Stream stream) {
  // To TMA all types of 16 bits are one.
  const auto consumers = static_cast<int>(ceil_div(tokens, kConsumerTokens));
  const CUtensorMap hidden = matrix_map(o.hidden, DType::bf16, o.tokens, o.dim, o.hidden_stride,
                                        consumers * kConsumerTokens / kClusterCtas);
  const CUtensorMap rows =
      matrix_map(o.rows, DType::bf16, o.vocab, o.dim, o.row_stride, kTileColumns / 2);
  ForwardArguments a = arguments;
  a.steps = static_cast<int>(ceil_div(o.dim, kStep));
  a.first_pair = static_cast<int>((o.tokens - tokens) / kClusterRows);
  a.launch_pairs = 1;
  a.group = 1;
  const auto of = o.dtype == DType::f16 ? launch_of<__half> : launch_of<__nv_bfloat16>;
  of(mode, consumers)(hidden, rows, a, static_cast<cudaStream_t>(stream));
}

}  // namespace logitless::cuda
