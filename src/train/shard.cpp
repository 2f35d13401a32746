#include "train/shard.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <iterator>
#include <vector>

#include "logitless/error.h"

namespace logitless::train {
namespace {

struct Format {
  std::int32_t magic, version;
  std::size_t token_bytes;
};
constexpr Format kFormats[] = {{20240520, 1, 2}, {20240801, 7, 4}};
constexpr std::size_t kHeaderBytes = 1024;

// Little-endian, whatever the machine is.
std::int32_t number_at(const std::array<unsigned char, kHeaderBytes>& header, std::size_t index) {
  std::uint32_t value = 0;
  for (std::size_t b = 0; b < 4; ++b) value |= std::uint32_t{header[4 * index + b]} << (8 * b);
  return static_cast<std::int32_t>(value);
}

[[noreturn]] void refuse(const std::string& path, const std::string& text) {
  throw InvalidArgument(fmt::format("'{}': {}", path, text));
}

}  // namespace

Shard::Shard(std::string path) : path_(std::move(path)) {
  std::error_code error;
  const auto status = std::filesystem::status(path_, error);
  if (!std::filesystem::exists(status)) refuse(path_, "there is no such file");
  if (!std::filesystem::is_regular_file(status)) refuse(path_, "expected a file of tokens");
  const std::uintmax_t bytes = std::filesystem::file_size(path_);
  if (bytes < kHeaderBytes) {
    refuse(path_,
           fmt::format("expected a header of {} bytes, the file has {}", kHeaderBytes, bytes));
  }
  stream_.open(path_, std::ios::binary);
  std::array<unsigned char, kHeaderBytes> header{};
  stream_.read(reinterpret_cast<char*>(header.data()), kHeaderBytes);
  if (!stream_) refuse(path_, "cannot be read");
  const std::int32_t magic = number_at(header, 0), version = number_at(header, 1);
  const Format* format = std::find_if(std::begin(kFormats), std::end(kFormats),
                                      [&](const Format& f) { return f.magic == magic; });
  if (format == std::end(kFormats)) {
    refuse(path_, fmt::format("expected magic number {} (u16 tokens) or {} (u32), found {}",
                              kFormats[0].magic, kFormats[1].magic, magic));
  }
  if (version != format->version)
    refuse(path_, fmt::format("expected version {}, found {}", format->version, version));
  token_bytes_ = format->token_bytes;
  tokens_ = number_at(header, 2);
  if (tokens_ < 1) refuse(path_, fmt::format("expected at least 1 token, found {}", tokens_));
  const std::uintmax_t expected =
      kHeaderBytes + static_cast<std::uintmax_t>(tokens_) * token_bytes_;
  if (bytes != expected) {
    refuse(path_, fmt::format("expected {} bytes for {} tokens, the file has {}", expected, tokens_,
                              bytes));
  }
}

void Shard::read(std::int64_t begin, std::span<std::int64_t> to) const {
  if (begin < 0 || begin + static_cast<std::int64_t>(to.size()) > tokens_) {
    refuse(path_, fmt::format("tokens {} to {} of {} do not exist", begin,
                              begin + static_cast<std::int64_t>(to.size()), tokens_));
  }
  std::vector<unsigned char> bytes(to.size() * token_bytes_);
  stream_.clear();
  stream_.seekg(static_cast<std::streamoff>(kHeaderBytes) +
                static_cast<std::streamoff>(begin) * static_cast<std::streamoff>(token_bytes_));
  stream_.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!stream_) refuse(path_, "became shorter while it was read");
  for (std::size_t i = 0; i < to.size(); ++i) {
    std::int64_t token = 0;
    for (std::size_t b = token_bytes_; b-- > 0;) token = token << 8 | bytes[token_bytes_ * i + b];
    to[i] = token;
  }
}

}  // namespace logitless::train
