// A head with its vocabulary, and optionally its tokens, sharded over ranks that are threads;
// results are assembled.
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

// Vocabulary entries of each rank, ascending, and consecutive unless `table`.
struct VocabSplit {
  std::string name;
  std::vector<std::vector<std::int32_t>> ranks = {};
  bool table = false;
};
// Rank r has entries [borders[r], borders[r + 1]).
VocabSplit vocab_at(std::string name, const std::vector<std::int64_t>& borders);
VocabSplit even_vocab(int ranks, std::int64_t vocab);
// Each entry is on a random rank.
VocabSplit interleaved_vocab(int ranks, std::int64_t vocab);
// Returns these and other splits: one entry, none, a table.
std::vector<VocabSplit> vocab_splits(int ranks, std::int64_t vocab);

// Tokens of each rank; empty: all ranks have all tokens.
struct TokenSplit {
  std::string name;
  std::vector<std::int64_t> counts = {};
  ExchangeMode exchange = ExchangeMode::tokens;  // for sharded tokens
  std::int64_t slice_rows = 0;  // with gathered weights, rows of each rank in a slice; 0: as
                                // planned
  bool columns = false;         // ranks have columns of the full vocabulary instead of rows
  bool sharded() const { return !counts.empty(); }
};
// Returns splits with all tokens on all ranks, uneven ones, and all on the last rank. The same with
// gathered weights: as planned, in slices of a few rows, and by columns.
std::vector<TokenSplit> token_splits(int ranks, std::int64_t tokens, bool weights_move = true);
// Returns the split with gathered weights.
TokenSplit with_weights_moving(TokenSplit tokens, std::int64_t slice_rows = 0);
TokenSplit with_columns(TokenSplit tokens, std::int64_t slice_rows = 0);
// Returns the columns of earlier ranks: each rank has more than the one before, and the first of
// many has none.
std::int64_t columns_before(int rank, int ranks, std::int64_t dim);

struct ShardedRun {
  VocabSplit vocab = {};
  TokenSplit tokens = {};
  RunSpec run = {};                           // its `change` is applied on each rank
  unsigned delays = 0;                        // seed of random waits before exchanges
  std::atomic<std::int64_t>* sent = nullptr;  // bytes sent, over all ranks
  // Replica groups of the mean, whose problems run beside this one. Empty: none.
  std::shared_ptr<Communicator> replicas = {};
  std::function<void(int rank, const LossPlan&, const Context&)> after = {};
};

// One rank's shard of a problem.
struct RankProblem {
  RankProblem(const HeadProblem& whole, const ShardedRun& run, int rank);
  Sharding sharding(std::shared_ptr<Communicator> vocab_group) const;

  HeadProblem part;  // class_weight is global
  std::vector<std::int32_t> vocab_ids;
  Tensor table;
  std::int64_t vocab = 0, first_token = 0;
  bool spread_tokens = false;
  ExchangeMode exchange = ExchangeMode::planned;
  bool by_columns = false;
  std::int64_t columns = 0;
};

// Returns whether a kernel under test takes such a head; the others must refuse it by name.
bool takes_shards(const std::string& kernel, const HeadSpec& spec,
                  const VocabSplit& vocab_shards = {},
                  ExchangeMode exchange = ExchangeMode::tokens);

// Makes a group of threads for the kernel's memory, CPU or GPU.
Ranks make_group(const std::string& kernel, int size);

// Runs all ranks and assembles their results: vocabulary shards and sharded tokens are
// concatenated. Results that several ranks have are expected to have the same bits.
HeadResult run_sharded(const HeadProblem& problem, const ShardedRun& run);

// Expects equal bits.
void expect_same_far(const FarFieldStatistics& a, const FarFieldStatistics& b);

// Returns a communicator that waits before each exchange and counts the bytes sent.
std::shared_ptr<Communicator> watched(std::shared_ptr<Communicator> real, unsigned delays,
                                      std::atomic<std::int64_t>* sent);

}  // namespace logitless::test
