#include "compiler/target/cpu.h"

#include "compiler/target/head_workspace.h"
#include "head/plan/choose.h"
#include "head/program_head.h"

namespace logitless::ir {
namespace {

constexpr std::int64_t kMostHeadBytes = 128 << 20;  // larger chunks gain nothing

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
  shape.causal = a.scores.causal;
  shape.scale = static_cast<float>(a.scale);
  shape.softcap = static_cast<float>(a.scores.softcap);
  shape.window = a.scores.window;
  if (a.scores.bias) {
    const View& bias = a.bias;
    shape.bias = {{nullptr, bias.strides[0], bias.strides[1], bias.strides[2]}, bias.dtype};
  }
  if (a.scores.segments) {
    const View &queries = a.query_segments, &keys = a.key_segments;
    shape.segments = {nullptr, nullptr, queries.dtype, queries.strides[0], keys.strides[0]};
  }
  shape.threads = threads;
  return shape;
}

std::string CpuTarget::refuse(const Instruction& instruction) const {
  const auto* gemm = std::get_if<Gemm>(&instruction.what);
  if (gemm != nullptr && gemm->epilogue.any())
    return "fused_dot: no kernel of a CPU takes it; expected a dot and what follows it";
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

Rates CpuTarget::rates() const {
  Rates r;
  r.products16 = r.products32 = 100e9;
  r.products64 = 50e9;
  r.bytes = 10e9;
  r.functions = 1e9;
  r.launch = 0.5e-6;
  r.tile_rows = 4;
  r.tile_columns = 16;
  return r;
}

std::int64_t CpuTarget::parts_bytes(const Pointwise& reduction) const {
  if (reduction.parts <= 1) return 0;
  std::int64_t kept = 1;
  const std::size_t rank = reduction.shape.size(),
                    reduced = static_cast<std::size_t>(reduction.reduced);
  for (std::size_t d = 0; d < rank - reduced; ++d)
    kept *= reduction.shape[reduction.columns ? reduced + d : d];
  return reduction.parts * kept * (reduction.wide ? 8 : 4);
}

// Plans for one thread, so that neither chunks nor bits depend on the number of threads.
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
                                 : plan_without_limit(shape, features, request, kMostHeadBytes);
  const auto targets =
      static_cast<std::size_t>(program_head_scratch(DeviceKind::cpu, shape.tokens).workspace);
  head.value_bytes = static_cast<std::int64_t>(targets + alone.workspace_bytes());
  head.plan = std::make_shared<const LossPlan>(with_threads(std::move(alone), threads_));
  head.bytes = static_cast<std::int64_t>(targets + head.plan->workspace_bytes());
  return head;
}

}  // namespace logitless::ir
