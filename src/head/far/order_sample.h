// The input of a vocabulary order: some tokens and the weights of a step, copied so that later
// steps may change them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "logitless/vocab_order.h"

namespace logitless {

// Operands of a head during a step: hidden [..., D], weight [V, D], bias [V] or none.
struct OrderSource {
  ConstTensorView hidden, weight, bias;
  float logit_scale = 1.0f, softcap = 0.0f;
  Sharding sharding = {};
  bool tokens_elsewhere = false;  // tokens are sharded, and other ranks have some
};

struct OrderSample {
  Buffer hidden_copy, weight_copy, bias_copy;
  std::shared_ptr<const void> device_hidden;  // includes those of other ranks, on a GPU
  ConstTensorView hidden, weight, bias;
  std::vector<float> average;  // by token id; of the last order, or empty
  float logit_scale = 1.0f, softcap = 0.0f, tau = 0.0f;
  bool moments = false;
  Sharding sharding = {};  // its tokens are the same on all ranks
};

// Returns the sample's head: without tokens and without copies.
OrderSample head_of(const OrderSource& source);

// Returns a sample of `rows` evenly spaced tokens, or all if there are fewer. With `copy` the
// weight and bias are copied, otherwise they are views.
OrderSample sample_of(const OrderSource& source, std::int64_t rows, bool copy, MemoryMeter* meter);

// Returns the same without copies, of at most `rows` tokens, for an order that is made before the
// tensors change; also on a GPU.
OrderSample look_at(const OrderSource& source, std::int64_t rows);

// Returns the average probabilities of a sample, mixed in equal parts with those of its last order.
std::vector<float> average_of(const Context& context, const OrderSample& sample);

// Makes the order for these averages.
VocabOrder make_order(const Context& context, const OrderSample& sample);

}  // namespace logitless
