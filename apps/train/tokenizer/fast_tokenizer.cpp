#include "train/tokenizer/fast_tokenizer.h"

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "json/json.h"
#include "train/tokenizer/utf8.h"

namespace logitless::train {
namespace {

using Piece = SentencePieceModel::Piece;
using Kind = SentencePieceModel::Kind;

constexpr const char* kBlank = "\xe2\x96\x81";  // SentencePiece's symbol for a blank

// Returns the merges in the model's order: by the score of the piece that they make.
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
  // Parts of a piece are looked up only if some piece has their length: a long piece can be cut at
  // every byte.
  std::vector<bool> lengths;
  for (const auto& [text, id] : normal) {
    if (text.size() >= lengths.size()) lengths.resize(text.size() + 1);
    lengths[text.size()] = true;
  }
  Json merges = Json::array();
  for (const std::size_t id : order) {
    const std::string_view text = pieces[id].text;
    std::vector<std::tuple<std::size_t, std::size_t, std::size_t>> cuts;
    for (std::size_t cut = 1; cut < text.size(); ++cut) {
      if (!lengths[cut] || !lengths[text.size() - cut]) continue;
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

std::string fast_tokenizer_refusal(const SentencePieceModel& model) {
  const SentencePieceModel::Normalizer& normalizer = model.normalizer;
  const std::pair<bool, const char*> refusals[] = {
      {model.type != SentencePieceModel::Type::bpe, "a model_type other than BPE"},
      {!normalizer.charsmap.empty(), "a map of characters"},
      {normalizer.add_dummy_prefix, "add_dummy_prefix"},
      {normalizer.remove_extra_whitespaces, "remove_extra_whitespaces"},
      {!normalizer.escape_whitespaces, "blanks that are not escaped"},
      {model.blank_after_word, "treat_whitespace_as_suffix"},
      {!model.byte_fallback, "no byte_fallback"}};
  for (const auto& [holds, what] : refusals) {
    if (holds) return what;
  }
  std::unordered_set<float> scores;
  for (const Piece& piece : model.pieces) {
    if (piece.kind == Kind::unused) return "unused pieces";
    if (piece.kind == Kind::user && piece.text.find(kBlank) != std::string::npos)
      return "blanks in a user-defined piece";
    if (piece.kind == Kind::normal && utf8_length(piece.text, 0) < piece.text.size() &&
        !scores.insert(piece.score).second)
      return "pieces of equal scores";
  }
  return "";
}

std::string fast_tokenizer_json(const SentencePieceModel& model) {
  const std::vector<Piece>& pieces = model.pieces;
  Json::Object vocab;  // filled first, because operator[] of a Json searches linearly
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
