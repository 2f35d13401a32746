// Plans of a head: from a memory budget to a fast plan that fits, with the reasons.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "logitless/bytes.h"
#include "logitless/context.h"
#include "logitless/export.h"
#include "logitless/head_shape.h"
#include "logitless/sharding.h"

namespace logitless {

enum class PlanKind : std::uint8_t {
  forward = 0,    // 1 GEMM; no gradients
  dense = 1,      // 3 GEMMs; exp(z) of one chunk of tokens is saved in 16 bit (32 for f32 inputs)
  recompute = 2,  // 4 GEMMs; one vocabulary block at a time
  stored = 3,     // 4 - f GEMMs; a fraction f of exp(z) is saved
  // 1 + 3k GEMMs: gradients recompute a fraction k of the vocabulary's tiles, and the others enter
  // by their mass. The loss is exact, and tau sets the gradients' error: docs/use/far_field.md.
  far_backward = 4,
  // 4k GEMMs: the forward, too, computes only the selected tiles. The loss has an error.
  far_both = 5,
};
LOGITLESS_API std::string_view name_of(PlanKind kind);

// The approximation that a plan may use. All but exact must be requested.
enum class Accuracy : std::uint8_t {
  exact = 0,
  far_backward = 1,  // exact loss; gradients may use the far field
  far_both = 2,      // the loss may use it too
};
LOGITLESS_API std::string_view name_of(Accuracy accuracy);

struct PlanRequest {
  // Device of the plan. By default it is that of the given context, or else of a Context{}. A plan
  // runs in contexts with as many threads as it was made for.
  DeviceLimits device = {};
  // Ceiling in bytes of the plan's memory beyond inputs and outputs. A plan takes no more of it
  // than its speed is worth: its predicted time is within 1 % of the best below the ceiling, and
  // each such hundredth saves at least a tenth of the workspace. It stays below the fp32 logits, or
  // what a default may take, where such a plan exists. A head of at most 64 MiB of fp32 logits
  // takes the default plan if that is smaller and at most 6 % slower. A requested kind and the far
  // field take the fastest plan below the same ceiling.
  //
  // 0 is the default: the least workspace within 3 % of the best predicted time below a limit. That
  // is a quarter of the fp32 logits, or three tenths for a dense plan in one chunk. The limit is
  // at least 16 MiB; on a GPU at least all of the logits up to 64 MiB; and at least 512 MiB where
  // the far field is allowed. If no plan is that small, the least one is taken. A vocabulary
  // sharded over GPUs has 1 % instead of 3 %. Its exchange buffers of up to 16384 tokens of dim
  // numbers each come on top.
  std::size_t memory_budget = 0;
  // A kind to use, or none: the planner chooses.
  std::optional<PlanKind> kind = {};
  // Fraction of PlanKind::stored, in (0, 1), or 0 for as much as the budget holds.
  double stored_fraction = 0.0;
  // The planner uses the far field only where it predicts a gain. kind = far_backward or far_both
  // uses it anyway, or fails where it cannot.
  Accuracy accuracy = Accuracy::exact;
  // Threshold of the far field, in (0, 1): a tile with more probability than this for a token is
  // computed exactly for its block of tokens. 0: the default, 0.003.
  float tau = 0.0f;
  // Importance sampling of the far field: one block of tokens in this many is sampled to correct
  // d_weight and d_bias of skipped tiles. Their error grows in a single call, but its mean over
  // calls is zero. Training needs that, with another CrossEntropyInputs::sample_seed in each call.
  // Costs 2 / sample_every GEMMs at most, and on a GPU one more of its low-rank matrix products. 0:
  // off.
  std::int64_t sample_every = 0;
  // Tokens of the far field whose d_hidden is also computed exactly, for
  // FarFieldStatistics::audited_error. 0: none. Tokens sharded over GPUs are audited equally on
  // each rank: a few more in all, or fewer where a rank has too few.
  std::int64_t audit_rows = 0;
  // Share of the tokens that is expected to be ignored, in [0, 1]: a hint for exact plans on a GPU,
  // without a sharding. Predicted times are those of the other tokens, at least an eighth of all.
  // Gradient GEMMs by cuBLAS, whose sizes the host sets, take as many tokens as are then expected
  // to count. More of them are multiplied only where they do count, by a slower kernel
  // (docs/use/gpu.md). So results differ by the order of sums alone.
  float expected_ignored = 0.0f;
  // Sharding for plan_head. `shape` then has the local vocabulary shard, and planning is
  // collective. Calls with tensors take it from their inputs.
  Sharding sharding = {};
};

struct ShardAgreement;  // private; agreement of the ranks of a sharding
struct PlanLayout;      // private; offsets in the workspace

// One candidate of a choice.
struct PlanCandidate {
  PlanKind kind = PlanKind::forward;
  bool possible = false;
  std::string reason = {};          // why it was not chosen, or "chosen"
  double passes = 0.0;              // GEMMs of tokens * vocab * dim multiply-adds
  std::size_t workspace_bytes = 0;  // the least at about its speed; the least possible if none fits
  std::string keeps = {};           // its large parts; empty on a GPU
  double predicted_seconds = 0.0;
};

// The plan of one head. It is a value: copy it, keep it, use it for any call of at most
// shape.tokens tokens.
class LOGITLESS_API LossPlan {
 public:
  LossPlan() = default;

