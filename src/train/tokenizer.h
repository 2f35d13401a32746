// Words of a text: of a SentencePiece BPE model trained on the text itself, or of a tokenizer made
// elsewhere; and the text as their numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "train/text_corpus.h"

namespace logitless::train {

// A tokenizer as its files have it.
struct TokenizerModel {
  enum class Format {
    sentencepiece,  // tokenizer.model
    byte_level      // tokenizer.json (byte_level_tokenizer.h)
  };
  Format format = Format::sentencepiece;
  std::string bytes;
  // Of byte_level alone. The word between two texts: its name, or where that is empty its number.
  std::string end_of_text;
  std::int32_t end_of_text_word = -1;
  // Of one that was made elsewhere: what lies beside it, if anything, which goes with it.
  std::string config;  // tokenizer_config.json
  std::string fast;    // tokenizer.json beside a tokenizer.model

  bool operator==(const TokenizerModel&) const = default;
};

// Words of a text are those that SentencePiece gives of the whole of it. Of a tokenizer that
// train() makes white space is kept to the letter (no normalisation, runs of blanks and tabs are
// words of their own), and a character without a word falls back to its bytes, so
// decode(encode(text)) == text.
class Tokenizer {
 public:
  // Throws InvalidArgument where `model` is none, has no word between two texts, or has what is not
  // read.
  explicit Tokenizer(TokenizerModel model);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Trained on the first `sample_bytes` of the training files in the order of their names' hashes.
  // Deterministic. The result may have fewer words than asked for when the sample has no more pairs
  // to merge.
  static Tokenizer train(const Corpus& corpus, int vocab, std::size_t sample_bytes);

  int vocab() const;
  int end_of_text() const;  // the word between two files
  // Words that come before the first of a text; encode() does not give them.
  const std::vector<std::int32_t>& before_text() const;
  const TokenizerModel& model() const { return model_; }
  std::uint64_t hash() const;

  void encode(std::string_view text, std::vector<std::int32_t>& words) const;
  // UTF-8: what is none becomes U+FFFD. Special words are left out.
  std::string decode(const std::vector<std::int32_t>& words) const;

  class Words;  // what a format does

 private:
  TokenizerModel model_;
  std::unique_ptr<const Words> words_;
};

// All files in one stream each, before_text() before and end_of_text() after every file.
struct TokenizedText {
  Tokenizer tokenizer;
  std::vector<std::int32_t> train;
  std::vector<std::int32_t> held_out;
  std::uint64_t key = 0;  // of the words and the tokenizer
};

using Say = std::function<void(std::string_view)>;

// Tokenizer and streams of a corpus, from `cache_directory` when an earlier call left them there,
// else made and left there. The vocabulary is smaller than asked when the text is too short for it.
// `say` is told what is done and how long it took. With `model` the words are
// that one's, and `vocab` does not matter. Files of the cache that were changed, or that somebody
// else may have written, are made again; nothing is read from or written into a folder that is no
// place for a cache (own_files.h).
TokenizedText tokenize(const Corpus& corpus, int vocab, const std::string& cache_directory,
                       int threads, const Say& say, const TokenizerModel* model = nullptr);

// The most words that a text is worth: 64 bytes of it for each, and the 512 least.
int largest_vocab(std::size_t text_bytes);

}  // namespace logitless::train
