#include "compiler/plan/program.h"

#include <algorithm>

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
  std::vector<int> operator()(const Gemm& g) const {
    return present({g.a.buffer, g.b.buffer, g.bias.buffer, g.residual.buffer,
                    g.epilogue.gelu_gradient ? g.aux.buffer : -1});
  }
  std::vector<int> operator()(const Take& t) const { return buffers(t.table, t.index); }
  std::vector<int> operator()(const ScatterAdd& s) const {
    return buffers(s.index, s.updates, s.out);
  }
  std::vector<int> operator()(const Pick& p) const { return buffers(p.x, p.index); }
  std::vector<int> operator()(const Put& p) const { return buffers(p.index, p.updates, p.out); }
  std::vector<int> operator()(const ArgMax& a) const { return buffers(a.x); }
  std::vector<int> operator()(const Scan& s) const { return buffers(s.x); }
  std::vector<int> operator()(const Sort& s) const { return buffers(s.x); }
  std::vector<int> operator()(const Fill&) const { return {}; }
  std::vector<int> operator()(const Attention& a) const {
    std::vector<int> list =
        present(buffers(a.q, a.k, a.v, a.bias, a.query_segments, a.key_segments));
    if (a.gradient) list.insert(list.end(), {a.out.buffer, a.lse.buffer, a.d_out.buffer});
    return list;
  }
  std::vector<int> operator()(const LoopRun& l) const {
    std::vector<int> list;
    for (const LoopRun::Slice& slice : l.slices) list.push_back(slice.outer);
    return list;
  }
  std::vector<int> operator()(const HeadRun& h) const {
    return present(buffers(h.x, h.w, h.targets, h.bias, h.d_lse, h.d_logit));
  }
  // What a stage makes and later ones read is in registers.
  std::vector<int> operator()(const RowGroup& g) const {
    std::vector<int> list, made;
    for (const RowGroup::Stage& stage : g.stages) {
      for (const int b : (*this)(stage.loop)) {
        if (std::find(made.begin(), made.end(), b) == made.end()) list.push_back(b);
      }
      made.push_back(stage.loop.store.view.buffer);
    }
    return list;
  }
};

struct Writes {
  std::vector<int> operator()(const Pointwise& p) const {
    return present({p.store.view.buffer, p.scratch});
  }
  std::vector<int> operator()(const Gemm& g) const {
    return present({g.c.buffer, g.scratch, g.epilogue.gelu ? g.aux.buffer : -1});
  }
  std::vector<int> operator()(const Take& t) const { return buffers(t.out); }
  std::vector<int> operator()(const ScatterAdd& s) const {
    return present({s.out.buffer, s.scratch});
  }
  std::vector<int> operator()(const Pick& p) const { return buffers(p.out); }
  std::vector<int> operator()(const ArgMax& a) const { return buffers(a.out); }
  std::vector<int> operator()(const Scan& s) const { return buffers(s.out); }
  std::vector<int> operator()(const Sort& s) const { return buffers(s.values, s.index); }
  std::vector<int> operator()(const Put& p) const { return buffers(p.out); }
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
  std::vector<int> operator()(const RowGroup& g) const {
    std::vector<int> list;
    for (const RowGroup::Stage& stage : g.stages) {
      if (stage.stored) list.push_back(stage.loop.store.view.buffer);
    }
    list.push_back(g.scratch);
    return present(std::move(list));
  }
};

// Bytes of the elements of a view, those that share memory counted once.
double bytes_in(const View& view) {
  if (view.buffer < 0) return 0.0;
  auto bytes = static_cast<double>(size_of(view.dtype));
  for (std::size_t d = 0; d < view.shape.size(); ++d) {
    if (view.strides[d] != 0 || view.shape[d] == 0) bytes *= static_cast<double>(view.shape[d]);
  }
  return bytes;
}
template <typename... Views>
double sum_of(const Views&... views) {
  return (bytes_in(views) + ...);
}

