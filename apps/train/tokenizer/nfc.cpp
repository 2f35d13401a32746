#include "train/tokenizer/nfc.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <stdexcept>

namespace logitless::train {

std::string_view to_nfc(std::string_view text, std::string& made) {
  // All characters below U+0300, whose first byte is 0xcc, are in NFC.
  const auto plain = [](char c) { return static_cast<unsigned char>(c) < 0xcc; };
  if (std::all_of(text.begin(), text.end(), plain)) return text;
  utf8proc_uint8_t* bytes = nullptr;
  const utf8proc_ssize_t size =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()), &bytes,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(bytes, &std::free);
  if (size < 0) throw std::runtime_error(std::string("NFC: ") + utf8proc_errmsg(size));
  made.assign(reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(size));
  return made;
}

}  // namespace logitless::train
