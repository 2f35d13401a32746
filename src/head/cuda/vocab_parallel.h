// The chunk loop of a vocabulary-parallel call: each rank has a shard of the vocabulary, and all
// ranks go through the same chunks, the tokens that are processed together. With sharded tokens
// (sequence-parallel), a chunk has as many tokens from each rank, concatenated by rank. Everything
// is enqueued. A chunk takes:
//
//   1. With sharded tokens, an all-gather of hidden states and targets.
//   2. An all-gather of the targets' logits, which their sum over ranks merges: all shards take
//      their exponentials relative to the same logits.
//   3. The forward over the local shard. Its records, TokenRecord [tokens], hold what each token's
//      outputs need of this shard; an all-gather and merge_records give outputs of all shards.
//   4. The gradient coefficients of this rank's tokens. With sharded tokens, an all-gather.
//   5. The backward over the local shard. A reduce-scatter adds the partial sums of d_hidden over
//      the ranks. If all ranks have all tokens, an all-gather makes it an all-reduce.
//
// The reduce-scatter is an all-to-all and a sum in rank order, so that results are the same bits in
// every run.
//
// Collectives 1, 2 and 5 run on the communication stream, beside GEMMs of the call's stream: 1 and
// 2 are those of the next chunk, during this one's backward. So hidden, targets and merged logits
// are double-buffered. The other buffers have one copy, guarded by waits. Events of CommStream:
//
//   start        1 and 2 wait for it: the last work that reads the buffers they fill is done
//   ready        the forward waits for it: 1 and 2 are done
//   hidden_done  5 waits for it: the partial sums are complete, though d_weight is not
//   exchanged    the next backward, which overwrites these sums, waits for it: 5 is done
#pragma once

#include <optional>

#include "head/cuda/listed_tokens.h"
#include "head/cuda/shared_far_field.h"

namespace logitless::cuda {

class VocabParallel {
 public:
  // far: null without a far field.
  VocabParallel(const Run& run, FarField* far);

  void run(const ChunkFunction& set_coefficients);

 private:
  void run_chunks(const ChunkFunction& set_coefficients);
  // Returns whether a chunk's inputs are not the caller's tensors but copies, of the tokens of all
  // ranks or in another order.
  bool assembles_chunks() const {
    return run_.call.shard.tokens_sharded || run_.sizes.far || list_;
  }
  ForwardCall prefetch_chunk(const ShardChunk& of) const;
  ForwardCall assemble_chunk(const ShardChunk& of) const;
  void merge_target_logits(ForwardCall& chunk, int buffer) const;
  void forward(ForwardCall& chunk, const ChunkPlace& place);
  void set_local_coefficients(const ForwardCall& chunk, const ShardChunk& of,
                              const ChunkFunction& set_coefficients) const;
  void copy_local_outputs(const ForwardCall& own) const;
  void backward(const ForwardCall& chunk, const ShardChunk& of);
  bool gathers_rounded_sums() const;
  void reduce_hidden(const ShardChunk& of, std::int64_t tokens) const;
  void finish_hidden();

  const Run& run_;
  const Backward backward_;
  std::optional<SharedFarField> far_;
  std::optional<ListedTokens> list_;
  // Chunk whose d_hidden is being reduced over the ranks; count 0: none.
  ShardChunk pending_;
};

}  // namespace logitless::cuda
