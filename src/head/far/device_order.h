// Orders made on a GPU.
#pragma once

#include "logitless/context.h"
#include "logitless/vocab_order.h"

namespace logitless {

// make_vocab_order on a GPU, of arguments that are checked; strata of `per_stratum` words. Waits
// for the stream.
VocabOrder device_vocab_order(const Context& context, const ConstTensorView& weight,
                              std::span<const float> average, std::int64_t per_stratum,
                              std::uint64_t seed);
// measure_tiles on a GPU, of arguments that are checked. Waits for the stream. Throws Unsupported
// where the Hopper kernels do not take the head, or cuBLAS or cuSOLVER is missing. Collective with
// a sharding, and thrown on all ranks: cautions go by the totals of all of them.
VocabOrder device_measure_tiles(const Context& context, const VocabOrder& order,
                                const ConstTensorView& hidden, const ConstTensorView& weight,
                                const ConstTensorView& bias, float logit_scale, float tau,
                                const Sharding& sharding);

}  // namespace logitless
