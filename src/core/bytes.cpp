// Byte counts to and from text.
#include "logitless/bytes.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <string>
#include <utility>

#include "core/check.h"

namespace logitless {

std::size_t parse_bytes(std::string_view text) {
  static constexpr std::pair<std::string_view, double> kUnits[] = {
      {"", 1.0},       {"b", 1.0},    {"kib", 0x1p10}, {"mib", 0x1p20}, {"gib", 0x1p30},
      {"tib", 0x1p40}, {"k", 0x1p10}, {"m", 0x1p20},   {"g", 0x1p30},   {"t", 0x1p40},
      {"kb", 1e3},     {"mb", 1e6},   {"gb", 1e9},     {"tb", 1e12}};
  double number = 0.0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  std::string unit(rest, end);
  unit.erase(0, unit.find_first_not_of(' '));
  for (char& c : unit) c = 'A' <= c && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  for (const auto& [name, factor] : kUnits) {
    if (error == std::errc() && unit == name && std::isfinite(number) && number >= 0.0 &&
        number * factor < 0x1p62) {
      return static_cast<std::size_t>(std::llround(number * factor));
    }
  }
  throw InvalidArgument(concat(
      "'", text, "' is not a number of bytes; expected one such as 512MiB, 2GiB, 1.5GB or 65536"));
}

std::string format_bytes(std::size_t bytes) {
  static constexpr std::array<const char*, 5> kNames = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1023.95 && unit + 1 < kNames.size()) {
    value /= 1024.0;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", value, kNames[unit]);
  return text;
}

}  // namespace logitless
