// Epilogues of the forward kernel of Hopper on stored results of its GEMM. A warp has the results
// in the registers where the kernel has them, and runs the same code, so all sums have the same
// bits.
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/head/forward_sm90.cuh"

namespace logitless::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kWarpRows = 16;  // of accumulator_row
constexpr int kBlockRows = kWarps * kWarpRows;

// A thread block for 64 tokens (y) of a vocabulary tile (x).
template <ForwardMode kMode>
__global__ void __launch_bounds__(kWarps * 32) stored_tiles_kernel(const ForwardArguments a) {
  if (a.wanted != nullptr && a.wanted[a.token_pairs] == 0) return;
  const int row =
      static_cast<int>(blockIdx.y) * kBlockRows + static_cast<int>(threadIdx.x) / 32 * kWarpRows;
  const int pair = row / kClusterRows;
  if (row >= a.tokens || (a.wanted != nullptr && a.wanted[pair] == 0)) return;
  const Tile tile{pair, static_cast<int>(blockIdx.x), false};
  const HopperPosition at(a, row + static_cast<int>(threadIdx.x) % 32 / 4, tile);
  float z[128];
  get_logits(z, a, at);
  finish_tile<kMode, false>(z, a, at);
}

template <ForwardMode kMode>
void launch(const ForwardArguments& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(a.vocab_tiles),
                  static_cast<unsigned>(ceil_div(a.tokens, kBlockRows)));
  stored_tiles_kernel<kMode><<<grid, kWarps * 32, 0, stream>>>(a);
  require_cuda(cudaGetLastError(), "epilogues of stored logits");
}

void launch_tiles(ForwardMode mode, bool store, const TileOperands& o,
                  const ForwardArguments& arguments, Stream stream) {
  check(!store, "stored logits are not stored again");
  ForwardArguments a = arguments;
  a.logits = static_cast<float*>(o.block.data);
  a.tokens = o.tokens;
  const auto of = mode == ForwardMode::kPlain       ? launch<ForwardMode::kPlain>
                  : mode == ForwardMode::kReference ? launch<ForwardMode::kReference>
                                                    : launch<ForwardMode::kGeneral>;
  of(a, static_cast<cudaStream_t>(stream));
}

constexpr TileKernel kTiles = {.unsupported = [](const ForwardCall&) { return std::string(); },
                               .resident_bytes = [] { return std::int64_t{1} << 20; },
                               .launch = launch_tiles};

}  // namespace

void hopper_forward_stored(const ForwardCall& c) { forward_by_tiles(kTiles, c); }

}  // namespace logitless::cuda
