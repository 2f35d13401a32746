#include "train/tokenizer/byte_pairs.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <queue>
#include <tuple>

#include "train/hash.h"

namespace logitless::train {
namespace {

// The most bytes for which a linear search for the next merge is faster than a priority queue.
constexpr std::size_t kShort = 40;

}  // namespace

MergeTable::MergeTable(std::size_t pairs) : slots_(std::bit_ceil(2 * pairs + 1)) {}

std::size_t MergeTable::slot(std::int32_t left, std::int32_t right) const {
  const std::uint64_t key =
      std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
  std::size_t at = mix(key) & (slots_.size() - 1);
  while (slots_[at].left != -1 && (slots_[at].left != left || slots_[at].right != right))
    at = (at + 1) & (slots_.size() - 1);
  return at;
}

void MergeTable::add(std::int32_t left, std::int32_t right, Merge merge) {
  slots_[slot(left, right)] = {left, right, merge};
}

MergeTable::Merge MergeTable::find(std::int32_t left, std::int32_t right) const {
  return slots_[slot(left, right)].merge;
}

BytePairs::BytePairs(const std::int32_t (&bytes)[256], MergeTable merges,
                     std::unordered_map<std::string, std::int32_t> whole)
    : merges_(std::move(merges)), whole_(std::move(whole)) {
  std::copy(std::begin(bytes), std::end(bytes), bytes_);
  for (const auto& [text, word] : whole_) longest_whole_ = std::max(longest_whole_, text.size());
}

void BytePairs::encode(std::string_view piece, std::vector<std::int32_t>& words) const {
  if (piece.size() <= longest_whole_) {
    const auto word = whole_.find(std::string(piece));
    if (word != whole_.end()) {
      words.push_back(word->second);
      return;
    }
  }
  if (piece.size() <= kShort) {
    encode_short(piece, words);
  } else {
    encode_long(piece, words);
  }
}

void BytePairs::encode_short(std::string_view piece, std::vector<std::int32_t>& words) const {
  std::int32_t ids[kShort];
  MergeTable::Merge next[kShort];  // the merge of a word with its successor
  std::size_t count = piece.size();
  for (std::size_t i = 0; i < count; ++i) ids[i] = bytes_[static_cast<unsigned char>(piece[i])];
  for (std::size_t i = 0; i + 1 < count; ++i) next[i] = merges_.find(ids[i], ids[i + 1]);
  while (count > 1) {
    std::size_t best = 0;
    for (std::size_t i = 1; i + 1 < count; ++i)
      if (next[i].rank < next[best].rank) best = i;
    if (next[best].rank == UINT32_MAX) break;
    ids[best] = next[best].made;
    --count;
    for (std::size_t i = best + 1; i < count; ++i) {
      ids[i] = ids[i + 1];
      next[i - 1] = next[i];
    }
    if (best + 1 < count) next[best] = merges_.find(ids[best], ids[best + 1]);
    if (best > 0) next[best - 1] = merges_.find(ids[best - 1], ids[best]);
  }
  words.insert(words.end(), ids, ids + count);
}

void BytePairs::encode_long(std::string_view piece, std::vector<std::int32_t>& words) const {
  struct Link {
    std::int32_t word;  // -1: merged into its predecessor
    std::size_t before, after;
  };
  const std::size_t count = piece.size();
  std::vector<Link> links(count);
  for (std::size_t i = 0; i < count; ++i)
    links[i] = {bytes_[static_cast<unsigned char>(piece[i])], i - 1, i + 1};

  // A heap: the lowest rank first, the leftmost of equal ranks. Outdated entries stay in it; they
  // are recognised by the words that they were made of.
  using Pair = std::tuple<std::uint32_t, std::size_t, std::int32_t, std::int32_t, std::int32_t>;
  std::vector<Pair> first;
  const auto pair_at = [&](std::size_t left, std::size_t right) -> Pair {
    const MergeTable::Merge merge = merges_.find(links[left].word, links[right].word);
    return {merge.rank, left, links[left].word, links[right].word, merge.made};
  };
  for (std::size_t i = 0; i + 1 < count; ++i) {
    if (const Pair pair = pair_at(i, i + 1); std::get<0>(pair) != UINT32_MAX) first.push_back(pair);
  }
  std::priority_queue queue(std::greater<Pair>(), std::move(first));
  const auto add = [&](std::size_t left, std::size_t right) {
    if (const Pair pair = pair_at(left, right); std::get<0>(pair) != UINT32_MAX) queue.push(pair);
  };
  while (!queue.empty()) {
    const auto [rank, at, left, right, made] = queue.top();
    queue.pop();
    const std::size_t after = links[at].after;
    if (links[at].word != left || after >= count || links[after].word != right) continue;
    links[at].word = made;
    links[at].after = links[after].after;
    links[after].word = -1;
    if (links[at].after < count) {
      links[links[at].after].before = at;
      add(at, links[at].after);
    }
    if (at > 0) add(links[at].before, at);
  }
  for (std::size_t i = 0; i < count; i = links[i].after) words.push_back(links[i].word);
}

}  // namespace logitless::train
