// What an order of the vocabulary is made from: some tokens and the weights of a step, copied so
// that the steps after it may change them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "logitless/vocab_order.h"

namespace logitless {

// A head in the middle of a step: hidden [..., D], weight [V, D], bias [V] or none.
struct OrderSource {
  ConstTensorView hidden, weight, bias;
  float logit_scale = 1.0f, softcap = 0.0f;
  Sharding sharding = {};
  bool tokens_elsewhere = false;  // of spread tokens, other ranks have some
};

struct OrderSample {
  Buffer hidden_copy, weight_copy, bias_copy;
  std::shared_ptr<const void> device_hidden;  // of other ranks, too, on a GPU
  ConstTensorView hidden, weight, bias;
  std::vector<float> average;  // by word; of the last order, or empty
  float logit_scale = 1.0f, softcap = 0.0f, tau = 0.0f;
  bool moments = false;
  Sharding sharding = {};  // of tokens that are the same on all ranks
};

// Without its tokens, and without copies.
OrderSample head_of(const OrderSource& source);

// `rows` tokens, evenly spaced, or all there are. Weights and bias are copied where `copy` says so,
// else looked at where they are.
OrderSample sample_of(const OrderSource& source, std::int64_t rows, bool copy, MemoryMeter* meter);

// The same without a copy, of at most `rows` tokens: for an order that is made before they change,
// on a GPU too.
OrderSample look_at(const OrderSource& source, std::int64_t rows);

// Average probabilities of a sample, mixed half and half with those of its last order.
std::vector<float> average_of(const Context& context, const OrderSample& sample);

// The order for these averages.
VocabOrder make_order(const Context& context, const OrderSample& sample);

}  // namespace logitless