// A product's view has strides for more dimensions than it has sizes.
double bytes_in(const Gemm& g, View view, std::int64_t rows, std::int64_t columns) {
  if (view.buffer < 0) return 0.0;
  view.shape = g.outer;
  view.shape.insert(view.shape.end(), {rows, columns});
  return bytes_in(view);
}

struct Moved {
  double operator()(const Pointwise& p) const {
    double bytes = bytes_in(p.store.view) * (p.store.accumulate ? 2.0 : 1.0);
    for (const Pointwise::Leaf& leaf : p.leaves) {
      if (leaf.kind == Pointwise::Leaf::Kind::memory) bytes += bytes_in(leaf.view);
    }
    return bytes;
  }
  double operator()(const Gemm& g) const {
    return bytes_in(g, g.a, g.m, g.k) + bytes_in(g, g.b, g.k, g.n) +
           bytes_in(g, g.c, g.m, g.n) * (g.accumulate ? 2.0 : 1.0) + sum_of(g.bias) +
           bytes_in(g, g.residual, g.m, g.n) + bytes_in(g, g.aux, g.m, g.n);
  }
  double operator()(const Take& t) const { return sum_of(t.index) + 2.0 * sum_of(t.out); }
  double operator()(const ScatterAdd& s) const { return sum_of(s.index) + 3.0 * sum_of(s.updates); }
  double operator()(const Pick& p) const { return sum_of(p.index) + 2.0 * sum_of(p.out); }
  double operator()(const Put& p) const { return sum_of(p.index) + 3.0 * sum_of(p.updates); }
  double operator()(const ArgMax& a) const { return sum_of(a.x, a.out); }
  double operator()(const Scan& s) const { return sum_of(s.x, s.out); }
  double operator()(const Sort& s) const { return sum_of(s.x, s.values, s.index); }
  double operator()(const Fill& f) const { return sum_of(f.out); }
  double operator()(const Attention& a) const {
    return sum_of(a.q, a.k, a.v, a.out, a.lse, a.bias, a.query_segments, a.key_segments) +
           (a.gradient ? sum_of(a.d_out, a.d_q, a.d_k, a.d_v) : 0.0);
  }
  double operator()(const LoopRun& l) const {
    return static_cast<double>(l.extent / l.chunk) * bytes_moved(*l.body) +
           (l.tail ? bytes_moved(*l.tail) : 0.0);
  }
  double operator()(const HeadRun& h) const {
    return sum_of(h.x, h.w, h.targets, h.bias, h.d_lse, h.d_logit, h.lse, h.logit, h.d_x, h.d_w,
                  h.d_bias);
  }
  // What several stages read is read once.
  double operator()(const RowGroup& g) const {
    double bytes = 0.0;
    std::vector<std::pair<int, std::int64_t>> seen;
    const std::vector<int> from = Reads()(g);
    for (const RowGroup::Stage& stage : g.stages) {
      for (const Pointwise::Leaf& leaf : stage.loop.leaves) {
        const std::pair at{leaf.view.buffer, leaf.view.offset};
        if (leaf.kind != Pointwise::Leaf::Kind::memory ||
            std::find(from.begin(), from.end(), at.first) == from.end() ||
            std::find(seen.begin(), seen.end(), at) != seen.end())
          continue;
        seen.push_back(at);
        bytes += bytes_in(leaf.view);
      }
      if (stage.stored)
        bytes += bytes_in(stage.loop.store.view) * (stage.loop.store.accumulate ? 2.0 : 1.0);
    }
    return bytes;
  }
};

}  // namespace

double bytes_moved(const Instruction& i) { return std::visit(Moved(), i.what); }
double bytes_moved(const Program& program) {
  double bytes = 0.0;
  for (const Instruction& i : program.instructions) bytes += bytes_moved(i);
  return bytes;
}

std::vector<int> reads_of(const Instruction& i) { return std::visit(Reads(), i.what); }
std::vector<int> writes_of(const Instruction& i) { return std::visit(Writes(), i.what); }

}  // namespace logitless::ir
