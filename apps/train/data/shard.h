// Token files of llm.c: 256 numbers i32, then the tokens as u16, or as u32 for Llama 3.
#pragma once

#include <cstdint>
#include <fstream>
#include <span>
#include <string>

namespace logitless::train {

class Shard {
 public:
  // Reads the header. Throws InvalidArgument naming the file, what was expected and what was found.
  explicit Shard(std::string path);

  const std::string& path() const { return path_; }
  std::int64_t tokens() const { return tokens_; }
  // Throws InvalidArgument naming the first token that is not below `vocab`; reads the whole file
  // unless its type has no such token.
  void check(std::int64_t vocab) const;
  // Reads the tokens from `begin` on. Throws InvalidArgument when the file ends before them.
  void read(std::int64_t begin, std::span<std::int64_t> to) const;

 private:
  std::string path_;
  std::int64_t tokens_ = 0;
  std::size_t token_bytes_ = 0;
  mutable std::ifstream stream_;
};

}  // namespace logitless::train
