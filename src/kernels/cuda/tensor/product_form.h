// A product in cuBLASLt's terms. No CUDA: plans are made without a device.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/device_gemm.h"

namespace logitless::cuda {

// The most that a product is given: what cuBLASLt is documented to want on Hopper.
inline constexpr std::size_t kLtWorkspaceBytes = std::size_t{32} << 20;

// A matrix in cuBLASLt's column-major terms: `rows` contiguous elements in each column.
struct ColumnMajor {
  std::int64_t rows = 0, columns = 0, leading = 0;
  bool transposed = false;  // against what the product is of
  bool possible = false;
};

// c = op(a) op(b), all column-major.
struct LtForm {
  ColumnMajor a, b, c;
  bool swapped = false;  // a and b of the product are b and a of the call
  bool possible() const { return a.possible && b.possible && c.possible && !c.transposed; }
};

LtForm form_of(const ProductShape& shape);

// Whether cuBLASLt has kernels for it, whatever its epilogue.
bool suits_lt(const ProductShape& shape);
// Whether its epilogues may have the shape's: layouts and alignments.
bool suits_lt_epilogue(const ProductShape& shape);

// An algorithm of cuBLASLt's by the numbers of cublasLt.h.
struct LtAlgorithm {
  int id = 0, tile = 0, cluster = 0;
  bool operator==(const LtAlgorithm&) const = default;
};
// Those that are faster on Hopper than what the heuristic names first, the best first: measured by
// bench_products, docs/gpu.md has the figures. Nothing where it is right.
std::vector<LtAlgorithm> preferred_algorithms(const ProductShape& shape);

// A product that is a part of another; bytes from the other's addresses.
struct ProductPart {
  ProductShape shape;
  std::int64_t a = 0, b = 0, c = 0;
};
// In the order in which they run. Large products of 16-bit matrices whose contiguous dimensions are
// no multiples of 8, though their rows begin at multiples of 16 bytes, are cut there: cuBLASLt has
// no fast kernel for the whole, and one for all but the last few.
std::vector<ProductPart> parts_of(const ProductShape& shape);

}  // namespace logitless::cuda
