// The tensors that travel between ranks with sharded tokens: hidden states to the vocabulary shards
// (token-dispatched), or rows of weight to the tokens (weight-gathered). Every rank makes the same
// choice, from sizes and times that all ranks have exchanged.
#pragma once

#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "comm/digest.h"
#include "head/gathered_vocab.h"
#include "logitless/plan.h"
#include "logitless/sharding.h"

namespace logitless {

std::string_view name_of(ExchangeMode exchange);

// Inputs of the choice between the two movements of one sharded head.
struct ExchangeProblem {
  HeadShape shape;  // local: the rank's vocabulary shard, 1 entry or more
  HeadFeatures features;
  DeviceKind device = DeviceKind::cpu;
  std::int64_t tokens = 0;  // of this rank; if tokens are sharded, the most of any rank
  GatheredVocab vocab;
  int rank = 0;
  bool far = false;  // a far field may be planned, whose weights are not gathered

  int ranks() const { return static_cast<int>(vocab.ranks.size()); }
};

// Makes the candidate plans of a sharded head and chooses one of them.
class ExchangePlans {
 public:
  using Planner = std::function<LossPlan(const HeadShape&, const HeadFeatures&)>;

  ExchangePlans(const Sharding& sharding, ExchangeProblem problem);

  // Makes the candidate plans and adds their sizes to the digest. Throws the planner's error for a
  // requested movement, or that of the token-dispatched plan if neither can be made.
  void make(const Planner& planner, PlanDigest& digest);
  // Returns this rank's token-dispatched plan as last made; an empty exact plan if there is none.
  LossPlan with_tokens() const { return tokens_.plan.value_or(LossPlan()); }
  // Returns whether all ranks can go through their chunks together. The size of a first chunk that
  // reuses d_weight's memory determines a rank's other chunks. If these differ between ranks, the
  // next plan reuses nothing.
  bool agree_on_begin(const Agreement& said);
  // Returns the plan that all ranks agree on: the same movement on each. Throws InvalidArgument if
  // some rank has no plan for each of the movements.
  LossPlan agreed(const Agreement& said);

 private:
  struct Way {
    ExchangeMode exchange;
    bool wanted = false;
    std::optional<LossPlan> plan = {};  // of this rank
    std::exception_ptr error = {};      // why there is none
    std::string refusal = {};           // the message of the error
    std::int64_t size = 0;              // the smallest chunk, or slice, of any rank
    double seconds = 0.0;               // of the slowest rank, including exchanges
    double bytes = 0.0;                 // sent by a rank
  };
  void try_plan(Way& way, const Planner& planner) const;
  void agree(Way& way, const Agreement& said) const;
  LossPlan taken(Way& way) const;
  LossPlan with_chunks(LossPlan plan, std::int64_t chunk) const;
  std::string reasons(const Way& taken, const Way& other) const;
  double bytes_of(ExchangeMode exchange, std::int64_t size) const;

  ExchangeProblem p_;
  bool spread_;
  bool planned_;
  bool aliases_ = true;  // whether chunks may reuse d_weight's memory
  // If the first chunk of all ranks has its own size: weight_ranges, and its tokens.
  int ranges_ = 0;
  std::int64_t first_ = 0;
  Way tokens_{ExchangeMode::tokens};
  Way weights_{ExchangeMode::weights};
};

}  // namespace logitless
