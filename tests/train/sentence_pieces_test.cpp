// Tests imported SentencePiece tokenizers: words, refusals, and the files of an export.
#include "train/tokenizer/sentence_pieces.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "train/hash.h"
#include "train/model/gpt.h"
#include "train/model/hugging_face.h"
#include "train/test_folder.h"
#include "train/tokenizer/fast_tokenizer.h"
#include "train/tokenizer/tokenizer.h"
#include "train/whole_file.h"

namespace logitless::train {
namespace {

namespace fs = std::filesystem;
using Options = std::map<std::string, std::string>;

// Returns a text with words, blanks, blank lines, characters that maps change, and others without a
// piece.
std::string text_of(int seed) {
  std::ostringstream text;
  for (std::uint64_t i = 0; i < 300; ++i) {
    const std::uint64_t draw = mix(static_cast<std::uint64_t>(seed), i);
    text << "abcdefghij"[draw % 10] << "aeiou"[draw / 10 % 5] << "nrst"[draw / 50 % 4];
    text << (draw % 7 == 0 ? "\n" : draw % 5 == 0 ? "  " : " ");
    if (draw % 23 == 0) text << "\xef\xac\x81 \xe2\x91\xa0 \xe2\x82\xac\n\n\t";
  }
  return text.str();
}

struct Sentences : sentencepiece::SentenceIterator {
  std::vector<std::string> lines;
  std::size_t at = 0;
  bool done() const override { return at >= lines.size(); }
  void Next() override { ++at; }
  const std::string& value() const override { return lines[at]; }
  sentencepiece::util::Status status() const override { return {}; }
};

// Trains a model and returns it serialised.
std::string trained(const Options& more) {
  std::unordered_map<std::string, std::string> options = {{"model_type", "bpe"},
                                                          {"vocab_size", "350"},
                                                          {"hard_vocab_limit", "false"},
                                                          {"byte_fallback", "true"},
                                                          {"minloglevel", "2"},
                                                          {"num_threads", "1"},
                                                          {"normalization_rule_name", "identity"},
                                                          {"remove_extra_whitespaces", "false"}};
  for (const auto& [name, value] : more) options[name] = value;
  Sentences sentences;
  for (int seed = 0; seed < 8; ++seed) {
    std::istringstream in(text_of(seed));
    for (std::string line; std::getline(in, line);) sentences.lines.push_back(line);
  }
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(options, &sentences, &model);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return model;
}

Tokenizer tokenizer_of(const std::string& bytes) {
  TokenizerModel model;
  model.bytes = bytes;
  return Tokenizer(std::move(model));
}

const std::map<std::string, Options> kForms = {
    {"plain", {{"add_dummy_prefix", "false"}}},
    {"llama", {}},
    {"trimmed", {{"remove_extra_whitespaces", "true"}}},
    {"nmt_nfkc", {{"normalization_rule_name", "nmt_nfkc"}}},
    {"suffix", {{"treat_whitespace_as_suffix", "true"}}},
    {"newlines", {{"user_defined_symbols", "\n\n,n\n\na"}}},
    {"no bytes", {{"byte_fallback", "false"}}},
    {"unigram", {{"model_type", "unigram"}, {"vocab_size", "320"}}},
    {"word", {{"model_type", "word"}, {"byte_fallback", "false"}}},
    {"char", {{"model_type", "char"}, {"byte_fallback", "false"}}}};

class SentencePiecesTest : public TestFolder {};

// The words of a text equal the library's for the whole text, also where it is tokenised by lines.
TEST_F(SentencePiecesTest, WordsAreTheLibrarys) {
  for (const auto& [name, options] : kForms) {
    SCOPED_TRACE(name);
    const std::string bytes = trained(options);
    const Tokenizer tokenizer = tokenizer_of(bytes);
    sentencepiece::SentencePieceProcessor library;
    ASSERT_TRUE(library.LoadFromSerializedProto(bytes).ok());
    const bool by_lines = name == "plain" || name == "llama";
    EXPECT_EQ(splits_into_lines(parse_sentence_pieces(bytes)), by_lines);
    EXPECT_EQ(fast_tokenizer_refusal(parse_sentence_pieces(bytes)).empty(), name == "plain");
    for (const std::string& text :
         {text_of(1), text_of(99), "\n\n" + text_of(3), std::string(" a"), std::string("\n"),
          std::string(), std::string(3000, 'a') + "\nban ban" + std::string(3000, 'b')}) {
      std::vector<int> expected;
      ASSERT_TRUE(library.Encode(text, &expected).ok());
      std::vector<std::int32_t> words;
      tokenizer.encode(text, words);
      EXPECT_EQ(words, expected);
    }
  }
}

TEST_F(SentencePiecesTest, RefusesWhatWouldFailAfterTheRun) {
  expect_message(
      [&] {
        tokenizer_of(trained({{"eos_id", "-1"}}));
      },
      "tokenizer: expected a SentencePiece model with a token between two texts (</s>), "
      "found none");
  expect_message([&] { tokenizer_of("no model"); }, "tokenizer: expected a SentencePiece model");
  const std::string good = trained({});
  const SentencePieceModel model = parse_sentence_pieces(good);
  const std::size_t id = 280;  // id of a piece of letters
  const std::string& text = model.pieces[id].text;
  const std::size_t at = good.find(text);
  ASSERT_NE(at, std::string::npos);
  std::string bad = good;
  bad[at] = '\xff';
  expect_message([&] { tokenizer_of(bad); }, "of UTF-8, found other bytes in piece");
  bad = good;
  const float nan = std::nanf("");
  const auto score = std::bit_cast<std::array<char, 4>>(model.pieces[id].score);
  const std::size_t number = good.find(std::string(score.data(), 4), at);
  std::memcpy(bad.data() + number, &nan, sizeof(nan));
  expect_message([&] { tokenizer_of(bad); }, "found no number as score of piece");
}

// Maps of characters that lead outside their bytes; the library walks them without bounds checks.
TEST_F(SentencePiecesTest, RefusesHostileMapsOfCharacters) {
  const std::string good = trained({{"normalization_rule_name", "nmt_nfkc"}});
  const std::string map = parse_sentence_pieces(good).normalizer.charsmap;
  ASSERT_GT(map.size(), 100'000u);
  const std::size_t at = good.find(map);
  ASSERT_NE(at, std::string::npos);
  const auto with_map = [&](const std::string& other) {
    std::string bad = good;
    return bad.replace(at, map.size(), other);
  };
  std::uint32_t trie = 0;
  std::memcpy(&trie, map.data(), 4);
  const char* damaged =
      "tokenizer: expected a SentencePiece model, found a damaged map of characters";
  for (const char byte : {'\xff', '\x7f', '\x01'}) {
    std::string other = map;
    std::memset(other.data() + 4, byte, trie);
    expect_message([&] { tokenizer_of(with_map(other)); }, damaged);
  }
  for (const std::uint32_t size : {0u, 3u, 0xffffffffu, static_cast<std::uint32_t>(map.size())}) {
    std::string other = map;
    std::memcpy(other.data(), &size, 4);
    expect_message([&] { tokenizer_of(with_map(other)); }, damaged);
  }
  std::string other = map;
  other.back() = 'x';
  expect_message([&] { tokenizer_of(with_map(other)); }, damaged);
  // Every child of the root is the root: a loop.
  other = map;
  for (std::uint32_t c = 1; c < 256; ++c) {
    const std::uint32_t unit = c | c << 10;
    std::memcpy(other.data() + 4 + 4 * c, &unit, 4);
  }
  const std::uint32_t root = 0;
  std::memcpy(other.data() + 4, &root, 4);
  expect_message([&] { tokenizer_of(with_map(other)); }, damaged);
  // Any damage is refused, or harmless.
  const std::string text = text_of(1) + "\xef\xac\x81\xe2\x91\xa0\xe3\x8d\xbf";
  int refused = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    other = map;
    for (std::uint64_t k = 0; k < 200; ++k)
      other[4 + mix(seed, k) % (trie - 4)] = static_cast<char>(mix(seed + 1000, k));
    try {
      std::vector<std::int32_t> words;
      tokenizer_of(with_map(other)).encode(text, words);
    } catch (const InvalidArgument&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 30);
}

std::string varint(std::size_t value) {
  std::string text;
  for (; value >= 128; value >>= 7) text += static_cast<char>((value & 127) | 128);
  return text + static_cast<char>(value);
}
std::string field(char key, const std::string& bytes) {
  return std::string(1, key) + varint(bytes.size()) + bytes;
}

// A field with a type that the library skips does not hide the map that it reads.
TEST_F(SentencePiecesTest, ReadsTheMapThatTheLibraryReads) {
  const std::string hostile = field('\x12', std::string(64, '\xff'));
  const std::string hidden = hostile + field('\x32', "") + std::string("\x10\x00", 2);
  for (const char spec : {'\x1a', '\x2a'})
    expect_message([&] { parse_sentence_pieces(field(spec, hidden)); },
                   "a damaged map of characters");
  const std::string later = field('\x1a', hostile) + field('\x1a', std::string("\x18\x00", 2));
  expect_message([&] { parse_sentence_pieces(later); }, "a damaged map of characters");
}

// The longest piece of a file has a merge at each of two cuts, and is searched at no other cut.
TEST_F(SentencePiecesTest, LongPiecesAreExported) {
  SentencePieceModel model;
  model.type = SentencePieceModel::Type::bpe;
  const std::string length(2'000'000, 'a');
  for (const std::string& text : {std::string("a"), length, length + "a"})
    model.pieces.push_back({text, -static_cast<float>(model.pieces.size())});
  const Json json = Json::parse(fast_tokenizer_json(model));
  EXPECT_EQ(json.at("model").at("merges").size(), 2u);
}

TEST_F(SentencePiecesTest, FilesOfATokenizerGoWithTheModelAsTheyAre) {
  GptConfig config;
  config.vocab = 400;
  config.dim = 8;
  config.heads = 2;
  config.layers = 1;
  config.context = 8;
  const ModelPtr model = make_gpt(config);
  const TensorSet values(model->parameters());
  const auto exported = [&](const std::string& name, const std::string& folder) {
    return file_contents(path(folder + "/" + name)).value_or("none");
  };
  const auto export_to = [&](const std::string& folder, TokenizerModel words) {
    const Tokenizer tokenizer(std::move(words));
    fs::create_directories(path(folder));
    write_file(path(folder + "/tokenizer.json"), "{\"of\": \"another\"}");
    export_model(path(folder + "/model.safetensors"), *model, values, {}, &tokenizer);
  };
  for (const char* name : {"plain", "llama", "unigram"}) {
    SCOPED_TRACE(name);
    TokenizerModel words;
    words.bytes = trained(kForms.at(name));
    export_to("alone", words);
    EXPECT_EQ(exported("tokenizer.model", "alone"), words.bytes);
    const bool made = words.bytes == trained(kForms.at("plain"));
    EXPECT_EQ(missing_fast_tokenizer(words).empty(), made);
    EXPECT_EQ(exported("tokenizer.json", "alone") == "none", !made);
    EXPECT_EQ(exported("tokenizer_config.json", "alone") == "none", !made);
    words.fast = "{\"mine\": 1}\n";
    words.config = "{\"mine\": 2}\n";
    export_to("beside", words);
    EXPECT_EQ(exported("tokenizer.model", "beside"), words.bytes);
    EXPECT_EQ(exported("tokenizer.json", "beside"), words.fast);
    EXPECT_EQ(exported("tokenizer_config.json", "beside"), words.config);
    EXPECT_EQ(missing_fast_tokenizer(words), "");
    const TokenizerModel read = read_hugging_face_tokenizer(path("beside/model.safetensors"));
    EXPECT_TRUE(read == words);
  }
}

}  // namespace
}  // namespace logitless::train
