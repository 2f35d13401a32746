// Chooses the registers of an elementwise loop: f32 or f64, and whether integers need their own.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "compiler/plan/integers.h"
#include "compiler/plan/pointwise_builder.h"

namespace logitless::ir {
namespace {

using Kind = Pointwise::Step::Kind;

constexpr double kExactInFloat = 0x1p24, kExactInDouble = 0x1p53;

bool is_logical(Function f) {
  return f == Function::logical_and || f == Function::logical_or || f == Function::logical_not;
}

// Bounds of a register.
struct Known {
  bool whole = false;  // an i32 or i64; or a number that may stand for one
  double most = 1.0;   // of a whole one: it is no farther from 0
  // A whole one that a float of the loop's width holds, or rounds in order: a value of memory.
  bool exact = true, ordered = true;
};

// Tells whether floats of a width compute what a loop's integers are.
class Integers {
 public:
  Integers(const Pointwise& loop, bool wide)
      : loop_(loop), limit_(wide ? kExactInDouble : kExactInFloat) {
    for (const Pointwise::Leaf& leaf : loop.leaves) add(of(leaf));
    for (const Pointwise::Step& step : loop.steps) add(of(step));
    const Pointwise::Store& to = loop.store;
    if (!is_index(to.view.dtype)) return;
    const Known& source = at(to.source);
    const bool sum = loop.reduction && loop.reduce == Reduce::sum;
    double elements = 1.0;
    for (const std::int64_t size : loop.shape) elements *= static_cast<double>(size);
    const double most = (source.whole ? source.most : 1.0) * elements;
    // The value in memory that a result is added to may be anything.
    rounded_ = rounded_ || (source.whole && !source.exact) || to.accumulate ||
               (sum && !(most < std::min(limit_, most_of(to.view.dtype))));
  }
  // Returns whether floats would round some integer.
  bool rounded() const { return rounded_; }
  const std::vector<Known>& registers() const { return known_; }

 private:
  const Pointwise& loop_;
  const double limit_;
  std::vector<Known> known_;
  bool rounded_ = false;

  const Known& at(int reg) const {
    static const Known kNothing;
    return reg < 0 ? kNothing : known_[static_cast<std::size_t>(reg)];
  }
  void add(Known k) { known_.push_back(k); }
  Known whole(double most) const { return {true, most, most < limit_, true}; }

  Known of(const Pointwise::Leaf& leaf) const {
    switch (leaf.kind) {
      case Pointwise::Leaf::Kind::memory:
        if (!is_index(leaf.view.dtype)) return {};
        // The least i32 is a float.
        return whole(leaf.view.dtype == DType::i32 ? 0x1p31 : 0x1p63);
      case Pointwise::Leaf::Kind::constant:
        if (std::trunc(leaf.number) != leaf.number || std::isinf(leaf.number)) return {};
        return whole(std::abs(leaf.number));
      case Pointwise::Leaf::Kind::iota:
        return whole(static_cast<double>(loop_.shape[static_cast<std::size_t>(leaf.dim)]));
      case Pointwise::Leaf::Kind::first:
        return whole(leaf.number);
    }
    return {};
  }

  Known of(const Pointwise::Step& s) {
    const Known &a = at(s.a), &b = at(s.b), &c = at(s.c);
    if (s.kind == Kind::round) {
      if (!is_index(s.dtype)) return {};
      const double most = a.whole ? a.most : most_of(s.dtype);
      // A float that is cut to an integer is one of its width.
      Known made = whole(std::min(most, most_of(s.dtype)));
      made.exact = made.exact || !a.whole;
      rounded_ = rounded_ || (a.whole && most > most_of(s.dtype)) || (a.whole && !a.exact);
      return made;
    }
    if (is_compare(s.function)) {
      const bool fits = (a.exact && b.exact) || ((a.exact || b.exact) && a.ordered && b.ordered);
      rounded_ = rounded_ || (a.whole && b.whole && !fits);
      return {};
    }
    if (!is_index(s.dtype)) return {};
    return of_integers(s.function, s.dtype, a, b, c);
  }

