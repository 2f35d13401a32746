// Elementwise operations and reductions become loops of Pointwise.
#include <algorithm>
#include <limits>

#include "compiler/analysis/split.h"
#include "compiler/ir/build.h"
#include "compiler/plan/fuse.h"
#include "compiler/plan/lowering.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

constexpr std::int64_t kExactInFloat = std::int64_t{1} << 24;

bool is_integer(DType dtype) { return is_index(dtype); }

}  // namespace

// Collects the leaves and steps of one loop.
class PointwiseBuilder {
 public:
  static constexpr int kNone = std::numeric_limits<int>::min();

  PointwiseBuilder(Lowering& lowering, std::vector<std::int64_t> shape) : l_(lowering) {
    loop_.shape = std::move(shape);
  }

  int value(Value v) {
    const auto found = registers_.find(v);
    if (found != registers_.end()) return found->second;
    return registers_[v] = make(v);
  }
  int constant(double number) {
    Pointwise::Leaf leaf;
    leaf.kind = Pointwise::Leaf::Kind::constant;
    leaf.number = number;
    return leaf_register(leaf);
  }
  int memory(const View& view) {
    Pointwise::Leaf leaf;
    leaf.view = view;
    return leaf_register(leaf);
  }
  int step(Function f, int a, int b = kNone, int c = kNone) {
    Pointwise::Step s;
    s.function = f;
    s.a = a;
    s.b = b;
    s.c = c;
    loop_.steps.push_back(s);
    return -static_cast<int>(loop_.steps.size());  // negative until the leaves are counted
  }
  int round(DType dtype, int a) {
    Pointwise::Step s;
    s.kind = Pointwise::Step::Kind::round;
    s.dtype = dtype;
    s.a = a;
    s.b = s.c = kNone;
    loop_.steps.push_back(s);
    return -static_cast<int>(loop_.steps.size());
  }
  // Numbers the registers: leaves first, then steps. Register `r` of the building time becomes:
  int final(int r) const { return r > 0 ? r - 1 : static_cast<int>(loop_.leaves.size()) - r - 1; }

  Pointwise finish() {
    for (Pointwise::Step& s : loop_.steps) {
      for (int* r : {&s.a, &s.b, &s.c}) *r = *r == kNone ? -1 : final(*r);
    }
    check(static_cast<int>(loop_.leaves.size() + loop_.steps.size()) <= kMaxRegisters,
          "a loop needs ", loop_.leaves.size() + loop_.steps.size(), " registers");
    return std::move(loop_);
  }
  Pointwise& loop() { return loop_; }

 private:
  Lowering& l_;
  Pointwise loop_;
  std::map<Value, int> registers_;

  int leaf_register(const Pointwise::Leaf& leaf) {
    loop_.leaves.push_back(leaf);
    return static_cast<int>(loop_.leaves.size());  // from 1
  }

  int make(Value v) {
    const Node& n = l_.g_.node(v);
    if (n.op == Op::constant) return constant(n.attributes.number);
    if (n.op == Op::iota) {
      Pointwise::Leaf leaf;
      leaf.kind = Pointwise::Leaf::Kind::iota;
      leaf.dim = n.attributes.axis;
      return leaf_register(leaf);
    }
    if (n.op == Op::broadcast || n.op == Op::reshape) {
      const Node& from = l_.g_.node(n.operands[0]);
      if (from.op == Op::constant) return constant(from.attributes.number);
    }
    if (!l_.inlined_[static_cast<std::size_t>(v.node)]) return memory(l_.memory_of(v));
    return compute(v);
  }

 public:
  // The node itself, whether or not it has memory.
  int compute(Value v) {
    const Node& n = l_.g_.node(v);
    if (n.op == Op::cast) {
      const int x = value(n.operands[0]);
      const DType from = l_.g_.type(n.operands[0]).dtype, to = n.results[0].dtype;
      const bool same = from == to || to == DType::f64 ||
                        (to == DType::f32 && from != DType::f64) ||
                        (is_integer(to) && (is_integer(from) || from == DType::i8));
      return same ? x : round(to, x);
    }
    if (n.op != Op::map) return make(v);
    int r[3] = {kNone, kNone, kNone};
    for (std::size_t i = 0; i < n.operands.size(); ++i) r[i] = value(n.operands[i]);
    return step(n.attributes.function, r[0], r[1], r[2]);
  }
};

