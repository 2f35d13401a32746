// A GEMM in cuBLASLt's terms. No CUDA: plans are made without a device.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/device/gemm.h"

namespace logitless::cuda {

// Largest workspace of a GEMM: cuBLASLt's documented recommendation for Hopper.
inline constexpr std::size_t kLtWorkspaceBytes = std::size_t{32} << 20;

// A column-major matrix, as cuBLASLt has it: `rows` contiguous elements in each column.
struct ColumnMajor {
  std::int64_t rows = 0, columns = 0, leading = 0;
  bool transposed = false;  // relative to the caller's matrix
  bool possible = false;
};

// c = op(a) op(b), all column-major.
struct LtForm {
  ColumnMajor a, b, c;
  bool swapped = false;  // a and b here are b and a of the call
  bool possible() const { return a.possible && b.possible && c.possible && !c.transposed; }
};

LtForm form_of(const GemmShape& shape);

// Returns true if cuBLASLt has kernels for the GEMM, leaving its epilogue aside.
bool suits_lt(const GemmShape& shape);
// Returns true if cuBLASLt can fuse the epilogue, by layouts and alignments.
bool suits_lt_epilogue(const GemmShape& shape);

// A cuBLASLt algorithm, by the numbers of cublasLt.h.
struct LtAlgorithm {
  int id = 0, tile = 0, cluster = 0;
  bool operator==(const LtAlgorithm&) const = default;
};
// Algorithms that beat the heuristic's first on Hopper, best first, as bench_gemms measured;
// docs/use/gpu.md has the figures. Empty where the heuristic is right.
std::vector<LtAlgorithm> preferred_algorithms(const GemmShape& shape);

// Most workspace that cuBLASLt's algorithms of the GEMM may use.
std::size_t lt_workspace_bytes(const GemmShape& shape);

}  // namespace logitless::cuda
