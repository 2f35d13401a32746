// Gather and scatter by index on a GPU. It includes no CUDA headers; in a build without CUDA every
// call throws the reason.
//
// Calls enqueue on a stream. They neither wait nor allocate, and may be captured into a CUDA graph.
// Results are deterministic. Indices are i32 or i64.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/head.h"
#include "logitless/dtype.h"

namespace logitless::cuda {

// out[i, :] = table[index[i], :], 0 where the index is outside [0, rows). Contiguous.
struct TakeCall {
  const void* table = nullptr;  // [rows, row_bytes]
  const void* index = nullptr;  // [count]
  void* out = nullptr;          // [count, row_bytes]
  DType index_dtype = DType::i64;
  std::int64_t rows = 0, count = 0, row_bytes = 0;
  Stream stream = nullptr;
};
void take_rows(const TakeCall& call);

// out[index[i], :] += updates[i, :] for i in order; indices outside [0, rows) add nothing.
// Contiguous. The updates of a row are summed 128 at a time in order, then those sums in order.
struct ScatterCall {
  const void* index = nullptr;    // [count]
  const void* updates = nullptr;  // [count, width]
  void* out = nullptr;            // [rows, width]
  DType index_dtype = DType::i64;
  DType dtype = DType::f32;      // of updates: any but i8
  DType out_dtype = DType::f32;  // f32 | f64 | i32 | i64
  std::int64_t rows = 0, count = 0, width = 0;
  void* workspace = nullptr;  // scatter_workspace_bytes(), aligned to 256
  Stream stream = nullptr;
};
// Depends on sizes and dtypes alone: about 24 bytes for each index, and one row in 64.
std::size_t scatter_workspace_bytes(const ScatterCall& call);
void scatter_add_rows(const ScatterCall& call);

inline constexpr int kMostDims = 12;

// An index space that tensors are strided over, in elements.
struct StridedSpace {
  int rank = 0;
  std::int64_t sizes[kMostDims] = {};
};
struct Strides {
  std::int64_t of[kMostDims] = {};
};

// out[p] = x[p, index[p]] along an axis of `size` elements `step` apart; 0 outside [0, size).
// x_strides is 0 along the picked axis if `out` has it.
struct PickCall {
  StridedSpace space;  // of out
  const void* x = nullptr;
  const void* index = nullptr;
  void* out = nullptr;
  Strides x_strides, index_strides, out_strides;
  std::int64_t size = 0, step = 0;
  DType index_dtype = DType::i64;
  int element_bytes = 4;
  Stream stream = nullptr;
};
void pick_elements(const PickCall& call);

// out[p, index[p, k]] += updates[p, k] for k in order; indices outside [0, size) add nothing.
// distinct: no two indices of a row are equal. whole: they are distinct and all of [0, size), and
// their updates become the elements.
struct PutCall {
  StridedSpace space;  // of updates, of size 1 along the axis
  const void* index = nullptr;
  const void* updates = nullptr;
  void* out = nullptr;
  Strides index_strides, update_strides, out_strides;
  int axis = 0;
  std::int64_t count = 0, size = 0;  // along the axis: of updates, of out
  DType index_dtype = DType::i64;
  DType dtype = DType::f32;      // of updates: any but i8
  DType out_dtype = DType::f32;  // f32 | f64 | i32 | i64; distinct: any but i8
  bool distinct = false, whole = false;
  Stream stream = nullptr;
};
void put_elements(const PutCall& call);

// out[p] i64 = the first k whose x[p, k] is the largest; a NaN is greater than all.
struct ArgMaxCall {
  StridedSpace space;  // of out
  const void* x = nullptr;
  std::int64_t* out = nullptr;
  Strides x_strides, out_strides;
  std::int64_t size = 0, step = 0;
  DType dtype = DType::f32;
  Stream stream = nullptr;
};
void find_largest(const ArgMaxCall& call);

// out[p] = number, rounded to the dtype.
struct FillCall {
  StridedSpace space;
  void* out = nullptr;
  Strides out_strides;
  DType dtype = DType::f32;
  double number = 0.0;
  Stream stream = nullptr;
};
void fill_elements(const FillCall& call);

// Converts the targets of a program's head for the loss engine: -1 where ignored. A target outside
// [0, vocab) becomes entry 0, and its logit gets no gradient.
struct HeadTargetsCall {
  const void* targets = nullptr;  // [tokens]
  DType dtype = DType::i64;
  std::int64_t tokens = 0, vocab = 0;
  bool has_ignored = false;
  std::int64_t ignored = 0;
  const float* d_logit = nullptr;     // [tokens]; null: no gradients
  std::int64_t* vocab_ids = nullptr;  // [tokens], written
  float* deltas = nullptr;            // [tokens], written: d_logit, or 0
  Stream stream = nullptr;
};
void head_targets(const HeadTargetsCall& call);
// logit[i] = 0 where targets[i] is outside [0, vocab).
void clear_missing_logits(const HeadTargetsCall& call, float* logit);

}  // namespace logitless::cuda