void finish_pointwise(Pointwise& loop) {
  const auto rank = loop.shape.size();
  std::vector<bool> fixed(rank, false);
  bool wide = false;
  for (const Pointwise::Leaf& leaf : loop.leaves) {
    if (leaf.kind == Pointwise::Leaf::Kind::iota) {
      fixed[static_cast<std::size_t>(leaf.dim)] = true;
      wide = wide || loop.shape[static_cast<std::size_t>(leaf.dim)] > kExactInFloat;
    }
    if (leaf.kind == Pointwise::Leaf::Kind::memory) wide = wide || leaf.view.dtype == DType::f64;
  }
  const DType stored = loop.store.view.dtype;
  for (const Pointwise::Step& s : loop.steps)
    wide = wide || (s.kind == Pointwise::Step::Kind::round && s.dtype == DType::f64);
  loop.wide = wide || stored == DType::f64 || is_integer(stored);
  // A border between what is kept and what is reduced stays where it is.
  const std::size_t border = loop.columns ? static_cast<std::size_t>(loop.reduced)
                                          : rank - static_cast<std::size_t>(loop.reduced);
  std::vector<std::vector<std::int64_t>*> strides;
  for (Pointwise::Leaf& leaf : loop.leaves) {
    if (leaf.kind == Pointwise::Leaf::Kind::memory) strides.push_back(&leaf.view.strides);
  }
  strides.push_back(&loop.store.view.strides);
  std::vector<std::int64_t> marks(rank, 0);
  if (loop.reduction) {
    // Strides that no merge across the border satisfies.
    std::int64_t mark = 1;
    for (std::size_t d = rank; d-- > 0;) {
      if (d + 1 == border) mark = -1;
      marks[d] = mark;
      mark *= loop.shape[d];
    }
    strides.push_back(&marks);
  }
  const std::vector<int> to = merge_dims(loop.shape, strides, fixed);
  for (Pointwise::Leaf& leaf : loop.leaves) {
    if (leaf.kind == Pointwise::Leaf::Kind::iota) leaf.dim = to[static_cast<std::size_t>(leaf.dim)];
  }
  if (loop.reduction) {
    int kept = 0;
    for (std::size_t d = 0; d < rank; ++d) {
      const bool is_kept = loop.columns ? d >= border : d < border;
      if (is_kept && to[d] >= 0)
        kept =
            std::max(kept, loop.columns ? static_cast<int>(loop.shape.size()) - to[d] : to[d] + 1);
    }
    loop.reduced = static_cast<int>(loop.shape.size()) - kept;
  }
  for (Pointwise::Leaf& leaf : loop.leaves) leaf.view.shape = loop.shape;
  loop.store.view.shape = loop.shape;
}

Pointwise copy_loop(const View& from, const View& to, bool accumulate) {
  Pointwise loop;
  loop.shape = to.shape;
  Pointwise::Leaf leaf;
  leaf.view = from;
  loop.leaves.push_back(leaf);
  loop.store = {0, to, accumulate};
  finish_pointwise(loop);
  return loop;
}

void Lowering::emit_pointwise(Value v, const Target& to) {
  PointwiseBuilder builder(*this, sizes_of(g_.type(v)));
  int r = builder.compute(v);
  if (to.kind == Target::Kind::max) {
    r = builder.step(Function::max, builder.memory(to.view), r, PointwiseBuilder::kNone);
  } else if (to.kind == Target::Kind::lse) {
    // max + log(exp(a - max) + exp(b - max)); both -inf stay so.
    const int a = builder.memory(to.view), none = PointwiseBuilder::kNone;
    const int top = builder.step(Function::max, a, r, none);
    const int low = builder.constant(-std::numeric_limits<double>::infinity());
    const int empty = builder.step(Function::eq, top, low, none);
    const int safe = builder.step(Function::select, empty, builder.constant(0.0), top);
    const int x =
        builder.step(Function::exp, builder.step(Function::sub, a, safe, none), none, none);
    const int y =
        builder.step(Function::exp, builder.step(Function::sub, r, safe, none), none, none);
    const int sum =
        builder.step(Function::log, builder.step(Function::add, x, y, none), none, none);
    r = builder.step(Function::add, safe, sum, none);
  }
  const int source = builder.final(r);
  Pointwise loop = builder.finish();
  loop.store = {source, to.view, to.kind == Target::Kind::sum};
  finish_pointwise(loop);
  push(v.node, std::move(loop));
}

