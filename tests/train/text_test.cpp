// Tests the text of a machine, its tokenizer and its cache.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "logitless/tensor_file.h"
#include "train/data/text_corpus.h"
#include "train/test_folder.h"
#include "train/tokenizer/tokenizer.h"
#include "train/tokenizer/utf8.h"

namespace logitless::train {
namespace {

namespace fs = std::filesystem;

class TextTest : public TestFolder {
 protected:
  Corpus read(std::size_t max_bytes = 1u << 20) const {
    CorpusOptions options;
    options.paths = {(root_ / "text").string()};
    options.max_bytes = max_bytes;
    options.max_file_bytes = 5000;
    return read_corpus(options);
  }
  // Returns a different text for each number, with recurring words.
  static std::string lines(int number, int count) {
    std::string text;
    for (int i = 0; i < count; ++i) {
      text += "int value_" + std::to_string((number * 37 + i * 11) % 101) + " = function(" +
              std::to_string(i % 7) + ");\n";
    }
    return text;
  }
};

using CorpusTest = TextTest;
using TokenizerTest = TextTest;

TEST_F(CorpusTest, SkipsBinaryRepeatedAndLargeFiles) {
  write("text/b.h", lines(1, 20));
  write("text/a/c.h", lines(2, 20));
  write("text/copy.h", lines(1, 20));
  write("text/binary", std::string("a\0b", 3));
  write("text/table.inc", std::string(6000, '1'));
  write("text/empty.h", "");
  fs::create_symlink(root_ / "text/b.h", root_ / "text/link.h");
  const Corpus corpus = read();
  EXPECT_EQ(corpus.binary, 1u);
  EXPECT_EQ(corpus.duplicates, 1u);
  EXPECT_EQ(corpus.too_large, 1u);
  EXPECT_TRUE(corpus.split_files);  // two files: the end of each is held out
  EXPECT_EQ(corpus.count(false), 2u);
  EXPECT_EQ(corpus.bytes(false) + corpus.bytes(true), lines(1, 20).size() + lines(2, 20).size());
  EXPECT_GT(corpus.bytes(true), 0u);
  EXPECT_EQ(corpus.files.front().name, "a/c.h");
}

TEST_F(CorpusTest, HoldsOutWholeFilesWhenThereAreMany) {
  for (int i = 0; i < 300; ++i) write("text/" + std::to_string(i) + ".h", lines(i, 5));
  const Corpus corpus = read();
  EXPECT_FALSE(corpus.split_files);
  EXPECT_EQ(corpus.count(false) + corpus.count(true) + corpus.duplicates, 300u);
  EXPECT_GE(corpus.count(true), 1u);
  EXPECT_LE(corpus.count(true), 20u);
  EXPECT_EQ(read().key(), corpus.key());
  write("text/7.h", lines(7, 6));
  EXPECT_NE(read().key(), corpus.key());
}

TEST_F(CorpusTest, StaysWithinItsLimit) {
  for (int i = 0; i < 30; ++i) write("text/" + std::to_string(i) + ".h", lines(i, 20));
  const Corpus some = read(5000);
  EXPECT_LE(some.bytes(false) + some.bytes(true), 5000u);
  EXPECT_GT(some.left_out, 0u);
  EXPECT_GT(some.bytes(false), 3000u);
  const Corpus cut = read(100);  // less than any file
  EXPECT_EQ(cut.bytes(false) + cut.bytes(true), 100u);
  EXPECT_EQ(cut.cut, 1u);
}

TEST_F(CorpusTest, ReadsOtherBytesAsLatin1) {
  write("text/a", "caf\xe9 and caf\xc3\xa9, \xf0\x9f\x98\x80 \xff" + lines(1, 10));
  const Corpus corpus = read();
  EXPECT_TRUE(
      corpus.files[0].text.starts_with("caf\xc3\xa9 and caf\xc3\xa9, \xf0\x9f\x98\x80 \xc3\xbf"));
}

TEST_F(CorpusTest, SaysWhatIsMissing) {
  EXPECT_THROW(read(), std::runtime_error);
  write("text/empty", "");
  try {
    read();
    FAIL() << "no text was accepted";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("no text to train on: 1 files found, 1 empty"),
              std::string::npos)
        << error.what();
  }
}

// One U+FFFD replaces each start of a truncated character, and each other byte.
TEST(Utf8Test, ReplacesWhatIsNoCharacter) {
  const std::string mark = "\xef\xbf\xbd";
  const std::pair<std::string, std::string> cases[] = {
      {"", ""},
      {"caf\xc3\xa9 \xf0\x9f\x98\x80", "caf\xc3\xa9 \xf0\x9f\x98\x80"},
      {"\xf0\x9f\x98", mark},
      {"\xf0\x9f\x98x\xe2\x82y\xc3", mark + "x" + mark + "y" + mark},
      {"\xff\xfe", mark + mark},
      {"\xed\xa0\x80", mark + mark + mark},             // a surrogate
      {"\xc0\x80\xe0\x80", mark + mark + mark + mark},  // overlong
      {"\xf4\x90\x80\x80", mark + mark + mark + mark},  // beyond the last code point
      {"\xe2\x82\xf0\x9f\x98\x80", mark + "\xf0\x9f\x98\x80"},
  };
  for (const auto& [text, expected] : cases) EXPECT_EQ(replace_invalid_utf8(text), expected);
}

TEST_F(TokenizerTest, KeepsEveryByteOfTheText) {
  for (int i = 0; i < 40; ++i) write("text/" + std::to_string(i) + ".h", lines(i, 40));
  const Tokenizer tokenizer = Tokenizer::train(read(), 512, 1u << 20);
  EXPECT_GT(tokenizer.vocab(), 300);
  EXPECT_LE(tokenizer.vocab(), 512);
  const std::string texts[] = {
      "int value_7 = function(3);\n",
      "  two blanks,\ttab,\t\t\t\t\t\tsix tabs, end  \n\n\n   ",
      "CR LF\r\n\r\nnever seen: \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80 \x01\x7f",
      std::string(5000, 'x') + std::string(3000, ' ') + "\n",
      "\xe2\x82\xac" + std::string(1022, 'a') + "\xe2\x82\xac\xe2\x82\xac",  // no character is cut
      "",
  };
  for (const std::string& text : texts) {
    std::vector<std::int32_t> words;
    tokenizer.encode(text, words);
    EXPECT_EQ(tokenizer.decode(words), text);
    for (const std::int32_t word : words) ASSERT_LT(word, tokenizer.vocab());
  }
}

TEST_F(TokenizerTest, IsTheSameFromTheTextAndFromTheCache) {
  for (int i = 0; i < 40; ++i) write("text/" + std::to_string(i) + ".h", lines(i, 40));
  const Corpus corpus = read();
  std::string said;
  const Print print = [&](std::string_view line) { said += std::string(line) + "\n"; };
  const TokenizedText made = tokenize(corpus, 400, (root_ / "cache").string(), 2, print);
  EXPECT_EQ(said.find("tokens from"), std::string::npos) << said;
  const TokenizedText one_thread = tokenize(corpus, 400, (root_ / "other").string(), 1, print);
  said.clear();
  const TokenizedText kept = tokenize(corpus, 400, (root_ / "cache").string(), 2, print);
  EXPECT_NE(said.find("tokens from"), std::string::npos) << said;
  EXPECT_TRUE(made.tokenizer.model() == kept.tokenizer.model());
  EXPECT_EQ(made.train, kept.train);
  EXPECT_EQ(made.held_out, kept.held_out);
  EXPECT_EQ(made.key, kept.key);
  EXPECT_EQ(made.key, one_thread.key);
  EXPECT_NE(tokenize(corpus, 401, (root_ / "cache").string(), 2, print).key, kept.key);
}

// The damaged words are in the vocabulary, but are not those that were written.
TEST_F(TokenizerTest, MakesADamagedCacheAgain) {
  for (int i = 0; i < 40; ++i) write("text/" + std::to_string(i) + ".h", lines(i, 40));
  const Corpus corpus = read();
  std::string said;
  const Print print = [&](std::string_view line) { said += std::string(line) + "\n"; };
  const auto tokenized = [&] {
    return tokenize(corpus, 400, (root_ / "cache").string(), 1, print);
  };
  const TokenizedText made = tokenized();
  const fs::path cache = fs::directory_iterator(root_ / "cache")->path();
  std::string bytes;
  {
    std::ifstream stream(cache, std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(stream), {});
  }
  const std::int32_t first = made.train.front(), other = (first + 1) % made.tokenizer.vocab();
  std::string words(reinterpret_cast<const char*>(made.train.data()), 32);
  const std::size_t at = bytes.find(words);
  ASSERT_NE(at, std::string::npos);
  std::memcpy(bytes.data() + at, &other, sizeof(other));
  std::ofstream(cache, std::ios::binary) << bytes;
  said.clear();
  const TokenizedText again = tokenized();
  EXPECT_NE(said.find("is not as it was written"), std::string::npos) << said;
  EXPECT_EQ(again.train, made.train);
  EXPECT_EQ(again.key, made.key);
}

// A tokenizer in the cache is not loaded if it differs from the one that was written.
TEST_F(TokenizerTest, ChecksACacheBeforeItIsUsed) {
  for (int i = 0; i < 40; ++i) write("text/" + std::to_string(i) + ".h", lines(i, 40));
  const Corpus corpus = read();
  std::string said;
  const Print print = [&](std::string_view line) { said += std::string(line) + "\n"; };
  const auto tokenized = [&] {
    return tokenize(corpus, 400, (root_ / "cache").string(), 1, print);
  };
  const TokenizedText made = tokenized();
  const fs::path cache = fs::directory_iterator(root_ / "cache")->path();
  const auto again = [&](const char* why) {
    said.clear();
    const TokenizedText text = tokenized();
    EXPECT_NE(said.find(why), std::string::npos) << said;
    EXPECT_EQ(text.key, made.key);
    EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(cache)));
    said.clear();
    tokenized();
    EXPECT_NE(said.find("tokens from"), std::string::npos) << said;
  };
  const TensorFile file(cache.string());
  const std::string bytes(made.tokenizer.model().bytes.size(), '\x08');
  const NamedTensor tensors[] = {
      {"tokenizer", {bytes.data(), DType::i8, {static_cast<std::int64_t>(bytes.size())}}},
      {"train", file.tensor("train")},
      {"held_out", file.tensor("held_out")}};
  write_safetensors(cache.string(), tensors, file.metadata());
  again("is not as it was written");

  // Files that another user may have planted, and a link to a file of this user.
  fs::copy_file(cache, root_ / "mine");
  fs::remove(cache);
  fs::create_symlink(root_ / "mine", cache);
  again("may have been written by another user");
  EXPECT_EQ(fs::file_size(root_ / "mine"), fs::file_size(cache));
  fs::permissions(cache, fs::perms::group_write, fs::perm_options::add);
  again("may have been written by another user");
  EXPECT_EQ(fs::status(cache).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  if (geteuid() == 0) {
    ASSERT_EQ(chown(cache.c_str(), 65534, 65534), 0);
    again("may have been written by another user");
  }
  // A folder that other users may write is neither read nor written.
  fs::permissions(root_ / "cache", fs::perms::others_write, fs::perm_options::add);
  fs::remove(cache);
  said.clear();
  EXPECT_EQ(tokenized().key, made.key);
  EXPECT_NE(said.find("is not used: other users may write it"), std::string::npos) << said;
  EXPECT_TRUE(fs::is_empty(root_ / "cache"));
}

