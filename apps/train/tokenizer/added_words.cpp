#include "train/tokenizer/added_words.h"

namespace logitless::train {
namespace {

std::uint64_t edge(std::uint32_t node, char byte) {
  return std::uint64_t{node} << 8 | static_cast<unsigned char>(byte);
}

}  // namespace

void AddedWords::add(std::string_view text, std::int32_t word) {
  starts_[static_cast<unsigned char>(text[0])] = true;
  std::uint32_t node = 0;
  for (const char byte : text) {
    const auto [entry, is_new] =
        next_.try_emplace(edge(node, byte), static_cast<std::uint32_t>(ends_.size()));
    if (is_new) ends_.push_back(-1);
    node = entry->second;
  }
  ends_[node] = word;
}

std::vector<AddedWords::Part> AddedWords::parts(std::string_view text) const {
  std::vector<Part> parts;
  std::size_t done = 0;
  for (std::size_t i = 0; i < text.size();) {
    if (!starts_[static_cast<unsigned char>(text[i])]) {
      ++i;
      continue;
    }
    Part longest;
    std::uint32_t node = 0;
    for (std::size_t k = i; k < text.size(); ++k) {
      const auto step = next_.find(edge(node, text[k]));
      if (step == next_.end()) break;
      node = step->second;
      if (ends_[node] >= 0) longest = {text.substr(i, k + 1 - i), ends_[node]};
    }
    if (longest.word < 0) {
      ++i;
      continue;
    }
    if (i > done) parts.push_back({text.substr(done, i - done), -1});
    parts.push_back(longest);
    done = i += longest.text.size();
  }
  if (done < text.size()) parts.push_back({text.substr(done), -1});
  return parts;
}

}  // namespace logitless::train
