#include "compiler/target/cpu.h"

#include <algorithm>

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

GemmProblem gemm_problem(const Gemm& gemm, int threads) {
  GemmProblem p;
  const std::size_t outer = gemm.outer.size();
  const auto batch = [&](const View& v) { return outer > 0 ? v.strides[outer - 1] : 0; };
  p.batch = outer > 0 ? gemm.outer.back() : 1;
  p.m = gemm.m;
  p.n = gemm.n;
  p.k = gemm.k;
  p.a = {nullptr, gemm.a.dtype, batch(gemm.a), gemm.a.strides[outer], gemm.a.strides[outer + 1]};
  p.b = {nullptr, gemm.b.dtype, batch(gemm.b), gemm.b.strides[outer], gemm.b.strides[outer + 1]};
  p.c = {nullptr, gemm.c.dtype, batch(gemm.c), gemm.c.strides[outer], gemm.c.strides[outer + 1]};
  p.accumulate = gemm.accumulate;
  p.threads = threads;
  return p;
}

AttentionShape attention_shape(const Attention& a, int threads) {
  AttentionShape shape;
  shape.batch = a.q.shape[0];
  shape.heads = a.q.shape[1];
  shape.kv_heads = a.k.shape[1];
  shape.queries = a.q.shape[2];
  shape.keys = a.k.shape[2];
  shape.dim = a.q.shape[3];
  shape.dtype = a.q.dtype;
  shape.causal = a.causal;
  shape.scale = static_cast<float>(a.scale);
  shape.threads = threads;
  return shape;
}

std::string CpuTarget::refuse(const Instruction& instruction) const {
  const auto* attention = std::get_if<Attention>(&instruction.what);
  if (attention != nullptr && attention->q.dtype == DType::f64)
    return "attention: no kernel takes f64; expected f32, bf16 or f16";
  return {};
}

std::int64_t CpuTarget::scratch_bytes(const Gemm& gemm) const {
  return static_cast<std::int64_t>(gemm_scratch_bytes(gemm_problem(gemm, threads_)));
}
std::int64_t CpuTarget::scratch_bytes(const Attention& attention) const {
  return static_cast<std::int64_t>(
      attention_scratch_bytes(attention_shape(attention, threads_), attention.gradient));
}

// Planned for one thread, so that neither chunks nor bits depend on how many there are.
HeadPlan CpuTarget::head_plan(const HeadShape& shape, const HeadFeatures& features,
                              std::int64_t workspace) const {
  ContextOptions options;
  options.threads = threads_;
  HeadPlan head;
  head.context = std::make_shared<const Context>(options);
  PlanRequest request;
  request.device = head.context->device();
  request.device.threads = 1;
  LossPlan alone = workspace > 0 ? plan_within(shape, features, request, workspace)
                                 : plan_without_limit(shape, features, request);
  // Targets as the engine takes them, then its workspace.
  const std::size_t targets = (static_cast<std::size_t>(shape.tokens) * 8 + 63) / 64 * 64;
  head.value_bytes = static_cast<std::int64_t>(targets + alone.workspace_bytes());
  head.plan = std::make_shared<const LossPlan>(with_threads(std::move(alone), threads_));
  head.bytes = static_cast<std::int64_t>(targets + head.plan->workspace_bytes());
  return head;
}

}  // namespace logitless::ir
