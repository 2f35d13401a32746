#include "compiler/plan/group_rows.h"

#include <algorithm>
#include <set>

#include "compiler/target/target.h"

namespace logitless::ir {
namespace {

constexpr std::int64_t kLeastRows = 64;  // fewer rows are split into parts
constexpr std::int64_t kLeastColumns = 8;
constexpr std::size_t kMostStages = 16;
constexpr std::size_t kMostViews = 64;   // operands of all stages
constexpr std::size_t kMostBetween = 8;  // instructions between loops of a group

bool is_memory(const Pointwise::Leaf& leaf) { return leaf.kind == Pointwise::Leaf::Kind::memory; }

// Reshapes a loop over [rows * columns] to [rows, columns].
std::optional<Pointwise> unfolded(Pointwise loop, std::int64_t rows, std::int64_t columns) {
  const auto unfold = [&](View& view) {
    const std::int64_t stride = view.strides[0];
    view.strides = {stride * columns, stride};
  };
  for (Pointwise::Leaf& leaf : loop.leaves) {
    if (leaf.kind == Pointwise::Leaf::Kind::iota) return std::nullopt;
    if (is_memory(leaf)) unfold(leaf.view);
  }
  unfold(loop.store.view);
  loop.shape = {rows, columns};
  return loop;
}

// Returns whether rows are contiguous and in order.
bool is_whole(const View& view, std::int64_t columns) {
  return view.strides[1] == 1 && view.strides[0] >= columns;
}

bool same_memory(const View& a, const View& b) {
  return a.buffer == b.buffer && a.offset == b.offset && a.dtype == b.dtype;
}

// The stages of one group while they are collected.
class Collector {
 public:
  Collector(std::int64_t rows, std::int64_t columns) {
    group_.rows = rows;
    group_.columns = columns;
  }

  // Adds the loop if it can be a stage after the existing ones.
  bool add(const Pointwise& loop) {
    if (group_.stages.size() == kMostStages) return false;
    std::optional<Pointwise> stage = stage_of(loop, group_.rows, group_.columns);
    if (!stage || read_.contains(stage->store.view.buffer) ||
        written_.contains(stage->store.view.buffer))
      return false;
    group_.stages.push_back({std::move(*stage), true});
    const std::size_t own = group_.stages.size() - 1;
    const Pointwise& made = group_.stages.back().loop;
    std::size_t views = 1;
    bool fits =
        group_.columns <= RowGroup::kMostColumnsOfBlock || kind_of(made) != StageKind::column_sum;
    for (const Pointwise::Leaf& leaf : made.leaves) {
      if (!is_memory(leaf) || maker_of(group_, own, leaf) >= 0) continue;
      fits = fits && !written_.contains(leaf.view.buffer);
      ++views;
    }
    if (!fits || views_ + views > kMostViews) {
      group_.stages.pop_back();
      return false;
    }
    for (const Pointwise::Leaf& leaf : made.leaves) {
      if (is_memory(leaf) && maker_of(group_, own, leaf) < 0) read_.insert(leaf.view.buffer);
    }
    if (made.store.accumulate) read_.insert(made.store.view.buffer);
    written_.insert(made.store.view.buffer);
    views_ += views;
    return true;
  }

  bool is_group() const {
    return group_.stages.size() >= 2 &&
           std::any_of(group_.stages.begin(), group_.stages.end(),
                       [](const RowGroup::Stage& s) { return kind_of(s.loop) != StageKind::rows; });
  }
  // Returns whether the loop reads a value that a stage reads or makes.
  bool shares(const Pointwise& loop) const {
    return std::any_of(loop.leaves.begin(), loop.leaves.end(), [&](const Pointwise::Leaf& leaf) {
      return is_memory(leaf) &&
             (read_.contains(leaf.view.buffer) || written_.contains(leaf.view.buffer));
    });
  }
  RowGroup take() {
    join_sums();
    return std::move(group_);
  }

