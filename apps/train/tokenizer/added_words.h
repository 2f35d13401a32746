// Added words: their texts are searched for in a text before it is split.
#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace logitless::train {

class AddedWords {
 public:
  // `text` is not empty.
  void add(std::string_view text, std::int32_t word);

  // A part of a text: either one added word, or a stretch without any (word -1).
  struct Part {
    std::string_view text;
    std::int32_t word = -1;
  };
  // Splits `text` into parts whose concatenation is `text`. Where several words start at one
  // position, the longest is taken.
  std::vector<Part> parts(std::string_view text) const;

 private:
  bool starts_[256] = {};
  // A trie: (node, byte) -> the next node, node 0 being the root; `ends_` has the word of each
  // node.
  std::unordered_map<std::uint64_t, std::uint32_t> next_;
  std::vector<std::int32_t> ends_{-1};
};

}  // namespace logitless::train
