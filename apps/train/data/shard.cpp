#include "train/data/shard.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
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

// Reads a little-endian number on any machine.
std::int32_t number_at(const std::array<unsigned char, kHeaderBytes>& header, std::size_t index) {
  std::uint32_t value = 0;
  for (std::size_t b = 0; b < 4; ++b) value |= std::uint32_t{header[4 * index + b]} << (8 * b);
  return static_cast<std::int32_t>(value);
}

[[noreturn]] void refuse(const std::string& path, const std::string& text) {
  throw InvalidArgument(fmt::format("'{}': {}", path, text));
}

static_assert(std::endian::native == std::endian::little, "tokens are read as they lie");

// Returns the index of the first token that is `vocab` or more; the count where there is none.
template <typename Token>
std::size_t first_outside(std::span<const unsigned char> bytes, std::int64_t vocab) {
  constexpr std::size_t kBlock = 4096;  // its maximum is computed with SIMD
  const std::size_t count = bytes.size() / sizeof(Token);
  std::array<Token, kBlock> tokens;
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t size = std::min(kBlock, count - begin);
    std::memcpy(tokens.data(), bytes.data() + begin * sizeof(Token), size * sizeof(Token));
    Token largest = 0;
    for (std::size_t i = 0; i < size; ++i) largest = std::max(largest, tokens[i]);
    if (largest < vocab) continue;
    return begin +
           static_cast<std::size_t>(std::find_if(tokens.begin(),
                                                 tokens.begin() + static_cast<std::ptrdiff_t>(size),
                                                 [&](Token t) { return t >= vocab; }) -
                                    tokens.begin());
  }
  return count;
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

void Shard::check(std::int64_t vocab) const {
  if (token_bytes_ == sizeof(std::uint16_t) && vocab > UINT16_MAX) return;
  constexpr std::size_t kRead = std::size_t{1} << 22;  // bytes read at a time
  std::vector<unsigned char> bytes(kRead);
  stream_.clear();
  stream_.seekg(static_cast<std::streamoff>(kHeaderBytes));
  for (std::int64_t begin = 0; begin < tokens_;) {
    const std::size_t count =
        std::min(kRead / token_bytes_, static_cast<std::size_t>(tokens_ - begin));
    const std::span<unsigned char> part(bytes.data(), count * token_bytes_);
    stream_.read(reinterpret_cast<char*>(part.data()), static_cast<std::streamsize>(part.size()));
    if (!stream_) refuse(path_, "became shorter while it was read");
    const std::size_t at = token_bytes_ == sizeof(std::uint16_t)
                               ? first_outside<std::uint16_t>(part, vocab)
                               : first_outside<std::uint32_t>(part, vocab);
    if (at < count) {
      std::uint32_t token = 0;
      std::memcpy(&token, part.data() + at * token_bytes_, token_bytes_);
      refuse(path_, fmt::format("expected tokens below {} (vocab), found {} at {}", vocab, token,
                                begin + static_cast<std::int64_t>(at)));
    }
    begin += static_cast<std::int64_t>(count);
  }
}

}  // namespace logitless::train
