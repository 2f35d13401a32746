// Makers of vocabulary orders on a GPU, and rows of the caller's matrices for those on a CPU.
#pragma once

#include <cstdint>
#include <span>

#include "core/element.h"
#include "kernels/cpu_tensor.h"
#include "logitless/context.h"
#include "logitless/tensor_view.h"
#include "logitless/vocab_order.h"

namespace logitless {

// Does make_vocab_order on a GPU, with checked arguments and strata of `per_stratum` entries. Waits
// for the stream.
VocabOrder device_vocab_order(const Context& context, const ConstTensorView& weight,
                              std::span<const float> average, std::int64_t per_stratum,
                              std::uint64_t seed);
// Does measure_tiles on a GPU, with checked arguments. Waits for the stream. Throws Unsupported if
// no kernel with a far field takes the head, or cuBLAS or cuSOLVER is missing. Collective with a
// sharding, and errors are thrown on all ranks: cautions depend on the totals of all ranks.
VocabOrder device_measure_tiles(const Context& context, const VocabOrder& order,
                                const ConstTensorView& hidden, const ConstTensorView& weight,
                                const ConstTensorView& bias, float logit_scale, float tau,
                                const Sharding& sharding);

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
