// Byte counts to and from text.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "logitless/export.h"

namespace logitless {

inline namespace literals {
constexpr std::size_t operator""_KiB(unsigned long long n) {
  return static_cast<std::size_t>(n) << 10;
}
constexpr std::size_t operator""_MiB(unsigned long long n) {
  return static_cast<std::size_t>(n) << 20;
}
constexpr std::size_t operator""_GiB(unsigned long long n) {
  return static_cast<std::size_t>(n) << 30;
}
}  // namespace literals

// Parses "512MiB", "2GiB", "1.5GB" or "4096" into bytes; units in any case. Throws InvalidArgument.
LOGITLESS_API std::size_t parse_bytes(std::string_view text);
// Formats bytes: 1536 becomes "1.5 KiB".
LOGITLESS_API std::string format_bytes(std::size_t bytes);

}  // namespace logitless
