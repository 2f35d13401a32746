// The exchanges of a vocabulary-parallel chunk. Everything is merged in the order of ranks, so that
// all ranks get the same bits.
#pragma once

#include <cstdint>
#include <span>

#include "head/cpu/run.h"

namespace logitless::cpu {

class VocabParallel {
 public:
  explicit VocabParallel(const Run& run) : run_(run) {}

  // All-gathers the numbers of valid tokens. Returns them by rank.
  std::span<const std::int64_t> gather_counts() const;
  // Sets the indices of a chunk's tokens in the exchanged buffers. All-gathers hidden states and
  // targets if tokens are sharded.
  void gather_tokens(const ChunkTokens& tokens) const;
  // Writes the targets of the tokens in the order of these indices.
  void copy_targets(const ChunkTokens& tokens, std::int32_t* vocab_ids) const;
  // Merges the outputs of the forward over the ranks into those of the global vocabulary.
  void merge_states(const ForwardChunk& chunk) const;
  // Adds the ranks' partial sums of d_hidden in fp32. Returns the sums [count, D] of this rank's
  // tokens, or of all if all ranks have all tokens.
  std::span<const float> reduce_hidden(const ChunkTokens& tokens) const;

 private:
  const Run& run_;
};

// The forward of a rank without vocabulary entries.
void forward_nothing(const ForwardChunk& chunk);

}  // namespace logitless::cpu
