// Byte counts as text, both ways.
#include "logitless/bytes.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <utility>

#include "core/check.h"

namespace logitless {

std::size_t parse_bytes(std::string_view text) {
  static constexpr std::pair<std::string_view, double> kUnits[] = {
      {"", 1.0},       {"B", 1.0},    {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30},
      {"TiB", 0x1p40}, {"K", 0x1p10}, {"M", 0x1p20},   {"G", 0x1p30},   {"T", 0x1p40},
      {"kB", 1e3},     {"KB", 1e3},   {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12}};
  double number = 0.0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  std::string_view unit(rest, static_cast<std::size_t>(end - rest));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
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
