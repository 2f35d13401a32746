// Byte-level BPE tokenizers in tokenizer.json, the format of Hugging Face's tokenizers, as GPT-2,
// Llama 3, Qwen 2 and Qwen 3 use them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "train/tokenizer/added_words.h"
#include "train/tokenizer/byte_pairs.h"
#include "train/tokenizer/split_pattern.h"

namespace logitless::train {

// Gives the same words for a text as Hugging Face's tokenizers. Any bytes are text: bytes that are
// not UTF-8 are neither lost nor joined with others.
class ByteLevelTokenizer {
 public:
  // Reads the model BPE whose vocabulary has a word for every byte, and added tokens. Further
  // fields that it reads:
  // - pre-tokenizers ByteLevel and Split (isolated, patterns of split_pattern.h), also in a
  // Sequence
  // - the normalizer NFC and the decoder ByteLevel
  // - the post-processor TemplateProcessing with words before the text
  // Throws InvalidArgument on anything else. The message has the field, its value, and the values
  // that are read.
  explicit ByteLevelTokenizer(std::string_view json);

  // Returns the largest number of a word, plus one.
  int vocab() const { return static_cast<int>(texts_.size()); }
  // Returns the number of an added token or of an entry of the vocabulary, by its name in the file;
  // -1: none.
  std::int32_t word(const std::string& name) const;
  // Returns the words that the post-processor puts before a text.
  const std::vector<std::int32_t>& before_text() const { return before_; }

  // Appends the words of `text`, without before_text().
  void encode(std::string_view text, std::vector<std::int32_t>& words) const;
  // Returns the bytes of `words`; a character may be cut at either end. Special words and numbers
  // without a word have no bytes.
  std::string bytes(const std::vector<std::int32_t>& words) const;

 private:
  struct File;
  explicit ByteLevelTokenizer(const File& file);

  void encode_part(std::string_view text, std::vector<std::int32_t>& words) const;
  void encode_pieces(std::string_view text, std::vector<std::int32_t>& words) const;

  std::unordered_map<std::string, std::int32_t> names_;
  std::vector<std::string> texts_;  // by number; empty: special, or no word
  AddedWords added_;                // searched for in the text before normalisation
  AddedWords added_normalized_;     // searched for in the normalised text
  bool normalize_ = false;          // to NFC
  std::vector<SplitPattern> patterns_;
  std::vector<std::int32_t> before_;
  BytePairs pairs_;
};

}  // namespace logitless::train
