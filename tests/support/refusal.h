// Message of a refused call.
#pragma once

#include <exception>
#include <string>

#include "logitless/error.h"

namespace logitless::test {

// Returns the message of the E that the call throws; "accepted" if it throws nothing.
template <typename E = InvalidArgument, typename F>
std::string message_of(F&& call) {
  try {
    call();
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    return std::string("another exception: ") + e.what();
  }
  return "accepted";
}

}  // namespace logitless::test
