// Shared parts of the tests of files: a temporary directory, whole-file reading and writing, the
// message of an error.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "logitless/error.h"
#include "support/temp_dir.h"

namespace logitless {

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

inline void write_atomically(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::span<const std::byte> as_bytes(const std::string& text) {
  return std::as_bytes(std::span(text));
}

// Returns the bytes of a hand-made safetensors file. `length`, if given, replaces the header's own.
inline std::string safetensors_bytes(const std::string& header, const std::string& data,
                                     std::optional<std::uint64_t> length = {}) {
  const std::uint64_t stored = length.value_or(header.size());
  std::string file(sizeof(stored), '\0');
  std::memcpy(file.data(), &stored, sizeof(stored));
  return file + header + data;
}

// Returns the bytes of a hand-made npy file of format major.0, with `length` as above.
inline std::string npy_bytes(int major, const std::string& dict, const std::string& data,
                             std::optional<std::uint32_t> length = {}) {
  const std::uint32_t stored = length.value_or(static_cast<std::uint32_t>(dict.size()));
  std::string text(major == 1 ? 2 : 4, '\0');
  std::memcpy(text.data(), &stored, text.size());
  return std::string("\x93NUMPY") + static_cast<char>(major) + '\0' + text + dict + data;
}

// A copy in a block of exactly its size, `shift` bytes off an aligned address: AddressSanitizer
// detects reads past either end.
class ExactBytes {
 public:
  explicit ExactBytes(const std::string& bytes, std::size_t shift = 0)
      : block_(new std::byte[shift + bytes.size()]), bytes_(block_.get() + shift, bytes.size()) {
    std::copy_n(as_bytes(bytes).begin(), bytes.size(), block_.get() + shift);
  }
  std::span<const std::byte> get() const { return bytes_; }

 private:
  std::unique_ptr<std::byte[]> block_;
  std::span<const std::byte> bytes_;
};

// Returns the message of the Expected that `function` throws; "" if nothing is thrown. Other
// exceptions pass through.
template <typename Expected, typename F>
std::string message_of(F&& function) {
  try {
    function();
  } catch (const Expected& error) {
    return error.what();
  }
  return "";
}

}  // namespace logitless
