// Unicode's normalisation form C.
#pragma once

#include <string>
#include <string_view>

namespace logitless::train {

// Returns `text`, UTF-8, in NFC (Unicode 14). The view is `text` itself or refers to `made`. Throws
// std::runtime_error where utf8proc fails.
std::string_view to_nfc(std::string_view text, std::string& made);

}  // namespace logitless::train