void Lowering::emit_fill(const View& view, double number) {
  p_.instructions.push_back({{}, Fill{view, number}});
}

void Lowering::emit_reduce(int id) {
  const Node& n = g_.node(id);
  const Value v{id, 0};
  if (n.attributes.reduce == Reduce::argmax) {
    const View x = memory_of(n.operands[0]);
    std::vector<int> order = other_dims(g_.type(n.operands[0]).rank(), n.attributes.dims);
    order.push_back(n.attributes.dims[0]);
    push(id, ArgMax{transposed(x, order), result_of(v)});
    return;
  }
  const View out = result_of(v);
  emit_reduction(id, n.attributes.dims, n.operands[0], out, accumulates(v));
}

void Lowering::emit_reduction(int id, const std::vector<int>& dims, Value operand, const View& out,
                              bool accumulate) {
  const Type& from = g_.type(operand);
  const std::vector<std::int64_t> sizes = sizes_of(from);
  const Reduce kind = g_.node(id).attributes.reduce;
  const std::vector<int> kept = other_dims(from.rank(), dims);
  std::int64_t rows = 1, reduced = 1;
  for (const int d : kept) rows *= sizes[static_cast<std::size_t>(d)];
  for (const int d : dims) reduced *= sizes[static_cast<std::size_t>(d)];
  const bool columns = !kept.empty() &&
                       std::find(dims.begin(), dims.end(), from.rank() - 1) == dims.end() &&
                       rows > 1;
  PointwiseBuilder builder(*this, sizes);
  const int r = builder.value(operand);
  const int source = builder.final(r);
  Pointwise loop = builder.finish();
  // Dimensions in the loop's order: what is kept, then what is reduced, or the other way round.
  std::vector<int> sorted = dims;
  std::sort(sorted.begin(), sorted.end());
  std::vector<int> order = columns ? sorted : kept;
  order.insert(order.end(), (columns ? kept : sorted).begin(), (columns ? kept : sorted).end());
  std::vector<int> place(order.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    place[static_cast<std::size_t>(order[i])] = static_cast<int>(i);
  std::vector<std::int64_t> shape;
  for (const int d : order) shape.push_back(sizes[static_cast<std::size_t>(d)]);
  loop.shape = shape;
  for (Pointwise::Leaf& leaf : loop.leaves) {
    if (leaf.kind == Pointwise::Leaf::Kind::memory) leaf.view = transposed(leaf.view, order);
    if (leaf.kind == Pointwise::Leaf::Kind::iota)
      leaf.dim = place[static_cast<std::size_t>(leaf.dim)];
  }
  loop.reduction = true;
  loop.reduce = kind;
  loop.columns = columns;
  loop.reduced = static_cast<int>(dims.size());
  std::vector<int> spread;
  for (const int d : kept) spread.push_back(place[static_cast<std::size_t>(d)]);
  loop.store = {source, broadcasted(out, shape, spread), accumulate};
  finish_pointwise(loop);
  // Few results of many elements: parts of fixed size, added in order.
  constexpr std::int64_t kPart = 8192, kMostParts = 64;
  if (kind != Reduce::lse && loop.reduced > 0) {
    const std::int64_t first =
        loop.columns ? loop.shape[0]
                     : loop.shape[loop.shape.size() - static_cast<std::size_t>(loop.reduced)];
    if (rows <= 4096 && rows * reduced > 2 * kPart)
      loop.parts = std::clamp<std::int64_t>(rows * reduced / kPart, 1, std::min(kMostParts, first));
    if (loop.parts > 1) {
      const std::int64_t bytes = loop.parts * rows * (loop.wide ? 8 : 4);
      loop.scratch = add_buffer(Place::arena, bytes, name_of_node(id) + " parts");
    }
  }
  push(id, std::move(loop));
}

}  // namespace logitless::ir
