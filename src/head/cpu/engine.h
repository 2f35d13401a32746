// The chunk loop of every call of the head: forward of a chunk, a function of
// each token's outputs, backward.
#pragma once

#include <cstdint>

#include "head/cpu/far_field.h"
#include "head/cpu/run.h"
#include "head/cpu/vocab_parallel.h"

namespace logitless::cpu {

class Engine {
 public:
  // Throws InvalidArgument if plan or workspace do not fit the call, or a
  // target is out of range. Writes no output.
  explicit Engine(const HeadCall& call, const ChosenRows& chosen = {});
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  std::int64_t valid_tokens() const { return run_.valid; }
  // Returns the valid tokens after run: of all ranks if tokens are sharded,
  // else of this call.
  std::int64_t all_valid_tokens() const { return all_valid_; }
  const std::int64_t* valid_rows() const { return run_.valid_rows(); }

  const TargetReader& targets() const { return run_.targets; }

  // Audits after run of a far-field plan. `function` as in run.
  void audit(TokenFunction function) { far_.audit(function); }
  // Returns the statistics after run and the audit.
  FarFieldStatistics far_statistics() const {
    return run_.far() ? far_.statistics() : FarFieldStatistics{};
  }

  // Runs all chunks. All requested gradients are then complete, including rows
  // of ignored tokens.
  void run(TokenFunction function);

 private:
  std::int64_t count_tokens();  // of the rank with the most
  void run_chunk(const ChunkTokens& tokens, bool first_chunk, bool last_chunk,
                 TokenFunction function);
  void backward(const ForwardChunk& forward, const ChunkTokens& tokens, bool first_chunk,
                bool last_chunk);
  void finish_bias() const;

  const Run run_;
  const VocabParallel ranks_{run_};
  FarField far_{run_};
  std::int64_t all_valid_ = 0;
};

}  // namespace logitless::cpu
