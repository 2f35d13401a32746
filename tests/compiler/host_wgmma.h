// The engine of products on Hopper (kernels/device/tile_engine.h) as text for the host. It gives
// epilogues the sums of a tile in the registers of wgmma, computed by plain loops; the pipeline of
// TMA and wgmma has no stand-in.
#pragma once

#include <cstdint>
#include <string>

#include "compiler/host_mma.h"
#include "core/check.h"
#include "kernels/device/tile_engine.h"

namespace logitless::test {

// A CUtensorMap on the host.
struct HostMatrix {
  void* data;
  std::int64_t rows, columns, row_stride;
};

inline constexpr const char* kHostWgmma = R"host(
#define __grid_constant__
struct CUtensorMap {
  unsigned short* data;
  std::int64_t rows, columns, row_stride;
  bool has(std::int64_t row, std::int64_t column) const {
    return row >= 0 && row < rows && column >= 0 && column < columns;
  }
};
namespace logitless::cuda {
enum class Products { one, beside, difference };
struct ProductMaps { const CUtensorMap *a, *b, *c, *d; };
struct ProductTiles { int row_pairs, column_tiles, steps, other_steps; };

// Row of 128 and column of 8 of a consumer's first sum.
static int accumulator_row() {
  return ((int)threadIdx.x / 128 - 1) * 64 + (int)threadIdx.x / 32 % 4 * 16 + (int)threadIdx.x % 32 / 4;
}
static int accumulator_column() { return (int)threadIdx.x % 4 * 2; }

// Elements outside are 0, as TMA loads them.
template <typename T>
static float element(const CUtensorMap& of, std::int64_t row, std::int64_t column) {
  return of.has(row, column) ? number_of<T>(of.data[row * of.row_stride + column]) : 0.0f;
}
template <typename T, int kTransposeB>
static float product(const CUtensorMap& a, const CUtensorMap& b, int steps, int row, int column) {
  float sum = 0.0f;
  for (int k = 0; k < 64 * steps; ++k)
    sum += element<T>(a, row, k) * (kTransposeB ? element<T>(b, k, column) : element<T>(b, column, k));
  return sum;
}

struct BoxWriter {
  void put(const unsigned (&pairs)[16], const CUtensorMap* map, int column, int row) const {
    for (int p = 0; p < 16; ++p) {
      for (int j = 0; j < 2; ++j) {
        const int y = row + accumulator_row() % 64 + p % 2 * 8, x = column + p / 2 * 8 + accumulator_column() + j;
        if (map->has(y, x)) map->data[y * map->row_stride + x] = (unsigned short)(pairs[p] >> 16 * j);
      }
    }
  }
};

// A cluster of two CTAs, one above the other, has one tile of each.
template <typename T, int kTransposeB, Products kProducts, typename Ahead, typename Epilogue>
static void products_of_tiles(const ProductMaps& maps, const ProductTiles& of, const Ahead& ahead,
                              const Epilogue& epilogue) {
  constexpr bool kBeside = kProducts == Products::beside;
  constexpr int kColumns = kBeside ? 128 : 256;
  const int tile = (int)blockIdx.x / 2, rank = (int)blockIdx.x % 2;
  if (threadIdx.x < 128 || tile >= of.row_pairs * of.column_tiles) return;
  const int first_row = (tile % of.row_pairs * 2 + rank) * 128, first_column = tile / of.row_pairs * kColumns;
  ahead(first_row, first_column);
  float z[128];
  for (int r = 0; r < 128; ++r) {
    const int row = first_row + accumulator_row() + r / 2 % 2 * 8;
    const int column = accumulator_column() + r / 4 * 8 + r % 2;
    const bool second = kBeside && column >= kColumns;
    z[r] = product<T, kTransposeB>(*maps.a, second ? *maps.d : *maps.b, of.steps, row,
                                   first_column + column % kColumns);
    if (kProducts == Products::difference)
      z[r] -= product<T, kTransposeB>(*maps.c, *maps.d, of.other_steps, row, first_column + column);
  }
  BoxWriter writer;
  epilogue(z, first_row, first_column, writer);
}
}  // namespace logitless::cuda
)host";

inline std::string host_sm90_engine() {
  return concat(kHostProducts, kHostWgmma,
                "namespace logitless::cuda { constexpr int kTileShared = ",
                cuda::kSm90Engine.shared_bytes, "; }\n");
}

}  // namespace logitless::test
