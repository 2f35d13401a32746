// A head whose words, and maybe tokens, are spread over ranks that are threads, put together again.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/ranks.h"
#include "support/problem.h"

namespace logitless::test {

// The words of each rank, ascending; those of a rank follow one another unless `table`.
struct WordSplit {
  std::string name;
  std::vector<std::vector<std::int32_t>> ranks = {};
  bool table = false;
};
// [borders[r], borders[r + 1]) on rank r.
WordSplit words_at(std::string name, const std::vector<std::int64_t>& borders);
WordSplit even_words(int ranks, std::int64_t vocab);
// Every word on a rank by chance.
WordSplit dealt_words(int ranks, std::int64_t vocab);
// Of these and others: one word, none, a table.
std::vector<WordSplit> word_splits(int ranks, std::int64_t vocab);

// How many tokens each rank has; empty: all of them have all.
struct TokenSplit {
  std::string name;
  std::vector<std::int64_t> counts = {};
  Movement moves = Movement::tokens;  // of sharded ones
  std::int64_t piece_rows = 0;        // where weights move: of each rank at a time; 0: as planned
  bool columns = false;               // ranks have columns of all words, instead of words
  bool sharded() const { return !counts.empty(); }
};
// All on all ranks, uneven ones, all on the last rank; and these with weights that move, as planned
// and in pieces of a few rows, and by columns.
std::vector<TokenSplit> token_splits(int ranks, std::int64_t tokens, bool weights_move = true);
// Weights move to these tokens.
TokenSplit with_weights_moving(TokenSplit tokens, std::int64_t piece_rows = 0);
TokenSplit with_columns(TokenSplit tokens, std::int64_t piece_rows = 0);
// Columns of the ranks before this one: more on each than on the one before, none on the first of
// many.
std::int64_t columns_before(int rank, int ranks, std::int64_t dim);

struct ShardedRun {
  WordSplit words = {};
  TokenSplit tokens = {};
  RunSpec run = {};                           // its `change` is applied on each rank
  unsigned delays = 0;                        // a seed: each exchange waits for a random time
  std::atomic<std::int64_t>* sent = nullptr;  // bytes that leave a rank, over all of them
  // Groups to average over: problems that stand beside this one. Empty: none.
  std::shared_ptr<Communicator> replicas = {};
  std::function<void(int rank, const LossPlan&, const Context&)> after = {};
};

// One rank's part of a problem.
struct RankProblem {
  RankProblem(const HeadProblem& whole, const ShardedRun& run, int rank);
  Sharding sharding(std::shared_ptr<Communicator> words) const;

  HeadProblem part;  // class_weight is whole
  std::vector<std::int32_t> words;
  Tensor table;
  std::int64_t vocab = 0, first_token = 0;
  bool spread_tokens = false;
  Movement moves = Movement::planned;
  bool by_columns = false;
  std::int64_t columns = 0;
};

// Of the kernels under test those that take such a head; each says no by name else.
bool takes_shards(const std::string& kernel, const HeadSpec& spec, const WordSplit& words = {},
                  Movement moves = Movement::tokens);

// Threads, for the kernel under test: of the CPU's memory or a GPU's.
Ranks make_group(const std::string& kernel, int size);

// Runs all ranks and puts their answers together: the outputs of words and of sharded tokens one
// after another. What several ranks have must be the same bits, which is expected here.
HeadAnswer run_sharded(const HeadProblem& problem, const ShardedRun& run);

// To the bit.
void expect_same_far(const FarFieldStatistics& a, const FarFieldStatistics& b);

// A communicator that waits before each exchange and counts what leaves the rank.
std::shared_ptr<Communicator> watched(std::shared_ptr<Communicator> real, unsigned delays,
                                      std::atomic<std::int64_t>* sent);

}  // namespace logitless::test
