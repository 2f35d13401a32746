// Machine code kept on disk. What is found there is code that the GPU will run, so it counts as
// none unless this user's key proves that this user wrote it for this content. No CUDA here.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace logitless::cuda {

// $LOGITLESS_CACHE, or $XDG_CACHE_HOME/logitless/cubin, or ~/.cache/logitless/cubin. Empty: none.
std::string cubin_folder();

// What `make` gives, from the folder where a file has it for this content. `content`: everything
// that the result depends on. The folder's file `key`, which its owner alone may read, proves the
// others. Files are written aside and renamed; a folder that cannot be made, read or written, or
// that other users may write (core/own_files.h), costs time and is no error.
std::string cached(const std::string& folder, std::string_view content,
                   const std::function<std::string()>& make);

}  // namespace logitless::cuda