// The words are those of an imported tokenizer, which has a separate cache entry.
TEST_F(TokenizerTest, TakesATokenizerMadeElsewhere) {
  for (int i = 0; i < 40; ++i) write("text/" + std::to_string(i) + ".h", lines(i, 40));
  const Corpus corpus = read();
  const Print print = [](std::string_view) {};
  const std::string cache = (root_ / "cache").string();
  const Tokenizer other = Tokenizer::train(corpus, 333, 1u << 20);
  const TokenizedText own = tokenize(corpus, 400, cache, 1, print);
  const TokenizedText given = tokenize(corpus, 400, cache, 1, print, &other.model());
  EXPECT_TRUE(given.tokenizer.model() == other.model());
  EXPECT_NE(given.train, own.train);
  EXPECT_EQ(tokenize(corpus, 400, cache, 1, print).key, own.key);
  EXPECT_EQ(tokenize(corpus, 400, cache, 1, print, &other.model()).key, given.key);
}

TEST_F(TokenizerTest, TakesFewerWordsForAShortText) {
  write("text/a", lines(1, 100));
  std::string said;
  const TokenizedText text =
      tokenize(read(), 32768, (root_ / "cache").string(), 2,
               [&](std::string_view line) { said += std::string(line) + "\n"; });
  EXPECT_LE(text.tokenizer.vocab(), 512);
  EXPECT_NE(said.find("short for 32768 tokens: taking 512"), std::string::npos) << said;
}

}  // namespace
}  // namespace logitless::train
