// The forward call: workspace, tensor maps, launches.
#include <algorithm>
#include <bit>
#include <tuple>

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/forward_sm90.cuh"
#include "kernels/cuda/device/token_kernels.cuh"

namespace logitless::cuda {
namespace {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Offsets in bytes of the workspace.
struct ForwardLayout {
  explicit ForwardLayout(const ForwardShape& s)
      : token_pairs(ceil_div(std::max<std::int64_t>(s.tokens, 1), kClusterCtas * kTokenTile)),
        word_tiles(ceil_div(s.vocab, kWordTile)),
        padded_tokens(token_pairs * kClusterCtas * kTokenTile) {
    const std::int64_t map = padded_tokens * word_tiles * 4;
    reference = take(padded_tokens * 4);
    target_logits = take(s.tokens * s.targets_per_token * 4);
    overflowed = take((token_pairs + 1) * 4);
    sums = take(map);
    entropy = take(s.entropy ? map : 0);
    weighted = take(s.weighted_sum ? map : 0);
    best = take(s.argmax ? map : 0);
    best_index = take(s.argmax ? map : 0);
  }
  std::size_t take(std::int64_t bytes) {
    const std::size_t at = total;
    total += static_cast<std::size_t>(ceil_div(bytes, 256) * 256);
    return at;
  }

  std::int64_t token_pairs, word_tiles, padded_tokens;
  std::size_t total = 0;
  std::size_t reference, target_logits, overflowed, sums, entropy, weighted, best, best_index;
};

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The one driver function used, found at run time so that no driver is needed to link or to start.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    require_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                  cudaEnableDefault, &result),
                 "cuTensorMapEncodeTiled");
    if (result != cudaDriverEntryPointSuccess)
      throw DeviceError("the driver has no cuTensorMapEncodeTiled");
    return std::bit_cast<EncodeTiled>(found);
  }();
  return function;
}

// Boxes of 128 rows x 64 columns, swizzled by 128 bytes; 0 outside the matrix.
CUtensorMap matrix_map(const void* data, std::int64_t rows, std::int64_t columns,
                       std::int64_t row_stride) {
  CUtensorMap map;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_stride) * 2};
  const cuuint32_t box[] = {kDimStep, kTokenTile};
  const cuuint32_t steps[] = {1, 1};
  const CUresult result =
      encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes,
                     strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw DeviceError(concat("cuTensorMapEncodeTiled: error ", static_cast<int>(result)));
  return map;
}

template <ForwardMode kMode>
void launch(const CUtensorMap& hidden, const CUtensorMap& weight, const ForwardArguments& a,
            cudaStream_t stream) {
  int device = 0;
  int processors = 0;
  require_cuda(cudaGetDevice(&device), "cudaGetDevice");
  require_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
               "multiprocessor count");
  require_cuda(cudaFuncSetAttribute(forward_tiles<kMode>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, kForwardShared),
               "shared memory of the forward kernel");
  const int most = a.token_pairs * a.word_tiles * kClusterCtas;
  const int ctas = std::min(processors / kClusterCtas * kClusterCtas, most);
  forward_tiles<kMode><<<ctas, kForwardThreads, kForwardShared, stream>>>(hidden, weight, a);
  require_cuda(cudaGetLastError(), "forward kernel");
}

}  // namespace

std::string forward_unsupported(const ForwardCall& c) {
  if (c.shape.dtype != DType::bf16)
    return concat("multiplies bf16, hidden and weight are ", name_of(c.shape.dtype));
  if (c.shape.dim % 8 != 0) return concat("dim: expected a multiple of 8, got ", c.shape.dim);
  for (const auto& [name, data, stride] :
       {std::tuple{"hidden", c.hidden, c.hidden_stride}, {"weight", c.weight, c.weight_stride}}) {
    if (reinterpret_cast<std::uintptr_t>(data) % 16 != 0)
      return concat(name, ": expected an address that is a multiple of 16");
    if (stride % 8 != 0 || stride < c.shape.dim) {
      return concat(name, ": expected rows a multiple of 8 elements apart, at least ", c.shape.dim,
                    ", got ", stride);
    }
  }
  return {};
}

