// Lowers elementwise operations to Pointwise loops.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "compiler/analysis/split.h"
#include "compiler/ops/op.h"
#include "compiler/plan/pointwise_builder.h"
#include "core/check.h"

namespace logitless::ir {

int PointwiseBuilder::value(Value v) {
  for (const Register& r : registers_) {
    if (r.value == v && r.backwards == backwards_) return r.number;
  }
  const int number = make(v);
  registers_.push_back({v, backwards_, number});
  return number;
}

int PointwiseBuilder::backwards(Value v, int dim) {
  backwards_ ^= 1u << static_cast<unsigned>(dim);
  const int found = value(v);
  backwards_ ^= 1u << static_cast<unsigned>(dim);
  return found;
}

int PointwiseBuilder::compute(Value v) {
  const auto rule = row_of(graph().node(v).op).registers;
  return rule != nullptr ? rule(*this, v) : make(v);
}

int PointwiseBuilder::make(Value v) {
  const Node& n = graph().node(v);
  if (row_of(n.op).of_nothing) return compute(v);
  // Constants and the argument are equal in all elements, so their broadcasts need no memory.
  Value from = v;
  while (graph().node(from).op == Op::broadcast || graph().node(from).op == Op::reshape)
    from = graph().node(from).operands[0];
  if (l_.is_first(from)) {
    Pointwise::Leaf argument;
    argument.kind = Pointwise::Leaf::Kind::first;
    return leaf(std::move(argument));
  }
  if (n.op == Op::broadcast || n.op == Op::reshape) {
    const Node& number = graph().node(n.operands[0]);
    if (number.op == Op::constant) return constant(number.attributes->number);
  }
  return l_.is_inlined(v.node) ? compute(v) : memory(l_.memory_of(v));
}

int PointwiseBuilder::constant(double number) {
  Pointwise::Leaf constant;
  constant.kind = Pointwise::Leaf::Kind::constant;
  constant.number = number;
  return leaf(std::move(constant));
}
int PointwiseBuilder::iota(int dim) {
  Pointwise::Leaf iota;
  iota.kind = Pointwise::Leaf::Kind::iota;
  iota.dim = dim;
  const int index = leaf(std::move(iota));
  if ((backwards_ >> static_cast<unsigned>(dim) & 1u) == 0) return index;
  const std::int64_t last = loop_.shape[static_cast<std::size_t>(dim)] - 1;
  return step(Function::sub, constant(static_cast<double>(last)), index);
}
int PointwiseBuilder::memory(View view) {
  for (std::size_t d = 0; d < view.shape.size(); ++d) {
    if ((backwards_ >> d & 1u) == 0) continue;
    view.offset += (view.shape[d] - 1) * view.strides[d];
    view.strides[d] = -view.strides[d];
  }
  Pointwise::Leaf memory;
  memory.view = std::move(view);
  return leaf(std::move(memory));
}
int PointwiseBuilder::step(Function f, int a, int b, int c) {
  return add_step({Pointwise::Step::Kind::function, f, DType::f32, a, b, c});
}
int PointwiseBuilder::round(DType dtype, int a) {
  return add_step({Pointwise::Step::Kind::round, Function::neg, dtype, a, kNone, kNone});
}
int PointwiseBuilder::leaf(Pointwise::Leaf leaf) {
  loop_.leaves.push_back(std::move(leaf));
  return static_cast<int>(loop_.leaves.size());  // positive, from 1
}
int PointwiseBuilder::add_step(const Pointwise::Step& step) {
  loop_.steps.push_back(step);
  return -static_cast<int>(loop_.steps.size());  // negative until the number of leaves is known
}

Pointwise PointwiseBuilder::finish() {
  for (Pointwise::Step& s : loop_.steps) {
    for (int* r : {&s.a, &s.b, &s.c}) *r = *r == kNone ? -1 : final(*r);
  }
  check(static_cast<int>(loop_.leaves.size() + loop_.steps.size()) <= kMaxRegisters,
        "a loop needs ", loop_.leaves.size() + loop_.steps.size(), " registers");
  return std::move(loop_);
}

namespace {

constexpr std::int64_t kExactInFloat = std::int64_t{1} << 24;

// Returns whether a register is 0 or 1.
bool is_truth(const Pointwise& loop, int reg) {
  const int leaves = static_cast<int>(loop.leaves.size());
  if (reg < leaves) {
    const Pointwise::Leaf& leaf = loop.leaves[static_cast<std::size_t>(reg)];
    return leaf.kind == Pointwise::Leaf::Kind::memory && leaf.view.dtype == DType::i8;
  }
  const Pointwise::Step& s = loop.steps[static_cast<std::size_t>(reg - leaves)];
  if (s.kind == Pointwise::Step::Kind::round) return is_truth(loop, s.a);
  constexpr Function kTruths[] = {
      Function::eq, Function::ne,          Function::lt,         Function::le,         Function::gt,
      Function::ge, Function::logical_and, Function::logical_or, Function::logical_not};
  return std::find(std::begin(kTruths), std::end(kTruths), s.function) != std::end(kTruths);
}

// Returns whether the result is exact in f32: a truth value, or a small sum of them.
bool is_small(const Pointwise& loop) {
  std::int64_t elements = 1;
  for (const std::int64_t size : loop.shape) elements *= size;
  return (!loop.reduction || elements <= kExactInFloat) && is_truth(loop, loop.store.source);
}

// How exactly an f32 register holds integers. exact: all of them. ordered: small ones exactly, and
// larger ones rounded in order. unknown: comparisons may be wrong.
enum class Whole : std::uint8_t { exact, ordered, unknown };

Whole wholeness(const Pointwise::Leaf& leaf) {
  const double size = std::abs(leaf.number);
  const bool large = size >= static_cast<double>(kExactInFloat) && std::isfinite(size);
  if (leaf.kind == Pointwise::Leaf::Kind::constant) return large ? Whole::unknown : Whole::exact;
  const bool read = leaf.kind == Pointwise::Leaf::Kind::memory && is_index(leaf.view.dtype);
  return read ? Whole::ordered : Whole::exact;
}

Whole wholeness(const Pointwise::Step& s, Whole a, Whole b, Whole c) {
  if (s.kind == Pointwise::Step::Kind::round) return is_index(s.dtype) ? a : Whole::exact;
  switch (s.function) {
    case Function::select:
      return std::max(b, c);
    case Function::max:
    case Function::min:
      return std::max(a, b);
    case Function::add:
    case Function::sub:
      return a == Whole::exact || b == Whole::exact ? std::max(a, b) : Whole::unknown;
    default:
      return std::max(a, b) == Whole::exact ? Whole::exact : Whole::unknown;
  }
}

// Returns whether the loop compares integers that f32 may confuse.
bool compares_whole(const Pointwise& loop) {
  std::vector<Whole> of;
  for (const Pointwise::Leaf& leaf : loop.leaves) of.push_back(wholeness(leaf));
  const auto at = [&](int reg) {
    return reg < 0 ? Whole::exact : of[static_cast<std::size_t>(reg)];
  };
  for (const Pointwise::Step& s : loop.steps) {
    const Whole a = at(s.a), b = at(s.b), most = std::max(a, b);
    const bool truth = is_truth(loop, static_cast<int>(of.size()));
    const bool logical = s.function == Function::logical_and ||
                         s.function == Function::logical_or || s.function == Function::logical_not;
    if (truth && !logical && s.kind == Pointwise::Step::Kind::function &&
        (most == Whole::unknown || (most == Whole::ordered && a == b)))
      return true;
    of.push_back(truth ? Whole::exact : wholeness(s, a, b, at(s.c)));
  }
  return false;
}

// Returns whether registers must be f64.
bool is_wide(const Pointwise& loop) {
  const DType stored = loop.store.view.dtype;
  bool wide = stored == DType::f64 || (is_index(stored) && !is_small(loop));
  for (const Pointwise::Leaf& leaf : loop.leaves) {
    if (leaf.kind == Pointwise::Leaf::Kind::iota)
      wide = wide || loop.shape[static_cast<std::size_t>(leaf.dim)] > kExactInFloat;
    if (leaf.kind == Pointwise::Leaf::Kind::memory) wide = wide || leaf.view.dtype == DType::f64;
  }
  for (const Pointwise::Step& s : loop.steps)
    wide = wide || (s.kind == Pointwise::Step::Kind::round ? s.dtype == DType::f64
                                                           : s.function == Function::random);
  // Values that another loop computes in f32 must have the bits of f32 here, too.
  const bool reads_numbers =
      std::any_of(loop.leaves.begin(), loop.leaves.end(), [](const Pointwise::Leaf& leaf) {
        return leaf.kind == Pointwise::Leaf::Kind::memory && !is_index(leaf.view.dtype);
      });
  return wide || (!reads_numbers && compares_whole(loop));
}

}  // namespace

void finish_pointwise(Pointwise& loop) {
  const auto rank = loop.shape.size();
  std::vector<bool> fixed(rank, false);
  for (const Pointwise::Leaf& leaf : loop.leaves) {
    if (leaf.kind == Pointwise::Leaf::Kind::iota) fixed[static_cast<std::size_t>(leaf.dim)] = true;
  }
  loop.wide = is_wide(loop);
  // Kept and reduced dimensions must not be merged.
  const std::size_t border = loop.columns ? static_cast<std::size_t>(loop.reduced)
                                          : rank - static_cast<std::size_t>(loop.reduced);
  std::vector<std::vector<std::int64_t>*> strides;
  strides.reserve(loop.leaves.size() + 2);
  for (Pointwise::Leaf& leaf : loop.leaves) {
    if (leaf.kind == Pointwise::Leaf::Kind::memory) strides.push_back(&leaf.view.strides);
  }
  strides.push_back(&loop.store.view.strides);
  std::vector<std::int64_t> marks(rank, 0);
  if (loop.reduction) {
    // Strides that prevent a merge across the border.
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
  loop.leaves.push_back(std::move(leaf));
  loop.store = {0, to, accumulate};
  finish_pointwise(loop);
  return loop;
}

void Lowering::compute(Value v, const Destination& to) {
  PointwiseBuilder builder(*this, sizes_of(g_.type(v)));
  int r = builder.compute(v);
  if (to.kind == Destination::Kind::max) {
    r = builder.step(Function::max, builder.memory(to.view), r, PointwiseBuilder::kNone);
  } else if (to.kind == Destination::Kind::lse) {
    // max + log(exp(a - max) + exp(b - max)), also if both are -inf.
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
  loop.store = {source, to.view, to.kind == Destination::Kind::sum};
  finish_pointwise(loop);
  push(v.node, std::move(loop));
}

}  // namespace logitless::ir
