// What moves between ranks whose tokens are spread: hidden states to the words, or rows of weight
// to the tokens. All ranks take the same, by what they know of one another.
#pragma once

#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "comm/digest.h"
#include "head/gathered_words.h"
#include "logitless/plan.h"
#include "logitless/sharding.h"

namespace logitless {

std::string_view name_of(Movement moves);

// What plans of one sharded head differ by.
struct MovementProblem {
  HeadShape shape;  // this rank's: its words, 1 or more
  HeadFeatures features;
  DeviceKind device = DeviceKind::cpu;
  std::int64_t tokens = 0;  // of this rank; of spread ones the most of a rank
  GatheredWords words;
  int rank = 0;
  bool far = false;  // a far field may be planned, of words that stay

  int ranks() const { return static_cast<int>(words.ranks.size()); }
};

// The plans of a sharded head, and which of them is taken.
class MovementPlans {
 public:
  using Planner = std::function<LossPlan(const HeadShape&, const HeadFeatures&)>;

  MovementPlans(const Sharding& sharding, MovementProblem problem);

  // Makes what may be taken, and says its sizes. Throws what the planner throws of the plan asked
  // for; of the one whose tokens move where neither can be made.
  void make(const Planner& planner, PlanDigest& digest);
  // Of this rank, whose tokens move, as made last; an exact one of nothing where there is none.
  LossPlan with_tokens() const { return tokens_.plan.value_or(LossPlan()); }
  // Whether the chunks of what they have said can be gone through together. A rank plans its other
  // chunks by a first one whose exponentials lie in d_weight's memory; where these differ, it makes
  // none the next time.
  bool begin_alike(const Agreement& said);
  // Of what all ranks have said: the same on each of them. Throws InvalidArgument where each way
  // has a rank without a plan.
  LossPlan agreed(const Agreement& said);

 private:
  struct Way {
    Movement moves;
    bool wanted = false;
    std::optional<LossPlan> plan = {};  // of this rank
    std::exception_ptr error = {};      // why there is none
    std::string refusal = {};           // the same in words
    std::int64_t size = 0;              // the least chunk, or piece, of a rank
    double seconds = 0.0;               // of the slowest rank, exchanges included
    double bytes = 0.0;                 // that a rank sends
  };
  void try_plan(Way& way, const Planner& planner) const;
  void meet(Way& way, const Agreement& said) const;
  LossPlan taken(Way& way) const;
  LossPlan with_chunks(LossPlan plan, std::int64_t chunk) const;
  std::string reasons(const Way& taken, const Way& other) const;
  double bytes_of(Movement moves, std::int64_t size) const;

  MovementProblem p_;
  bool spread_;
  bool planned_;
  bool lends_ = true;  // d_weight's memory
  // Of chunks of tokens, all ranks', where the first one is another: weight_ranges, and its tokens.
  int ranges_ = 0;
  std::int64_t first_ = 0;
  Way tokens_{Movement::tokens};
  Way weights_{Movement::weights};
};

}  // namespace logitless
