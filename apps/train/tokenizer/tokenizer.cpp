#include "train/tokenizer/tokenizer.h"

#include <fmt/format.h>
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <unordered_map>

#include "core/own_files.h"
#include "logitless/error.h"
#include "logitless/parallel.h"
#include "logitless/plan.h"
#include "logitless/tensor_file.h"
#include "train/hash.h"
#include "train/tokenizer/byte_level_tokenizer.h"
#include "train/tokenizer/sentence_pieces.h"
#include "train/tokenizer/utf8.h"

namespace logitless::train {
namespace {

constexpr std::size_t kMaxLine = 1024;  // bytes; longer lines are cut when the tokenizer is trained
constexpr std::size_t kMaxEncodedLine =
    1u << 20;  // bytes; longer lines are cut in encoding, which may change words
constexpr std::size_t kSampleBytes = 4u << 20;  // bytes of text that the tokenizer is trained on
constexpr std::uint64_t kCacheFormat = 4;       // increment when tokenisation changes
// Metadata key of a cache for TokenizedText::key.
constexpr const char* kChecksum = "checksum";

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

void check(const sentencepiece::util::Status& status, std::string_view what) {
  if (!status.ok()) throw std::runtime_error(fmt::format("{}: {}", what, status.ToString()));
}

// Takes a line with its newline, or `most` bytes of it, cut between two characters.
std::string_view take_line(std::string_view& text, std::size_t most) {
  const std::size_t newline = text.substr(0, most).find('\n');
  std::size_t length =
      newline == std::string_view::npos ? std::min(text.size(), most) : newline + 1;
  while (length < text.size() && length > 1 &&
         (static_cast<unsigned char>(text[length]) & 0xc0u) == 0x80u) {
    --length;
  }
  const std::string_view line = text.substr(0, length);
  text.remove_prefix(length);
  return line;
}

// Feeds the lines of some files to the trainer.
class Lines : public sentencepiece::SentenceIterator {
 public:
  Lines(std::vector<const TextFile*> files, std::size_t max_bytes)
      : files_(std::move(files)), left_(max_bytes) {
    Next();
  }
  bool done() const override { return done_; }
  void Next() override {
    while (rest_.empty() && file_ < files_.size()) rest_ = files_[file_++]->text;
    done_ = rest_.empty() || left_ == 0;
    if (done_) return;
    line_ = take_line(rest_, kMaxLine);
    left_ -= std::min(left_, line_.size());
  }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  std::vector<const TextFile*> files_;
  std::size_t left_;
  std::size_t file_ = 0;
  std::string_view rest_;
  std::string line_;
  bool done_ = false;
};

// Returns the words of the files in order. Files are tokenised in parallel.
std::vector<std::int32_t> encode_files(const Tokenizer& tokenizer, const Corpus& corpus,
                                       bool held_out, int threads) {
  std::vector<const TextFile*> files;
  for (const TextFile& file : corpus.files) {
    if (file.held_out == held_out) files.push_back(&file);
  }
  std::vector<std::vector<std::int32_t>> words(files.size());
  parallel_for(threads, static_cast<std::int64_t>(files.size()), [&](std::int64_t task, int) {
    const auto i = static_cast<std::size_t>(task);
    words[i] = tokenizer.before_text();
    tokenizer.encode(files[i]->text, words[i]);
    words[i].push_back(tokenizer.end_of_text());
  });
  std::vector<std::int32_t> stream;
  for (const std::vector<std::int32_t>& part : words) {
    stream.insert(stream.end(), part.begin(), part.end());
  }
  return stream;
}

std::uint64_t hash_of(const TokenizerModel& model) {
  if (model.format == TokenizerModel::Format::sentencepiece) return hash_bytes(model.bytes);
  std::uint64_t hash = hash_bytes(model.bytes, 1);
  hash = hash_bytes(model.end_of_text, hash);
  return hash_bytes(model.config, mix(hash, static_cast<std::uint32_t>(model.end_of_text_word)));
}

std::vector<std::int32_t> words_of(const ConstTensorView& view) {
  if (view.dtype() != DType::i32 || view.rank() != 1 || !view.contiguous()) {
    throw std::runtime_error("tokens are not one row of i32");
  }
  const auto* data = static_cast<const std::int32_t*>(view.data());
  return {data, data + view.numel()};
}

void check_words(const std::vector<std::int32_t>& words, int vocab) {
  for (const std::int32_t word : words) {
    if (word < 0 || word >= vocab)
      throw std::runtime_error(fmt::format("token {} of {}", word, vocab));
  }
}

std::uint64_t key_of(std::uint64_t tokenizer, const std::vector<std::int32_t>& train,
                     const std::vector<std::int32_t>& held_out) {
  std::uint64_t key = tokenizer;
  for (const auto* words : {&train, &held_out}) {
    key = hash_bytes({reinterpret_cast<const char*>(words->data()), words->size() * 4}, key);
  }
  return key;
}

// `given`: the tokenizer that the cache was made with; null: one that was trained and is in the
// cache. Its bytes are parsed only after their checksum is verified.
TokenizedText load_cache(const std::string& path, const TokenizerModel* given) {
  if (!is_own_file(path))
    throw std::runtime_error(fmt::format("'{}' may have been written by another user", path));
  const TensorFile file(path);
  const auto& metadata = file.metadata();
  const auto said = [&](const char* name) {
    const auto found = metadata.find(name);
    if (found == metadata.end()) throw std::runtime_error(fmt::format("no {}", name));
    return found->second;
  };
  TokenizerModel model;
  if (given != nullptr) {
    model = *given;
  } else {
    const ConstTensorView bytes = file.tensor("tokenizer");
    model.bytes.assign(static_cast<const char*>(bytes.data()),
                       static_cast<std::size_t>(bytes.bytes()));
  }
  std::vector<std::int32_t> train = words_of(file.tensor("train"));
  std::vector<std::int32_t> held_out = words_of(file.tensor("held_out"));
  const std::uint64_t key = key_of(hash_of(model), train, held_out);
  if (said(kChecksum) != hex(key))
    throw std::runtime_error(fmt::format("'{}' is not as it was written", path));
  TokenizedText text{Tokenizer(std::move(model)), std::move(train), std::move(held_out), key};
  for (const auto* words : {&text.train, &text.held_out})
    check_words(*words, text.tokenizer.vocab());
  return text;
}

void save_cache(const std::string& path, const TokenizedText& text) {
  const auto row = [](const auto& values, DType dtype) {
    return ConstTensorView(values.data(), dtype, {static_cast<std::int64_t>(values.size())});
  };
  const TokenizerModel& model = text.tokenizer.model();
  const NamedTensor tensors[] = {
      {"tokenizer", row(model.bytes, DType::i8)},
      {"train", row(text.train, DType::i32)},
      {"held_out", row(text.held_out, DType::i32)},
  };
  write_safetensors(path, tensors, {{kChecksum, hex(text.key)}}, FileUse::cache);
}

}  // namespace

class Tokenizer::Words {
 public:
  virtual ~Words() = default;
  virtual int vocab() const = 0;
  virtual int end_of_text() const = 0;
  virtual const std::vector<std::int32_t>& before_text() const = 0;
  virtual void encode(std::string_view text, std::vector<std::int32_t>& words) const = 0;
  virtual std::string decode(const std::vector<std::int32_t>& words) const = 0;
};

namespace {

class SentencePieces : public Tokenizer::Words {
 public:
  explicit SentencePieces(const std::string& bytes) {
    const SentencePieceModel model = parse_sentence_pieces(bytes);
    load(bytes, first_);
    if (first_.eos_id() < 0) {
      throw InvalidArgument(
          "tokenizer: expected a SentencePiece model with a token between two texts (</s>), found "
          "none");
    }
    by_lines_ = splits_into_lines(model);
    if (by_lines_ && model.normalizer.add_dummy_prefix)
      load(without_dummy_prefix(bytes), rest_.emplace());
  }
  int vocab() const override { return first_.GetPieceSize(); }
  int end_of_text() const override { return first_.eos_id(); }
  const std::vector<std::int32_t>& before_text() const override { return none_; }
  void encode(std::string_view text, std::vector<std::int32_t>& words) const override;
  std::string decode(const std::vector<std::int32_t>& words) const override {
    std::string text;
    check(first_.Decode(std::vector<int>(words.begin(), words.end()), &text), "tokenizer");
    return text;
  }

