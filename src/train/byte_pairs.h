// Byte-pair encoding: bytes joined to words, two at a time, in the order of a list of merges.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace logitless::train {

// Words that two words next to each other become, and which pair comes first.
class MergeTable {
 public:
  struct Merge {
    std::uint32_t rank = UINT32_MAX;  // the lowest comes first; UINT32_MAX: no such pair
    std::int32_t made = -1;
  };

  // `pairs` is how many will be added at most.
  explicit MergeTable(std::size_t pairs);
  // Replaces what the pair had.
  void add(std::int32_t left, std::int32_t right, Merge merge);
  Merge find(std::int32_t left, std::int32_t right) const;

 private:
  struct Slot {
    std::int32_t left = -1, right = -1;  // -1: empty
    Merge merge;
  };
  std::size_t slot(std::int32_t left, std::int32_t right) const;

  std::vector<Slot> slots_;  // a power of two, at most half of them taken
};

class BytePairs {
 public:
  // A word for each byte, and the merges of words. With `whole`, a piece that is a word itself is
  // that word, whatever the merges say: the words by their bytes.
  BytePairs(const std::int32_t (&bytes)[256], MergeTable merges,
            std::unordered_map<std::string, std::int32_t> whole);

  // Appends the words of a piece. Time grows with n log n of its bytes.
  void encode(std::string_view piece, std::vector<std::int32_t>& words) const;

 private:
  void encode_short(std::string_view piece, std::vector<std::int32_t>& words) const;
  void encode_long(std::string_view piece, std::vector<std::int32_t>& words) const;

  std::int32_t bytes_[256];
  MergeTable merges_;
  std::unordered_map<std::string, std::int32_t> whole_;
  std::size_t longest_whole_ = 0;
};

}  // namespace logitless::train
