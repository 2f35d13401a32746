// Handle of a communicator.
#pragma once

#include <memory>

#include "core/check.h"
#include "logitless/c_communicator.h"
#include "logitless/communicator.h"

struct logitless_communicator {
  std::shared_ptr<logitless::Communicator> communicator;
};

namespace logitless::capi {

inline Communicator& communicator_of(const logitless_communicator* handle) {
  require(handle != nullptr, "communicator: expected a handle, got NULL");
  return *handle->communicator;
}

}  // namespace logitless::capi
