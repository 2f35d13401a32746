// Words with a text of their own, looked for before a text is split.
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

  // A part of a text that is one of the words, or, with word -1, has none in it.
  struct Part {
    std::string_view text;
    std::int32_t word = -1;
  };
  // Together the parts are `text`. Of words that start at one place the longest is taken.
  std::vector<Part> parts(std::string_view text) const;

 private:
  bool starts_[256] = {};
  // A tree: from (node, byte) to the next node, node 0 being the root; and what ends at a node.
  std::unordered_map<std::uint64_t, std::uint32_t> next_;
  std::vector<std::int32_t> ends_{-1};
};

}  // namespace logitless::train
