// The chunk loop on a GPU: forward of a chunk, a function of its tokens, backward. Enqueues and
// returns.
#pragma once

#include <optional>

#include "head/cuda/far_field.h"
#include "head/cuda/listed_tokens.h"
#include "head/cuda/run.h"

namespace logitless::cuda {

// Runs one call, which must outlive the engine.
class Engine {
 public:
  // Throws InvalidArgument if plan or workspace do not fit the call, or the kernels do not support
  // a tensor's strides. The first call of a far-field plan with an order on a device copies the
  // order there, and waits for the copy.
  explicit Engine(const HeadCall& call);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Run& bound() const { return run_; }

  void run(const ChunkFunction& set_coefficients);
  // Audits after run of a far-field plan: an engine runs the exact plan of the audited tokens, and
  // the results are compared.
  void audit(const ChunkFunction& set_coefficients) const;

  // Split `run` into two calls, each with its own engine, for a dense plan of all tokens at once.
  // The block of exponentials and the outputs stay in the workspace in between. The outputs are
  // those of the call; null ones are not requested.
  ForwardCall forward_saved();
  void backward_saved(const ChunkFunction& set_coefficients);

 private:
  // The engine of an audit: the tokens of `far` in the order of audit.rows.
  Engine(const HeadCall& call, const Run& far, const FarAudit& audit);
  void prepare() const;
  void run_chunks(const ChunkFunction& set_coefficients);
  ForwardCall chunk_call(std::int64_t first, std::int64_t count) const;
  void forward(const ForwardCall& chunk);
  void spread_hidden() const;
  // Computes d_weight after all chunks, see Sizes::weight_apart.
  void run_weight_pass() const;

  Run run_;
  std::optional<FarField> far_;
  std::optional<ListedTokens> list_;
};

}  // namespace logitless::cuda
