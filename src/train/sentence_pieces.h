// A SentencePiece model as its file has it, read without the library and checked before the library
// sees it: what the library builds from a file it believes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace logitless::train {

// The fields of sentencepiece_model.proto that decide about words, with their defaults.
struct SentencePieceModel {
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
  enum class Type : std::uint64_t { unigram = 1, bpe = 2, word = 3, character = 4 };

  std::vector<Piece> pieces;
  Type type = Type::unigram;
  bool byte_fallback = false;
  bool blank_after_word = false;  // treat_whitespace_as_suffix
  struct Normalizer {
    std::string charsmap;
    bool add_dummy_prefix = true;
    bool remove_extra_whitespaces = true;
    bool escape_whitespaces = true;
  };
  Normalizer normalizer, denormalizer;
};

// Throws InvalidArgument where `bytes` is no such model, has a piece that is no UTF-8 or a score
// that is no number, or a map of characters that leads out of its own bytes.
SentencePieceModel parse_sentence_pieces(std::string_view bytes);

// Whether the words of a text are those of its lines, one after another, where all but the first
// come without the blank of add_dummy_prefix.
bool splits_into_lines(const SentencePieceModel& model);

// Returns the bytes of the same model without add_dummy_prefix.
std::string without_dummy_prefix(std::string_view bytes);

}  // namespace logitless::train
