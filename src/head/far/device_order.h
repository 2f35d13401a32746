// Vocabulary orders made on a GPU.
#pragma once

#include "logitless/context.h"
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

}  // namespace logitless
