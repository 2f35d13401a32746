// Words of tokenizer.json, the format of Hugging Face's tokenizers: byte-level BPE, as GPT-2,
// Llama 3, Qwen 2 and Qwen 3 have it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "train/added_words.h"
#include "train/byte_pairs.h"
#include "train/split_pattern.h"

namespace logitless::train {

// The words that tokenizers gives the same text. Any bytes are text: those that are not UTF-8 are
// never joined with others, nor lost.
class ByteLevelTokenizer {
 public:
  // Read are: the model BPE whose vocabulary has a word for every byte; the pre-tokenizers
  // ByteLevel and Split (isolated, patterns of split_pattern.h), also in a Sequence; the normalizer
  // NFC; added tokens; the post-processor TemplateProcessing with words before the text; the
  // decoder ByteLevel. Throws InvalidArgument on anything else, naming the field, what was expected
  // and what it has.
  explicit ByteLevelTokenizer(std::string_view json);

  // One more than the largest number of a word.
  int vocab() const { return static_cast<int>(texts_.size()); }
  // Of an added token or of the vocabulary, as the file writes it; -1: none.
  std::int32_t word(const std::string& name) const;
  // What the post-processor puts before a text.
  const std::vector<std::int32_t>& before_text() const { return before_; }

  // Appends the words of `text`, without before_text().
  void encode(std::string_view text, std::vector<std::int32_t>& words) const;
  // Their bytes, in which characters may be cut. Special words have none, nor have numbers that
  // belong to no word.
  std::string bytes(const std::vector<std::int32_t>& words) const;

 private:
  struct File;
  explicit ByteLevelTokenizer(const File& file);

  void encode_part(std::string_view text, std::vector<std::int32_t>& words) const;
  void encode_pieces(std::string_view text, std::vector<std::int32_t>& words) const;

  std::unordered_map<std::string, std::int32_t> names_;
  std::vector<std::string> texts_;  // by number; empty: special, or no word
  AddedWords added_;                // looked for in the text as it is
  AddedWords added_normalized_;     // looked for in the normalised text
  bool normalize_ = false;          // to NFC
  std::vector<SplitPattern> patterns_;
  std::vector<std::int32_t> before_;
  BytePairs pairs_;
};

}  // namespace logitless::train
