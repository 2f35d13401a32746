#include "logitless/tensor_view.h"

#include <algorithm>

#include "core/check.h"

namespace logitless {
namespace {

// Returns the rank of a view with this many sizes. Throws InvalidArgument when it exceeds kMaxRank.
std::size_t checked_rank(std::size_t sizes) {
  require(sizes <= kMaxRank, "tensor view: rank ", sizes, " is over ", kMaxRank);
  return sizes;
}

std::array<std::int64_t, kMaxRank> values(std::initializer_list<Extent> shape) {
  checked_rank(shape.size());
  std::array<std::int64_t, kMaxRank> out{};
  std::transform(shape.begin(), shape.end(), out.begin(), [](Extent e) { return e.value(); });
  return out;
}

}  // namespace

template <typename Pointer>
BasicTensorView<Pointer>::BasicTensorView(Pointer data, DType dtype,
                                          std::initializer_list<Extent> shape)
    : BasicTensorView(data, dtype,
                      std::span<const std::int64_t>(values(shape).data(), shape.size())) {}

template <typename Pointer>
BasicTensorView<Pointer>::BasicTensorView(Pointer data, DType dtype,
                                          std::span<const std::int64_t> shape)
    : BasicTensorView(data, dtype, shape, {}) {
  std::int64_t stride = 1;
  for (int d = rank_ - 1; d >= 0; --d) {
    strides_[d] = stride;
    stride *= shape_[d];
  }
}

template <typename Pointer>
BasicTensorView<Pointer>::BasicTensorView(Pointer data, DType dtype,
                                          std::span<const std::int64_t> shape,
                                          std::span<const std::int64_t> strides)
    : data_(data), dtype_(dtype), rank_(static_cast<int>(checked_rank(shape.size()))) {
  require(strides.empty() || strides.size() == shape.size(), "tensor view: ", strides.size(),
          " strides for rank ", shape.size());
  std::int64_t count = 1;
  for (int d = 0; d < rank_; ++d) {
    require(shape[d] >= 0, "tensor view: size ", shape[d], " of dimension ", d, " is negative");
    require(!__builtin_mul_overflow(count, shape[d], &count) && count <= INT64_MAX / 8,
            "tensor view: the number of elements overflows at dimension ", d);
    shape_[d] = shape[d];
    if (!strides.empty()) strides_[d] = strides[d];
  }
}

template class BasicTensorView<void*>;
template class BasicTensorView<const void*>;

std::string describe(const ConstTensorView& view) {
  if (!view.defined()) return "none";
  std::string text = concat(name_of(view.dtype()), "[");
  for (int d = 0; d < view.rank(); ++d) text += concat(d ? ", " : "", view.size(d));
  text += "]";
  if (!view.contiguous()) {
    text += " strides [";
    for (int d = 0; d < view.rank(); ++d) text += concat(d ? ", " : "", view.stride(d));
    text += "]";
  }
  return text;
}

}  // namespace logitless
