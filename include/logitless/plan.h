// A memory budget in, the fastest plan that fits out, and the reasons.
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
  forward = 0,    // 1 pass; no gradients
  dense = 1,      // 3 passes; exp(z) of one chunk of tokens is kept in 16 bit (32 for f32 inputs)
  recompute = 2,  // 4 passes; one vocabulary slice at a time
  stored = 3,     // 4 - f passes; a fraction f of exp(z) is kept
  // 1 + 3k passes: a fraction k of the vocabulary's tiles is computed again for the gradients, the
  // rest enters by its mass. Exact loss, gradients to an error that tau sets: docs/far_field.md.
  far_backward = 4,
  // 4k passes: the forward, too, computes the tiles that matter alone. The loss has an error.
  far_both = 5,
};
LOGITLESS_API std::string_view name_of(PlanKind kind);

// What a plan may do to the numbers. Anything but exact has to be asked for.
enum class Accuracy : std::uint8_t {
  exact = 0,
  far_backward = 1,  // the loss is exact, gradients may come from the far field
  far_both = 2,      // the loss may, too
};
LOGITLESS_API std::string_view name_of(Accuracy accuracy);

struct PlanRequest {
  // What the plan is for. As it is here: the device of the context that is given, or else of a
  // Context{}. A plan runs in contexts of as many threads as it was made for.
  DeviceLimits device = {};
  // Bytes the plan may take beyond inputs and outputs: a ceiling. The fastest plan that fits,
  // but where that takes more than the fp32 logits would, and no kind is asked for, the plan of 0
  // if that is less. 0: the least workspace within 3 % of the best predicted time among plans of at
  // most a quarter of the fp32 logits (16 MiB at least; 512 where the far field is allowed), three
  // tenths for a dense plan in one chunk, or the least plan if none is that small. Of words over a
  // GPU's ranks within 1 %, and what up to 16384 tokens exchange of dim numbers each comes on top.
  std::size_t memory_budget = 0;
  // A kind to use, or none: the fastest that fits.
  std::optional<PlanKind> kind = {};
  // Of PlanKind::stored: the fraction wanted in (0, 1), or 0 for as much as the budget holds.
  double stored_fraction = 0.0;
  // The planner takes the far field only where it predicts that it is faster; kind = far_backward
  // or far_both takes it anyway, or fails where it cannot be.
  Accuracy accuracy = Accuracy::exact;
  // Of the far field: tiles with more than this probability for a token are computed exactly, for
  // its block of tokens. In (0, 1); 0: the default, 0.003.
  float tau = 0.0f;
  // Of the far field: d_weight and d_bias of far tiles are corrected by this many times what a
  // sample of one block of tokens in this many shows them to be off. Their error is then larger in
  // a call, and zero in the mean over calls: what training needs, where each call has its own
  // CrossEntropyInputs::sample_seed. Costs 2 / sample_every passes at most, and on a GPU
  // one of its thin products again. 0: off.
  std::int64_t sample_every = 0;
  // Of the far field: tokens whose d_hidden is computed exactly as well, for
  // FarFieldStatistics::audited_error. 0: none. Of tokens spread over the ranks of GPUs as many on
  // each, so that there may be a few more, or fewer where a rank has not so many.
  std::int64_t audit_rows = 0;
  // Of plan_head: words spread over ranks. shape is then this rank's, with its own words. Planning
  // is collective. The calls of tensors take it from their inputs.
  Sharding sharding = {};
};

struct ShardAgreement;  // of the ranks of a sharding, internal

// One candidate of a choice.
struct PlanCandidate {
  PlanKind kind = PlanKind::forward;
  bool possible = false;
  std::string reason = {};          // why it was not chosen, or "chosen"
  double passes = 0.0;              // over tokens * vocab * dim multiply-adds
  std::size_t workspace_bytes = 0;  // the least at about its speed; the least of all if none fits
  std::string keeps = {};           // what of that is big; empty on a GPU
  double predicted_seconds = 0.0;
};

