// The parts of the log-bilinear example that read: files, tokenizer, cache, checkpoint.
#include <gtest/gtest.h>
#include <logitless/logitless.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "checkpoint.h"
#include "text_corpus.h"
#include "tokenizer.h"

namespace log_bilinear {
namespace {

namespace fs = std::filesystem;

// A folder of its own for each test, gone with it.
class Folder : public testing::Test {
 protected:
  Folder() {
    const testing::TestInfo& info = *testing::UnitTest::GetInstance()->current_test_info();
    root_ = fs::temp_directory_path() /
            (std::string("log_bilinear_") + info.name() + std::to_string(::getpid()));
    fs::create_directories(root_);
  }
  ~Folder() override { fs::remove_all(root_); }

  void write(const std::string& name, const std::string& text) const {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name, std::ios::binary) << text;
  }
  Corpus read(std::size_t max_bytes = 1u << 20) const {
    CorpusOptions options;
    options.paths = {(root_ / "text").string()};
    options.max_bytes = max_bytes;
    options.max_file_bytes = 5000;
    return read_corpus(options);
  }
  // Different text for each number, with words to find.
  static std::string lines(int number, int count) {
    std::string text;
    for (int i = 0; i < count; ++i) {
      text += "int value_" + std::to_string((number * 37 + i * 11) % 101) + " = function(" +
              std::to_string(i % 7) + ");\n";
    }
    return text;
  }

  fs::path root_;
};

using CorpusTest = Folder;
using TokenizerTest = Folder;
using CheckpointTest = Folder;

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
    EXPECT_NE(std::string(error.what()).find("no text to train on: 1 files found"),
              std::string::npos)
        << error.what();
  }
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
      "\xe2\x82\xac" + std::string(1022, 'a') + "\xe2\x82\xac\xe2\x82\xac",  // cut inside neither
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
  const Say say = [&](std::string_view line) { said += std::string(line) + "\n"; };
  const TokenizedText made = tokenize(corpus, 400, (root_ / "cache").string(), 2, say);
  EXPECT_EQ(said.find("words from"), std::string::npos) << said;
  const TokenizedText one_thread = tokenize(corpus, 400, (root_ / "other").string(), 1, say);
  said.clear();
  const TokenizedText kept = tokenize(corpus, 400, (root_ / "cache").string(), 2, say);
  EXPECT_NE(said.find("words from"), std::string::npos) << said;
  EXPECT_EQ(made.tokenizer.model(), kept.tokenizer.model());
  EXPECT_EQ(made.train, kept.train);
  EXPECT_EQ(made.held_out, kept.held_out);
  EXPECT_EQ(made.key, kept.key);
  EXPECT_EQ(made.key, one_thread.key);
  EXPECT_NE(tokenize(corpus, 401, (root_ / "cache").string(), 2, say).key, kept.key);
}

TEST_F(TokenizerTest, TakesFewerWordsForAShortText) {
  write("text/a", lines(1, 100));
  std::string said;
  const TokenizedText text =
      tokenize(read(), 32768, (root_ / "cache").string(), 2,
               [&](std::string_view line) { said += std::string(line) + "\n"; });
  EXPECT_LE(text.tokenizer.vocab(), 512);
  EXPECT_NE(said.find("short for 32768 words: taking 512"), std::string::npos) << said;
}

TEST_F(CheckpointTest, GivesBackWhatItTookAndRefusesWhatDoesNotFit) {
  const ModelShape shape{50, 8, 2, true, false};
  Model model(shape, 4, 1, nullptr);
  model.initialise(3, std::vector<float>(50, -4.0f));
  Optimizer optimizer({}, model.parameters(), 1, nullptr);
  optimizer.state()[1].data()[5] = 0.25f;
  const std::string path = (root_ / "out/checkpoint").string();
  save_checkpoint(path, model, optimizer, {7, 3, 28}, {{"dim", "8"}, {"steps", "9"}});

  Model other(shape, 4, 1, nullptr);
  Optimizer other_optimizer({}, other.parameters(), 1, nullptr);
  const Position position =
      load_checkpoint(path, other, other_optimizer, {{"dim", "8"}, {"steps", "10"}});
  EXPECT_EQ(position.step, 7);
  EXPECT_EQ(position.seed, 3u);
  EXPECT_EQ(position.examples, 28);
  for (std::size_t p = 0; p < model.parameters().size(); ++p) {
    const Parameter& parameter = model.parameters()[p];
    EXPECT_TRUE(std::equal(parameter.value(), parameter.value() + parameter.numel(),
                           other.parameters()[p].value()));
  }
  EXPECT_EQ(other_optimizer.state()[1].data()[5], 0.25f);

  EXPECT_THROW(load_checkpoint(path, other, other_optimizer, {{"dim", "16"}}), std::runtime_error);
  EXPECT_THROW(load_checkpoint(path, other, other_optimizer, {{"unheard of", "1"}}),
               std::runtime_error);
  Model wider({50, 9, 2, true, false}, 4, 1, nullptr);
  Optimizer wider_optimizer({}, wider.parameters(), 1, nullptr);
  EXPECT_THROW(load_checkpoint(path, wider, wider_optimizer, {}), std::runtime_error);
}

}  // namespace
}  // namespace log_bilinear
