// How a GEMM is divided into parts. cuBLASLt has fast kernels for 16-bit matrices only where rows
// begin at multiples of 16 bytes and contiguous dimensions are multiples of 8. No CUDA: plans are
// made without a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "kernels/device/gemm.h"

namespace logitless::cuda {

// The beginning of a part's matrix, in bytes from the caller's address of it or from the workspace.
struct PartPlace {
  bool in_workspace = false;
  std::int64_t bytes = 0;
  bool operator==(const PartPlace&) const = default;
};

// A GEMM of the library or of our own.
struct MultiplyPart {
  GemmShape shape;
  PartPlace a, b, c;
};
// Copies lines of contiguous elements into the workspace, where they begin at multiples of 16 bytes
// and end with zeros.
struct CopyPart {
  bool of_a = false;              // else of b
  std::int64_t from = 0, to = 0;  // bytes
  std::int64_t lines = 0, length = 0;
  std::int64_t from_stride = 0, to_stride = 0;  // elements
};
// Makes a block of c from its fp32 sums in the workspace, adding up their parts. Adds the terms
// from first_k on, c where the GEMM accumulates, and the epilogue, and rounds once.
struct FinishPart {
  std::int64_t a = 0, b = 0, c = 0;        // bytes: the matrices of this batch
  std::int64_t sums = 0, sums_stride = 0;  // bytes; elements
  std::int64_t parts = 1;                  // of the sums: [parts, rows, sums_stride]
  std::int64_t first_row = 0, rows = 0, first_column = 0, columns = 0;
  std::int64_t first_k = 0;
};
using GemmPart = std::variant<MultiplyPart, CopyPart, FinishPart>;

// Returns the parts in the order in which they run. Large GEMMs of 16-bit matrices without a fast
// kernel are divided in up to three ways.
//
// Cuts: of a contiguous dimension that is no multiple of 8, the last few elements are a GEMM of
// their own. It adds to an fp32 c if the dimension is contracted.
//
// Blocks of fp32 sums: where rows of c are not aligned, or where something is added to the sums of
// a 16-bit c. That may be contracted terms, c itself or an epilogue.
//
// Copies: of operands whose rows are not aligned, a block at a time. Each element of the copy is
// multiplied often enough.
//
// There are neither blocks nor copies if shape.workspace is less than they take.
//
// Split-K: parts of a long inner dimension, of fp32 GEMMs with few tiles (split_k.h).
std::vector<GemmPart> parts_of(const GemmShape& shape);

// Workspace for cuBLASLt, at the beginning of the GEMM's.
std::size_t lt_bytes_of_parts(const GemmShape& shape);

}  // namespace logitless::cuda
