// Plans and calls of a head whose words are spread over ranks: what the ranks agree on, and how all
// of them throw where one does.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/collective_calls.h"
#include "comm/digest.h"
#include "head/gathered_words.h"
#include "head/head_call.h"
#include "logitless/plan.h"
#include "logitless/sharding.h"

namespace logitless {

// Kept by the plan and its copies: the calls of a plan are counted together.
struct ShardAgreement {
  Sharding sharding;
  std::int64_t rows = 0;    // of weight here
  std::int64_t tokens = 0;  // that a rank may bring to a call
  // Of kVocabTile words, each rank's own: of the ranks before this one, and of all.
  std::int64_t first_tile = 0, tiles = 0;
  CollectiveCalls calls;
  std::unique_ptr<CollectiveCalls> replicas;
  GatheredWords words;                   // of all ranks
  std::vector<std::int32_t> table = {};  // Sharding::word_table, as planned
  ExchangeLane lane;                     // on a GPU: of streams and events at the first call
};

inline bool is_sharded(const Sharding& sharding) { return sharding.words != nullptr; }
inline bool by_columns(const Sharding& sharding) {
  return sharding.weight == WeightSharding::columns;
}

// Of features: how many ranks hold the words, and whether the tokens, too.
void set_sharding(const Sharding& sharding, HeadFeatures& features);
// That its groups' exchanges move this device's memory; and what a GPU does not serve. Throws
// InvalidArgument.
void require_device(const Sharding& sharding, DeviceKind device);
// Of the weight here, as require_head wants them: -1: those of hidden.
std::int64_t columns_of(const Sharding& sharding);
// Of whole vocabularies, for what is given whole: `rows` without sharding.
std::int64_t whole_vocab(const Sharding& sharding, std::int64_t rows);
// Throws InvalidArgument or Unsupported, naming what is wrong with it; `rows` of weight are here.
void require_sharding(const Sharding& sharding, std::int64_t rows);

// Of the far field, whose words stay: throws Unsupported for a weight by columns.
void require_rows(const Sharding& sharding);

// What a rank wants to plan: its sizes, features, and all options that must be equal.
struct ShardedHead {
  HeadShape shape;  // this rank's: tokens, and rows of weight in vocab, which may be 0
  HeadFeatures features;
  DeviceKind device = DeviceKind::cpu;
  std::function<void(PlanDigest&)> options = {};
};
// The plan of one rank alone.
using PlanOfRank =
    std::function<LossPlan(const HeadShape&, const HeadFeatures&, const PlanRequest&)>;
// Collective. `head` may throw what is wrong with the arguments; `plan` gets the request or, where
// ranks would take unlike far fields, one for an exact plan. Throws as agree() does, the same on
// all ranks.
LossPlan plan_sharded(const Sharding& sharding, const PlanRequest& request,
                      const std::function<ShardedHead()>& head, const PlanOfRank& plan);

// The ranks of a call that runs by run_call, and the sizes that go with them.
void set_shard(const LossPlan& plan, const Sharding& sharding, HeadCall& call);

// The words of a rank whose weight has so many rows.
std::vector<WordRun> words_of(const Sharding& sharding, std::int64_t rows);

bool is_planned(const ShardAgreement& agreed, const Sharding& sharding);
// Throws InvalidArgument unless a plan's agreement (null: none) is for calls of this sharding.
void require_planned(const ShardAgreement* agreed, const Sharding& sharding);

// Runs one call of a plan: `body` on its own where neither plan nor call is sharded, else together
// with the other ranks, and all throw where one does. Allocates nothing on its own.
template <typename Body>
void run_call(const LossPlan& plan, const Sharding& sharding, const Body& body) {
  ShardAgreement* const agreed = plan.agreement.get();
  const auto checked = [&] {
    require_planned(agreed, sharding);
    body();
  };
  if (agreed == nullptr) return checked();
  // What is wrong with the call is said to both groups.
  agreed->calls.run(
      [&] { agreed->replicas == nullptr ? checked() : agreed->replicas->run(checked); });
}

}  // namespace logitless
