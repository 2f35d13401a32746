#include "compiler/plan/program.h"

namespace logitless::ir {
namespace {

template <typename... Views>
std::vector<int> buffers(const Views&... views) {
  std::vector<int> list;
  (list.push_back(views.buffer), ...);
  return list;
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

std::vector<int> reads_of(const Instruction& i) {
  std::vector<int> list;
  switch (i.kind) {
    case Instruction::Kind::pointwise:
      for (const Pointwise::Leaf& leaf : i.pointwise.leaves) {
        if (leaf.kind == Pointwise::Leaf::Kind::memory) list.push_back(leaf.view.buffer);
      }
      break;
    case Instruction::Kind::gemm:
      list = buffers(i.gemm.a, i.gemm.b);
      break;
    case Instruction::Kind::take:
      list = buffers(i.take.table, i.take.index);
      break;
    case Instruction::Kind::scatter_add:
      list = buffers(i.scatter.index, i.scatter.updates, i.scatter.out);
      break;
    case Instruction::Kind::pick:
      list = buffers(i.pick.x, i.pick.index);
      break;
    case Instruction::Kind::argmax:
      list = buffers(i.argmax.x);
      break;
    case Instruction::Kind::fill:
      break;
    case Instruction::Kind::attention:
      list = buffers(i.attention.q, i.attention.k, i.attention.v);
      if (i.attention.gradient) {
        for (const View* v : {&i.attention.out, &i.attention.lse, &i.attention.d_out})
          list.push_back(v->buffer);
      }
      break;
    case Instruction::Kind::loop:
      for (const LoopRun::Slice& slice : i.loop.slices) list.push_back(slice.outer);
      break;
    case Instruction::Kind::head:
      for (const View* v :
           {&i.head.x, &i.head.w, &i.head.targets, &i.head.bias, &i.head.d_lse, &i.head.d_logit}) {
        if (v->buffer >= 0) list.push_back(v->buffer);
      }
      break;
  }
  return list;
}

std::vector<int> writes_of(const Instruction& i) {
  std::vector<int> list;
  const auto scratch = [&](int buffer) {
    if (buffer >= 0) list.push_back(buffer);
  };
  switch (i.kind) {
    case Instruction::Kind::pointwise:
      list.push_back(i.pointwise.store.view.buffer);
      scratch(i.pointwise.scratch);
      break;
    case Instruction::Kind::gemm:
      list = buffers(i.gemm.c);
      scratch(i.gemm.scratch);
      break;
    case Instruction::Kind::take:
      list = buffers(i.take.out);
      break;
    case Instruction::Kind::scatter_add:
      list = buffers(i.scatter.out);
      break;
    case Instruction::Kind::pick:
      list = buffers(i.pick.out);
      break;
    case Instruction::Kind::argmax:
      list = buffers(i.argmax.out);
      break;
    case Instruction::Kind::fill:
      list = buffers(i.fill.out);
      break;
    case Instruction::Kind::attention:
      if (i.attention.gradient) {
        list = buffers(i.attention.d_q, i.attention.d_k, i.attention.d_v);
      } else {
        list = buffers(i.attention.out, i.attention.lse);
      }
      scratch(i.attention.scratch);
      break;
    case Instruction::Kind::loop:
      for (const LoopRun::Slice& slice : i.loop.slices) list.push_back(slice.outer);
      scratch(i.loop.arena);
      break;
    case Instruction::Kind::head:
      for (const View* v : {&i.head.lse, &i.head.logit, &i.head.d_x, &i.head.d_w, &i.head.d_bias})
        scratch(v->buffer);
      scratch(i.head.scratch);
      break;
  }
  return list;
}

}  // namespace logitless::ir
