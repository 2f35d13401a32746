// Checks shared by the calls of the head: shapes, dtypes, strides, with messages that name the
// argument.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/cpu_head.h"
#include "logitless/cross_entropy.h"
#include "logitless/tensor_view.h"

namespace logitless {

// A [..., D] tensor as rows: leading dimensions must collapse to one stride.
struct RowMatrix {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 1;
};

// Throws InvalidArgument when the leading dimensions do not collapse, naming the argument and its
// strides.
RowMatrix as_rows(std::string_view name, const ConstTensorView& view);

// Element offsets of a tensor of any strides by flat index (last dimension fastest).
class FlatIndex {
 public:
  FlatIndex() = default;
  explicit FlatIndex(const ConstTensorView& view);
  std::int64_t operator()(std::int64_t flat) const {
    if (contiguous_) return flat;
    std::int64_t offset = 0;
    for (int d = rank_ - 1; d >= 0; --d) {
      offset += flat % shape_[d] * strides_[d];
      flat /= shape_[d];
    }
    return offset;
  }

 private:
  bool contiguous_ = true;
  int rank_ = 0;
  std::int64_t shape_[kMaxRank] = {};
  std::int64_t strides_[kMaxRank] = {};
};

// An optional per-token array of floats, and how to read it.
class TokenFloats {
 public:
  TokenFloats() = default;
  explicit TokenFloats(const ConstTensorView& view)
      : data_(static_cast<const float*>(view.data())), index_(view), defined_(view.defined()) {}
  bool defined() const { return defined_; }
  float get(std::int64_t flat, float otherwise) const {
    return defined_ ? data_[index_(flat)] : otherwise;
  }

 private:
  const float* data_ = nullptr;
  FlatIndex index_;
  bool defined_ = false;
};

// An optional per-token output of floats or indices.
class TokenOutput {
 public:
  TokenOutput() = default;
  explicit TokenOutput(const TensorView& view)
      : data_(view.data()),
        dtype_(view.dtype()),
        index_(ConstTensorView(view)),
        defined_(view.defined()) {}
  bool defined() const { return defined_; }
  void set(std::int64_t flat, double value) const;

 private:
  void* data_ = nullptr;
  DType dtype_ = DType::f32;
  FlatIndex index_;
  bool defined_ = false;
};

// Throws unless the view has data, or no elements.
void require_data(std::string_view name, const ConstTensorView& view);
// Throws unless `view` is undefined or of this dtype with the leading dimensions of hidden (and
// `last` after them if >= 0).
void require_per_token(std::string_view name, const ConstTensorView& view,
                       const ConstTensorView& hidden, bool index_dtype, std::int64_t last = -1);
// Throws when elements of an output share memory: where a stride is 0.
void require_own_elements(std::string_view name, const ConstTensorView& view);
// require_per_token for an output.
void require_per_token_output(std::string_view name, const ConstTensorView& view,
                              const ConstTensorView& hidden, bool index_dtype,
                              std::int64_t last = -1);
// Throws unless `view` is undefined or [size] of f32 or `other`.
void require_vector(std::string_view name, const ConstTensorView& view, std::int64_t size,
                    DType other);
// Throws unless `view` is undefined or shaped like `like`, of its dtype or f32.
void require_gradient(std::string_view name, const ConstTensorView& view,
                      const ConstTensorView& like);
// hidden, weight, bias against each other; returns the sizes. least_rows: that weight must have;
// columns: that it has, -1: those of hidden.
HeadShape require_head(const ConstTensorView& hidden, const ConstTensorView& weight,
                       const ConstTensorView& bias, std::int64_t least_rows = 1,
                       std::int64_t columns = -1);
// Throws when an option is not finite or out of range.
void require_transform(float logit_scale, float softcap);
// Throws unless least <= value <= most, which at the greatest float is no bound.
void require_in_range(std::string_view name, double value, double least, double most);
// The numbers of a loss's formula (loss_numbers) in their ranges.
template <typename Options>
void require_loss_numbers(const Options& options) {
  for (const auto& number : loss_numbers(options))
    require_in_range(number.name, *number.value, number.least, number.most);
}

}  // namespace logitless