  PlanKind kind = PlanKind::forward;
  HeadShape shape;
  HeadFeatures features;
  std::string kernel;             // name of its kernel
  std::string kernel_reasons;     // reasons against earlier kernels of the list, a line each
  int threads = 1;                // threads that the workspace holds scratch for; 0 on a GPU
  std::int64_t chunk_tokens = 0;  // tokens per chunk of the outer loop
  // vocabulary entries of one vocabulary block, whose logit gradients exist at a time
  std::int64_t block_vocab = 0;
  std::int64_t stored_vocab = 0;  // vocabulary entries whose exp(z) is saved per chunk
  // On a GPU, the first chunk, of first_tokens tokens, may reuse d_weight's memory. d_weight of the
  // saved vocabulary is then computed in so many blocks. Until then its memory holds exp(z) of all
  // blocks but the last. If some entries are not saved, it also holds the gradients of more than
  // block_vocab entries at a time. 0: nothing is reused, and the first chunk is as large as the
  // others.
  int weight_ranges = 0;
  std::int64_t first_tokens = 0;
  // Weight-gathered plans: rows of each rank that are gathered at a time; else 0.
  std::int64_t slice_rows = 0;
  // Vocabulary entries whose 16-bit d_weight is computed at a time, when the budget does not hold
  // its full sums; else 0. It takes an additional GEMM after everything else.
  std::int64_t weight_vocab = 0;
  double passes = 0.0;
  double predicted_seconds = 0.0;  // approximate on the CPU: the work over a kernel's nominal rate
  bool calibrated = false;         // predicted by rates measured on the card (calibration.h)
  float expected_ignored = 0.0f;   // of the request
  std::size_t memory_budget = 0;   // 0: the default
  // The limit of the default plan for one thread (chunks do not depend on their number); 0 where
  // the least plan exceeds it. Under a budget the ceiling of the plan, or 0 for a requested kind.
  std::size_t default_limit = 0;
  float tau = 0.0f;               // threshold of the far field, else 0
  bool budget_is_plenty = false;  // under a budget: this is the default plan
  std::int64_t sample_every = 0;  // likewise
  // The exact plan of the audited tokens of the far field, or null.
  std::shared_ptr<const LossPlan> audit;
  std::vector<PlanCandidate> candidates;
  std::shared_ptr<ShardAgreement> agreement;  // with the other ranks; null without sharding
  std::string note;             // on a workspace larger than the fp32 logits: the alternatives
  std::string exchange_choice;  // of sharded tokens: the tensors that are exchanged, and why; lines

  // Bytes of the communicator's own memory (Communicator::exchange_memory) beside the workspace,
  // for a vocabulary sharded over GPUs. Plans of the group share it. 0: exchanges use the
  // workspace. The budget covers both.
  std::size_t exchange_bytes = 0;

  // Returns the exact bytes of the one allocation that a call needs beyond inputs and outputs.
  std::size_t workspace_bytes() const { return workspace_bytes_; }
  // Returns the bytes of the unfused loss's fp32 logits: tokens * vocab * 4.
  std::size_t logits_bytes() const {
    return static_cast<std::size_t>(shape.tokens) * static_cast<std::size_t>(shape.vocab) * 4;
  }
  // Explains strategy, kernel, chunk sizes, GEMMs, workspace, and the rejected plans in several
  // lines.
  std::string explain() const;

 private:
  friend struct LossPlanAccess;
  std::size_t workspace_bytes_ = 0;
  std::shared_ptr<const PlanLayout> layout_;
};

// Chooses a plan as PlanRequest::memory_budget says. Pure: it uses request.device, and only where
// that is open the threads of a Context{} and the kernels that this processor runs. Throws
// InvalidArgument on impossible sizes, or a budget below every plan, naming the least one and its
// large parts. Throws Unsupported with the reason when a requested kind cannot serve the features.
LOGITLESS_API LossPlan plan_head(const HeadShape& shape, const HeadFeatures& features,
                                 const PlanRequest& request = {});
// The same for the device and threads of a context. Throws InvalidArgument when request.device is
// set to something else.
LOGITLESS_API LossPlan plan_head(const Context& context, const HeadShape& shape,
                                 const HeadFeatures& features, const PlanRequest& request = {});

// Returns whether a kernel of the device takes heads of this dtype and width whose vocabulary is
// sharded over ranks. Otherwise such calls throw Unsupported, and the weight has to be gathered.
LOGITLESS_API bool supports_vocab_parallel(const DeviceLimits& device, DType dtype,
                                           std::int64_t dim);

}  // namespace logitless
