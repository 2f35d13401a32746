// Reads small files at once.
#pragma once

#include <optional>
#include <string>

namespace logitless::train {

// Returns the contents of a file; none where it cannot be opened.
std::optional<std::string> file_contents(const std::string& path);

}  // namespace logitless::train
