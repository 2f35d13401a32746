// Exceptions whose message is concatenated from parts: require(ok, "weight is [", a, "]").
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

// Throws for a mistake of the caller.
template <typename... Parts>
void require(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    throw InvalidArgument(concat(parts...));
}

// Throws for a bug of the library.
template <typename... Parts>
void check(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    throw InternalError(concat(parts...));
}

}  // namespace logitless
