// Throwing with a message made of parts: require(ok, "weight is [", a, "]").
#pragma once

#include <sstream>
#include <string>

#include "logitless/error.h"

namespace logitless {

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  ((out << parts), ...);
  return std::move(out).str();
}

// The caller's mistake.
template <typename... Parts>
void require(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    throw InvalidArgument(concat(parts...));
}

// Ours.
template <typename... Parts>
void check(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    throw InternalError(concat(parts...));
}

}  // namespace logitless
