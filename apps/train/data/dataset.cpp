#include "train/data/dataset.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <span>

#include "logitless/error.h"
#include "train/data/shard.h"
#include "train/data/shuffle.h"
#include "train/hash.h"
#include "train/model/gpt.h"

namespace logitless::train {

// The token streams of a data set: one for each file.
class Dataset::Source {
 public:
  virtual ~Source() = default;
  virtual std::size_t streams() const = 0;
  virtual std::int64_t tokens(std::size_t stream) const = 0;
  virtual std::string name(std::size_t stream) const = 0;
  virtual void read(std::size_t stream, std::int64_t begin, std::span<std::int64_t> to) const = 0;
  // Throws InvalidArgument naming the first token that is not in [0, vocab).
  virtual void check(std::int64_t vocab) const = 0;
};

namespace {

std::int64_t windows_in(std::int64_t tokens, std::int64_t length) {
  return std::max<std::int64_t>(0, (tokens - 1) / length);
}

template <typename Token>
void check_tokens(std::span<const Token> tokens, std::int64_t vocab, const std::string& name,
                  std::int64_t begin) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= vocab) {
      throw InvalidArgument(fmt::format("{}: expected tokens below {} (vocab), found {} at {}",
                                        name, vocab, tokens[i],
                                        begin + static_cast<std::int64_t>(i)));
    }
  }
}

}  // namespace

class Dataset::Tokens : public Source {
 public:
  explicit Tokens(std::vector<std::int32_t> tokens) : tokens_(std::move(tokens)) {}
  std::size_t streams() const override { return 1; }
  std::int64_t tokens(std::size_t) const override {
    return static_cast<std::int64_t>(tokens_.size());
  }
  std::string name(std::size_t) const override { return "the text"; }
  void read(std::size_t, std::int64_t begin, std::span<std::int64_t> to) const override {
    std::copy_n(tokens_.begin() + begin, to.size(), to.begin());
  }
  void check(std::int64_t vocab) const override {
    check_tokens(std::span<const std::int32_t>(tokens_), vocab, name(0), 0);
  }

 private:
  std::vector<std::int32_t> tokens_;
};

class Dataset::Shards : public Source {
 public:
  explicit Shards(const std::vector<std::string>& paths) {
    for (const std::string& path : paths) shards_.emplace_back(path);
  }
  std::size_t streams() const override { return shards_.size(); }
  std::int64_t tokens(std::size_t stream) const override { return shards_[stream].tokens(); }
  std::string name(std::size_t stream) const override {
    return fmt::format("'{}'", shards_[stream].path());
  }
  // Thread-safe, because the parts of a split data set share their files.
  void read(std::size_t stream, std::int64_t begin, std::span<std::int64_t> to) const override {
    const std::lock_guard lock(mutex_);
    shards_[stream].read(begin, to);
  }
  void check(std::int64_t vocab) const override {
    const std::lock_guard lock(mutex_);
    for (const Shard& shard : shards_) shard.check(vocab);
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Shard> shards_;
};

Dataset::Dataset(std::shared_ptr<const Source> source, std::int64_t length, std::int64_t vocab)
    : source_(std::move(source)), length_(length), vocab_(vocab) {
  if (length < 1) throw InvalidArgument(fmt::format("length: expected at least 1, got {}", length));
  std::int64_t tokens = 0;
  for (std::size_t s = 0; s < source_->streams(); ++s) {
    end_ += windows_in(source_->tokens(s), length);
    tokens += source_->tokens(s);
  }
  if (end_ == 0) {
    throw InvalidArgument(fmt::format(
        "length: windows of {} tokens and one more do not fit into {} tokens", length, tokens));
  }
}

Dataset Dataset::of_tokens(std::vector<std::int32_t> tokens, std::int64_t length,
                           std::int64_t vocab) {
  return {std::make_shared<Tokens>(std::move(tokens)), length, vocab};
}

Dataset Dataset::of_shards(const std::vector<std::string>& paths, std::int64_t length,
                           std::int64_t vocab) {
  return {std::make_shared<Shards>(paths), length, vocab};
}

std::uint64_t Dataset::key() const {
  constexpr std::int64_t kSample = 4096;
  std::uint64_t key = mix(mix(static_cast<std::uint64_t>(begin_), static_cast<std::uint64_t>(end_)),
                          static_cast<std::uint64_t>(length_));
  for (std::size_t s = 0; s < source_->streams(); ++s) {
    const std::int64_t count = source_->tokens(s);
    key = mix(key, static_cast<std::uint64_t>(count));
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(std::min(count, kSample)));
    for (const std::int64_t begin : {std::int64_t{0}, count - std::min(count, kSample)}) {
      source_->read(s, begin, tokens);
      for (const std::int64_t token : tokens) key = mix(key, static_cast<std::uint64_t>(token));
    }
  }
  return key;
}

void Dataset::check() const { source_->check(vocab_); }

std::pair<Dataset, Dataset> Dataset::split(std::int64_t count) const {
  if (count < 1 || count >= windows()) {
    throw InvalidArgument(
        fmt::format("{} windows of {} tokens cannot be split: expected 1 to {}, got {}", windows(),
                    length_, windows() - 1, count));
  }
  std::pair<Dataset, Dataset> parts(*this, *this);
  parts.first.end_ = parts.second.begin_ = end_ - count;
  return parts;
}

void Dataset::add_window(std::int64_t window, Batch& batch) const {
  std::size_t stream = 0;
  while (window >= windows_in(source_->tokens(stream), length_)) {
    window -= windows_in(source_->tokens(stream++), length_);
  }
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(length_ + 1));
  source_->read(stream, window * length_, tokens);
  // Files may have changed since check().
  check_tokens(std::span<const std::int64_t>(tokens), vocab_, source_->name(stream),
               window * length_);
  batch.tokens.insert(batch.tokens.end(), tokens.begin(), tokens.end() - 1);
  batch.targets.insert(batch.targets.end(), tokens.begin() + 1, tokens.end());
  batch.counted += length_;
}

Batch Dataset::shuffled_batch(std::uint64_t seed, std::int64_t first, std::int64_t rows) const {
  Batch batch{rows, length_, {}, {}, 0};
  for (std::int64_t i = first; i < first + rows; ++i) {
    add_window(begin_ + shuffled(seed, windows(), i), batch);
  }
  return batch;
}

Batch Dataset::sequential_batch(std::int64_t first, std::int64_t rows) const {
  Batch batch{rows, length_, {}, {}, 0};
  for (std::int64_t i = first; i < std::min(first + rows, windows()); ++i) {
    add_window(begin_ + i, batch);
  }
  const auto size = static_cast<std::size_t>(rows * length_);
  batch.tokens.resize(size, 0);
  batch.targets.resize(size, kIgnoredTarget);
  return batch;
}

}  // namespace logitless::train
