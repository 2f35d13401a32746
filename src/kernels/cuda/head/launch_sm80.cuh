// Launches of the forward kernel of compute capability 8.0, for one Pipeline.
#pragma once

#include "kernels/cuda/device/error.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/head/forward_sm80.cuh"
#include "kernels/cuda/head/sizes.h"
#include "kernels/cuda/head/tile_launches.h"

namespace logitless::cuda::sm80 {

// Returns whether rows begin at multiples of 16 bytes and consist of chunks of 16 bytes.
inline bool all_aligned(const TileOperands& o) {
  const auto aligned = [](const void* data, std::int64_t stride) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
  };
  return o.dim % 8 == 0 && aligned(o.hidden, o.hidden_stride) && aligned(o.rows, o.row_stride);
}

using Launch = void (*)(const Operands&, const ForwardArguments&, cudaStream_t);

template <class P>
struct Launches {
  template <typename T, ForwardMode kMode, bool kStore, bool kAligned>
  static void launch(const Operands& operands, const ForwardArguments& all, cudaStream_t stream) {
    const auto kernel = logit_tiles<T, P, kMode, kStore, kAligned>;
    allow_shared(kernel, P::kSharedBytes);
    const int processors = processor_count();
    for_launches(all, processors / 2, [&](const ForwardArguments& a, int tiles) {
      const int ctas = tiles < processors / 2 ? 2 * tiles : processors;
      kernel<<<ctas, kThreads, P::kSharedBytes, stream>>>(operands, a);
      require_cuda(cudaGetLastError(), "forward kernel");
    });
  }

  template <typename T, ForwardMode kMode, bool kAligned>
  static Launch by_store(bool store) {
    return store ? launch<T, kMode, true, kAligned> : launch<T, kMode, false, kAligned>;
  }

  // The general modes compute the plain ones too. Rows that are not aligned have them alone.
  template <typename T>
  static Launch of(ForwardMode mode, bool store, bool aligned) {
    switch (mode) {
      case ForwardMode::kPlain:
        if (aligned) return by_store<T, ForwardMode::kPlain, true>(store);
        break;
      case ForwardMode::kPlainEntropy:
        if (aligned) return by_store<T, ForwardMode::kPlainEntropy, true>(store);
        break;
      case ForwardMode::kPlainBest:
      case ForwardMode::kGeneral:
        if (aligned) return by_store<T, ForwardMode::kGeneral, true>(store);
        break;
      case ForwardMode::kReference:
        return aligned ? launch<T, ForwardMode::kReference, false, true>
                       : launch<T, ForwardMode::kReference, false, false>;
      case ForwardMode::kPlainGradient:
        if (aligned) return launch<T, ForwardMode::kPlainGradient, true, true>;
        return launch<T, ForwardMode::kGradient, true, false>;
      case ForwardMode::kLogits:
        return aligned ? launch<T, ForwardMode::kLogits, false, true>
                       : launch<T, ForwardMode::kLogits, false, false>;
      case ForwardMode::kGradient:
        return aligned ? launch<T, ForwardMode::kGradient, true, true>
                       : launch<T, ForwardMode::kGradient, true, false>;
    }
    return by_store<T, ForwardMode::kGeneral, false>(store);
  }

  static void launch_tiles(ForwardMode mode, bool store, const TileOperands& o,
                           const ForwardArguments& arguments, Stream stream) {
    Operands operands{};
    operands.hidden = o.hidden;
    operands.hidden_stride = o.hidden_stride;
    operands.rows = o.rows;
    operands.row_stride = o.row_stride;
    operands.tokens = static_cast<int>(o.tokens);
    operands.dim = static_cast<int>(o.dim);
    operands.block = o.block;
    operands.ranges = o.ranges;
    ForwardArguments a = arguments;
    a.steps = static_cast<int>(ceil_div(o.dim, P::kStepElements));
    const auto by_mode = o.dtype == DType::bf16 ? of<__nv_bfloat16> : of<__half>;
    by_mode(mode, store, all_aligned(o))(operands, a, static_cast<cudaStream_t>(stream));
  }

  static std::string unsupported(const ForwardCall& c) {
    return c.far == nullptr ? sm80_unsupported(c.shape) : sm80_far_call_unsupported(c);
  }

  static std::int64_t resident_bytes() { return cache_bytes() / 6; }
  static constexpr TileKernel kTiles = {
      .unsupported = unsupported, .resident_bytes = resident_bytes, .launch = launch_tiles};
};

}  // namespace logitless::cuda::sm80