// The plan of one head. A value: copy it, keep it, use it for any call of at most shape.tokens
// tokens.
class LOGITLESS_API LossPlan {
 public:
  LossPlan() = default;

  PlanKind kind = PlanKind::forward;
  HeadShape shape;
  HeadFeatures features;
  std::string kernel;             // name of the kernel it runs on
  std::string kernel_reasons;     // why earlier kernels of the list were declined, a line each
  int threads = 1;                // threads the workspace has room for; 0 on a GPU
  std::int64_t chunk_tokens = 0;  // tokens per chunk of the outer loop
  std::int64_t slab_vocab = 0;  // vocabulary entries whose gradient of the logits exists at a time
  std::int64_t stored_vocab = 0;  // vocabulary entries whose exp(z) is kept per chunk
  // On a GPU, of the first chunk of first_tokens: d_weight of the words kept is made in so many
  // ranges of words, and until it is, its memory holds exp(z) of all of them but the last; where
  // some words are not kept, also their gradients, of more than slab_vocab words at a time. 0: it
  // holds nothing else, and the first chunk is as large as the others.
  int weight_ranges = 0;
  std::int64_t first_tokens = 0;
  // Where weights move: rows of each rank that are gathered at a time; else 0.
  std::int64_t piece_rows = 0;
  // On the CPU, of a 16-bit d_weight under a budget that does not hold the sums of all of it:
  // vocabulary entries whose d_weight is made at a time, after everything else and in a pass of its
  // own; else 0.
  std::int64_t weight_words = 0;
  double passes = 0.0;
  double predicted_seconds = 0.0;  // rough on the CPU: a nominal rate of the kernel times the work
  std::size_t memory_budget = 0;   // 0: the default
  // Of the default: what no plan was to exceed for one thread (chunks do not depend on how many
  // there are); 0 where the least one does.
  std::size_t default_limit = 0;
  float tau = 0.0f;               // of the far field, else 0
  std::int64_t sample_every = 0;  // likewise
  // Of the far field: the exact plan of the tokens audited, or null.
  std::shared_ptr<const LossPlan> audit;
  std::vector<PlanCandidate> candidates;
  std::shared_ptr<ShardAgreement> agreement;  // with the other ranks; null without sharding
  std::string note;      // of a workspace larger than the fp32 logits: what else there is
  std::string movement;  // of spread tokens: what moves between the ranks, and why; lines

  // Of words over ranks on a GPU: bytes beside the workspace, of the communicator's own memory
  // (Communicator::exchange_memory), which plans of the group share; 0: exchanges are in the
  // workspace. The budget is of both.
  std::size_t exchange_bytes = 0;

  // Bytes of the one allocation a call needs beyond inputs and outputs. Exact.
  std::size_t workspace_bytes() const { return workspace_bytes_; }
  // Bytes that the logits of the unfused loss take in fp32: tokens * vocab * 4.
  std::size_t logits_bytes() const {
    return static_cast<std::size_t>(shape.tokens) * static_cast<std::size_t>(shape.vocab) * 4;
  }
  // Strategy, kernel, chunk sizes, passes, workspace, and why not the others. Several lines.
  std::string explain() const;

 private:
  friend struct LossPlanAccess;
  std::size_t workspace_bytes_ = 0;
};

// The fastest plan that fits; of plans that are about as fast (3 %), one that holds less than the
// fp32 logits would. Pure: asks nothing of the machine but what request.device says, and, where
// that leaves it open, how many threads a Context{} takes and which kernels this processor runs.
// Throws InvalidArgument on impossible sizes, or a budget below every plan, naming the least one
// and what makes it large; Unsupported when a wanted kind cannot serve the features, with the
// reason.
LOGITLESS_API LossPlan plan_head(const HeadShape& shape, const HeadFeatures& features,
                                 const PlanRequest& request = {});
// The same for the device and threads of a context. Throws InvalidArgument when request.device is
// set to something else.
LOGITLESS_API LossPlan plan_head(const Context& context, const HeadShape& shape,
                                 const HeadFeatures& features, const PlanRequest& request = {});

}  // namespace logitless
