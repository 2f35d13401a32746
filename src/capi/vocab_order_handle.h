// Handle of an order of the vocabulary.
#pragma once

#include "core/check.h"
#include "logitless/c_far_field.h"
#include "logitless/vocab_order.h"

struct logitless_vocab_order {
  logitless::VocabOrder order;
};

namespace logitless::capi {

inline const VocabOrder& order_of(const logitless_vocab_order* handle) {
  require(handle != nullptr, "order: expected a handle, got NULL");
  return handle->order;
}

}  // namespace logitless::capi
