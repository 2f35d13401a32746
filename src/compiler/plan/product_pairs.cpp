#include "compiler/plan/product_pairs.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "compiler/plan/views.h"

namespace logitless::ir {
namespace {

using Leaf = Pointwise::Leaf;
using Step = Pointwise::Step;

bool reads(const Leaf& leaf, const View& v) {
  return leaf.kind == Leaf::Kind::memory && same_memory(leaf.view, v);
}
bool reads_buffer(const Leaf& leaf, const View& v) {
  return leaf.kind == Leaf::Kind::memory && leaf.view.buffer == v.buffer;
}

// Returns whether one kernel takes the operands of both.
bool fit(const Gemm& one, const Gemm& other) {
  const auto by_rows = [](const Gemm& g) { return g.b.strides[0] == 1; };
  return one.m == other.m && one.n == other.n && one.a.dtype == other.a.dtype &&
         by_rows(one) == by_rows(other);
}

// Rewrites a loop whose registers of both results are only subtracted, from - what, to one in which
// the view `from` stands for the difference.
class Subtracted {
 public:
  Subtracted(const Pointwise& loop, const View& from, const View& what)
      : loop_(loop), from_(from), what_(what), to_(loop.leaves.size() + loop.steps.size(), -1) {}

  // Returns nothing if another operation reads one of them.
  std::optional<Pointwise> run() {
    Pointwise made = loop_;
    made.leaves.clear();
    made.steps.clear();
    for (std::size_t i = 0; i < loop_.leaves.size(); ++i) {
      const Leaf& leaf = loop_.leaves[i];
      if (reads(leaf, what_)) continue;
      if (reads_buffer(leaf, what_)) return std::nullopt;
      to_[i] = static_cast<int>(made.leaves.size());
      made.leaves.push_back(leaf);
    }
    const auto leaves = static_cast<int>(made.leaves.size());
    for (std::size_t i = 0; i < loop_.steps.size(); ++i) {
      Step step = loop_.steps[i];
      int& to = to_[loop_.leaves.size() + i];
      if (is_difference(step)) {
        to = to_[static_cast<std::size_t>(step.a)];
        continue;
      }
      for (int* const r : {&step.a, &step.b, &step.c}) {
        if (*r >= 0 && is_result(*r)) return std::nullopt;
        if (*r >= 0) *r = to_[static_cast<std::size_t>(*r)];
      }
      to = leaves + static_cast<int>(made.steps.size());
      made.steps.push_back(step);
    }
    if (loop_.store.source >= 0) {
      if (is_result(loop_.store.source)) return std::nullopt;
      made.store.source = to_[static_cast<std::size_t>(loop_.store.source)];
    }
    return made;
  }

 private:
  const Pointwise& loop_;
  const View &from_, &what_;
  std::vector<int> to_;  // by register: its new number

  const Leaf* leaf(int r) const {
    const auto at = static_cast<std::size_t>(r);
    return r >= 0 && at < loop_.leaves.size() ? &loop_.leaves[at] : nullptr;
  }
  bool is_result(int r) const {
    return leaf(r) != nullptr && (reads(*leaf(r), from_) || reads(*leaf(r), what_));
  }
  bool is_difference(const Step& s) const {
    return s.kind == Step::Kind::function && s.function == Function::sub && leaf(s.a) != nullptr &&
           leaf(s.b) != nullptr && reads(*leaf(s.a), from_) && reads(*leaf(s.b), what_);
  }
};

// Returns the group whose first product is `from`, and its second `what`.
std::optional<RowGroup> subtracted(RowGroup group, const Gemm& from, const Gemm& what) {
  for (RowGroup::Stage& stage : group.stages) {
    std::optional<Pointwise> loop = Subtracted(stage.loop, from.c, what.c).run();
    if (!loop) return std::nullopt;
    stage.loop = std::move(*loop);
  }
  group.product = from;
  group.other = what;
  group.difference = true;
  return group;
}

}  // namespace

std::optional<RowGroup> beside(const RowGroup& group, const Gemm& other) {
  if (!fit(*group.product, other) || group.product->k != other.k ||
      !same_memory(group.product->a, other.a))
    return std::nullopt;
  for (const RowGroup::Stage& stage : group.stages) {
    for (const Leaf& leaf : stage.loop.leaves) {
      if (reads_buffer(leaf, other.c) && !reads(leaf, other.c)) return std::nullopt;
    }
  }
  RowGroup both = group;
  both.other = other;
  return both;
}

std::optional<std::pair<Gemm, Gemm>> halves_of(const Gemm& product) {
  constexpr std::int64_t kColumns = 8;  // of which results have a multiple
  if (product.n % (2 * kColumns) != 0) return std::nullopt;
  Gemm left = product;
  left.n = product.n / 2;
  left.b.shape = {left.k, left.n};
  left.c.shape = {left.m, left.n};
  Gemm right = left;
  right.b.offset += left.n * left.b.strides[1];
  right.c.offset += left.n * left.c.strides[1];
  return std::pair(std::move(left), std::move(right));
}

std::optional<RowGroup> difference_of(const RowGroup& group, const Gemm& other) {
  if (!fit(*group.product, other) || group.product->c.dtype != DType::f32 ||
      other.c.dtype != DType::f32)
    return std::nullopt;
  std::optional<RowGroup> both = subtracted(group, *group.product, other);
  return both ? both : subtracted(group, other, *group.product);
}

}  // namespace logitless::ir
