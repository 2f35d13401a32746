// Tokenizers: a SentencePiece BPE model trained on the text itself, or an imported tokenizer. They
// map texts to numbers of words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "train/data/text_corpus.h"

namespace logitless::train {

// The files of a tokenizer.
struct TokenizerModel {
  enum class Format {
    sentencepiece,  // tokenizer.model
    byte_level      // tokenizer.json (byte_level_tokenizer.h)
  };
  Format format = Format::sentencepiece;
  std::string bytes;
  // byte_level only: the word between two texts, by name, or by number where the name is empty.
  std::string end_of_text;
  std::int32_t end_of_text_word = -1;
  // Imported tokenizers only: files next to it, which are exported with it.
  std::string config;  // tokenizer_config.json
  std::string fast;    // tokenizer.json next to a tokenizer.model

  bool operator==(const TokenizerModel&) const = default;
};

// encode() gives the words that SentencePiece gives for the whole text. Tokenizers of train()
// preserve white space: there is no normalisation, and runs of blanks and tabs are words. A
// character without a word falls back to its bytes, so that decode(encode(text)) == text.
class Tokenizer {
 public:
  // Throws InvalidArgument where `model` is invalid, lacks a word between two texts, or uses
  // unsupported features.
  explicit Tokenizer(TokenizerModel model);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Trains on the first `sample_bytes` of the training files, ordered by hashes of their names.
  // Deterministic. The vocabulary may be smaller than `vocab` when the sample has no more pairs to
  // merge.
  static Tokenizer train(const Corpus& corpus, int vocab, std::size_t sample_bytes);

  int vocab() const;
  int end_of_text() const;  // the word between two files
  // Returns the words that precede a text; encode() does not add them.
  const std::vector<std::int32_t>& before_text() const;
  const TokenizerModel& model() const { return model_; }
  std::uint64_t hash() const;

  void encode(std::string_view text, std::vector<std::int32_t>& words) const;
  // Returns UTF-8, in which invalid bytes become U+FFFD. Special words are left out.
  std::string decode(const std::vector<std::int32_t>& words) const;

  class Words;  // implementation for one format

 private:
  TokenizerModel model_;
  std::unique_ptr<const Words> words_;
};

// The training and the held-out files as streams, with before_text() before and end_of_text() after
// every file.
struct TokenizedText {
  Tokenizer tokenizer;
  std::vector<std::int32_t> train;
  std::vector<std::int32_t> held_out;
  std::uint64_t key = 0;  // key of the words and the tokenizer
};

using Print = std::function<void(std::string_view)>;

// Returns the tokenizer and the streams of a corpus, from the cache of an earlier call in
// `cache_directory`, or else computed and cached. The vocabulary is smaller than `vocab` when the
// text is too short for it. `print` receives progress messages with times. With `model` that
// tokenizer is used, and `vocab` has no effect. Cache files that were changed, or that another user
// may have written, are recomputed. A folder that is unsafe for a cache is neither read nor written
// (own_files.h).
TokenizedText tokenize(const Corpus& corpus, int vocab, const std::string& cache_directory,
                       int threads, const Print& print, const TokenizerModel* model = nullptr);

// Returns the largest useful vocabulary of a text: one word for each 64 bytes, at least 512.
int largest_vocab(std::size_t text_bytes);

}  // namespace logitless::train