 private:
  // Moves sums of rows behind earlier ones if they read nothing that is made later: a kernel takes
  // adjacent ones by one pass, with one barrier. Not those of column operands: their values for all
  // of a thread's elements take its registers, and a group took 1.4 times as long.
  void join_sums() {
    auto& stages = group_.stages;
    for (std::size_t s = 0; s < stages.size(); ++s) {
      if (kind_of(stages[s].loop) != StageKind::row_sum) continue;
      const std::size_t first = s;
      for (std::size_t next = s + 1; next < stages.size(); ++next) {
        if (!may_join(first, next)) continue;
        const auto from = stages.begin() + static_cast<std::ptrdiff_t>(++s);
        const auto at = stages.begin() + static_cast<std::ptrdiff_t>(next);
        std::rotate(from, at, at + 1);
      }
    }
  }
  bool may_join(std::size_t first, std::size_t next) const {
    const Pointwise& loop = group_.stages[next].loop;
    return kind_of(loop) == StageKind::row_sum &&
           std::all_of(loop.leaves.begin(), loop.leaves.end(), [&](const Pointwise::Leaf& leaf) {
             const bool column =
                 is_memory(leaf) && leaf.view.strides[0] == 0 && leaf.view.strides[1] != 0;
             return !column && maker_of(group_, next, leaf) < static_cast<int>(first);
           });
  }

