#include "train/tokenizer/sentence_pieces.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "logitless/error.h"
#include "train/tokenizer/utf8.h"

namespace logitless::train {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw InvalidArgument(fmt::format("tokenizer: expected a SentencePiece model{}", what));
}

// Iterates over the fields of a protocol buffer.
class Fields {
 public:
  explicit Fields(std::string_view message) : rest_(message) {}

  bool next() {
    if (rest_.empty()) return false;
    const std::uint64_t key = varint();
    if (key > UINT32_MAX) refuse("");
    number_ = key >> 3;
    wire_ = key & 7u;
    switch (wire_) {
      case kVarint:
        value_ = varint();
        break;
      case 1:
        value_ = fixed(8);
        break;
      case kBytes:
        bytes_ = take(varint());
        break;
      case kFixed32:
        value_ = fixed(4);
        break;
      default:
        refuse("");
    }
    return true;
  }

  // Calls `act` with the field's value if it has this number and type. Others are skipped, as the
  // library skips fields of unexpected types.
  template <typename Act>
  void on_bytes(std::uint64_t number, Act&& act) const {
    if (number_ == number && wire_ == kBytes) act(bytes_);
  }
  template <typename Act>
  void on_value(std::uint64_t number, Act&& act) const {
    if (number_ == number && wire_ == kVarint) act(value_);
  }
  void take_float(std::uint64_t number, float& to) const {
    if (number_ == number && wire_ == kFixed32)
      to = std::bit_cast<float>(static_cast<std::uint32_t>(value_));
  }
  void take_bool(std::uint64_t number, bool& to) const {
    on_value(number, [&](std::uint64_t value) { to = value != 0; });
  }

 private:
  static constexpr std::uint64_t kVarint = 0, kBytes = 2, kFixed32 = 5;

  std::string_view take(std::uint64_t count) {
    if (count > rest_.size()) refuse("");
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }
  std::uint64_t fixed(std::size_t count) {
    std::uint64_t result = 0;
    const std::string_view taken = take(count);
    for (std::size_t i = 0; i < count; ++i)
      result |= std::uint64_t{static_cast<unsigned char>(taken[i])} << (8 * i);
    return result;
  }
  std::uint64_t varint() {
    std::uint64_t result = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1)[0]);
      result |= std::uint64_t{byte & 0x7fu} << shift;
      if ((byte & 0x80u) == 0) return result;
    }
    refuse("");
  }

  std::string_view rest_;
  std::uint64_t number_ = 0, wire_ = 0, value_ = 0;
  std::string_view bytes_;
};

// Values that the library does not know become the default.
template <typename Enum>
void take_enum(std::uint64_t value, Enum last, Enum& to) {
  if (value >= 1 && value <= static_cast<std::uint64_t>(last)) to = static_cast<Enum>(value);
}

SentencePieceModel::Piece piece_of(std::string_view message) {
  SentencePieceModel::Piece piece;
  for (Fields field(message); field.next();) {
    field.on_bytes(1, [&](std::string_view text) { piece.text = text; });
    field.take_float(2, piece.score);
    field.on_value(3, [&](std::uint64_t kind) {
      take_enum(kind, SentencePieceModel::Kind::byte, piece.kind);
    });
  }
  return piece;
}

void read_trainer(std::string_view message, SentencePieceModel& model) {
  for (Fields field(message); field.next();) {
    field.on_value(3, [&](std::uint64_t type) {
      take_enum(type, SentencePieceModel::Type::character, model.type);
    });
    field.take_bool(24, model.blank_after_word);
    field.take_bool(35, model.byte_fallback);
  }
}

void read_normalizer(std::string_view message, SentencePieceModel::Normalizer& normalizer) {
  for (Fields field(message); field.next();) {
    field.on_bytes(2, [&](std::string_view map) { normalizer.charsmap = map; });
    field.take_bool(3, normalizer.add_dummy_prefix);
    field.take_bool(4, normalizer.remove_extra_whitespaces);
    field.take_bool(5, normalizer.escape_whitespaces);
  }
}

// The trie of a map of characters, a double array of darts-clone. The library walks it without
// bounds checks. Therefore every node that some text reaches must lie inside, and so must the texts
// of its leaves.
class CharsMap {
 public:
  explicit CharsMap(std::string_view map) {
    std::uint32_t bytes = 0;
    if (map.size() <= sizeof(bytes)) fail();
    std::memcpy(&bytes, map.data(), sizeof(bytes));
    map.remove_prefix(sizeof(bytes));
    if (bytes == 0 || bytes % sizeof(std::uint32_t) != 0 || bytes >= map.size()) fail();
    units_.resize(bytes / sizeof(std::uint32_t));
    std::memcpy(units_.data(), map.data(), bytes);
    texts_ = map.substr(bytes);
    if (texts_.back() != '\0' || !is_utf8(texts_)) fail();
  }

