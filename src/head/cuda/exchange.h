// The common parts of all calls over several ranks on a GPU: the communication stream, the group's
// exchange memory, and sums over the tokens of all ranks.
#pragma once

#include <functional>

#include "head/cuda/run.h"

namespace logitless::cuda {

inline const CommStream& comm_of(const Run& run) { return *run.call.shard.comm_stream; }
inline Stream comm_stream_of(const Run& run) { return comm_of(run).stream.get(); }

// Orders subsequent work on the communication stream after everything enqueued on the call's stream
// so far.
void comm_stream_waits(const Run& run);
// Runs a call that receives into the group's exchange memory, which all plans of the group share:
// it waits for the last call that did, on any stream. Launches of a captured graph must be ordered
// by the caller.
void with_exchange_memory(const Run& run, const std::function<void()>& body);

// Throws on all ranks if their numbers of tokens or their orders differ. Sharded tokens may differ
// in number: each rank passes 0. Only the first check of a call exchanges anything, so a call may
// come here from global_denominator and once more from its loop.
void require_same_tokens(const Run& run);
// Throws here, before the first collective: a kernel would throw later, and on this rank alone.
void require_aligned_operands(const Run& run);
// Marks that no rank has a bad target yet. Kernels do so themselves, except where they do not read
// the caller's targets.
void reset_bad_targets(const Run& run);

// Returns the denominator of a mean over the ranks of sharded tokens and the replicas; null if the
// local tokens are all. Collective, like finish_sharded, which replaces finish_loss for sharded
// tokens.
const double* global_denominator(const Run& run, const LossCall& loss);
void finish_sharded(const Run& run, const LossCall& loss);

// Runs a weight-gathered call (head/schedule/weight_gathered.h).
void run_weight_gathered(const Run& run, const ChunkFunction& set_coefficients);

}  // namespace logitless::cuda
