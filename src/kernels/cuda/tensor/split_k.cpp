#include "kernels/cuda/tensor/split_k.h"

#include <algorithm>

#include "kernels/cuda/device/tile_sizes.h"
#include "kernels/cuda/tensor/product_form.h"

namespace logitless::cuda {
namespace {

constexpr std::int64_t kTile = 128;       // rows and columns of cuBLASLt's largest fp32 tiles
constexpr std::int64_t kMostTiles = 64;   // of c: more of them keep half of a large GPU's SMs busy
constexpr std::int64_t kTiles = 256;      // of all parts: two for each SM of such a GPU, or nearly
constexpr std::int64_t kShortest = 512;   // k of a part
constexpr std::int64_t kLeastParts = 4;   // fewer save less than the sums and a launch cost
constexpr std::int64_t kVector = 8;       // parts begin at multiples of it
constexpr std::int64_t kMostBatches = 8;  // their GEMMs run one after another
constexpr std::int64_t kLtBytes = 256 << 10;  // for cuBLASLt, which does not split the parts

}  // namespace

std::optional<SplitK> split_k_of(const GemmShape& s) {
  const bool types = s.a.dtype == DType::f32 && s.b.dtype == DType::f32 && s.c.dtype == DType::f32;
  if (!types || s.m <= 0 || s.n <= 0 || s.batch <= 0 || s.batch > kMostBatches) return {};
  const std::int64_t tiles = ceil_div(s.m, kTile) * ceil_div(s.n, kTile);
  if (tiles > kMostTiles || tiles * s.batch > 2 * kMostTiles) return {};
  SplitK split;
  split.sums_at = kLtBytes;
  split.parts = std::min(kTiles / tiles, s.k / kShortest);
  const std::int64_t sums = 4 * s.m * s.n;
  if (s.workspace >= 0) split.parts = std::min(split.parts, (s.workspace - kLtBytes) / sums);
  if (split.parts < kLeastParts) return {};
  split.k = s.k / split.parts / kVector * kVector;
  split.bytes = split.sums_at + ceil_div(split.parts * sums, 256) * 256;
  if (!suits_lt(shape_of_parts(s, split))) return {};
  return split;
}

GemmShape shape_of_parts(const GemmShape& s, const SplitK& split) {
  GemmShape parts = s;
  parts.batch = split.parts;
  parts.k = split.k;
  parts.a.batch_stride = split.k * s.a.col_stride;
  parts.b.batch_stride = split.k * s.b.row_stride;
  parts.a.alignment = std::min(s.a.alignment, kVector * 4);
  parts.b.alignment = std::min(s.b.alignment, kVector * 4);
  parts.c = {DType::f32, s.m * s.n, s.n, 1, 16};
  parts.accumulate = false;
  parts.epilogue = {};
  return parts;
}

}  // namespace logitless::cuda
