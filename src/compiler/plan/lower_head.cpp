// A head: the head engine's plan within the workspace given, and its views.
#include <algorithm>

#include "compiler/plan/lowering.h"
#include "head/plan/choose.h"
#include "logitless/error.h"

namespace logitless::ir {
namespace {

// The fastest plan within `bytes`, or within the least power of two times it that one fits into.
LossPlan plan_within(const HeadShape& shape, const HeadFeatures& features, PlanRequest request,
                     std::int64_t bytes) {
  constexpr std::size_t kLeast = 1 << 16;
  request.memory_budget =
      std::max(static_cast<std::size_t>(std::max<std::int64_t>(bytes, 0)), kLeast);
  for (;; request.memory_budget *= 2) {
    try {
      return plan_head(shape, features, request);
    } catch (const InvalidArgument&) {
      if (request.memory_budget > (std::size_t{1} << 46)) throw;
    }
  }
}

// Without a limit nothing is computed twice: the dense plan, in a part of the logits' bytes.
LossPlan plan_without_limit(const HeadShape& shape, const HeadFeatures& features,
                            PlanRequest request) {
  constexpr std::int64_t kMostBytes = 128 << 20;  // larger chunks gain nothing
  constexpr std::int64_t kLogitsShare = 8;
  const LossPlan any = plan_head(shape, features, request);
  for (const PlanCandidate& c : any.candidates) {
    if (c.kind == PlanKind::dense && c.workspace_bytes > 0) request.kind = PlanKind::dense;
  }
  return plan_within(
      shape, features, request,
      std::min(static_cast<std::int64_t>(any.logits_bytes()) / kLogitsShare, kMostBytes));
}

}  // namespace

void Lowering::emit_head(int id) {
  const Node& n = g_.node(id);
  const Head& h = n.attributes.head;
  HeadRun run;
  std::size_t next = 0;
  run.x = contiguous(n.operands[next++]);
  run.w = memory_of(n.operands[next++]);
  run.targets = memory_of(n.operands[next++]);
  if (h.bias) run.bias = memory_of(n.operands[next++]);
  if (h.gradients) {
    run.d_lse = contiguous(n.operands[next++]);
    run.d_logit = contiguous(n.operands[next++]);
  }
  std::int32_t result = 0;
  run.lse = result_of({id, result++});
  run.logit = result_of({id, result++});
  if (h.d_x != DType::i8) run.d_x = result_of({id, result++});
  if (h.d_w != DType::i8) run.d_w = result_of({id, result++});
  if (h.d_bias != DType::i8) run.d_bias = result_of({id, result++});
  run.ignored = h.ignored;

  HeadShape shape;
  shape.dim = run.w.shape[1];
  shape.vocab = run.w.shape[0];
  shape.tokens = elements_of(run.targets);
  shape.dtype = run.x.dtype;
  HeadFeatures features;
  features.bias = h.bias;
  features.logit_scale = static_cast<float>(h.scale);
  features.softcap = static_cast<float>(h.softcap);
  features.d_hidden = h.d_x != DType::i8;
  features.d_weight = h.d_w != DType::i8;
  features.d_bias = h.d_bias != DType::i8;
  if (features.d_hidden) features.d_hidden_dtype = h.d_x;
  if (features.d_weight) features.d_weight_dtype = h.d_w;
  // Planned for one thread, so that neither chunks nor bits depend on how many there are.
  ContextOptions options;
  options.threads = threads_;
  auto context = std::make_shared<const Context>(options);
  PlanRequest request;
  request.device = context->device();
  request.device.threads = 1;
  LossPlan alone = h.workspace > 0 ? plan_within(shape, features, request, h.workspace)
                                   : plan_without_limit(shape, features, request);
  const std::size_t targets = (static_cast<std::size_t>(shape.tokens) * 8 + 63) / 64 * 64;
  const std::size_t value_bytes = targets + alone.workspace_bytes();
  auto plan = std::make_shared<const LossPlan>(with_threads(std::move(alone), threads_));
  run.scratch_bytes = static_cast<std::int64_t>(targets + plan->workspace_bytes());
  run.scratch = add_buffer(Place::arena, run.scratch_bytes, name_of_node(id) + " workspace",
                           static_cast<std::int64_t>(value_bytes));
  p_.multiply_adds += plan->passes * static_cast<double>(shape.tokens) *
                      static_cast<double>(shape.vocab) * static_cast<double>(shape.dim);
  run.plan = std::move(plan);
  run.context = std::move(context);
  push(id, std::move(run));
}

}  // namespace logitless::ir
