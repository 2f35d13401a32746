#include "compiler/plan/program.h"

#include <algorithm>
#include <cstdlib>

namespace logitless::ir {
namespace {

// Appends an instruction's existing buffers to a list.
class Named {
 public:
  explicit Named(std::vector<int>& list) : list_(list) {}

 protected:
  void add(int buffer) const {
    if (buffer >= 0) list_.push_back(buffer);
  }
  template <typename... Views>
  void add(const Views&... views) const {
    (add(views.buffer), ...);
  }
  std::vector<int>& list_;
};

struct Reads : Named {
  using Named::Named;
  void operator()(const Pointwise& p) const {
    for (const Pointwise::Leaf& leaf : p.leaves) {
      if (leaf.kind == Pointwise::Leaf::Kind::memory) add(leaf.view);
    }
  }
  void operator()(const Gemm& g) const {
    add(g.a, g.b, g.bias, g.residual);
    if (g.epilogue.gelu_gradient) add(g.aux);
  }
  void operator()(const Take& t) const { add(t.table, t.index); }
  void operator()(const ScatterAdd& s) const { add(s.index, s.updates, s.out); }
  void operator()(const Pick& p) const { add(p.x, p.index); }
  void operator()(const Put& p) const {
    add(p.index, p.updates);
    if (!p.whole) add(p.out);
  }
  void operator()(const ArgMax& a) const { add(a.x); }
  void operator()(const Scan& s) const { add(s.x, s.factors); }
  void operator()(const Sort& s) const { add(s.x); }
  void operator()(const ExternRun& e) const {
    for (const View& operand : e.operands) add(operand);
  }
  void operator()(const Fill&) const {}
  void operator()(const Attention& a) const {
    add(a.q, a.k, a.v, a.bias, a.query_segments, a.key_segments);
    if (a.gradient) add(a.out, a.lse, a.d_out);
  }
  void operator()(const LoopRun& l) const {
    for (const LoopRun::Slice& slice : l.slices) add(slice.outer);
  }
  void operator()(const HeadRun& h) const { add(h.x, h.w, h.targets, h.bias, h.d_lse, h.d_logit); }
  // Values between stages are in registers.
  void operator()(const RowGroup& g) const {
    std::vector<int> read, made;
    for (const std::optional<Gemm>* product : {&g.product, &g.other}) {
      if (!*product) continue;
      add((*product)->a, (*product)->b);
      made.push_back((*product)->c.buffer);
    }
    for (const RowGroup::Stage& stage : g.stages) {
      read.clear();
      Reads{read}(stage.loop);
      for (const int b : read) {
        if (std::find(made.begin(), made.end(), b) == made.end()) add(b);
      }
      made.push_back(stage.loop.store.view.buffer);
    }
  }
};

struct Writes : Named {
  using Named::Named;
  void operator()(const Pointwise& p) const {
    add(p.store.view);
    add(p.scratch);
  }
  void operator()(const Gemm& g) const {
    add(g.c);
    add(g.scratch);
    if (g.epilogue.gelu) add(g.aux);
  }
  void operator()(const Take& t) const { add(t.out); }
  void operator()(const ScatterAdd& s) const {
    add(s.out);
    add(s.scratch);
  }
  void operator()(const Pick& p) const { add(p.out); }
  void operator()(const ArgMax& a) const { add(a.out); }
  void operator()(const Scan& s) const { add(s.out); }
  void operator()(const Sort& s) const { add(s.values, s.index); }
  void operator()(const ExternRun& e) const { add(e.out); }
  void operator()(const Put& p) const { add(p.out); }
  void operator()(const Fill& f) const { add(f.out); }
  void operator()(const Attention& a) const {
    if (a.gradient) {
      add(a.d_q, a.d_k, a.d_v);
    } else {
      add(a.out, a.lse);
    }
    add(a.scratch);
  }
  void operator()(const LoopRun& l) const {
    Reads{list_}(l);
    add(l.arena);
  }
  void operator()(const HeadRun& h) const {
    add(h.lse, h.logit, h.log_prob, h.d_x, h.d_w, h.d_bias);
    add(h.scratch);
  }
  void operator()(const RowGroup& g) const {
    for (const RowGroup::Stage& stage : g.stages) {
      if (stage.stored) add(stage.loop.store.view);
    }
    add(g.scratch);
  }
};

// Returns the elements of a view that are next to each other in memory.
std::int64_t adjacent_elements(const View& view) {
  std::int64_t run = 1;
  for (std::size_t tries = 0; tries < view.shape.size(); ++tries) {
    const std::int64_t before = run;
    for (std::size_t d = 0; d < view.shape.size() && run == before; ++d) {
      if (view.shape[d] > 1 && std::abs(view.strides[d]) == run) run *= view.shape[d];
    }
    if (run == before) break;
  }
  return run;
}

// Returns the bytes of a view's elements; elements that share memory count once. Less than a line
// of a cache that stands apart counts as a line.
double bytes_in(const View& view) {
  constexpr double kLine = 64.0;
  if (view.buffer < 0) return 0.0;
  const auto size = static_cast<double>(size_of(view.dtype));
  double elements = 1.0;
  for (std::size_t d = 0; d < view.shape.size(); ++d) {
    if (view.strides[d] != 0 || view.shape[d] == 0) elements *= static_cast<double>(view.shape[d]);
  }
  if (view.shape.size() != view.strides.size()) return elements * size;  // of a product
  const auto adjacent = static_cast<double>(adjacent_elements(view));
  if (elements <= adjacent || adjacent * size >= kLine) return elements * size;
  return elements / adjacent * kLine;
}
template <typename... Views>
double sum_of(const Views&... views) {
  return (bytes_in(views) + ...);
}

// The view of a matrix product has strides for more dimensions than sizes.
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
           bytes_in(g, g.residual, g.m, g.n) + bytes_in(g, g.aux, g.m, g.n) +
           static_cast<double>(g.additional_bytes);
  }
  double operator()(const Take& t) const { return sum_of(t.index) + 2.0 * sum_of(t.out); }
  double operator()(const ScatterAdd& s) const { return sum_of(s.index) + 3.0 * sum_of(s.updates); }
  double operator()(const Pick& p) const { return sum_of(p.index) + 2.0 * sum_of(p.out); }
  double operator()(const Put& p) const {
    return p.whole ? sum_of(p.index, p.updates, p.out) : sum_of(p.index) + 3.0 * sum_of(p.updates);
  }
  double operator()(const ArgMax& a) const { return sum_of(a.x, a.out); }
  double operator()(const Scan& s) const { return sum_of(s.x, s.factors, s.out); }
  double operator()(const Sort& s) const { return sum_of(s.x, s.values, s.index); }
  double operator()(const ExternRun& e) const {
    double bytes = sum_of(e.out);
    for (const View& operand : e.operands) bytes += bytes_in(operand);
    return bytes;
  }
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
    return sum_of(h.x, h.w, h.targets, h.bias, h.d_lse, h.d_logit, h.lse, h.logit, h.log_prob,
                  h.d_x, h.d_w, h.d_bias);
  }
  // A value that several stages read is loaded once.
  double operator()(const RowGroup& g) const {
    double bytes = g.product ? sum_of(g.product->a, g.product->b) : 0.0;
    if (g.other) bytes += sum_of(g.other->b) + (g.difference ? sum_of(g.other->a) : 0.0);
    std::vector<std::pair<int, std::int64_t>> seen;
    std::vector<int> from;
    Reads{from}(g);
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

void add_reads_of(const Instruction& i, std::vector<int>& buffers) {
  std::visit(Reads{buffers}, i.what);
}
void add_writes_of(const Instruction& i, std::vector<int>& buffers) {
  std::visit(Writes{buffers}, i.what);
}
std::vector<int> reads_of(const Instruction& i) {
  std::vector<int> buffers;
  add_reads_of(i, buffers);
  return buffers;
}
std::vector<int> writes_of(const Instruction& i) {
  std::vector<int> buffers;
  add_writes_of(i, buffers);
  return buffers;
}

}  // namespace logitless::ir
