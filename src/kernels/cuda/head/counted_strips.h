// Sums of strips of gradients over tokens of which the device alone knows whether they count: those
// from GradientGemmsCall::fixed_tokens on. The GEMMs of the tokens before them have their sizes
// from the host.
#pragma once

#include <cstdint>

#include "kernels/device/gradient.h"

namespace logitless::cuda {

inline constexpr int kStripTile = 128;  // rows of a CTA

// A strip [rows, columns] of sums of a product. 16-bit operands have rows of contiguous elements,
// at addresses and strides that are multiples of 16 bytes.
struct CountedStrip {
  DType dtype = DType::bf16;
  int rows = 0;
  int columns = 0;
  // The block. d_hidden takes [rows, contracted], with zeros up to a multiple of 256 columns.
  // d_weight takes the strip's columns, [contracted tokens, block_columns].
  const void* block = nullptr;
  std::int64_t block_stride = 0;
  int block_columns = 0;
  const void* right = nullptr;  // [contracted, columns]: weight, or hidden times its factors
  std::int64_t right_stride = 0;
  int contracted = 0;
  // The tokens are those of the chunk from `first_token` on. Tokens behind 256 * *last_active do
  // not count, and are neither read nor written.
  const int* last_active = nullptr;
  std::int64_t first_token = 0;
  float* sums = nullptr;  // [rows, columns]
  bool adds = false;      // to what the strip holds
  Stream stream = nullptr;
};

// Rows that count of a strip of d_hidden. Where they are few, the contracted index is cut into
// parts: row i of part p is row p * part_rows + i of the strip.
struct CountedRows {
  int rows;
  int part_rows;  // a multiple of kStripTile
  int parts;
};
LOGITLESS_HOST_DEVICE inline CountedRows counted_rows(int last_active, std::int64_t first_token,
                                                      int rows) {
  const std::int64_t behind = std::int64_t{last_active} * kBlockPadding - first_token;
  const int counted = behind < 0 ? 0 : behind < rows ? static_cast<int>(behind) : rows;
  const int part_rows = (counted + kStripTile - 1) / kStripTile * kStripTile;
  return {counted, part_rows, part_rows == 0 || part_rows > rows ? 1 : rows / part_rows};
}

// Returns the rows of a strip, at most `most`, whose tiles leave the fewest SMs idle.
std::int64_t counted_strip_rows(std::int64_t most, std::int64_t columns);
void sum_counted_hidden(const CountedStrip& strip);
void sum_counted_weight(const CountedStrip& strip);

}  // namespace logitless::cuda
