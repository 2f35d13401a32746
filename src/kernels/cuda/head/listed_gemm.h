// Arguments of sums of products over lists of blocks (listed_gemm_sm80.cuh), and the order of their
// work.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/head.h"

namespace logitless::cuda::listed {

inline constexpr int kBlock = 256;  // rows, and contracted elements, of a block

// One result. 16-bit operands have rows of contiguous elements, at addresses and strides that are
// multiples of 16 bytes.
struct Product {
  int row_blocks = 0;  // 0: the result is not wanted
  int rows = 0;
  int columns = 0;
  int contracted = 0;
  // [rows, contracted] of the first result, with zeros up to a multiple of 256 columns;
  // [contracted, left_width] of the second.
  const void* left = nullptr;
  std::int64_t left_stride = 0;
  int left_width = 0;
  const void* right = nullptr;  // [contracted, columns]
  std::int64_t right_stride = 0;
  // [row_blocks][list_stride] 32 bits each: bit first + b lists contracted block b. Null: all
  // blocks.
  const std::uint32_t* lists = nullptr;
  int list_stride = 0;
  int first = 0;
  // Rows and contracted elements of which so many count, in device memory; null: all. Those behind
  // are neither read nor written.
  const std::int32_t* counted_rows = nullptr;
  const std::int32_t* counted_contracted = nullptr;
};

// Row blocks with work, in device memory.
struct Work {
  std::int32_t next;           // the next item
  std::int32_t row_blocks[2];  // of each result
};
struct Products {
  Product results[2];
  Work* work = nullptr;
  // [row blocks of both]: those of the first result with long lists first, then, from its number
  // of row blocks on, those of the second.
  std::int32_t* order = nullptr;
};

// Bytes of `work` and `order`.
constexpr std::size_t work_bytes(std::int64_t row_blocks) {
  return sizeof(Work) + static_cast<std::size_t>(row_blocks) * sizeof(std::int32_t);
}
// Writes work and order, before each launch of the products.
void order_work(const Products& products, Stream stream);

}  // namespace logitless::cuda::listed
