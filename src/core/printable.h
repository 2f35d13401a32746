// Foreign text in messages.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace logitless {

// Returns the bytes of the first UTF-8 character if a terminal shows it, else 0.
inline std::size_t shown_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
  const std::size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const unsigned second = byte(1);
  const bool control = first == 0xc2 && second < 0xa0;
  // Overlong encodings, surrogates, and code points beyond the last.
  const bool wrong = (first == 0xe0 && second < 0xa0) || (first == 0xed && second >= 0xa0) ||
                     (first == 0xf0 && second < 0x90) || (first == 0xf4 && second >= 0x90);
  // Marks that change the direction of text.
  const bool turns = text.starts_with("\u200e") || text.starts_with("\u200f") ||
                     (first == 0xe2 && second == 0x80 && byte(2) >= 0xa8 && byte(2) <= 0xae) ||
                     (first == 0xe2 && second == 0x81 && byte(2) >= 0xa6 && byte(2) <= 0xa9);
  return control || wrong || turns ? 0 : length;
}

// Returns the text with everything escaped that a terminal would obey instead of show. Control
// characters, direction marks and bytes that are not UTF-8 become \x1b and the like; a new line
// becomes \n.
inline std::string printable(std::string_view text) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string result;
  while (!text.empty()) {
    const std::size_t length = shown_bytes(text);
    if (length > 0) {
      result += text.substr(0, length);
    } else if (text.front() == '\n') {
      result += "\\n";
    } else {
      const auto byte = static_cast<unsigned char>(text.front());
      ((result += "\\x") += kDigits[byte >> 4]) += kDigits[byte & 15];
    }
    text.remove_prefix(length > 0 ? length : 1);
  }
  return result;
}

}  // namespace logitless
