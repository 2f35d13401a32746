// A product in cuBLASLt's terms. No CUDA: plans are made without a device.
#pragma once

#include <cstdint>

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

}  // namespace logitless::cuda
