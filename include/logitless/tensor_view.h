// Non-owning, strided views of tensors. Strides count elements, and may be zero (broadcast) or
// negative.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>

#include "logitless/dtype.h"

namespace logitless {

inline constexpr int kMaxRank = 4;

// One size of a shape in braces: any integer, also size_t. One beyond 63 bits becomes negative,
// which views refuse.
class Extent {
 public:
  template <std::integral T>
  constexpr Extent(T value)  // NOLINT: implicit on purpose
      : value_(static_cast<std::int64_t>(value)) {}
  constexpr std::int64_t value() const { return value_; }

 private:
  std::int64_t value_;
};

// Layout shared by the mutable and the read-only view. Rank 0 is a scalar.
template <typename Pointer>
class BasicTensorView {
 public:
  BasicTensorView() = default;  // no tensor: defined() is false

  // Contiguous, last dimension fastest. Throws InvalidArgument on rank > kMaxRank or a negative
  // size.
  BasicTensorView(Pointer data, DType dtype, std::initializer_list<Extent> shape);
  BasicTensorView(Pointer data, DType dtype, std::span<const std::int64_t> shape);
  BasicTensorView(Pointer data, DType dtype, std::span<const std::int64_t> shape,
                  std::span<const std::int64_t> strides);

  // Converts a mutable view to a read-only one.
  template <typename Other>
  requires(std::is_convertible_v<Other, Pointer> && !std::is_same_v<Other, Pointer>)
      BasicTensorView(const BasicTensorView<Other>& other)
      : data_(other.data()), dtype_(other.dtype()), rank_(other.rank()) {
    for (int d = 0; d < rank_; ++d) {
      shape_[d] = other.size(d);
      strides_[d] = other.stride(d);
    }
  }

  // Returns whether a tensor was given. A tensor without elements may have a null pointer and is
  // defined.
  bool defined() const { return rank_ >= 0; }
  Pointer data() const { return data_; }
  DType dtype() const { return dtype_; }
  int rank() const { return rank_; }
  std::int64_t size(int dim) const { return shape_[dim]; }
  std::int64_t stride(int dim) const { return strides_[dim]; }
  std::int64_t numel() const {
    std::int64_t count = rank_ < 0 ? 0 : 1;
    for (int d = 0; d < rank_; ++d) count *= shape_[d];
    return count;
  }
  std::int64_t bytes() const { return numel() * static_cast<std::int64_t>(size_of(dtype_)); }
  bool contiguous() const {
    std::int64_t expected = 1;
    for (int d = rank_ - 1; d >= 0; --d) {
      if (shape_[d] != 1 && strides_[d] != expected) return false;
      expected *= shape_[d];
    }
    return true;
  }

 private:
  Pointer data_ = nullptr;
  DType dtype_ = DType::f32;
  int rank_ = -1;
  std::array<std::int64_t, kMaxRank> shape_{};
  std::array<std::int64_t, kMaxRank> strides_{};
};

using TensorView = BasicTensorView<void*>;
using ConstTensorView = BasicTensorView<const void*>;

extern template class LOGITLESS_API BasicTensorView<void*>;
extern template class LOGITLESS_API BasicTensorView<const void*>;

// Returns text like "bf16[2048, 512]", with strides where the view is not contiguous; "none" for an
// undefined view.
LOGITLESS_API std::string describe(const ConstTensorView& view);

}  // namespace logitless
