// Handle of a context, for the files of the C ABI.
#pragma once

#include "core/check.h"
#include "logitless/c_api.h"
#include "logitless/context.h"

struct logitless_context {
  logitless::Context context;
};

namespace logitless::capi {

inline const Context& context_of(const logitless_context* context) {
  require(context != nullptr, "context: expected a handle, got NULL");
  return context->context;
}

}  // namespace logitless::capi
