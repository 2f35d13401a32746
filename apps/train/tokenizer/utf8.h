// Validation and encoding of UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace logitless::train {

// Returns the length of the UTF-8 sequence at text[i]; 0 if there is none.
inline std::size_t utf8_length(std::string_view text, std::size_t i) {
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  const unsigned first = byte(i);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || i + length > text.size()) return 0;
  std::uint32_t code = first & (0x7fu >> length);
  for (std::size_t k = 1; k < length; ++k) {
    if ((byte(i + k) & 0xc0u) != 0x80u) return 0;
    code = code << 6 | (byte(i + k) & 0x3fu);
  }
  const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  return overlong || surrogate || code > 0x10ffff ? 0 : length;
}

// The longest run of bytes at the start of a text that are all UTF-8, or all not.
struct Utf8Run {
  std::size_t bytes = 0;
  bool valid = true;
};
inline Utf8Run utf8_run(std::string_view text) {
  Utf8Run run;
  run.valid = !text.empty() && utf8_length(text, 0) > 0;
  while (run.bytes < text.size()) {
    const std::size_t length = utf8_length(text, run.bytes);
    if ((length > 0) != run.valid) break;
    run.bytes += length > 0 ? length : 1;
  }
  return run;
}

inline bool is_utf8(std::string_view text) {
  const Utf8Run run = utf8_run(text);
  return text.empty() || (run.valid && run.bytes == text.size());
}

// Appends the character of code point `code`, below 0x110000 and not a surrogate.
inline void append_utf8(std::string& text, std::uint32_t code) {
  const auto put = [&](std::uint32_t byte) { text.push_back(static_cast<char>(byte)); };
  const auto tail = [&](unsigned shift) { put(0x80u | (code >> shift & 0x3fu)); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xc0u | code >> 6);
    tail(0);
  } else if (code < 0x10000) {
    put(0xe0u | code >> 12);
    tail(6);
    tail(0);
  } else {
    put(0xf0u | code >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
}

// Replaces bytes that are not UTF-8 by U+FFFD, one for each truncated start of a character, as
// Unicode advises.
std::string replace_invalid_utf8(std::string_view text);

}  // namespace logitless::train
