#include "train/fast_tokenizer.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "json/json.h"
#include "logitless/error.h"

namespace logitless::train {
namespace {

// Of sentencepiece_model.proto.
enum class Kind : std::uint64_t {
  normal = 1,
  unknown = 2,
  control = 3,
  user = 4,
  unused = 5,
  byte = 6
};
struct Piece {
  std::string text;
  float score = 0.0f;
  Kind kind = Kind::normal;
};

// The fields of a protocol buffer, one after another.
class Fields {
 public:
  explicit Fields(std::string_view message) : rest_(message) {}

  bool next() {
    if (rest_.empty()) return false;
    const std::uint64_t key = varint();
    number = key >> 3;
    switch (key & 7u) {
      case 0:
        value = varint();
        break;
      case 1:
        value = fixed(8);
        break;
      case 2:
        bytes = take(varint());
        break;
      case 5:
        value = fixed(4);
        break;
      default:
        refuse();
    }
    return true;
  }

  std::uint64_t number = 0;
  std::uint64_t value = 0;  // of a number
  std::string_view bytes;   // of a text or message

 private:
  [[noreturn]] static void refuse() {
    throw InvalidArgument("tokenizer: expected a SentencePiece model");
  }
  std::string_view take(std::uint64_t count) {
    if (count > rest_.size()) refuse();
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
    refuse();
  }

  std::string_view rest_;
};

std::vector<Piece> pieces_of(std::string_view model) {
  std::vector<Piece> pieces;
  for (Fields top(model); top.next();) {
    if (top.number != 1) continue;
    Piece& piece = pieces.emplace_back();
    for (Fields field(top.bytes); field.next();) {
      if (field.number == 1) piece.text = field.bytes;
      if (field.number == 2)
        piece.score = std::bit_cast<float>(static_cast<std::uint32_t>(field.value));
      if (field.number == 3) piece.kind = static_cast<Kind>(field.value);
    }
  }
  return pieces;
}

// Pairs in the order in which the model makes them one: by the score of what they make.
Json merges_of(const std::vector<Piece>& pieces) {
  std::unordered_map<std::string_view, std::size_t> normal;
  std::vector<std::size_t> order;
  for (std::size_t id = 0; id < pieces.size(); ++id) {
    if (pieces[id].kind != Kind::normal) continue;
    normal.emplace(pieces[id].text, id);
    order.push_back(id);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return pieces[a].score > pieces[b].score; });
  Json merges = Json::array();
  for (const std::size_t id : order) {
    const std::string_view text = pieces[id].text;
    std::vector<std::tuple<std::size_t, std::size_t, std::size_t>> cuts;
    for (std::size_t cut = 1; cut < text.size(); ++cut) {
      const auto left = normal.find(text.substr(0, cut)), right = normal.find(text.substr(cut));
      if (left != normal.end() && right != normal.end())
        cuts.emplace_back(left->second, right->second, cut);
    }
    std::sort(cuts.begin(), cuts.end());
    for (const auto& [left, right, cut] : cuts)
      merges.push_back({std::string(text.substr(0, cut)), std::string(text.substr(cut))});
  }
  return merges;
}

Json added_of(const std::vector<Piece>& pieces) {
  Json added = Json::array();
  for (std::size_t id = 0; id < pieces.size(); ++id) {
    const Kind kind = pieces[id].kind;
    if (kind != Kind::unknown && kind != Kind::control && kind != Kind::user) continue;
    added.push_back({{"id", id},
                     {"content", pieces[id].text},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", kind != Kind::user}});
  }
  return added;
}

}  // namespace

std::string fast_tokenizer_json(std::string_view model) {
  constexpr const char* kBlank = "\xe2\x96\x81";  // what SentencePiece writes for a blank
  const std::vector<Piece> pieces = pieces_of(model);
  Json::Object vocab;  // operator[] of a Json would search for each
  Json unknown = nullptr;
  for (std::size_t id = 0; id < pieces.size(); ++id) {
    vocab.emplace_back(pieces[id].text, id);
    if (pieces[id].kind == Kind::unknown) unknown = pieces[id].text;
  }
  const auto replace = [](const char* from, const char* to) {
    return Json{{"type", "Replace"}, {"pattern", {{"String", from}}}, {"content", to}};
  };
  Json decoders = Json::array();
  decoders.push_back(replace(kBlank, " "));
  decoders.push_back({{"type", "ByteFallback"}});
  decoders.push_back({{"type", "Fuse"}});
  const Json json = {{"version", "1.0"},
                     {"truncation", nullptr},
                     {"padding", nullptr},
                     {"added_tokens", added_of(pieces)},
                     {"normalizer", replace(" ", kBlank)},
                     {"pre_tokenizer", nullptr},
                     {"post_processor", nullptr},
                     {"decoder", {{"type", "Sequence"}, {"decoders", decoders}}},
                     {"model",
                      {{"type", "BPE"},
                       {"dropout", nullptr},
                       {"unk_token", unknown},
                       {"continuing_subword_prefix", nullptr},
                       {"end_of_word_suffix", nullptr},
                       {"fuse_unk", true},
                       {"byte_fallback", true},
                       {"ignore_merges", false},
                       {"vocab", vocab},
                       {"merges", merges_of(pieces)}}}};
  return json.dump(1) + "\n";
}

}  // namespace logitless::train
