// One checked call of the head, passed from validation to the engine of a device.
#pragma once

#include <cstdint>
#include <memory>

#include "comm/collective_calls.h"
#include "head/gathered_vocab.h"
#include "head/vocab_shard.h"
#include "logitless/context.h"
#include "logitless/head.h"
#include "logitless/vocab_order.h"
#include "logitless/workspace.h"

namespace logitless {

struct HeadOperands {
  ConstTensorView hidden;         // [..., D]
  ConstTensorView weight;         // [V, D]
  ConstTensorView bias;           // [V], or none
  ConstTensorView logit_weights;  // [global V], or none for 1: weights of the weighted logit sum
  ConstTensorView targets;        // [...] or [..., K]
  std::int64_t ignore_index = -100;
  // Sequence length T: row i has the target of row i + 1, and the last row of each sequence has
  // none. 0: each row has the target of the same index.
  std::int64_t sequence = 0;
};

// Per-token outputs; an undefined view is not computed. Rows of ignored tokens are 0 (argmax: -1).
struct TokenOutputs {
  TensorView lse;
  TensorView target_logit;  // [..., K]
  TensorView log_prob;      // [..., K]
  TensorView entropy;
  TensorView weighted_sum;
  TensorView argmax;
};

// Operands of far-field plans.
struct FarOperands {
  const VocabOrder* order = nullptr;
  std::uint64_t sample_seed = 0;
  TensorView d_hidden_bound;  // 0 with exact plans
};

// The communication stream of a GPU, on which exchanges overlap the GEMMs of a call, and the events
// that order it and the call's stream.
struct CommStream {
  std::shared_ptr<void> stream;
  std::shared_ptr<void> start;        // the receive buffers of a chunk's inputs or a slice are free
  std::shared_ptr<void> ready;        // these inputs, or the slice, have arrived
  std::shared_ptr<void> hidden_done;  // the local partial sums of a chunk's d_hidden are complete
  std::shared_ptr<void> exchanged;    // those of all ranks, or of a weight slice, have arrived
  // i32 [rows]: Sharding::vocab_ids on the device; null: the entries are consecutive.
  std::shared_ptr<const void> vocab_ids;
  // Exchange memory of the communicator, which replaces the workspace's part for exchanges; null:
  // none. The event is shared by all plans of the group: the last call that received into the
  // memory no longer reads it.
  void* memory = nullptr;
  std::shared_ptr<void> memory_released;
};

// Operands of a vocabulary-parallel call.
struct ShardOperands {
  CollectiveCalls* calls = nullptr;     // null: no sharding
  CollectiveCalls* replicas = nullptr;  // null: none
  VocabShard vocab{0};                  // the local shard; may be empty, and shape.vocab is 1 then
  bool tokens_sharded = false;
  const CommStream* comm_stream = nullptr;  // on a GPU
  const GatheredVocab* gathered = nullptr;  // null: not gathered. Else shape.vocab is global
  std::int64_t first_tile = 0, tiles = 0;   // of earlier ranks, and of all

  bool sharded() const { return calls != nullptr; }
  int ranks() const { return calls->communicator().size(); }
  int rank() const { return calls->communicator().rank(); }
};

struct HeadCall {
  const Context* context = nullptr;
  const LossPlan* plan = nullptr;
  const Workspace* workspace = nullptr;
  HeadShape shape;  // of this call; it may have fewer tokens than the plan
  HeadFeatures features;
  HeadOperands in;
  TokenOutputs out;
  HeadGradients gradients;  // added to the present values if features.accumulate
  FarOperands far;
  ShardOperands shard;
};

}  // namespace logitless
