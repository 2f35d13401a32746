// Argument checks that the calls of the head share: shapes, dtypes and strides. Messages name the
// argument.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/cpu_head.h"
#include "logitless/cross_entropy.h"
#include "logitless/tensor_view.h"

namespace logitless {

// A [..., D] tensor as a matrix of rows, whose leading dimensions collapse to one stride.
struct RowMatrix {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 1;
};

// Returns `view` as rows. Throws InvalidArgument naming the argument and its strides if the leading
// dimensions do not collapse.
RowMatrix as_rows(std::string_view name, const ConstTensorView& view);

// Maps a flat index (last dimension fastest) to the element offset in a tensor of any strides.
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

// Reads an optional per-token array of floats.
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

// Writes an optional per-token output of floats or indices.
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

// Throws unless the view has data or no elements.
void require_data(std::string_view name, const ConstTensorView& view);
// Throws unless `view` is undefined, or has an allowed dtype and the leading dimensions of hidden,
// followed by `last` if that is >= 0.
void require_per_token(std::string_view name, const ConstTensorView& view,
                       const ConstTensorView& hidden, bool index_dtype, std::int64_t last = -1);
// Throws if elements of an output share memory: a stride is 0.
void require_own_elements(std::string_view name, const ConstTensorView& view);
// Does require_per_token for an output.
void require_per_token_output(std::string_view name, const ConstTensorView& view,
                              const ConstTensorView& hidden, bool index_dtype,
                              std::int64_t last = -1);
// Throws unless `view` is undefined or [size] of f32 or `other`.
void require_vector(std::string_view name, const ConstTensorView& view, std::int64_t size,
                    DType other);
// Throws unless `view` is undefined, or has the shape of `like` and its dtype or f32.
void require_gradient(std::string_view name, const ConstTensorView& view,
                      const ConstTensorView& like);
// Checks hidden, weight and bias against each other and returns their sizes. `least_rows` is the
// minimum of weight's rows. `columns` is the number of its columns; -1: those of hidden. The dtype
// is that of both, or f32 where one of them has it and the other has 16 bits.
HeadShape require_head(const ConstTensorView& hidden, const ConstTensorView& weight,
                       const ConstTensorView& bias, std::int64_t least_rows = 1,
                       std::int64_t columns = -1);
// Throws Unsupported if hidden and weight have two dtypes; `where` ends what was expected.
void require_one_dtype(const ConstTensorView& hidden, const ConstTensorView& weight,
                       std::string_view where);
// Sets the dtypes of operands that differ.
void set_operands(const ConstTensorView& hidden, const ConstTensorView& weight,
                  HeadFeatures& features);
// Throws if an option is not finite or out of range.
void require_transform(float logit_scale, float softcap);
// Throws unless least <= value <= most. The largest float as `most` is no bound.
void require_in_range(std::string_view name, double value, double least, double most);
// Throws unless the numbers of a loss's formula (loss_numbers) are within their ranges.
template <typename Options>
void require_loss_numbers(const Options& options) {
  for (const auto& number : loss_numbers(options))
    require_in_range(number.name, *number.value, number.least, number.most);
}

}  // namespace logitless
