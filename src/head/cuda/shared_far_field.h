// The far field of a vocabulary over ranks on a GPU. Each rank selects local tiles by itself, from
// global totals. Exchanges use the order in which a chunk was made, the same on all ranks. Each
// rank computes in its local order, by its selected tiles.
#pragma once

#include "head/cuda/far_field.h"

namespace logitless::cuda {

// A chunk of a vocabulary-parallel call: tokens [first, first + count), of each rank if tokens are
// sharded.
struct ShardChunk {
  std::int64_t first = 0, count = 0;
  int buffer = 0;  // index of its input buffers
  ChunkPlace place = {};
};
// Returns the call for this rank's tokens of a chunk, without padding, in the order of the chunk.
ForwardCall call_of_local_tokens(const Run& run, const ShardChunk& of);

class SharedFarField {
 public:
  SharedFarField(const Run& run, FarField& far) : run_(run), far_(far) {}

  void begin() const;
  // Returns the order of this rank's tokens, the same on all ranks.
  const std::int32_t* token_rows() const { return far_.token_order().slots; }
  // The same as the function above, with the order that the outputs are scattered by.
  ForwardCall call_of_local_tokens(const ShardChunk& of) const;
  // Writes this rank's outputs of a chunk into the caller's.
  void give_outputs(const ForwardCall& own) const;
  // Writes the chunk's records of the local shard into `mine`; for far_both they include the
  // estimates of skipped tiles.
  void forward(ForwardCall& chunk, bool first_chunk, TokenRecord* mine);
  // Computes the gradients of the local shard, and its partial sums of d_hidden.
  void backward(const ForwardCall& chunk, const ShardChunk& of);
  // The error of a token's d_hidden is at most the sum of the ranks' bounds.
  void exchange_bounds(const ForwardCall& chunk, const ShardChunk& of) const;
  // Computes the norm and saves the rows of audited tokens, from sums [tokens, D]: d_hidden of the
  // global vocabulary before rounding, which follows.
  void finish_hidden(const float* sums, const ShardChunk& of) const;

 private:
  ForwardCall call_in_local_order(const ForwardCall& chunk) const;
  void forward_local(const ForwardCall& chunk, bool first_chunk);
  void exchange_totals(const ForwardCall* local, std::int64_t tokens) const;

  const Run& run_;
  FarField& far_;
  ForwardCall local_;  // the chunk in the local order, from its forward to its backward
};

// All-gathers the far field's sums of all ranks, after the audit, for far_statistics.
void publish_far_sums(const Run& run);

}  // namespace logitless::cuda
