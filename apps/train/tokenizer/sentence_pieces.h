// Parses a SentencePiece model file without the library, and checks it before the library loads it:
// the library trusts its input.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace logitless::train {

// The fields of sentencepiece_model.proto that affect words, with their defaults.
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

// Parses a model. Throws InvalidArgument where `bytes` is no model, a piece is not UTF-8 or a score
// is not a number. Also throws where a map of characters leads outside its bytes.
SentencePieceModel parse_sentence_pieces(std::string_view bytes);

// Returns whether a text can be tokenised line by line: all lines but the first without the blank
// of add_dummy_prefix.
bool splits_into_lines(const SentencePieceModel& model);

// Returns the bytes of the same model without add_dummy_prefix.
std::string without_dummy_prefix(std::string_view bytes);

}  // namespace logitless::train
