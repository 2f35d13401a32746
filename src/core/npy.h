// NumPy's npy container: magic, version, header length, a Python dict literal, bytes.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "core/stored_tensor.h"
#include "logitless/tensor_view.h"

namespace logitless {

bool has_npy_magic(std::span<const std::byte> file);

// Parses a whole npy file of format 1.0, 2.0 or 3.0 in memory into its one tensor, named ""; `path`
// appears in messages. Throws InvalidArgument unless it is C-ordered and little-endian, has a dtype
// of the library, and fills the file exactly.
TensorIndex parse_npy(std::span<const std::byte> file, const std::string& path);

// Returns everything before the data, format 1.0, a multiple of 64 bytes. Throws InvalidArgument
// for bf16.
std::string npy_header(const ConstTensorView& tensor, const std::string& path);

}  // namespace logitless
