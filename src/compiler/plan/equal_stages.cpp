// Equal stages of a row group, which recomputation leaves where a value's readers turn out to be
// close: the second one goes, and its readers read the first.
#include <algorithm>

#include "compiler/plan/group_rows.h"
#include "compiler/plan/views.h"

namespace logitless::ir {
namespace {

bool same(const Pointwise::Leaf& a, const Pointwise::Leaf& b) {
  return a.kind == b.kind && same_memory(a.view, b.view) && a.number == b.number && a.dim == b.dim;
}
bool same(const Pointwise::Step& a, const Pointwise::Step& b) {
  return a.kind == b.kind && a.function == b.function && a.dtype == b.dtype && a.a == b.a &&
         a.b == b.b && a.c == b.c && a.near == b.near;
}
template <typename T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const T& x, const T& y) { return same(x, y); });
}
// Returns whether two loops store equal values in equal order, each in memory of its own.
bool store_the_same(const Pointwise& a, const Pointwise& b) {
  View stored = b.store.view;
  stored.buffer = a.store.view.buffer;
  return a.shape == b.shape && same(a.leaves, b.leaves) && same(a.steps, b.steps) &&
         a.store.source == b.store.source && same_memory(a.store.view, stored) &&
         !a.store.accumulate && !b.store.accumulate && a.wide == b.wide && a.exact == b.exact &&
         a.reduction == b.reduction && a.reduce == b.reduce && a.reduced == b.reduced &&
         !a.columns && !b.columns;
}

// Calls visit(view) for each operand in memory. Returns false for instructions of other kinds.
bool each_operand(Instruction& i, const auto& visit) {
  const auto leaves = [&](Pointwise& loop) {
    for (Pointwise::Leaf& leaf : loop.leaves) {
      if (leaf.kind == Pointwise::Leaf::Kind::memory) visit(leaf.view);
    }
  };
  if (auto* const gemm = std::get_if<Gemm>(&i.what)) {
    for (View* const v : {&gemm->a, &gemm->b, &gemm->bias, &gemm->residual, &gemm->aux}) visit(*v);
  } else if (auto* const loop = std::get_if<Pointwise>(&i.what)) {
    leaves(*loop);
  } else if (auto* const group = std::get_if<RowGroup>(&i.what)) {
    for (RowGroup::Stage& stage : group->stages) leaves(stage.loop);
  } else {
    return false;
  }
  return true;
}

class Merger {
 public:
  explicit Merger(Program& program) : p_(program) {}

  void run() {
    for (Instruction& i : p_.instructions) {
      auto* const group = std::get_if<RowGroup>(&i.what);
      for (std::size_t s = 1; group != nullptr && s < group->stages.size(); ++s) {
        if (merge(group->stages, s)) --s;
      }
    }
  }

 private:
  Program& p_;

  const Buffer& buffer(int b) const { return p_.buffers[static_cast<std::size_t>(b)]; }

  bool merge(std::vector<RowGroup::Stage>& stages, std::size_t s) {
    const auto end = stages.begin() + static_cast<std::ptrdiff_t>(s);
    const auto first = std::find_if(stages.begin(), end, [&](const RowGroup::Stage& stage) {
      return store_the_same(stage.loop, stages[s].loop);
    });
    if (first == end) return false;
    const int kept = first->loop.store.view.buffer, gone = stages[s].loop.store.view.buffer;
    if (!is_written_once(kept) || !is_written_once(gone) || !can_rename(gone)) return false;
    stages.erase(end);
    for (Instruction& i : p_.instructions) {
      each_operand(i, [&](View& v) {
        if (v.buffer == gone) v.buffer = kept;
      });
    }
    return true;
  }
  bool is_written_once(int b) const {
    if (buffer(b).place != Place::arena) return false;
    std::ptrdiff_t writes = 0;
    for (const Instruction& i : p_.instructions) {
      const std::vector<int> written = writes_of(i);
      writes += std::count(written.begin(), written.end(), b);
    }
    return writes == 1;
  }
  bool can_rename(int b) {
    return std::all_of(p_.instructions.begin(), p_.instructions.end(), [&](Instruction& i) {
      const std::vector<int> read = reads_of(i);
      return std::find(read.begin(), read.end(), b) == read.end() || each_operand(i, [](View&) {});
    });
  }
};

}  // namespace

void merge_equal_stages(Program& program) { Merger(program).run(); }

}  // namespace logitless::ir
