// What a model learns from: windows of a stream of tokens, in a shuffled order that is a function
// of numbers alone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace logitless::train {

// Rows of tokens and of the tokens after them.
struct Batch {
  std::int64_t rows = 0;
  std::int64_t length = 0;
  std::vector<std::int64_t> tokens;   // [rows, length]
  std::vector<std::int64_t> targets;  // [rows, length], kIgnoredTarget where there is nothing
  std::int64_t counted = 0;           // targets that are not ignored
};

// Non-overlapping windows of `length` tokens and the one after; a window never crosses two files,
// and what is left at the end of a file is not used.
class Dataset {
 public:
  // Throws InvalidArgument when there is no window in them, or a word that is not in [0, vocab).
  static Dataset of_words(std::vector<std::int32_t> words, std::int64_t length, std::int64_t vocab);
  // llm.c's files (shard.h); tokens are read when they are asked for. Throws InvalidArgument naming
  // the file.
  static Dataset of_shards(const std::vector<std::string>& paths, std::int64_t length,
                           std::int64_t vocab);

  std::int64_t length() const { return length_; }
  std::int64_t windows() const { return end_ - begin_; }
  // Of all its windows.
  std::int64_t tokens() const { return windows() * length_; }
  // Changes with sizes, and with the tokens at beginning and end of every file.
  std::uint64_t key() const;
  // Reads all tokens of its files. Throws InvalidArgument naming file and position of the first one
  // outside of the vocabulary.
  void check() const;
  // Two parts: all but the last `windows` windows, and those. Throws InvalidArgument when one would
  // be empty.
  std::pair<Dataset, Dataset> split(std::int64_t windows) const;

  // Windows first, first + 1, ... of an endless order: every epoch has each window once, in an
  // order of its own. Throws InvalidArgument naming file and position of a token outside the
  // vocabulary.
  Batch shuffled_batch(std::uint64_t seed, std::int64_t first, std::int64_t rows) const;
  // The same in the order of the text; all targets after the last window are ignored.
  Batch sequential_batch(std::int64_t first, std::int64_t rows) const;

 private:
  class Source;
  class Words;
  class Shards;
  Dataset(std::shared_ptr<const Source> source, std::int64_t length, std::int64_t vocab);
  void add_window(std::int64_t window, Batch& batch) const;

  std::shared_ptr<const Source> source_;
  std::int64_t length_ = 0;
  std::int64_t vocab_ = 0;
  std::int64_t begin_ = 0, end_ = 0;  // windows of the source
};

}  // namespace logitless::train
