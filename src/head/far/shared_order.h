// Orders of a sharded vocabulary. Everything that may throw on one rank runs during an agreement,
// so that all ranks throw it.
#pragma once

#include <cstdint>
#include <functional>

#include "head/far/order_sample.h"
#include "logitless/head_shape.h"
#include "logitless/vocab_order.h"

namespace logitless {

// Checks the input of an order and returns its sizes. Throws InvalidArgument on wrong shapes and
// communicators. Collective with a sharding, and errors are thrown on all ranks.
HeadShape require_order_source(const Context& context, const ConstTensorView& hidden,
                               const ConstTensorView& weight, const ConstTensorView& bias,
                               const Sharding& sharding);
// Returns `mine`, or the sum over all ranks if tokens are sharded. Collective with a sharding.
std::int64_t sampled_tokens(const Sharding& sharding, std::int64_t mine);

// Runs `body` on all ranks; all of them throw if one does.
void together(const Sharding& sharding, const std::function<void()>& body);

// Returns a sample of all ranks' tokens, evenly spaced and the same on all ranks, like sample_of on
// one. It has at most `rows` tokens; on a GPU it may have some more for each rank. The sample's
// sharding has tokens that are the same on all ranks.
OrderSample sample_of_ranks(const Context& context, const OrderSource& source, std::int64_t rows);

// Replaces mine[i], i < count, by log2 of the sum over ranks of 2^mine[i], in the order of ranks.
void sum_log2(const Sharding& sharding, float* mine, std::int64_t count);

// Does make_order collectively, including the share_order of all ranks' entries.
VocabOrder make_shared_order(const Context& context, const OrderSample& sample);

}  // namespace logitless
