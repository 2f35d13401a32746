// Agreement of ranks before a plan is made. Everything is compared once, so that calls of the plan
// need no negotiation.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "logitless/communicator.h"

namespace logitless {

// Vocabulary entries [first, end).
struct VocabRun {
  std::int64_t first = 0, end = 0;

  bool operator==(const VocabRun&) const = default;
};

// Returns the runs of consecutive entries of a table, in its order.
std::vector<VocabRun> runs_of(std::span<const std::int32_t> table);

// One rank's proposal for a plan.
class PlanDigest {
 public:
  // Adds a property that must be equal on all ranks: shapes, dtypes, options, sizes of plans.
  // Differences are searched in the order of these calls and reported as text.
  void same(std::string_view name, std::int64_t value);
  void same(std::string_view name, std::string_view value);
  // Adds a local property that all ranks learn and that may differ, such as a token count.
  void own(std::string_view name, std::int64_t value);
  // Sets the local vocabulary shard, in the order of its rows. The shards of all ranks must cover
  // [0, vocab) exactly once; a shard may be empty.
  void add_vocab(std::int64_t vocab, std::span<const VocabRun> runs);

 private:
  friend struct DigestBytes;
  std::vector<std::pair<std::string, std::string>> same_;
  std::vector<std::pair<std::string, std::int64_t>> own_;
  std::int64_t vocab_ = 0;
  std::vector<VocabRun> runs_;
};

// The common result, the same on all ranks.
struct Agreement {
  std::uint64_t plan = 0;                              // hash of all digests, never 0
  std::vector<std::vector<VocabRun>> vocab_runs = {};  // by rank
  std::vector<std::vector<std::pair<std::string, std::int64_t>>> own = {};

  std::int64_t value_of(int rank, std::string_view name) const;  // throws InternalError if absent
};

// Exchanges and compares the digests that `fill` makes. Collective. Throws the same on every rank:
// - an exception of `fill`, in the class of the first rank that threw: "rank 2: weight is [3,
//   4100]; ..."
// - InvalidArgument with the first difference, "rank 2: dim 4096, rank 0: 4100". It is also thrown
//   for different library versions, and when one rank makes a plan and another a call
// - InvalidArgument naming the first vocabulary entry that is on no rank, on two, or out of range
// - DeviceError when the group fails
//
// Memory: all digests, twice.
Agreement agree(Communicator& communicator, const std::function<void(PlanDigest&)>& fill);

}  // namespace logitless
