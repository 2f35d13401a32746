// Copies of operands whose rows are not aligned.
#pragma once

#include <cstdint>

#include "kernels/device/gemm.h"

namespace logitless::cuda {

// Lines of contiguous 16-bit elements. `to` is aligned to 16 bytes, its stride a multiple of 8 and
// not less than length: what is between is set to zero.
struct CopyLines {
  const void* from = nullptr;
  void* to = nullptr;
  std::int64_t lines = 0, length = 0;
  std::int64_t from_stride = 0, to_stride = 0;  // elements
};
void copy_lines(const CopyLines& copy, Stream stream);

}  // namespace logitless::cuda
