#include "compiler/target/cuda.h"

#include <algorithm>
#include <numeric>

#include "compiler/exec/cuda/codegen.h"
#include "compiler/target/head_workspace.h"
#include "core/check.h"
#include "head/program_head.h"
#include "kernels/device/gpu_kernels.h"
#include "kernels/device/sort.h"

namespace logitless::ir {
cuda::GemmShape gemm_shape(const Gemm& gemm, std::span<const std::int64_t> alignments) {
  const std::size_t outer = gemm.outer.size();
  const auto layout = [&](const View& v) {
    cuda::MatrixLayout m;
    m.dtype = v.dtype;
    m.batch_stride = outer > 0 ? v.strides[outer - 1] : 0;
    m.row_stride = v.strides[outer];
    m.col_stride = v.strides[outer + 1];
    const auto size = static_cast<std::int64_t>(size_of(v.dtype));
    m.alignment = alignments.empty() ? 16 : alignments[static_cast<std::size_t>(v.buffer)];
    m.alignment = std::gcd(m.alignment, v.offset * size);
    for (std::size_t d = 0; d < outer; ++d)
      m.alignment = std::gcd(m.alignment, v.strides[d] * size);
    return m;
  };
  cuda::GemmShape p;
  p.batch = outer > 0 ? gemm.outer.back() : 1;
  p.m = gemm.m;
  p.n = gemm.n;
  p.k = gemm.k;
  p.a = layout(gemm.a);
  p.b = layout(gemm.b);
  p.c = layout(gemm.c);
  p.accumulate = gemm.accumulate;
  cuda::GemmEpilogue& e = p.epilogue;
  e.bias = gemm.epilogue.bias;
  e.residual = gemm.epilogue.residual;
  e.gelu = gemm.epilogue.gelu;
  e.gelu_gradient = gemm.epilogue.gelu_gradient;
  if (e.residual) e.residual_layout = layout(gemm.residual);
  if (gemm.aux.buffer >= 0) e.aux_layout = layout(gemm.aux);
  if (gemm.bias.buffer >= 0 && !alignments.empty())
    e.bias_alignment =
        std::gcd(alignments[static_cast<std::size_t>(gemm.bias.buffer)],
                 gemm.bias.offset * static_cast<std::int64_t>(size_of(gemm.bias.dtype)));
  return p;
}

cuda::AttentionCall attention_call(const Attention& a) {
  cuda::AttentionCall call;
  call.batch = a.q.shape[0];
  call.heads = a.q.shape[1];
  call.kv_heads = a.k.shape[1];
  call.queries = a.q.shape[2];
  call.keys = a.k.shape[2];
  call.dim = a.q.shape[3];
  call.dtype = a.q.dtype;
  call.causal = a.scores.causal;
  call.scale = static_cast<float>(a.scale);
  return call;
}

cuda::ScatterCall scatter_call(const ScatterAdd& s) {
  cuda::ScatterCall call;
  call.index_dtype = s.index.dtype;
  call.dtype = s.updates.dtype;
  call.out_dtype = s.out.dtype;
  call.rows = s.out.shape[0];
  call.count = elements_of(s.index);
  call.width = call.rows > 0 ? elements_of(s.out) / call.rows : 0;
  return call;
}

std::string CudaTarget::refuse(const Instruction& instruction) const {
  const auto rank = [](const View& v) {
    return v.shape.size() <= cuda::kMostDims
               ? std::string()
               : concat("tensors of ", v.shape.size(), " dimensions on a GPU, expected at most ",
                        cuda::kMostDims);
  };
  if (const auto* attention = std::get_if<Attention>(&instruction.what)) {
    const Scores& scores = attention->scores;
    if (scores != Scores{.causal = scores.causal})
      return concat("attention: no kernel of a GPU takes ", text_of(scores),
                    " scores; expected all of them, or causal ones");
    return cuda::attention_unsupported(attention_call(*attention), compute_capability_);
  }
  if (const auto* pick = std::get_if<Pick>(&instruction.what)) return rank(pick->out);
  if (const auto* argmax = std::get_if<ArgMax>(&instruction.what)) return rank(argmax->out);
  if (const auto* scan = std::get_if<Scan>(&instruction.what)) return rank(scan->out);
  if (const auto* sort = std::get_if<Sort>(&instruction.what)) {
    const std::int64_t size = sort->x.shape[static_cast<std::size_t>(sort->axis)];
    if (size > cuda::kMostSorted)
      return concat("sort of rows of ", size, " elements on a GPU, expected at most ",
                    cuda::kMostSorted);
    return rank(sort->x);
  }
  if (const auto* put = std::get_if<Put>(&instruction.what)) return rank(put->out);
  if (const auto* fill = std::get_if<Fill>(&instruction.what)) return rank(fill->out);
  return {};
}

std::int64_t CudaTarget::most_group_columns() const {
  if (!runs_) return 0;
  constexpr std::int64_t kMostOfClusters = 8 * 36864;  // 72 elements of each of 512 threads
  return compute_capability_ >= 90 ? kMostOfClusters : RowGroup::kMostColumnsOfBlock;
}

bool CudaTarget::gelu_epilogues() const {
  return epilogues() && cuda::instruction_capability(compute_capability_) == 90;
}

std::optional<ProductEngine> CudaTarget::product_engine() const {
  const int capability = cuda::instruction_capability(compute_capability_);
  if (!runs_ || !epilogues_ || capability < 80) return std::nullopt;
  return capability == 90 ? ProductEngine::sm90 : ProductEngine::sm80;
}

Rates CudaTarget::rates() const {
  Rates r;
  r.launch = runs_ ? 2.5e-6 : kFrameworkLaunch;
  r.fuses = runs_;
  r.products_wait = true;
  r.head_products = 0.89;  // plans of two sizes on an H200, by Hopper's kernels
  r.head_chunk = 100e-6;   // as heads are planned (kernels/cuda/head/kernels.cpp)
  r.tile_rows = r.tile_columns = 128;
  // Costs in exponentials: one for each score, and more in the backward for the sums of d_q. Within
  // 20 % of Hopper's kernels from 1024 to 4096 keys.
  r.attention_products = 1.0;
  r.score_functions = 1.0;
  r.score_gradient_functions = 4.0;
  r.score_rows = 128;
  const bool hopper = compute_capability_ >= 90 && compute_capability_ < 100;
  r.products16 = card_.gemm_flops;
  r.products32 = (hopper ? 50.0 / 67.0 : 0.83) * card_.fp32_flops;
  // Data centre cards alone have more fp64 units than 1 for 64 of fp32.
  const double wide = hopper                           ? 50.0 / 67.0
                      : compute_capability_ == 80      ? 0.77
                      : compute_capability_ / 10 == 10 ? 0.4
                                                       : 1.0 / 64;
  r.products64 = wide * card_.fp32_flops;
  r.bytes = card_.copy_bytes_per_second;
  r.functions = 3e12 * (card_.sms / 132.0);
  r.units = card_.sms;
  if (product_engine() == ProductEngine::sm90) {  // two SMs have two tiles of 128 x 256
    r.epilogue_products = card_.gemm_flops;
    r.epilogue_side = 256;
    r.epilogue_tiles = card_.sms / 2;
  } else {  // an SM has two tiles
    // cuBLAS has faster instructions than mma.sync on Hopper and the data centre's Blackwell alone.
    // 0.88 was measured on an H200. The same share of the instruction's rate is 0.8 of cuBLAS's
    // elsewhere, where nobody measured.
    const bool faster = compute_capability_ >= 90 && compute_capability_ < 120;
    r.epilogue_products = faster ? 0.88 * card_.tile_flops : 0.8 * card_.gemm_flops;
    r.epilogue_side = 128;
    r.epilogue_tiles = 2 * card_.sms;
  }
  return r;
}

std::int64_t CudaTarget::scratch_bytes(const Gemm& gemm) const {
  return static_cast<std::int64_t>(cuda::gemm_workspace_bytes(gemm_shape(gemm, {})));
}
std::int64_t CudaTarget::additional_bytes(const Gemm& gemm) const {
  std::int64_t calls = 1;  // the innermost outer dimension is a batch
  for (std::size_t d = 0; d + 1 < gemm.outer.size(); ++d) calls *= gemm.outer[d];
  return calls * cuda::gemm_additional_bytes(gemm_shape(gemm, {}));
}
std::int64_t CudaTarget::scratch_bytes(const Attention& a) const {
  return static_cast<std::int64_t>(
      cuda::attention_scratch_bytes(attention_call(a), a.gradient, compute_capability_));
}
std::int64_t CudaTarget::scratch_bytes(const ScatterAdd& scatter) const {
  return static_cast<std::int64_t>(cuda::scatter_workspace_bytes(scatter_call(scatter)));
}

std::int64_t CudaTarget::scratch_bytes(const RowGroup& group) const {
  return row_group_scratch_bytes(group);
}
std::int64_t CudaTarget::parts_bytes(const Pointwise& reduction) const {
  return pointwise_scratch_bytes(reduction);
}

HeadPlan CudaTarget::head_plan(const HeadShape& shape, const HeadFeatures& features,
                               std::int64_t workspace) const {
  PlanRequest request;
  request.device.kind = DeviceKind::cuda;
  request.device.compute_capability = compute_capability_;
  request.device.card = card_;
  HeadPlan head;
  auto plan = workspace > 0 ? plan_within(shape, features, request, workspace)
                            : plan_head(shape, features, request);
  head.bytes = head.value_bytes = program_head_scratch(DeviceKind::cuda, shape.tokens).workspace +
                                  static_cast<std::int64_t>(plan.workspace_bytes());
  head.plan = std::make_shared<const LossPlan>(std::move(plan));
  return head;
}

}  // namespace logitless::ir
