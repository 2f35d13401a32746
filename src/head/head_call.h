// One call of the head, checked, from validation to the engine of a device.
#pragma once

#include <cstdint>
#include <memory>

#include "comm/collective_calls.h"
#include "head/gathered_words.h"
#include "head/shard_words.h"
#include "logitless/context.h"
#include "logitless/head.h"
#include "logitless/vocab_order.h"
#include "logitless/workspace.h"

namespace logitless {

struct HeadOperands {
  ConstTensorView hidden;   // [..., D]
  ConstTensorView weight;   // [V, D]
  ConstTensorView bias;     // [V], or none
  ConstTensorView omega;    // [whole V], or none: 1. Weights of the weighted logit sum
  ConstTensorView targets;  // [...] or [..., K]
  std::int64_t ignore_index = -100;
  // T: row i has the target of row i + 1, and the last row of each T none. 0: its own.
  std::int64_t sequence = 0;
};

// Of each token; none where it is not wanted. Rows of ignored tokens get 0 (argmax: -1).
struct TokenOutputs {
  TensorView lse;
  TensorView target_logit;  // [..., K]
  TensorView log_prob;      // [..., K]
  TensorView entropy;
  TensorView weighted_sum;
  TensorView argmax;
};

// Of far-field plans.
struct FarOperands {
  const VocabOrder* order = nullptr;
  std::uint64_t sample_seed = 0;
  TensorView d_hidden_bound;  // 0 with exact plans
};

// Where exchanges on a GPU are enqueued that go on beside the products of a call: a stream of their
// own, and events that it and the call's stream wait for one another by.
struct ExchangeLane {
  std::shared_ptr<void> stream;
  std::shared_ptr<void> start;        // what a chunk is made from is there; a piece's room is free
  std::shared_ptr<void> ready;        // a chunk is made; a piece has come
  std::shared_ptr<void> hidden_done;  // a chunk's pieces of d_hidden are made
  std::shared_ptr<void> exchanged;    // and have come, or the sums of a piece
  // i32 [rows]: Sharding::word_table on the device; null: words follow one another.
  std::shared_ptr<const void> word_table;
  // Of the communicator, in place of the workspace's part for exchanges; null: none. The event, one
  // for all plans of the group: the last call that received there is done with it.
  void* memory = nullptr;
  std::shared_ptr<void> memory_free;
};

// Of words spread over ranks.
struct ShardOperands {
  CollectiveCalls* calls = nullptr;     // null: no sharding
  CollectiveCalls* replicas = nullptr;  // null: none
  ShardWords words{0};                  // here; may be none, and shape.vocab is 1 then
  bool tokens = false;
  const ExchangeLane* lane = nullptr;       // on a GPU
  const GatheredWords* gathered = nullptr;  // null: weights stay. Else shape.vocab is all words
  std::int64_t first_tile = 0, tiles = 0;   // of the ranks before this one, of all ranks

  bool sharded() const { return calls != nullptr; }
  int ranks() const { return calls->communicator().size(); }
  int rank() const { return calls->communicator().rank(); }
};

struct HeadCall {
  const Context* context = nullptr;
  const LossPlan* plan = nullptr;
  const Workspace* workspace = nullptr;
  HeadShape shape;  // of this call: tokens may be fewer than the plan's
  HeadFeatures features;
  HeadOperands in;
  TokenOutputs out;
  HeadGradients gradients;  // added to what they hold where features.accumulate
  FarOperands far;
  ShardOperands shard;
};

}  // namespace logitless
