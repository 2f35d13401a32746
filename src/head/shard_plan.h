// Plans and calls of a vocabulary-parallel head: the agreement of the ranks, and errors of one rank
// that are thrown on all of them.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/collective_calls.h"
#include "comm/digest.h"
#include "head/gathered_vocab.h"
#include "head/head_call.h"
#include "logitless/plan.h"
#include "logitless/sharding.h"

namespace logitless {

class LocalPlanner;  // head/plan/choose.h

// Agreement of the ranks on a plan. It is shared by the plan and its copies, so that their calls
// are counted together.
struct ShardAgreement {
  Sharding sharding;
  std::int64_t rows = 0;    // of the local weight
  std::int64_t tokens = 0;  // that a rank may bring to a call
  // Tiles of kVocabTile entries, which do not span ranks: those of earlier ranks, and of all.
  std::int64_t first_tile = 0, tiles = 0;
  CollectiveCalls calls;
  std::unique_ptr<CollectiveCalls> replicas;
  GatheredVocab vocab;                   // of all ranks
  std::vector<std::int32_t> table = {};  // copy of Sharding::vocab_ids at planning
  CommStream comm_stream;                // on a GPU; its stream and events are created by the first
                                         // call
};

inline bool is_sharded(const Sharding& sharding) { return sharding.vocab_group != nullptr; }
inline bool by_columns(const Sharding& sharding) {
  return sharding.weight == WeightSharding::columns;
}

// Sets the sharding in `features`: the number of vocabulary shards, and whether tokens are sharded.
void set_sharding(const Sharding& sharding, HeadFeatures& features);
// Throws InvalidArgument unless the groups can exchange this device's memory and the device
// supports the sharding.
void require_device(const Sharding& sharding, DeviceKind device);
// Returns the columns of the local weight for require_head; -1: those of hidden.
std::int64_t columns_of(const Sharding& sharding);
// Returns the size of the global vocabulary; `rows` without sharding.
std::int64_t global_vocab(const Sharding& sharding, std::int64_t rows);
// Throws InvalidArgument or Unsupported naming the fault of the sharding. `rows` is the number of
// local rows of weight.
void require_sharding(const Sharding& sharding, std::int64_t rows);

// Throws Unsupported for a weight sharded by columns, which the far field does not support.
void require_rows(const Sharding& sharding);

// A rank's input to planning: sizes, features, and all options that must be equal.
struct ShardedHead {
  HeadShape shape;  // local: its tokens, and its rows of weight in vocab, which may be 0
  HeadFeatures features;
  DeviceLimits device = {};  // all ranks plan with the card of rank 0
  std::function<void(PlanDigest&)> options = {};
};
// Plans with all ranks; collective. `head` may throw the errors of the arguments. `planner` gets
// the request, or one for an exact plan if the ranks would choose different far fields. Throws as
// agree() does, the same on all ranks.
LossPlan plan_sharded(const LocalPlanner& planner, const Sharding& sharding,
                      const PlanRequest& request, const std::function<ShardedHead()>& head);

// Sets the ranks of a call that run_call runs, and its sizes per rank.
void set_shard(const LossPlan& plan, const Sharding& sharding, HeadCall& call);

// Returns the vocabulary entries of the local shard, whose weight has so many rows.
std::vector<VocabRun> vocab_of(const Sharding& sharding, std::int64_t rows);

bool is_planned(const ShardAgreement& agreed, const Sharding& sharding);
// Throws InvalidArgument unless a plan's agreement (null: none) was made for this sharding.
void require_planned(const ShardAgreement* agreed, const Sharding& sharding);

// Runs one call of a plan: `body` alone if neither the plan nor the call is sharded. Otherwise it
// runs together with the other ranks, and all ranks throw if one does. Allocates nothing itself.
template <typename Body>
void run_call(const LossPlan& plan, const Sharding& sharding, const Body& body) {
  ShardAgreement* const agreed = plan.agreement.get();
  const auto checked = [&] {
    require_planned(agreed, sharding);
    body();
  };
  if (agreed == nullptr) return checked();
  // Errors of the arguments are propagated to both groups.
  agreed->calls.run(
      [&] { agreed->replicas == nullptr ? checked() : agreed->replicas->run(checked); });
}

}  // namespace logitless