std::size_t forward_workspace_bytes(const ForwardShape& shape) {
  return ForwardLayout(shape).total;
}

void forward(const ForwardCall& c) {
  const auto stream = static_cast<cudaStream_t>(c.stream);
  const std::string reason = forward_unsupported(c);
  if (!reason.empty()) throw Unsupported(reason);
  require_cuda(cudaMemsetAsync(c.bad_target, 0xff, sizeof(*c.bad_target), stream), "bad_target");
  if (c.shape.tokens == 0) return;

  const ForwardLayout layout(c.shape);
  auto* const base = static_cast<std::byte*>(c.workspace);
  const auto floats = [&](std::size_t at, bool wanted = true) {
    return wanted ? reinterpret_cast<float*>(base + at) : nullptr;
  };
  float* const reference = floats(layout.reference);
  float* const targets = floats(layout.target_logits);
  auto* const overflowed = reinterpret_cast<int*>(base + layout.overflowed);
  require_cuda(cudaMemsetAsync(overflowed, 0, (layout.token_pairs + 1) * sizeof(int), stream),
               "workspace");

  const CUtensorMap hidden = matrix_map(c.hidden, c.shape.tokens, c.shape.dim, c.hidden_stride);
  const CUtensorMap weight = matrix_map(c.weight, c.shape.vocab, c.shape.dim, c.weight_stride);
  ForwardArguments tiles{};
  tiles.vocab = static_cast<int>(c.shape.vocab);
  tiles.token_pairs = static_cast<int>(layout.token_pairs);
  tiles.word_tiles = static_cast<int>(layout.word_tiles);
  tiles.steps = static_cast<int>(ceil_div(c.shape.dim, kDimStep));
  tiles.padded_tokens = layout.padded_tokens;
  tiles.scale = c.logit_scale;
  tiles.cap = c.softcap;
  tiles.bias = c.bias;
  tiles.omega = c.omega;
  tiles.reference = reference;
  tiles.sums = floats(layout.sums);
  tiles.entropy = floats(layout.entropy, c.shape.entropy);
  tiles.weighted = floats(layout.weighted, c.shape.weighted_sum);
  tiles.best = floats(layout.best, c.shape.argmax);
  tiles.best_index = reinterpret_cast<int*>(floats(layout.best_index, c.shape.argmax));
  const Partials partials{layout.padded_tokens, tiles.word_tiles, tiles.sums,      tiles.entropy,
                          tiles.weighted,       tiles.best,       tiles.best_index};
  const bool general = c.bias != nullptr || c.softcap != 0.0f || c.shape.entropy ||
                       c.shape.weighted_sum || c.shape.argmax;
  const dim3 threads(kRowsPerBlock, kParts);
  const auto row_blocks = static_cast<unsigned>(layout.padded_tokens / kRowsPerBlock);

  const std::int64_t slots = c.shape.tokens * c.shape.targets_per_token;
  target_logits<<<static_cast<unsigned>(ceil_div(slots, 8)), 256, 0, stream>>>(c, targets);
  require_cuda(cudaGetLastError(), "target logits");

  // First against references from one tile; then, for tokens whose sums overflowed, from all.
  for (const int* wanted :
       {static_cast<const int*>(nullptr), static_cast<const int*>(overflowed)}) {
    ForwardArguments first = tiles;
    first.best = tiles.sums;  // free until the sums are made
    first.wanted = wanted;
    if (wanted == nullptr) first.word_tiles = 1;
    launch<ForwardMode::kReference>(hidden, weight, first, stream);
    set_reference<<<row_blocks, threads, 0, stream>>>(first.best, first.word_tiles,
                                                      layout.padded_tokens, wanted, reference);
    require_cuda(cudaGetLastError(), "reference exponents");
    tiles.wanted = wanted;
    if (general) {
      launch<ForwardMode::kGeneral>(hidden, weight, tiles, stream);
    } else {
      launch<ForwardMode::kPlain>(hidden, weight, tiles, stream);
    }
    write_outputs<<<row_blocks, threads, 0, stream>>>(c, partials, reference, targets, wanted,
                                                      wanted == nullptr ? overflowed : nullptr);
    require_cuda(cudaGetLastError(), "outputs");
  }
}

}  // namespace logitless::cuda
