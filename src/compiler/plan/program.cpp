#include "compiler/plan/program.h"

namespace logitless::ir {
namespace {

template <typename... Views>
std::vector<int> buffers(const Views&... views) {
  std::vector<int> list;
  (list.push_back(views.buffer), ...);
  return list;
}
// Those that there are.
std::vector<int> present(std::vector<int> list) {
  std::erase(list, -1);
  return list;
}

struct Reads {
  std::vector<int> operator()(const Pointwise& p) const {
    std::vector<int> list;
    for (const Pointwise::Leaf& leaf : p.leaves) {
      if (leaf.kind == Pointwise::Leaf::Kind::memory) list.push_back(leaf.view.buffer);
    }
    return list;
  }
  std::vector<int> operator()(const Gemm& g) const { return buffers(g.a, g.b); }
  std::vector<int> operator()(const Take& t) const { return buffers(t.table, t.index); }
  std::vector<int> operator()(const ScatterAdd& s) const {
    return buffers(s.index, s.updates, s.out);
  }
  std::vector<int> operator()(const Pick& p) const { return buffers(p.x, p.index); }
  std::vector<int> operator()(const ArgMax& a) const { return buffers(a.x); }
  std::vector<int> operator()(const Fill&) const { return {}; }
  std::vector<int> operator()(const Attention& a) const {
    return a.gradient ? buffers(a.q, a.k, a.v, a.out, a.lse, a.d_out) : buffers(a.q, a.k, a.v);
  }
  std::vector<int> operator()(const LoopRun& l) const {
    std::vector<int> list;
    for (const LoopRun::Slice& slice : l.slices) list.push_back(slice.outer);
    return list;
  }
  std::vector<int> operator()(const HeadRun& h) const {
    return present(buffers(h.x, h.w, h.targets, h.bias, h.d_lse, h.d_logit));
  }
};

struct Writes {
  std::vector<int> operator()(const Pointwise& p) const {
    return present({p.store.view.buffer, p.scratch});
  }
  std::vector<int> operator()(const Gemm& g) const { return present({g.c.buffer, g.scratch}); }
  std::vector<int> operator()(const Take& t) const { return buffers(t.out); }
  std::vector<int> operator()(const ScatterAdd& s) const {
    return present({s.out.buffer, s.scratch});
  }
  std::vector<int> operator()(const Pick& p) const { return buffers(p.out); }
  std::vector<int> operator()(const ArgMax& a) const { return buffers(a.out); }
  std::vector<int> operator()(const Fill& f) const { return buffers(f.out); }
  std::vector<int> operator()(const Attention& a) const {
    if (a.gradient) return present({a.d_q.buffer, a.d_k.buffer, a.d_v.buffer, a.scratch});
    return present({a.out.buffer, a.lse.buffer, a.scratch});
  }
  std::vector<int> operator()(const LoopRun& l) const {
    std::vector<int> list = Reads()(l);
    list.push_back(l.arena);
    return present(std::move(list));
  }
  std::vector<int> operator()(const HeadRun& h) const {
    return present(
        {h.lse.buffer, h.logit.buffer, h.d_x.buffer, h.d_w.buffer, h.d_bias.buffer, h.scratch});
  }
};

}  // namespace

std::vector<int> reads_of(const Instruction& i) { return std::visit(Reads(), i.what); }
std::vector<int> writes_of(const Instruction& i) { return std::visit(Writes(), i.what); }

}  // namespace logitless::ir
