// Access to rows of the caller's matrices as floats, outside of kernels.
#pragma once

#include <cstdint>

#include "core/element.h"
#include "kernels/cpu_tensor.h"
#include "logitless/tensor_view.h"

namespace logitless {

// Widens one row of a matrix of any strides, in f32, bf16 or f16, into to [columns].
inline void load_row(const ConstTensorView& m, std::int64_t row, float* to) {
  const std::int64_t at = row * m.stride(0);
  if (m.stride(1) == 1) {
    const auto bytes = static_cast<std::int64_t>(size_of(m.dtype()));
    to_f32(m.dtype(), static_cast<const std::byte*>(m.data()) + at * bytes, to, m.size(1));
    return;
  }
  for (std::int64_t k = 0; k < m.size(1); ++k)
    to[k] = static_cast<float>(load_element(m.data(), m.dtype(), at + k * m.stride(1)));
}

}  // namespace logitless
