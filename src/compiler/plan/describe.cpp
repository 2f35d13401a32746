#include <algorithm>

#include "compiler/plan/cost.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

std::string sizes_text(const std::vector<std::int64_t>& sizes) {
  std::string text;
  for (const std::int64_t size : sizes) text += concat(text.empty() ? "" : " x ", size);
  return text.empty() ? "1" : text;
}

int reads_memory(const Pointwise& p) {
  int count = 0;
  for (const Pointwise::Leaf& leaf : p.leaves)
    count += leaf.kind == Pointwise::Leaf::Kind::memory ? 1 : 0;
  return count;
}

struct Describe {
  std::string operator()(const Pointwise& p) const {
    std::string kind = "map";
    if (p.reduction) kind = p.columns ? "sums of columns" : "sums of rows";
    if (p.reduction && p.reduce != Reduce::sum) kind = "reduction";
    return concat(kind, " ", sizes_text(p.shape), ", ", p.steps.size(), " steps of ",
                  reads_memory(p), " operands to ", name_of(p.store.view.dtype),
                  p.store.accumulate ? ", added" : "");
  }
  std::string operator()(const RowGroup& g) const {
    std::size_t steps = 0;
    int columns = 0, stored = 0;
    for (const RowGroup::Stage& stage : g.stages) {
      steps += stage.loop.steps.size();
      stored += stage.stored ? 1 : 0;
      columns += stage.loop.reduction && stage.loop.columns ? 1 : 0;
    }
    std::string of = concat("rows ", g.rows, " x ", g.columns);
    if (g.product) of = (*this)(*g.product);
    if (g.other) of += concat(g.difference ? " minus " : " beside ", (*this)(*g.other));
    return concat(of, g.product ? " with an epilogue, " : ", ", g.stages.size(), " stages of ",
                  steps, " steps, ", stored, " stored, ", columns, " sums of columns");
  }
  std::string operator()(const Gemm& g) const {
    const auto across = [&](const View& v) { return v.strides.back() == 1; };
    std::string text = "product ";
    if (!g.outer.empty()) text += concat(sizes_text(g.outer), " of ");
    return text + concat(g.m, " x ", g.n, " x ", g.k, " ", name_of(g.a.dtype), " to ",
                         name_of(g.c.dtype), across(g.a) ? "" : ", a transposed",
                         across(g.b) ? "" : ", b transposed", g.accumulate ? ", added" : "",
                         g.epilogue.any() ? ", " : "", text_of(g.epilogue),
                         g.additional_bytes == 0   ? ""
                         : size_of(g.a.dtype) == 2 ? ", in blocks"
                                                   : ", in parts of its inner dimension");
  }
  std::string operator()(const Take& t) const {
    return concat("take ", sizes_text(t.out.shape), " ", name_of(t.out.dtype));
  }
  std::string operator()(const ScatterAdd& s) const {
    return concat("scatter_add ", sizes_text(s.updates.shape), " to ", sizes_text(s.out.shape));
  }
  std::string operator()(const Put& p) const {
    return concat("put of ", sizes_text(p.updates.shape), " ", name_of(p.updates.dtype));
  }
  std::string operator()(const Pick& p) const {
    return concat("pick of ", sizes_text(p.x.shape), " ", name_of(p.x.dtype));
  }
  std::string operator()(const ArgMax& m) const {
    return concat("argmax of ", sizes_text(m.x.shape), " ", name_of(m.x.dtype));
  }
  std::string operator()(const Scan& s) const {
    return concat(s.reverse ? "backward " : "", scan_text(s), " of ", sizes_text(s.x.shape), " ",
                  name_of(s.x.dtype));
  }
  std::string operator()(const Sort& s) const {
    const auto axis = static_cast<std::size_t>(s.axis);
    return concat("sort of ", sizes_text(s.x.shape), " ", name_of(s.x.dtype), ", ",
                  s.values.shape[axis], " kept");
  }
  std::string operator()(const ExternRun& e) const {
    return concat("extern ", e.id, " of ", e.operands.size(), " operands to ",
                  sizes_text(e.out.shape), " ", name_of(e.out.dtype));
  }
  std::string operator()(const Fill& f) const {
    return concat("fill ", sizes_text(f.out.shape), " ", name_of(f.out.dtype));
  }
  std::string operator()(const Attention& a) const {
    const std::string scores = text_of(a.scores);
    return concat(scores, scores.empty() ? "" : " ",
                  a.gradient ? "attention gradient " : "attention ", sizes_text(a.q.shape), ", ",
                  a.k.shape[1], " x ", a.k.shape[2], " keys ", name_of(a.q.dtype));
  }
  std::string operator()(const LoopRun& l) const {
    return concat("loop of ", (l.extent + l.chunk - 1) / l.chunk, " chunks of ", l.chunk);
  }
  std::string operator()(const HeadRun& h) const {
    const LossPlan& plan = *h.plan;
    return concat("head ", plan.shape.tokens, " x ", plan.shape.vocab, " x ", plan.shape.dim, " ",
                  name_of(plan.shape.dtype), ", ", name_of(plan.kind), " plan");
  }
};

struct Flops {
  template <typename T>
  double operator()(const T&) const {
    return 0.0;
  }
  double operator()(const Gemm& g) const {
    double flops =
        2.0 * static_cast<double>(g.m) * static_cast<double>(g.n) * static_cast<double>(g.k);
    for (const std::int64_t size : g.outer) flops *= static_cast<double>(size);
    return flops;
  }
  double operator()(const RowGroup& g) const {
    return (g.product ? (*this)(*g.product) : 0.0) + (g.other ? (*this)(*g.other) : 0.0);
  }
  // The forward has two products of queries and keys, the backward five.
  double operator()(const Attention& a) const {
    const auto queries = static_cast<double>(elements_of(a.q)),
               keys = static_cast<double>(a.k.shape[2]) * (a.scores.causal ? 0.5 : 1.0),
               window = static_cast<double>(a.scores.window) * (a.scores.causal ? 1.0 : 2.0);
    return (a.gradient ? 10.0 : 4.0) * queries * (window > 0.0 ? std::min(window, keys) : keys);
  }
  double operator()(const HeadRun& h) const {
    const HeadShape& shape = h.plan->shape;
    return 2.0 * h.plan->passes * static_cast<double>(shape.tokens) *
           static_cast<double>(shape.vocab) * static_cast<double>(shape.dim);
  }
};

}  // namespace

std::string scan_text(const Scan& scan) {
  if (scan.factors.buffer >= 0) return "recurrence";
  switch (scan.kind) {
    case Reduce::max:
      return "cummax";
    case Reduce::product:
      return "cumprod";
    default:
      return scan.kind == Reduce::lse ? "cumlse" : "cumsum";
  }
}

std::string describe(const Instruction& instruction) {
  return std::visit(Describe(), instruction.what);
}

double flops_of(const Instruction& instruction) { return std::visit(Flops(), instruction.what); }

}  // namespace logitless::ir
