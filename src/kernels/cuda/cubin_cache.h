// Machine code kept on disk. Nothing that is found there is trusted: a file that is not whole, or
// another's, counts as none. No CUDA here.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace logitless::cuda {

// $LOGITLESS_CACHE, or $XDG_CACHE_HOME/logitless/cubin, or ~/.cache/logitless/cubin. Empty: none.
std::string cubin_folder();

// What `make` gives, from the folder where a file has it for this content. `content`: everything
// that the result depends on. Files are written aside and renamed; a folder that cannot be made,
// read or written costs time and is no error.
std::string cached(const std::string& folder, std::string_view content,
                   const std::function<std::string()>& make);

}  // namespace logitless::cuda
