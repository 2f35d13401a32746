#include "train/run/data.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "logitless/context.h"
#include "logitless/error.h"
#include "train/data/text_corpus.h"
#include "train/model/hugging_face.h"

namespace logitless::train {
namespace {

RunData shards(const RunOptions& o, const Print& print, bool check_tokens) {
  const ModelPtr model = o.make_model(o.vocab);
  const auto read = [&](const char* option, const std::vector<std::string>& paths) {
    constexpr std::int64_t kWorthALine = 1'000'000'000;
    try {
      Dataset data = Dataset::of_shards(paths, o.length, model->sizes().vocab);
      if (check_tokens && data.tokens() >= kWorthALine)
        print(fmt::format("looking through the {} tokens of --{}", data.tokens(), option));
      if (check_tokens) data.check();
      return data;
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(fmt::format("--{}: {}", option, error.what()));
    }
  };
  Dataset all = read("data", o.data);
  if (!o.val.empty()) return {{}, model, std::move(all), read("val", o.val)};
  if (all.windows() < 2) {
    throw InvalidArgument(fmt::format(
        "--data: expected two windows of --length {} or more, one of them to validate, found 1",
        o.length));
  }
  auto [train, valid] = all.split(std::max<std::int64_t>(1, all.windows() / 50));
  return {{}, model, std::move(train), std::move(valid)};
}

std::optional<TokenizerModel> tokenizer_of(const RunOptions& o) {
  if (o.tokenizer.empty()) return std::nullopt;
  try {
    return read_hugging_face_tokenizer(o.tokenizer);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("--text: {}", error.what()));
  }
}

RunData text(const RunOptions& o, const Print& print) {
  CorpusOptions corpus_options;
  corpus_options.paths = o.text;
  const Corpus corpus = [&] {
    try {
      return read_corpus(corpus_options);
    } catch (const std::runtime_error& error) {
      throw InvalidArgument(error.what());
    }
  }();
  print(fmt::format("text: {} files, {}; held out: {}", corpus.count(false),
                    format_bytes(corpus.bytes(false)), format_bytes(corpus.bytes(true))));
  const std::int64_t wanted = o.make_model(o.vocab)->sizes().vocab;
  const std::string cache = o.cache.empty() ? default_cache_directory() : o.cache;
  ContextOptions context;
  context.threads = o.threads;
  const std::optional<TokenizerModel> tokenizer = tokenizer_of(o);
  TokenizedText words = [&] {
    try {
      return tokenize(corpus, static_cast<int>(wanted), cache, Context(context).threads(), print,
                      tokenizer ? &*tokenizer : nullptr);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(
          fmt::format("--text: the tokenizer of '{}': {}", o.tokenizer, error.what()));
    }
  }();
  if (const std::string missing = missing_fast_tokenizer(words.tokenizer.model());
      !o.hugging_face.empty() && !missing.empty()) {
    print(
        fmt::format("--export: tokenizer.model goes with the model as it is, without a "
                    "tokenizer.json, which has not {}",
                    missing));
  }
  // A model's vocabulary may be larger than its tokenizer's: rows are added to fill a tile.
  const ModelPtr model = o.make_model(tokenizer ? o.vocab : words.tokenizer.vocab());
  if (words.tokenizer.vocab() > model->sizes().vocab) {
    throw InvalidArgument(
        fmt::format("--text: expected a tokenizer of at most {} tokens, as the model "
                    "has, found {}",
                    model->sizes().vocab, words.tokenizer.vocab()));
  }
  const auto windows = [&](std::vector<std::int32_t> stream, const char* which) {
    try {
      return Dataset::of_tokens(std::move(stream), o.length, model->sizes().vocab);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(fmt::format("--length: {}: {}", which, error.what()));
    }
  };
  Dataset train = windows(std::move(words.train), "the text");
  Dataset valid = windows(std::move(words.held_out), "the text held out");
  return {std::move(words.tokenizer), model, std::move(train), std::move(valid)};
}

}  // namespace

RunData read_data(const RunOptions& options, const Print& print, bool check_tokens) {
  return options.has_shards() ? shards(options, print, check_tokens) : text(options, print);
}

}  // namespace logitless::train