  RowGroup group_;
  std::set<int> read_, written_;  // buffers that stages read from memory, and write
  std::size_t views_ = 0;         // memory operands of all stages
};

const Pointwise* loop_at(const std::vector<Instruction>& list, std::size_t i) {
  return i < list.size() ? std::get_if<Pointwise>(&list[i].what) : nullptr;
}

// Returns whether the instruction may move before or after a group of so many rows: a matrix
// product, a pick, or a loop over no more numbers than there are rows.
bool may_move(const Instruction& i, std::int64_t rows) {
  if (const auto* loop = std::get_if<Pointwise>(&i.what)) {
    std::int64_t elements = 1;
    for (const std::int64_t size : loop->shape) elements *= size;
    return elements <= rows;
  }
  return std::holds_alternative<Gemm>(i.what) || std::holds_alternative<Pick>(i.what);
}

// Returns rows and columns for `count` contiguous elements if no loop determines them.
std::optional<std::pair<std::int64_t, std::int64_t>> space_of(std::int64_t count) {
  for (std::int64_t columns = 2048; columns >= 256; columns -= 8) {
    if (count % columns == 0 && count / columns >= kLeastRows)
      return std::pair{count / columns, columns};
  }
  return std::nullopt;
}

// Returns the space of the first loop from i on that has rows and columns. If there is none among
// adjacent loops, a loop behind matrix products with as many elements determines it.
std::optional<std::pair<std::int64_t, std::int64_t>> space_at(const std::vector<Instruction>& list,
                                                              std::size_t i,
                                                              std::int64_t most_columns) {
  const Pointwise* const first = loop_at(list, i);
  if (first == nullptr) return std::nullopt;
  const bool in_order = first->shape.size() == 1;
  std::size_t products = 0;
  for (const std::size_t end = i + kMostStages; i < std::min(end, list.size()); ++i) {
    const Pointwise* const loop = loop_at(list, i);
    if (loop == nullptr) {
      if (!in_order || !may_move(list[i], 0) || products++ == kMostBetween) break;
      continue;
    }
    if (loop->shape.size() != 2) continue;
    const std::int64_t rows = loop->shape[0], columns = loop->shape[1];
    if (products > 0 && rows * columns != first->shape[0]) break;
    if (rows < kLeastRows || columns < kLeastColumns || columns > most_columns) return std::nullopt;
    return std::pair{rows, columns};
  }
  return in_order ? space_of(first->shape[0]) : std::nullopt;
}

bool meet(const std::vector<int>& a, const std::vector<int>& b) {
  return std::any_of(a.begin(), a.end(),
                     [&](int x) { return x >= 0 && std::find(b.begin(), b.end(), x) != b.end(); });
}
// Returns whether two instructions give the same results in either order.
bool commute(const Instruction& a, const Instruction& b) {
  const std::vector<int> read_a = reads_of(a), read_b = reads_of(b);
  const std::vector<int> written_a = writes_of(a), written_b = writes_of(b);
  return !meet(written_a, read_b) && !meet(written_b, read_a) && !meet(written_a, written_b);
}

// A group, and the instructions between its loops, which are moved before or after the group. So a
// product of some of its values, like the gradient of a weight, does not split it.
struct Run {
  Collector loops;
  std::vector<std::size_t> members, before, after;  // instruction indices
  std::size_t end = 0;                              // past the last member
};

bool commutes_with(const std::vector<Instruction>& list, std::size_t i,
                   const std::vector<std::size_t>& others) {
  return std::all_of(others.begin(), others.end(),
                     [&](std::size_t other) { return commute(list[i], list[other]); });
}

Run run_at(const std::vector<Instruction>& list, std::size_t begin,
           std::pair<std::int64_t, std::int64_t> space) {
  Run run{Collector(space.first, space.second), {}, {}, {}, begin};
  Run longer = run;
  bool shares = true;  // loops behind a product share values with those before it
  for (std::size_t i = begin; i < list.size(); ++i) {
    const Pointwise* const loop = loop_at(list, i);
    if (loop != nullptr && commutes_with(list, i, longer.after)) {
      const bool of_group = shares || longer.loops.shares(*loop);
      if (longer.loops.add(*loop)) {
        shares = of_group;
        longer.members.push_back(i);
        longer.end = i + 1;
        if (shares) run = longer;
        continue;
      }
    }
    if (!may_move(list[i], space.first) || longer.members.empty() ||
        longer.before.size() + longer.after.size() == kMostBetween)
      break;
    shares = shares && loop != nullptr;
    const bool first =
        commutes_with(list, i, longer.members) && commutes_with(list, i, longer.after);
    (first ? longer.before : longer.after).push_back(i);
  }
  return run;
}

}  // namespace

// Returns whether the loop makes a number of a row in f64.
static bool is_wide_row(const Pointwise& loop) {
  const DType to = loop.store.view.dtype;
  return !loop.reduction && loop.shape.size() == 1 && !loop.exact &&
         (to == DType::f32 || to == DType::f64);
}

StageKind kind_of(const Pointwise& loop) {
  if (loop.reduction) return loop.columns ? StageKind::column_sum : StageKind::row_sum;
  return loop.shape.size() == 1 ? StageKind::rows : StageKind::elements;
}

std::optional<Pointwise> stage_of(const Pointwise& given, std::int64_t rows, std::int64_t columns) {
  if (given.wide && !is_wide_row(given)) return std::nullopt;
  std::optional<Pointwise> loop = given;
  const std::vector<std::int64_t> all = {rows, columns};
  if (given.reduction) {
    const bool sum = given.reduce == Reduce::sum;
    if (given.reduce == Reduce::product) return std::nullopt;
    if (given.shape != all || given.reduced != 1 || (given.columns && !sum)) return std::nullopt;
  } else if (given.shape.size() == 1 && given.shape[0] == rows * columns) {
    loop = unfolded(given, rows, columns);
  } else if (given.shape != all && given.shape != std::vector{rows}) {
    return std::nullopt;
  }
  if (!loop) return loop;
  const StageKind kind = kind_of(*loop);
  for (const Pointwise::Leaf& leaf : loop->leaves) {
    if (is_memory(leaf) && leaf.view.strides[0] < 0) return std::nullopt;
  }
  if (kind == StageKind::rows) return loop->store.view.strides[0] > 0 ? loop : std::nullopt;
  for (const Pointwise::Leaf& leaf : loop->leaves) {
    if (!is_memory(leaf)) continue;
    const View& v = leaf.view;
    if (v.strides[1] != 0 && !is_whole(v, columns) && v.strides != std::vector<std::int64_t>{0, 1})
      return std::nullopt;
  }
  const View& to = loop->store.view;
  if (kind == StageKind::elements && !is_whole(to, columns)) return std::nullopt;
  if (kind == StageKind::row_sum && to.strides[0] == 0) return std::nullopt;
  return loop;
}

int maker_of(const RowGroup& group, std::size_t stage, const Pointwise::Leaf& leaf) {
  if (!is_memory(leaf)) return -1;
  const StageKind own = kind_of(group.stages[stage].loop);
  for (std::size_t s = 0; s < stage; ++s) {
    const Pointwise& made = group.stages[s].loop;
    const View& to = made.store.view;
    if (!same_memory(to, leaf.view) || made.store.accumulate) continue;
    const StageKind kind = kind_of(made);
    const bool whole = leaf.view.strides.size() == 2 && leaf.view.strides[1] == 1;
    if (kind == StageKind::elements) {
      if (own != StageKind::rows && whole && leaf.view.strides == to.strides)
        return static_cast<int>(s);
    } else if (kind != StageKind::column_sum) {
      const bool of_rows = own == StageKind::rows || leaf.view.strides[1] == 0;
      if (of_rows && leaf.view.strides[0] == to.strides[0]) return static_cast<int>(s);
    }
  }
  return -1;
}

void drop_stores(Program& program) {
  std::vector<int> readers(program.buffers.size(), 0), writers(program.buffers.size(), 0);
  const auto count = [](std::vector<int>& of, const std::vector<int>& buffers) {
    for (const int b : buffers) ++of[static_cast<std::size_t>(b)];
  };
  for (const Instruction& i : program.instructions) {
    count(readers, reads_of(i));
    count(writers, writes_of(i));
  }
  for (Instruction& i : program.instructions) {
    auto* group = std::get_if<RowGroup>(&i.what);
    if (group == nullptr) continue;
    for (RowGroup::Stage& stage : group->stages) {
      const auto b = static_cast<std::size_t>(stage.loop.store.view.buffer);
      stage.stored = program.buffers[b].place != Place::arena || readers[b] > 0 || writers[b] > 1 ||
                     stage.loop.store.accumulate || kind_of(stage.loop) == StageKind::column_sum;
    }
  }
}

void group_rows(Program& program, const Target& target) {
  std::vector<Instruction> grouped;
  for (std::size_t i = 0; i < program.instructions.size();) {
    Instruction& instruction = program.instructions[i];
    const auto space = space_at(program.instructions, i, target.most_group_columns());
    if (space) {
      Run run = run_at(program.instructions, i, *space);
      if (run.loops.is_group()) {
        const auto move = [&](const std::vector<std::size_t>& products) {
          for (const std::size_t at : products)
            grouped.push_back(std::move(program.instructions[at]));
        };
        RowGroup group = run.loops.take();
        const std::string last = program.instructions[run.members.back()].name;
        const int node = program.instructions[run.members.back()].node;
        if (const std::int64_t bytes = target.scratch_bytes(group); bytes > 0) {
          Buffer scratch;
          scratch.bytes = scratch.value_bytes = bytes;
          scratch.name = last + " parts";
          group.scratch = static_cast<int>(program.buffers.size());
          program.buffers.push_back(std::move(scratch));
        }
        move(run.before);
        grouped.push_back({last, std::move(group), node});
        move(run.after);
        i = run.end;
        continue;
      }
    }
    grouped.push_back(std::move(instruction));
    ++i;
  }
  program.instructions = std::move(grouped);
  merge_equal_stages(program);
  drop_stores(program);
}

}  // namespace logitless::ir