  void check() {
    leaves_below_.assign(units_.size(), kUnseen);
    walk(offset(units_[0]));
  }

 private:
  // Sizes of the library: its buffer of the leaves on one path, and a depth above that of any key.
  static constexpr int kMostLeaves = 32, kMostDepth = 256;
  static constexpr int kUnseen = -1, kOpen = -2;

  struct Level {
    std::size_t node = 0;
    int leaf = 0;           // 1 if the step to it ends a key
    int leaves = 0;         // the most leaves on a path below it
    std::size_t label = 1;  // the next label to visit
  };

  [[noreturn]] static void fail() { refuse(", found a damaged map of characters"); }
  static std::size_t offset(std::uint32_t unit) {
    return std::size_t{unit >> 10} << ((unit & 0x200u) >> 6);
  }

  Level open(std::size_t node, int leaf) {
    if ((node | 0xffu) >= units_.size()) fail();  // a text may have any byte here
    leaves_below_[node] = kOpen;
    return {node, leaf};
  }

  // Visits each node once, depth first; a node reachable from itself is a loop.
  void walk(std::size_t root) {
    std::vector<Level> path = {open(root, 0)};
    while (!path.empty()) {
      Level& at = path.back();
      if (at.label > 0xff) {
        const Level done = at;
        leaves_below_[done.node] = done.leaves;
        path.pop_back();
        if (!path.empty()) raise(path.back(), done.leaf + done.leaves);
        continue;
      }
      const std::size_t child = at.node ^ at.label;
      const std::uint32_t unit = units_[child];
      const bool is_child = (unit & 0x800000ffu) == at.label;
      ++at.label;
      if (!is_child) continue;
      const std::size_t next = child ^ offset(unit);
      if (next >= units_.size() || leaves_below_[next] == kOpen) fail();
      const int leaf = (unit >> 8) & 1u;
      if (leaf != 0 && (units_[next] & 0x7fffffffu) >= texts_.size()) fail();
      if (leaves_below_[next] != kUnseen) {
        raise(at, leaf + leaves_below_[next]);
      } else if (path.size() > kMostDepth) {
        fail();
      } else {
        path.push_back(open(next, leaf));
      }
    }
  }

  static void raise(Level& above, int leaves) {
    above.leaves = std::max(above.leaves, leaves);
    if (above.leaves > kMostLeaves) fail();
  }

  std::vector<std::uint32_t> units_;
  std::string_view texts_;
  std::vector<int> leaves_below_;  // by node: the most leaves on a path below, kUnseen or kOpen
};

void check_charsmap(const std::string& map) {
  if (!map.empty()) CharsMap(map).check();
}

void check_pieces(const SentencePieceModel& model) {
  for (std::size_t id = 0; id < model.pieces.size(); ++id) {
    const SentencePieceModel::Piece& piece = model.pieces[id];
    if (!is_utf8(piece.text)) refuse(fmt::format(" of UTF-8, found other bytes in piece {}", id));
    if (!std::isfinite(piece.score))
      refuse(fmt::format(", found no number as score of piece {}", id));
  }
}

}  // namespace

SentencePieceModel parse_sentence_pieces(std::string_view bytes) {
  SentencePieceModel model;
  for (Fields field(bytes); field.next();) {
    field.on_bytes(1, [&](std::string_view piece) { model.pieces.push_back(piece_of(piece)); });
    field.on_bytes(2, [&](std::string_view trainer) { read_trainer(trainer, model); });
    field.on_bytes(3, [&](std::string_view part) { read_normalizer(part, model.normalizer); });
    field.on_bytes(5, [&](std::string_view part) { read_normalizer(part, model.denormalizer); });
  }
  check_pieces(model);
  check_charsmap(model.normalizer.charsmap);
  check_charsmap(model.denormalizer.charsmap);
  return model;
}

bool splits_into_lines(const SentencePieceModel& model) {
  if (model.type != SentencePieceModel::Type::bpe || !model.byte_fallback ||
      model.blank_after_word || !model.normalizer.charsmap.empty() ||
      model.normalizer.remove_extra_whitespaces)
    return false;
  return std::none_of(model.pieces.begin(), model.pieces.end(), [](const auto& piece) {
    const std::size_t end = piece.text.find('\n');
    return end != std::string::npos && end + 1 < piece.text.size();
  });
}

std::string without_dummy_prefix(std::string_view bytes) {
  // A repeated field overrides the earlier one: this appends normalizer_spec with add_dummy_prefix
  // = false.
  constexpr std::string_view kNone("\x1a\x02\x18\x00", 4);
  return std::string(bytes) + std::string(kNone);
}

}  // namespace logitless::train
