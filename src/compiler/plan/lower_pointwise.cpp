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
  const Node& n = graph().node(v);
  const auto rule = row_of(n.op).registers;
  if (rule == nullptr) return make(v);
  const int r = rule(*this, v);
  if (n.attributes->near) loop_.steps.back().near = true;
  return r;
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
    argument.number = l_.last_first();
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
  return step(Function::sub, constant(static_cast<double>(last)), index, kNone, DType::i64);
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
int PointwiseBuilder::step(Function f, int a, int b, int c, DType dtype) {
  return add_step({Pointwise::Step::Kind::function, f, dtype, a, b, c});
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

void finish_pointwise(Pointwise& loop) {
  const auto rank = loop.shape.size();
  std::vector<bool> fixed(rank, false);
  for (const Pointwise::Leaf& leaf : loop.leaves) {
    if (leaf.kind == Pointwise::Leaf::Kind::iota) fixed[static_cast<std::size_t>(leaf.dim)] = true;
  }
  choose_registers(loop);
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
    r = builder.step(Function::max, builder.memory(to.view), r, PointwiseBuilder::kNone,
                     to.view.dtype);
  } else if (to.kind == Destination::Kind::lse) {
    // max + log(exp(a - max) + exp(b - max)), also if both are -inf or one is inf.
    const int a = builder.memory(to.view), none = PointwiseBuilder::kNone;
    const int top = builder.step(Function::max, a, r, none);
    const int far = builder.constant(std::numeric_limits<double>::infinity());
    const int infinite =
        builder.step(Function::eq, builder.step(Function::abs, top, none, none), far, none);
    const int safe = builder.step(Function::select, infinite, builder.constant(0.0), top);
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
