// The forward kernel of Hopper as a TileKernel: tensor maps and launches.
#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/kernels_of_file.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/tensor_map.cuh"
#include "kernels/cuda/head/forward_sm90.cuh"
#include "kernels/cuda/head/sizes.h"
#include "kernels/cuda/head/tile_launches.h"

namespace logitless::cuda {
namespace {

struct Maps {
  CUtensorMap hidden, rows;
  BlockMaps block;
  int pairs;  // of token tiles to launch, the first ones
};

template <typename T, ForwardMode kMode, bool kStore>
void launch(const Maps& maps, const ForwardArguments& all, cudaStream_t stream) {
  const auto kernel = forward_tiles<T, kMode, kStore, 0>;
  allow_shared(kernel, kTileShared);
  const int clusters = processor_count() / kClusterCtas;
  for_launches(all, clusters, [&](ForwardArguments a, int tiles) {
    if (a.list == nullptr) {
      a.launch_pairs = std::min(a.launch_pairs, maps.pairs - a.first_pair);
      tiles = a.launch_pairs * a.vocab_tiles;
    }
    if (tiles <= 0) return;
    kernel<<<std::min(clusters, tiles) * kClusterCtas, kTileThreads, kTileShared, stream>>>(
        maps.hidden, maps.rows, maps.block, a);
    require_cuda(cudaGetLastError(), "forward kernel");
  });
}

template <typename T, ForwardMode kMode>
auto launch_of(bool store) {
  return store ? launch<T, kMode, true> : launch<T, kMode, false>;
}
template <typename T>
auto launch_of(ForwardMode mode, bool store) {
  switch (mode) {
    case ForwardMode::kPlain:
      return launch_of<T, ForwardMode::kPlain>(store);
    case ForwardMode::kPlainEntropy:
      return launch_of<T, ForwardMode::kPlainEntropy>(store);
    case ForwardMode::kPlainBest:
      return launch_of<T, ForwardMode::kPlainBest>(store);
    case ForwardMode::kGeneral:
      return launch_of<T, ForwardMode::kGeneral>(store);
    case ForwardMode::kReference:
      return launch<T, ForwardMode::kReference, false>;
    case ForwardMode::kLogits:
      return launch<T, ForwardMode::kLogits, false>;
    case ForwardMode::kGradient:
      return launch<T, ForwardMode::kGradient, true>;
    case ForwardMode::kPlainGradient:
      break;
  }
  return launch<T, ForwardMode::kPlainGradient, true>;
}

bool tma_takes(const void* data, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
}
bool tma_takes(const TileOperands& o, bool store) {
  bool all = tma_takes(o.hidden, o.hidden_stride) && tma_takes(o.rows, o.row_stride);
  if (store) all = all && tma_takes(o.block.data, o.block.stride);
  for (int r = 0; store && r < o.ranges.count; ++r)
    all = all && tma_takes(o.ranges.data[r], o.ranges.stride(r));
  return all;
}

void launch_tiles(ForwardMode mode, bool store, const TileOperands& o,
                  const ForwardArguments& arguments, Stream stream) {
  // The gradient GEMMs of f16 take any address, so its forward does, too.
  if (o.dtype == DType::f16 && !tma_takes(o, store))
    return sm80_tiles().launch(mode, store, o, arguments, stream);
  const std::int64_t few = few_tokens(mode, store, o, arguments);
  if (few > 0) launch_few(mode, o, few, arguments, stream);
  if (few == o.tokens) return;
  // To TMA all types of 16 bits are one.
  Maps maps{matrix_map(o.hidden, DType::bf16, o.tokens, o.dim, o.hidden_stride, kTileRows),
            matrix_map(o.rows, DType::bf16, o.vocab, o.dim, o.row_stride, kTileColumns / 2),
            {},
            static_cast<int>(ceil_div(o.tokens - few, kClusterRows))};
  if (store) maps.block = block_maps(o.block, o.ranges, o.tokens, 64);
  ForwardArguments a = arguments;
  a.steps = static_cast<int>(ceil_div(o.dim, kStep));
  const auto of = o.dtype == DType::f16 ? launch_of<__half> : launch_of<__nv_bfloat16>;
  of(mode, store)(maps, a, static_cast<cudaStream_t>(stream));
}

std::string call_unsupported(const ForwardCall& c) {
  if (c.shape.dtype == DType::f16) return hopper_f16_unsupported(c.shape);
  const std::string reason = hopper_unsupported(c.shape);
  return reason.empty() ? rows_unsupported(c) : reason;
}

// A third of an H200's L2.
constexpr TileKernel kTiles = {.unsupported = call_unsupported,
                               .resident_bytes = [] { return std::int64_t{16} << 20; },
                               .launch = launch_tiles};

}  // namespace

const TileKernel& hopper_tiles() { return kTiles; }
std::string hopper_call_unsupported(const ForwardCall& c) { return call_unsupported(c); }
void hopper_forward(const ForwardCall& c) { forward_by_tiles(kTiles, c); }
void hopper_target_logits(const ForwardCall& c, float* logits) {
  target_logits_by_tiles(kTiles, c, logits);
}
void hopper_store(const ForwardCall& c, const float* logit_bias, float* results, float* tile_tops) {
  store_by_tiles(kTiles, c, logit_bias, results, tile_tops);
}
void hopper_begin_forward(const ForwardCall& c) { begin_forward_by_tiles(kTiles, c); }
void hopper_forward_tiles(const ForwardCall& c) { all_tiles(kTiles, c); }
void hopper_forward_selected(const ForwardCall& c) { selected_tiles(kTiles, c); }
void hopper_gradient_block(const BlockCall& b) { gradient_block_by_tiles(kTiles, b); }

}  // namespace logitless::cuda
