// Sorting and running sums, products and maxima along an axis on a GPU. It includes no CUDA
// headers; in a build without CUDA every call throws the reason.
//
// Calls enqueue on a stream. They neither wait nor allocate, and may be captured into a CUDA graph.
// Results are deterministic. A row holds the elements along the axis.
#pragma once

#include <cstdint>

#include "kernels/device/index.h"

namespace logitless::cuda {

// The first `kept` elements of each row in sorted order, with their indices. A NaN is greater than
// all numbers, equal elements stay in order. x is read again after results are written.
struct SortRowsCall {
  StridedSpace rows;  // of x, of size 1 along the axis
  const void* x = nullptr;
  void* values = nullptr;         // of x's dtype
  std::int64_t* index = nullptr;  // along the axis
  Strides x_strides, value_strides, index_strides;
  int axis = 0;
  std::int64_t size = 0, kept = 0;  // along the axis: of x, at most kMostSorted; of the results
  DType dtype = DType::f32;         // any but i8
  bool descending = false;
  Stream stream = nullptr;
};
inline constexpr std::int64_t kMostSorted = std::int64_t{1} << 31;
void sort_rows(const SortRowsCall& call);

// The kinds of running results along a row. recurrence: y[k] = factors[k] y[k - 1] + x[k].
enum class ScanKind : std::uint8_t { sum, log_sum_exp, product, max, recurrence };

// out[p, k] = the result of x[p, 0..k]. Numbers are f64; sums of integers are exact and wrap as the
// dtype does. A product has an exponent of its own, so that none in between overflows. Log-sum-exps
// but those of f64 are f32, of sums in f64.
struct ScanRowsCall {
  StridedSpace rows;  // of x, of size 1 along the axis
  const void* x = nullptr;
  const void* factors = nullptr;  // of a recurrence, of x's dtype; the first one is not read
  void* out = nullptr;            // of x's dtype
  Strides x_strides, factor_strides, out_strides;
  int axis = 0;
  std::int64_t size = 0;     // along the axis
  DType dtype = DType::f32;  // any but i8; floating-point but for sums and maxima
  ScanKind kind = ScanKind::sum;
  bool reverse = false;  // from the last element on
  Stream stream = nullptr;
};
void scan_rows(const ScanRowsCall& call);

}  // namespace logitless::cuda
