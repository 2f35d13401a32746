// Training data: windows of a token stream, in a shuffled order that is a function of numbers
// alone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace logitless::train {

// Rows of tokens, with the next token of each as its target.
struct Batch {
  std::int64_t rows = 0;
  std::int64_t length = 0;
  std::vector<std::int64_t> tokens;   // [rows, length]
  std::vector<std::int64_t> targets;  // [rows, length], or kIgnoredTarget
  std::int64_t counted = 0;           // targets that are not ignored
};

// Non-overlapping windows of `length` + 1 tokens, the last of which is the first of the next
// window. A window never crosses two files; an incomplete one at the end of a file is dropped.
class Dataset {
 public:
  // Throws InvalidArgument when `tokens` has no window, or a token that is not in [0, vocab).
  static Dataset of_tokens(std::vector<std::int32_t> tokens, std::int64_t length,
                           std::int64_t vocab);
  // Opens llm.c's files (shard.h), whose tokens are read on demand. Throws InvalidArgument naming
  // the file.
  static Dataset of_shards(const std::vector<std::string>& paths, std::int64_t length,
                           std::int64_t vocab);

  std::int64_t length() const { return length_; }
  std::int64_t windows() const { return end_ - begin_; }
  // Returns the tokens of all windows.
  std::int64_t tokens() const { return windows() * length_; }
  // Returns a key that changes with sizes, and with the tokens at the beginning and end of every
  // file.
  std::uint64_t key() const;
  // Reads all tokens of the files. Throws InvalidArgument naming file and position of the first
  // token outside the vocabulary.
  void check() const;
  // Returns all but the last `windows` windows, and those. Throws InvalidArgument when either is
  // empty.
  std::pair<Dataset, Dataset> split(std::int64_t windows) const;

  // Returns windows first, first + 1, ... of an endless order: every epoch has each window once, in
  // an order of its own. Throws InvalidArgument naming file and position of a token outside the
  // vocabulary.
  Batch shuffled_batch(std::uint64_t seed, std::int64_t first, std::int64_t rows) const;
  // Returns windows in the order of the text; targets after the last window are ignored. Throws as
  // shuffled_batch() does.
  Batch sequential_batch(std::int64_t first, std::int64_t rows) const;

 private:
  class Source;
  class Tokens;
  class Shards;
  Dataset(std::shared_ptr<const Source> source, std::int64_t length, std::int64_t vocab);
  void add_window(std::int64_t window, Batch& batch) const;

  std::shared_ptr<const Source> source_;
  std::int64_t length_ = 0;
  std::int64_t vocab_ = 0;
  std::int64_t begin_ = 0, end_ = 0;  // windows of the source
};

}  // namespace logitless::train
