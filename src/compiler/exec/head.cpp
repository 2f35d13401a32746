#include "compiler/exec/executor.h"
#include "core/element.h"
#include "head/engine.h"

namespace logitless::ir {
namespace {

std::byte* address(const View& view, Table table) {
  return table[view.buffer] + view.offset * static_cast<std::int64_t>(size_of(view.dtype));
}
TensorView tensor(const View& view, Table table) {
  if (view.buffer < 0) return {};
  return {address(view, table), view.dtype, view.shape, view.strides};
}

}  // namespace

void run_head(const HeadRun& h, Table table) {
  const LossPlan& plan = *h.plan;
  const std::int64_t rows = plan.shape.tokens;
  // The engine refuses targets outside the vocabulary. Here those have no logit: the rows read word
  // 0 and leave it alone.
  auto* words = reinterpret_cast<std::int64_t*>(table[h.scratch]);
  const TensorView targets = tensor(h.targets, table);
  const FlatIndex at(targets);
  const auto target = [&](std::int64_t row) {
    return load_index(targets.data(), targets.dtype(), at(row));
  };
  const auto hits = [&](std::int64_t word) { return word >= 0 && word < plan.shape.vocab; };
  auto* lse = reinterpret_cast<float*>(address(h.lse, table));
  auto* logit = reinterpret_cast<float*>(address(h.logit, table));
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t word = target(row);
    words[row] = h.ignored && word == *h.ignored ? -1 : hits(word) ? word : 0;
    lse[row] = logit[row] = 0.0f;
  }
  const std::int64_t used = (rows * 8 + 63) / 64 * 64;
  const Workspace workspace(table[h.scratch] + used,
                            static_cast<std::size_t>(h.scratch_bytes - used));
  const ConstTensorView shifted(words, DType::i64, {rows});
  const TargetReader reader(shifted, 1, -1, 0);
  EngineCall call;
  call.context = h.context.get();
  call.plan = &plan;
  call.workspace = &workspace;
  call.shape = plan.shape;
  call.hidden = tensor(h.x, table);
  call.weight = tensor(h.w, table);
  call.bias = tensor(h.bias, table);
  call.targets = &reader;
  call.d_hidden = tensor(h.d_x, table);
  call.d_weight = tensor(h.d_w, table);
  call.d_bias = tensor(h.d_bias, table);
  Engine engine(call, plan.features);
  const bool gradients = h.d_lse.buffer >= 0;
  const auto* d_lse = gradients ? reinterpret_cast<float*>(address(h.d_lse, table)) : nullptr;
  const auto* d_logit = gradients ? reinterpret_cast<float*>(address(h.d_logit, table)) : nullptr;
  engine.run([&](const TokenResult& r, TokenAnswer& answer) {
    const bool hit = hits(target(r.row));
    lse[r.row] = static_cast<float>(r.lse);
    logit[r.row] = hit ? r.target_logit[0] : 0.0f;
    if (!gradients) return;
    answer.cotangent.lse = d_lse[r.row];
    if (hit) answer.delta[0] = d_logit[r.row];
  });
}

}  // namespace logitless::ir