 private:
  using Processor = sentencepiece::SentencePieceProcessor;
  static void load(const std::string& bytes, Processor& to) {
    const auto status = to.LoadFromSerializedProto(bytes);
    if (!status.ok()) throw InvalidArgument(fmt::format("tokenizer: {}", status.ToString()));
  }

  Processor first_;                // for a text's first line, or all of it
  std::optional<Processor> rest_;  // for other lines, if they have no blank before them
  bool by_lines_ = false;
  std::vector<std::int32_t> none_;
};

void SentencePieces::encode(std::string_view text, std::vector<std::int32_t>& words) const {
  std::vector<int> fresh;
  const auto add = [&](const Processor& processor, std::string_view part) {
    check(processor.Encode(part, &fresh), "tokenizer");
    words.insert(words.end(), fresh.begin(), fresh.end());
  };
  if (!by_lines_) return add(first_, text);
  // Words never cross lines, so repeated lines have the same words. Code repeats short lines often.
  constexpr std::size_t kRemembered = 40;
  std::unordered_map<std::string_view, std::vector<int>> known;
  const Processor& rest = rest_ ? *rest_ : first_;
  for (bool is_first = true; !text.empty(); is_first = false) {
    const std::string_view line = take_line(text, kMaxEncodedLine);
    if (is_first || line.size() > kRemembered) {
      add(is_first ? first_ : rest, line);
      continue;
    }
    const auto [entry, is_new] = known.try_emplace(line);
    if (is_new) check(rest.Encode(line, &entry->second), "tokenizer");
    words.insert(words.end(), entry->second.begin(), entry->second.end());
  }
}

class ByteLevelWords : public Tokenizer::Words {
 public:
  explicit ByteLevelWords(const TokenizerModel& model) : words_(model.bytes) {
    end_of_text_ =
        model.end_of_text.empty() ? model.end_of_text_word : words_.word(model.end_of_text);
    if (end_of_text_ < 0 || end_of_text_ >= words_.vocab()) {
      throw InvalidArgument(
          model.end_of_text.empty()
              ? fmt::format("expected the token between two texts below {}, found {}",
                            words_.vocab(), model.end_of_text_word)
              : fmt::format("expected the token between two texts, \"{}\", found none",
                            model.end_of_text));
    }
  }
  int vocab() const override { return words_.vocab(); }
  int end_of_text() const override { return end_of_text_; }
  const std::vector<std::int32_t>& before_text() const override { return words_.before_text(); }
  void encode(std::string_view text, std::vector<std::int32_t>& words) const override {
    words_.encode(text, words);
  }
  std::string decode(const std::vector<std::int32_t>& words) const override {
    return replace_invalid_utf8(words_.bytes(words));
  }

