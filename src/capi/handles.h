// The handles of the C ABI.
#pragma once

#include <memory>

#include "core/check.h"
#include "logitless/c_api.h"
#include "logitless/c_communicator.h"
#include "logitless/c_far_field.h"
#include "logitless/communicator.h"
#include "logitless/context.h"
#include "logitless/vocab_order.h"

struct logitless_context {
  logitless::Context context;
};
struct logitless_communicator {
  std::shared_ptr<logitless::Communicator> communicator;
};
struct logitless_vocab_order {
  logitless::VocabOrder order;
};

namespace logitless::capi {

inline const Context& context_of(const logitless_context* context) {
  require(context != nullptr, "context: expected a handle, got NULL");
  return context->context;
}
inline Communicator& communicator_of(const logitless_communicator* handle) {
  require(handle != nullptr, "communicator: expected a handle, got NULL");
  return *handle->communicator;
}
inline const VocabOrder& order_of(const logitless_vocab_order* handle) {
  require(handle != nullptr, "order: expected a handle, got NULL");
  return handle->order;
}

}  // namespace logitless::capi
