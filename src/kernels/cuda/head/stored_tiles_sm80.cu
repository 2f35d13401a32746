// Epilogues of the forward kernels of compute capability 8.0 and later on stored results of their
// GEMM. A CTA has the results in the registers where the kernels have them, and runs the same code,
// so all sums have the same bits.
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/head/launch_sm80.cuh"

namespace logitless::cuda {
namespace {

using namespace sm80;  // NOLINT: its own kernels

// A CTA for 128 tokens (y) of a vocabulary tile (x).
template <ForwardMode kMode>
__global__ void __launch_bounds__(kThreads, 1) stored_tiles_kernel(const ForwardArguments a) {
  if (a.wanted != nullptr && a.wanted[a.token_pairs] == 0) return;
  __shared__ float partials[kPartialBytes / sizeof(float)];
  const int row = static_cast<int>(blockIdx.y) * kTileRows;
  const int pair = row / kClusterRows;
  if (a.wanted != nullptr && a.wanted[pair] == 0) return;
  const MmaPosition at(a, row, Tile{pair, static_cast<int>(blockIdx.x), false}, partials);
  float z[128];
  get_logits(z, a, at);
  finish_tile<kMode, false>(z, a, at);
  at.template flush<kMode>(a);
}

template <ForwardMode kMode>
void launch(const ForwardArguments& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(a.vocab_tiles),
                  static_cast<unsigned>(ceil_div(a.tokens, kTileRows)));
  stored_tiles_kernel<kMode><<<grid, kThreads, 0, stream>>>(a);
  require_cuda(cudaGetLastError(), "epilogues of stored logits");
}

// The modes are those that Launches::of takes without entropy and argmax.
void launch_tiles(ForwardMode mode, bool store, const TileOperands& o,
                  const ForwardArguments& arguments, Stream stream) {
  check(!store, "stored logits are not stored again");
  ForwardArguments a = arguments;
  a.logits = static_cast<float*>(o.block.data);
  a.tokens = o.tokens;
  const auto of = mode == ForwardMode::kReference                 ? launch<ForwardMode::kReference>
                  : mode == ForwardMode::kPlain && all_aligned(o) ? launch<ForwardMode::kPlain>
                                                                  : launch<ForwardMode::kGeneral>;
  of(a, static_cast<cudaStream_t>(stream));
}

constexpr TileKernel kTiles = {.unsupported = [](const ForwardCall&) { return std::string(); },
                               .resident_bytes = [] { return std::int64_t{1} << 20; },
                               .launch = launch_tiles};

}  // namespace

void sm80_forward_stored(const ForwardCall& c) { forward_by_tiles(kTiles, c); }

}  // namespace logitless::cuda
