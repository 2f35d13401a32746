// The safetensors container: u64 header length, JSON header, bytes. Parsing reads only the header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/stored_tensor.h"
#include "logitless/tensor_file.h"

namespace logitless {

// Reader and writer refuse longer headers, like the format's own implementation.
inline constexpr std::size_t kMaxSafetensorsHeader = 100'000'000;

// Returns the tensors of a whole file in memory; `path` appears in messages. Memory is proportional
// to the header's actual size. Throws InvalidArgument unless the header is well formed and the
// tensors cover the data exactly.
TensorIndex parse_safetensors(std::span<const std::byte> file, const std::string& path);

// Returns the 8 length bytes and the header for `tensors`, whose data follow in this order. It is
// padded with spaces to a multiple of 64 bytes, so that the data are aligned. Throws
// InvalidArgument naming `path` and the tensor.
std::string safetensors_header(std::span<const NamedTensor* const> tensors,
                               const std::map<std::string, std::string>& metadata,
                               const std::string& path);

// Returns the bytes that write_safetensors would write, for contiguous tensors. They end after the
// first `most` tensors in the order of the file: large elements first, equal ones as given.
std::vector<std::byte> safetensors_bytes(std::span<const NamedTensor> tensors,
                                         const std::map<std::string, std::string>& metadata,
                                         std::size_t most = SIZE_MAX);

}  // namespace logitless