  Known of_integers(Function f, DType dtype, const Known& a, const Known& b, const Known& c) {
    const auto chosen = [&](const Known& x, const Known& y) {
      Known made = whole(std::max(x.most, y.most));
      made.exact = x.exact && y.exact;
      return made;
    };
    double most = 0.0;
    switch (f) {
      case Function::select:
        return chosen(b, c);
      case Function::max:
      case Function::min:
        return chosen(a, b);
      case Function::sign:
        return whole(1.0);
      case Function::neg:
      case Function::abs:
        most = a.most;
        break;
      case Function::mul:
        most = a.most * b.most;
        break;
      default:
        most = a.most + b.most;
    }
    const bool fits = a.exact && b.exact && most < std::min(limit_, most_of(dtype));
    rounded_ = rounded_ || !fits;
    return whole(most);
  }
};

// Returns whether registers must be f64, whatever the integers are.
bool is_wide(const Pointwise& loop) {
  const auto is_truth = [&](int reg) {
    const int leaves = static_cast<int>(loop.leaves.size());
    while (reg >= leaves) {
      const Pointwise::Step& s = loop.steps[static_cast<std::size_t>(reg - leaves)];
      if (s.kind != Kind::round) return is_compare(s.function) || is_logical(s.function);
      reg = s.a;
    }
    const Pointwise::Leaf& leaf = loop.leaves[static_cast<std::size_t>(reg)];
    return leaf.kind == Pointwise::Leaf::Kind::memory && leaf.view.dtype == DType::i8;
  };
  double elements = 1.0;
  for (const std::int64_t size : loop.shape) elements *= static_cast<double>(size);
  // A truth is exact in f32, and so is how many of them are true.
  const bool small = (!loop.reduction || elements <= kExactInFloat) && is_truth(loop.store.source);
  const DType stored = loop.store.view.dtype;
  bool wide = stored == DType::f64 || (is_index(stored) && !small);
  for (const Pointwise::Leaf& leaf : loop.leaves) {
    if (leaf.kind == Pointwise::Leaf::Kind::iota)
      wide = wide ||
             static_cast<double>(loop.shape[static_cast<std::size_t>(leaf.dim)]) > kExactInFloat;
    if (leaf.kind == Pointwise::Leaf::Kind::memory) wide = wide || leaf.view.dtype == DType::f64;
  }
  for (const Pointwise::Step& s : loop.steps)
    wide = wide || (s.kind == Kind::round ? s.dtype == DType::f64 : is_random(s.function));
  return wide;
}

// Takes out the steps that give what they are given.
void drop_steps(Pointwise& loop, const std::vector<bool>& dropped) {
  const int leaves = static_cast<int>(loop.leaves.size());
  std::vector<int> to;
  for (int i = 0; i < leaves; ++i) to.push_back(i);
  std::vector<Pointwise::Step> kept;
  const auto moved = [&](int reg) { return reg < 0 ? reg : to[static_cast<std::size_t>(reg)]; };
  for (std::size_t i = 0; i < loop.steps.size(); ++i) {
    Pointwise::Step s = loop.steps[i];
    for (int* r : {&s.a, &s.b, &s.c}) *r = moved(*r);
    to.push_back(dropped[i] ? s.a : leaves + static_cast<int>(kept.size()));
    if (!dropped[i]) kept.push_back(s);
  }
  loop.store.source = moved(loop.store.source);
  loop.steps = std::move(kept);
}

}  // namespace

void choose_registers(Pointwise& loop) {
  loop.wide = is_wide(loop);
  // Numbers that another loop computes in f32 too have the bits of f32 here.
  const bool reads_numbers =
      std::any_of(loop.leaves.begin(), loop.leaves.end(), [](const Pointwise::Leaf& leaf) {
        return leaf.kind == Pointwise::Leaf::Kind::memory && !is_index(leaf.view.dtype);
      });
  if (!loop.wide && !reads_numbers) loop.wide = Integers(loop, false).rounded();
  const Integers integers(loop, loop.wide);
  loop.exact = integers.rounded();
  if (loop.exact) return;
  std::vector<bool> dropped;
  for (const Pointwise::Step& s : loop.steps) {
    const bool whole = s.a >= 0 && integers.registers()[static_cast<std::size_t>(s.a)].whole;
    const bool rounds = loop.wide ? s.dtype != DType::f64 : s.dtype != DType::f32;
    dropped.push_back(s.kind == Kind::round && whole && (is_index(s.dtype) || !rounds));
  }
  if (std::find(dropped.begin(), dropped.end(), true) != dropped.end()) drop_steps(loop, dropped);
}

}  // namespace logitless::ir
