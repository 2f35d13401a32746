// Agreement of ranks before a plan is made: everything is compared once, and calls of the plan need
// not negotiate again.
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

// Words [first, end) of the vocabulary.
struct WordRun {
  std::int64_t first = 0, end = 0;

  bool operator==(const WordRun&) const = default;
};

// The runs of a table of words, in its order.
std::vector<WordRun> runs_of(std::span<const std::int32_t> table);

// What one rank says of the plan that it wants.
class PlanDigest {
 public:
  // What must be equal on all ranks: shapes, dtypes, options, sizes of plans. Differences are
  // looked for in the order of these calls; names and values are their text.
  void same(std::string_view name, std::int64_t value);
  void same(std::string_view name, std::string_view value);
  // What may differ, and all ranks get to know: counts of tokens.
  void own(std::string_view name, std::int64_t value);
  // The words of this rank, in the order of its rows. With those of the other ranks they must cover
  // [0, vocab) once; a rank may have none.
  void words(std::int64_t vocab, std::span<const WordRun> runs);

 private:
  friend struct DigestBytes;
  std::vector<std::pair<std::string, std::string>> same_;
  std::vector<std::pair<std::string, std::int64_t>> own_;
  std::int64_t vocab_ = 0;
  std::vector<WordRun> runs_;
};

// What all ranks know then: the same on each of them.
struct Agreement {
  std::uint64_t plan = 0;                        // a hash of everything that was said, never 0
  std::vector<std::vector<WordRun>> words = {};  // by rank
  std::vector<std::vector<std::pair<std::string, std::int64_t>>> own = {};

  std::int64_t own_of(int rank, std::string_view name) const;  // throws InternalError: not said
};

// Collective: `fill` says what this rank wants, by throwing if need be, and all ranks compare.
// Throws the same on every rank:
// - what `fill` threw, in the class of the first rank that did: "rank 2: weight is [3, 4100]; ..."
// - InvalidArgument with the first difference, "rank 2: dim 4096, rank 0: 4100"; also of versions
//   of the library, and when one rank makes a plan and another a call
// - InvalidArgument naming the first word that is on no rank, or on two, or is none
// and DeviceError when the group fails. Memory: what all ranks say, twice.
Agreement agree(Communicator& communicator, const std::function<void(PlanDigest&)>& fill);

}  // namespace logitless
