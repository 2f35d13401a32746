// The safetensors container: u64 header length, JSON header, bytes. Parsing looks at the header
// only.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/stored_tensor.h"
#include "logitless/tensor_file.h"

namespace logitless {

// Longer headers are refused by reader and writer, as by the format's own implementation.
inline constexpr std::size_t kMaxSafetensorsHeader = 100'000'000;

// The tensors of a whole file in memory; `path` stands in messages. Memory used is proportional to
// the header, whatever it claims. Throws InvalidArgument unless the header is well formed and the
// tensors cover the data exactly.
TensorIndex parse_safetensors(std::span<const std::byte> file, const std::string& path);

// The 8 length bytes and the header for `tensors`, whose data follow in the order given. Padded
// with spaces to a multiple of 64 bytes, so that the data start aligned. Throws InvalidArgument,
// naming `path` and the tensor.
std::string safetensors_header(std::span<const NamedTensor* const> tensors,
                               const std::map<std::string, std::string>& metadata,
                               const std::string& path);

// What write_safetensors would write, of contiguous tensors.
std::vector<std::byte> safetensors_bytes(std::span<const NamedTensor> tensors,
                                         const std::map<std::string, std::string>& metadata);

}  // namespace logitless