 private:
  ByteLevelTokenizer words_;
  int end_of_text_ = -1;
};

std::unique_ptr<const Tokenizer::Words> words_of(const TokenizerModel& model) {
  if (model.format == TokenizerModel::Format::byte_level)
    return std::make_unique<ByteLevelWords>(model);
  return std::make_unique<SentencePieces>(model.bytes);
}

}  // namespace

Tokenizer::Tokenizer(TokenizerModel model) : model_(std::move(model)), words_(words_of(model_)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::train(const Corpus& corpus, int vocab, std::size_t sample_bytes) {
  std::vector<const TextFile*> files;
  for (const TextFile& file : corpus.files) {
    if (!file.held_out) files.push_back(&file);
  }
  std::stable_sort(files.begin(), files.end(), [](const TextFile* a, const TextFile* b) {
    return hash_bytes(a->name) < hash_bytes(b->name);
  });
  Lines lines(std::move(files), sample_bytes);
  std::string model;
  check(sentencepiece::SentencePieceTrainer::Train(
            {{"model_type", "bpe"},
             {"vocab_size", std::to_string(vocab)},
             {"hard_vocab_limit", "false"},
             {"byte_fallback", "true"},
             {"character_coverage", "0.9999"},
             {"normalization_rule_name", "identity"},
             {"add_dummy_prefix", "false"},
             {"remove_extra_whitespaces", "false"},
             {"allow_whitespace_only_pieces", "true"},
             {"user_defined_symbols", "\t,\t\t,\t\t\t,\t\t\t\t"},
             {"unk_id", "0"},
             {"eos_id", "1"},
             {"bos_id", "-1"},
             {"pad_id", "-1"},
             {"num_threads", "1"},
             {"minloglevel", "1"}},
            &lines, &model),
        fmt::format("--vocab: SentencePiece makes no tokenizer of {} tokens for this text", vocab));
  TokenizerModel result;
  result.bytes = std::move(model);
  return Tokenizer(std::move(result));
}

int Tokenizer::vocab() const { return words_->vocab(); }
int Tokenizer::end_of_text() const { return words_->end_of_text(); }
const std::vector<std::int32_t>& Tokenizer::before_text() const { return words_->before_text(); }
std::uint64_t Tokenizer::hash() const { return hash_of(model_); }
void Tokenizer::encode(std::string_view text, std::vector<std::int32_t>& words) const {
  words_->encode(text, words);
}
std::string Tokenizer::decode(const std::vector<std::int32_t>& words) const {
  return words_->decode(words);
}

int largest_vocab(std::size_t text_bytes) {
  return static_cast<int>(std::clamp<std::size_t>(text_bytes / 64, 512, 1u << 20));
}

TokenizedText tokenize(const Corpus& corpus, int vocab, const std::string& cache_directory,
                       int threads, const Print& print, const TokenizerModel* model) {
  const std::size_t train_bytes = corpus.bytes(false);
  if (model == nullptr && vocab > largest_vocab(train_bytes)) {
    print(fmt::format("text of {} is short for {} tokens: taking {}", format_bytes(train_bytes),
                      vocab, largest_vocab(train_bytes)));
    vocab = largest_vocab(train_bytes);
  }
  const std::uint64_t words =
      model != nullptr ? hash_of(*model) : static_cast<std::uint64_t>(vocab);
  const std::uint64_t key = mix(mix(corpus.key(), words), kCacheFormat);
  const std::string path =
      (std::filesystem::path(cache_directory) / (hex(key) + ".safetensors")).string();
  const std::string refusal = cache_refusal(cache_directory);
  if (!refusal.empty())
    print(fmt::format("the cache '{}' is not used: {}", cache_directory, refusal));
  if (refusal.empty() && std::filesystem::exists(std::filesystem::symlink_status(path))) {
    try {
      TokenizedText text = load_cache(path, model);
      print(fmt::format("tokenizer and tokens from {}", path));
      return text;
    } catch (const std::exception& error) {
      print(fmt::format("the cache is of no use and will be made again: {}", error.what()));
    }
  }

  const auto trained = [&] {
    print(fmt::format("training a BPE tokenizer of {} tokens on {} (once: it is cached)", vocab,
                      format_bytes(std::min(train_bytes, kSampleBytes))));
    Stopwatch training;
    Tokenizer tokenizer = Tokenizer::train(corpus, vocab, kSampleBytes);
    print(fmt::format("tokenizer of {} tokens trained in {:.1f} s", tokenizer.vocab(),
                      training.seconds()));
    return tokenizer;
  };
  TokenizedText text{model != nullptr ? Tokenizer(*model) : trained(), {}, {}};
  Stopwatch encoding;
  text.train = encode_files(text.tokenizer, corpus, false, threads);
  text.held_out = encode_files(text.tokenizer, corpus, true, threads);
  text.key = key_of(text.tokenizer.hash(), text.train, text.held_out);
  print(fmt::format("text tokenized in {:.1f} s", encoding.seconds()));
  if (!refusal.empty()) return text;
  try {
    if (const std::string why = make_cache_folder(cache_directory); !why.empty())
      throw DeviceError(fmt::format("'{}': {}", cache_directory, why));
    save_cache(path, text);
  } catch (const std::exception& error) {
    print(fmt::format("the cache could not be written, which costs time alone: {}", error.what()));
  }
  return text;
}

}  // namespace logitless::train
