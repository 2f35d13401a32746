// Cache of machine code on disk. The GPU will run this code. So a file only counts if its MAC under
// this user's key proves that this user wrote it for this content. No CUDA here.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace logitless::cuda {

// Returns the result of `make`, from the cache folder where a file has it for this content.
// `content` is everything that the result depends on. The folder's file `key`, readable by its
// owner alone, authenticates the other files. Files are written aside and renamed. A folder that
// cannot be made, read or written, or that other users may write (core/own_files.h), costs time and
// is no error.
std::string cached(const std::string& folder, std::string_view content,
                   const std::function<std::string()>& make);

}  // namespace logitless::cuda
