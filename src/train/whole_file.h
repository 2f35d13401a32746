// Small files, read and written in one piece.
#pragma once

#include <optional>
#include <string>

namespace logitless::train {

// None where it cannot be opened.
std::optional<std::string> file_contents(const std::string& path);
// Whole or not at all. Throws DeviceError.
void write_whole(const std::string& path, const std::string& text);

}  // namespace logitless::train
