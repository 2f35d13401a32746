// Unicode's normalisation form C.
#pragma once

#include <string>
#include <string_view>

namespace logitless::train {

// `text`, UTF-8, in NFC (Unicode 14): itself, or what `made` then holds. Throws std::runtime_error
// where the library cannot.
std::string_view to_nfc(std::string_view text, std::string& made);

}  // namespace logitless::train
