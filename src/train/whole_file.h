// Small files, read in one piece.
#pragma once

#include <optional>
#include <string>

namespace logitless::train {

// None where it cannot be opened.
std::optional<std::string> file_contents(const std::string& path);

}  // namespace logitless::train
