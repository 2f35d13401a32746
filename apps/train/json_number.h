// Strict whole numbers of JSON: the JSON library converts fractions and booleans to integers.
#pragma once

#include <cstdint>

#include "json/json.h"
#include "logitless/error.h"

namespace logitless::train {

// Returns a whole number. Throws InvalidArgument unless it fits into 64 bits, signed.
inline std::int64_t whole_number(const Json& json) {
  if (!json.is_number_integer() ||
      (json.is_number_unsigned() && json.get<std::uint64_t>() > std::uint64_t{INT64_MAX})) {
    throw InvalidArgument("expected a whole number, found " + json.dump());
  }
  return json.get<std::int64_t>();
}

}  // namespace logitless::train
