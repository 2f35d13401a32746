// A head inside a compiled program. The program's losses give the gradients of each token's
// log-sum-exp and target logit, and the head computes both outputs and its own gradients.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "head/head_call.h"
#include "logitless/cross_entropy.h"

namespace logitless {

struct ProgramHead {
  HeadCall call;            // operands, gradients and features; each run sets plan and workspace
  ConstTensorView targets;  // i32 | i64 [N]; a target outside [0, vocab) has no logit
  std::optional<std::int64_t> ignored;
  // Outputs [N], 0 for ignored tokens. logit and log_prob are also 0 for a target without a logit;
  // log_prob is null if it is not wanted.
  float* lse = nullptr;
  float* logit = nullptr;
  float* log_prob = nullptr;
  const float* d_lse = nullptr;  // [N]; null: the head has no gradients
  const float* d_logit = nullptr;
  std::byte* scratch = nullptr;  // ProgramHeadScratch
};

// Layout of the scratch in bytes: targets int64 [N], on a GPU their d_logit [N], the workspace of
// the head's plan.
struct ProgramHeadScratch {
  std::int64_t deltas = 0, workspace = 0;
};
ProgramHeadScratch program_head_scratch(DeviceKind device, std::int64_t tokens);

// How a far-field plan runs: not at all, or with or without measuring its error.
enum class FarRun : std::uint8_t { none, plain, audited };

// Runs `call`, which is head.call with a plan and a workspace, or the same for the vocabulary shard
// of a rank. Returns the statistics of a far-field plan; a GPU knows those of an audited run alone,
// and waits for them.
std::optional<FarFieldStatistics> run_program_head(const ProgramHead& head, HeadCall call,
                                                   FarRun far = FarRun::none);

// The parts of run_program_head for each device; `call` has the targets of the scratch.
namespace cpu {
std::optional<FarFieldStatistics> run_program_head(const ProgramHead& head, const HeadCall& call,
                                                   FarRun far);
}
namespace cuda {
std::optional<FarFieldStatistics> run_program_head(const ProgramHead& head, const HeadCall& call,
                                                   FarRun far);
}

}  // namespace logitless
