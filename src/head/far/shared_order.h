// Orders of words that are spread over ranks. Whatever may throw on one rank is done while ranks
// agree on something, so that all of them throw it.
#pragma once

#include <cstdint>
#include <functional>

#include "head/far/order_sample.h"
#include "logitless/head_shape.h"
#include "logitless/vocab_order.h"

namespace logitless {

// Of what an order is made from. Throws InvalidArgument on shapes and communicators; collective
// with a sharding, and thrown on all ranks.
HeadShape require_order_source(const Context& context, const ConstTensorView& hidden,
                               const ConstTensorView& weight, const ConstTensorView& bias,
                               const Sharding& sharding);
// `mine`, or those of all ranks where tokens are spread over them. Collective with a sharding.
std::int64_t sampled_tokens(const Sharding& sharding, std::int64_t mine);

// `body` on all ranks, which all throw where one does.
void together(const Sharding& sharding, const std::function<void()>& body);

// Rows of all ranks' tokens, evenly spaced and the same on all ranks, as sample_of takes them of
// one: at most `rows`, on a GPU some more for each rank. The sample's sharding is of tokens that
// are the same everywhere.
OrderSample sample_of_ranks(const Context& context, const OrderSource& source, std::int64_t rows);

// log2 of the sum over ranks of 2^(mine[i]), i < count, in the order of ranks.
void sum_log2(const Sharding& sharding, float* mine, std::int64_t count);

// make_order, collective; with the places of all ranks' words.
VocabOrder make_shared_order(const Context& context, const OrderSample& sample);

}  // namespace logitless
