// Byte-pair encoding: joins bytes to words, two at a time, in the order of a list of merges.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace logitless::train {

// Hash table of merges: a pair of adjacent words -> the word they become and the merge's rank.
class MergeTable {
 public:
  struct Merge {
    std::uint32_t rank = UINT32_MAX;  // the lowest comes first; UINT32_MAX: no such pair
    std::int32_t made = -1;
  };

  // `pairs`: the most merges that add() will be called with.
  explicit MergeTable(std::size_t pairs);
  // Adds a merge, or replaces that of the same pair.
  void add(std::int32_t left, std::int32_t right, Merge merge);
  Merge find(std::int32_t left, std::int32_t right) const;

 private:
  struct Slot {
    std::int32_t left = -1, right = -1;  // -1: empty
    Merge merge;
  };
  std::size_t slot(std::int32_t left, std::int32_t right) const;

  std::vector<Slot> slots_;  // a power of two in size, at most half full
};

class BytePairs {
 public:
  // `bytes`: the word of each byte. With `whole` (text -> word), a piece that is a word becomes
  // that word, whatever the merges give.
  BytePairs(const std::int32_t (&bytes)[256], MergeTable merges,
            std::unordered_map<std::string, std::int32_t> whole);

  // Appends the words of a piece. Takes O(n log n) time for n bytes.
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
