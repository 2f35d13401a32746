#include "train/tokenizer/utf8.h"

namespace logitless::train {
namespace {

// Returns the length of the truncated character at text[i], where none is complete; at least 1.
std::size_t broken_length(std::string_view text, std::size_t i) {
  const auto byte = [&](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  const unsigned first = byte(i);
  if (first < 0xe0 || first > 0xf4) return 1;  // a two-byte character is cut after the first byte
  // Bounds of the second byte, which exclude overlong forms, surrogates and code points above
  // U+10FFFF.
  const unsigned low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  const unsigned high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  if (i + 1 >= text.size() || byte(i + 1) < low || byte(i + 1) > high) return 1;
  const bool third = first >= 0xf0 && i + 2 < text.size() && (byte(i + 2) & 0xc0u) == 0x80u;
  return third ? 3 : 2;
}

}  // namespace

std::string replace_invalid_utf8(std::string_view text) {
  std::string result;
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t length = utf8_length(text, i);
    if (length > 0) {
      result.append(text.substr(i, length));
      i += length;
    } else {
      append_utf8(result, 0xfffd);
      i += broken_length(text, i);
    }
  }
  return result;
}

}  // namespace logitless::train
