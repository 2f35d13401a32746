#include <algorithm>
#include <optional>
#include <utility>

#include "compiler/plan/cost.h"
#include "compiler/plan/group_rows.h"
#include "compiler/plan/integers.h"
#include "compiler/plan/product_pairs.h"
#include "compiler/plan/views.h"
#include "compiler/target/target.h"

namespace logitless::ir {
namespace {

constexpr std::int64_t kAccess = 16;  // bytes of aligned rows
constexpr std::size_t kMostStages = 12;
constexpr std::size_t kMostStored = 4;
constexpr std::size_t kMostViews = 40;  // kernel arguments
constexpr double kGain = 0.97;          // of the predicted time, at most

bool is_memory(const Pointwise::Leaf& leaf) { return leaf.kind == Pointwise::Leaf::Kind::memory; }

bool is_aligned(const View& v, std::int64_t stride) {
  const auto size = static_cast<std::int64_t>(size_of(v.dtype));
  return stride * size % kAccess == 0 && v.offset * size % kAccess == 0;
}

// Returns whether the kernel multiplies these operands: 16 bits, a by rows, b by rows or columns.
bool takes_product(const Gemm& g) {
  const View &a = g.a, &b = g.b, &c = g.c;
  const bool narrow = a.dtype == DType::bf16 || a.dtype == DType::f16;
  if (!narrow || b.dtype != a.dtype || !g.outer.empty() || g.accumulate || g.epilogue.any() ||
      g.n % 8 != 0 || g.m == 0 || g.n == 0 || g.k == 0)
    return false;
  const bool rows = a.strides[1] == 1 && is_aligned(a, a.strides[0]) && a.strides[0] >= g.k;
  const bool columns = (b.strides[0] == 1 && is_aligned(b, b.strides[1]) && b.strides[1] >= g.k) ||
                       (b.strides[1] == 1 && is_aligned(b, b.strides[0]) && b.strides[0] >= g.n);
  return rows && columns && c.strides[1] == 1 && c.strides[0] >= g.n;
}

// Returns the product for a kernel that needs no scratch of cuBLASLt.
Gemm without_scratch(Gemm g) {
  g.scratch = -1;
  g.additional_bytes = 0;
  return g;
}

// Returns a pick of an element of each row as a sum of the row: an index outside gives 0.
std::optional<Pointwise> sum_of_pick(const Pick& pick, const Gemm& of) {
  constexpr std::int64_t kMostExact = 1 << 24;  // indices are compared as fp32
  if (!same_memory(pick.x, of.c) || pick.x.shape != std::vector{of.m, of.n} || pick.axis != 1 ||
      pick.out.shape != std::vector{of.m} || of.n > kMostExact)
    return std::nullopt;
  Pointwise sum;
  sum.shape = {of.m, of.n};
  sum.reduction = true;
  sum.reduced = 1;
  const auto leaf = [&](Pointwise::Leaf::Kind kind) -> Pointwise::Leaf& {
    sum.leaves.emplace_back().kind = kind;
    return sum.leaves.back();
  };
  leaf(Pointwise::Leaf::Kind::memory).view = pick.x;
  View& index = leaf(Pointwise::Leaf::Kind::memory).view = pick.index;
  index.shape = sum.shape;
  index.strides.push_back(0);
  leaf(Pointwise::Leaf::Kind::iota).dim = 1;
  leaf(Pointwise::Leaf::Kind::constant).number = 0.0;
  Pointwise::Step same;
  same.function = Function::eq;
  same.a = 1;
  same.b = 2;
  Pointwise::Step chosen;
  chosen.function = Function::select;
  chosen.a = 4;
  chosen.b = 0;
  chosen.c = 3;
  sum.steps = {same, chosen};
  sum.store.source = 5;
  sum.store.view = pick.out;
  sum.store.view.strides.push_back(0);
  return sum;
}

// Returns the loops of an instruction as stages over the product's rows and columns, or nothing.
std::optional<std::vector<RowGroup::Stage>> stages_of(const Instruction& i, const Gemm& of) {
  if (const auto* pick = std::get_if<Pick>(&i.what)) {
    std::optional<Pointwise> sum = sum_of_pick(*pick, of);
    if (!sum) return std::nullopt;
    return std::vector<RowGroup::Stage>{{std::move(*sum), true}};
  }
  if (const auto* loop = std::get_if<Pointwise>(&i.what)) {
    std::optional<Pointwise> stage = stage_of(*loop, of.m, of.n);
    if (!stage) return std::nullopt;
    return std::vector<RowGroup::Stage>{{std::move(*stage), true}};
  }
  const auto* group = std::get_if<RowGroup>(&i.what);
  if (group == nullptr || group->product || group->rows != of.m || group->columns != of.n)
    return std::nullopt;
  return group->stages;
}

bool meet(const std::vector<int>& a, const std::vector<int>& b) {
  return std::any_of(a.begin(), a.end(),
                     [&](int x) { return x >= 0 && std::find(b.begin(), b.end(), x) != b.end(); });
}

// A product and its readers as one group, and the loops that remain.
struct Fusion {
  RowGroup group;
  std::vector<Pointwise> after;      // loops over rows that need the group's sums
  std::vector<std::size_t> members;  // the product and its readers, in order
};

class Finder {
 public:
  Finder(const Program& program, const Target& target, ProductEngine engine)
      : p_(program), target_(target), engine_(engine) {
    for (const Instruction& i : p_.instructions) {
      reads_.push_back(reads_of(i));
      writes_.push_back(writes_of(i));
    }
  }

  std::optional<Fusion> find(std::size_t at) const {
    const auto* gemm = std::get_if<Gemm>(&p_.instructions[at].what);
    if (gemm == nullptr || !takes_product(*gemm) || is_unaligned(gemm->a.buffer) ||
        is_unaligned(gemm->b.buffer) || !is_only_writer(at, gemm->c.buffer))
      return std::nullopt;
    if (std::optional<Fusion> f = fastest(at, *gemm)) return f;
    // A result that is only read as two halves, such as gates and units.
    const auto halves = halves_of(*gemm);
    if (!halves) return std::nullopt;
    Grown both = grown(at, halves->first, halves->second);
    return both.fusion && !both.stored && gain(*both.fusion) > 0.0 ? both.fusion : std::nullopt;
  }

 private:
  const Program& p_;
  const Target& target_;
  const ProductEngine engine_;
  std::vector<std::vector<int>> reads_, writes_;  // by instruction

  bool is_unaligned(int buffer) const {
    return p_.buffers[static_cast<std::size_t>(buffer)].unaligned;
  }

  bool is_only_writer(std::size_t writer, int buffer) const {
    for (std::size_t i = 0; i < writes_.size(); ++i) {
      if (i != writer && meet(writes_[i], {buffer})) return false;
    }
    return true;
  }

  // Returns whether a value is a result of the program or read by others than the members.
  bool is_read_outside(int buffer, const std::vector<std::size_t>& members) const {
    if (p_.buffers[static_cast<std::size_t>(buffer)].place != Place::arena) return true;
    for (std::size_t i = 0; i < reads_.size(); ++i) {
      if (meet(reads_[i], {buffer}) &&
          std::find(members.begin(), members.end(), i) == members.end())
        return true;
    }
    return false;
  }

  // Returns whether all members may move to the place of the last.
  bool can_meet(const std::vector<std::size_t>& members) const {
    for (std::size_t m = 0; m + 1 < members.size(); ++m) {
      const std::size_t own = members[m];
      for (std::size_t i = own + 1; i < members.back(); ++i) {
        if (std::find(members.begin(), members.end(), i) != members.end()) continue;
        if (meet(writes_[own], reads_[i]) || meet(writes_[i], reads_[own]) ||
            meet(writes_[own], writes_[i]))
          return false;
      }
    }
    return true;
  }

  // A product and the readers of its result that its epilogue takes, the first ones.
  struct Grown {
    std::optional<Fusion> fusion;
    bool stored = false;  // others read the result, too
  };
  Grown grown(std::size_t at, const Gemm& gemm, const std::optional<Gemm>& other) const {
    std::vector<std::size_t> members = {at};
    std::vector<RowGroup::Stage> stages;
    Grown g;
    g.stored = p_.buffers[static_cast<std::size_t>(gemm.c.buffer)].place != Place::arena;
    for (std::size_t i = at + 1; i < p_.instructions.size(); ++i) {
      if (!meet(reads_[i], {gemm.c.buffer})) continue;
      std::optional<std::vector<RowGroup::Stage>> more = stages_of(p_.instructions[i], gemm);
      if (more) {
        members.push_back(i);
        stages.insert(stages.end(), more->begin(), more->end());
      }
      std::optional<Fusion> longer;
      if (more && can_meet(members)) longer = split(gemm, other, stages, members);
      if (!longer) {  // it and all later readers read memory
        g.stored = true;
        break;
      }
      g.fusion = std::move(longer);
    }
    return g;
  }

  // Returns the fusion that saves the most time, alone or with another product.
  std::optional<Fusion> fastest(std::size_t at, const Gemm& gemm) const {
    Grown g = grown(at, gemm, std::nullopt);
    std::optional<Fusion>& found = g.fusion;
    if (!found || (g.stored && !(has_elements(found->group) &&
                                 store_product(found->group, found->group.product->c))))
      return std::nullopt;
    double best = gain(*found);
    std::optional<Fusion> chosen = best > 0.0 ? found : std::nullopt;
    const std::vector<int> read = reads_of(Instruction{{}, found->group});
    for (std::size_t other = 0; other < found->members.back(); ++other) {
      if (!meet(writes_[other], read)) continue;
      std::optional<Fusion> both = with_other(*found, other);
      if (!both || gain(*both) <= best) continue;
      best = gain(*both);
      chosen = std::move(both);
    }
    return chosen;
  }

  // Divides the stages into those of the epilogue and loops over rows behind it. Returns nothing if
  // an element needs a sum of its row, or a stage is none of an epilogue.
  std::optional<Fusion> split(const Gemm& gemm, const std::optional<Gemm>& other,
                              const std::vector<RowGroup::Stage>& all,
                              const std::vector<std::size_t>& members) const {
    if (all.size() > kMostStages) return std::nullopt;
    Fusion f;
    f.members = members;
    RowGroup& group = f.group;
    group.rows = gemm.m;
    group.columns = gemm.n;
    group.engine = engine_;
    group.product = without_scratch(gemm);
    if (other) group.other = without_scratch(*other);
    std::vector<int> behind;  // buffers of sums and of what needs them
    for (const RowGroup::Stage& stage : all) {
      const StageKind kind = kind_of(stage.loop);
      std::vector<int> read;
      for (const Pointwise::Leaf& leaf : stage.loop.leaves) {
        if (is_memory(leaf)) read.push_back(leaf.view.buffer);
      }
      if (meet(read, behind)) {
        if (kind != StageKind::rows || stage.loop.store.accumulate) return std::nullopt;
        behind.push_back(stage.loop.store.view.buffer);
        f.after.push_back(stage.loop);
        continue;
      }
      if (!takes(stage.loop)) return std::nullopt;
      if (kind == StageKind::row_sum) behind.push_back(stage.loop.store.view.buffer);
      group.stages.push_back({stage.loop, is_read_outside(stage.loop.store.view.buffer, members) ||
                                              kind != StageKind::elements});
    }
    return reads_are_clear(group) ? std::optional(std::move(f)) : std::nullopt;
  }

  // Sums beside a stored product are left to the loop that reads it: it has them from registers.
  static bool has_elements(const RowGroup& group) {
    return std::any_of(group.stages.begin(), group.stages.end(), [](const RowGroup::Stage& s) {
      return s.stored && kind_of(s.loop) == StageKind::elements;
    });
  }
  // Returns the fusion with another product whose result its stages read, or nothing.
  std::optional<Fusion> with_other(const Fusion& f, std::size_t at) const {
    const auto* given = std::get_if<Gemm>(&p_.instructions[at].what);
    const bool member = std::find(f.members.begin(), f.members.end(), at) != f.members.end();
    if (given == nullptr || member || !takes_product(*given) || is_unaligned(given->a.buffer) ||
        is_unaligned(given->b.buffer) || !is_only_writer(at, given->c.buffer))
      return std::nullopt;
    const Gemm other = without_scratch(*given);
    Fusion both = f;
    both.members.insert(std::lower_bound(both.members.begin(), both.members.end(), at), at);
    for (const Pointwise& loop : f.after) {
      if (meet(reads_of(Instruction{{}, loop}), {other.c.buffer})) return std::nullopt;
    }
    if (!can_meet(both.members)) return std::nullopt;
    const bool stored = is_read_outside(other.c.buffer, both.members);
    std::optional<RowGroup> group = stored ? std::nullopt : difference_of(f.group, other);
    if (!group) group = beside(f.group, other);
    if (!group || (stored && !(has_elements(*group) && store_product(*group, other.c))) ||
        !reads_are_clear(*group))
      return std::nullopt;
    both.group = std::move(*group);
    return both;
  }

  // Adds the stage that stores a product's result c, for readers that are not of the group.
  static bool store_product(RowGroup& group, const View& c) {
    if (!is_aligned(c, c.strides[0])) return false;
    Pointwise copy;
    copy.shape = {group.rows, group.columns};
    copy.leaves.emplace_back().view = c;
    copy.store.source = 0;
    copy.store.view = c;
    group.stages.push_back({std::move(copy), true});
    return reads_are_clear(group);
  }

  // Returns whether the loop can be a stage of an epilogue.
  static bool takes(const Pointwise& loop) {
    const StageKind kind = kind_of(loop);
    const View& to = loop.store.view;
    if (kind == StageKind::column_sum || loop.store.accumulate) return false;
    if (kind == StageKind::rows) return !loop.exact;
    if (loop.wide || (kind == StageKind::row_sum && holds_integers(loop, loop.store.source)))
      return false;
    const bool stored = to.dtype == DType::f32 || to.dtype == DType::bf16 || to.dtype == DType::f16;
    return kind == StageKind::row_sum || (stored && is_aligned(to, to.strides[0]));
  }

  // Returns whether every leaf in memory is the product's, a value of an earlier stage, or one of
  // few in memory that no stage writes.
  static bool reads_are_clear(const RowGroup& group) {
    std::vector<int> written;
    std::size_t elements = 0;
    for (const RowGroup::Stage& stage : group.stages) {
      if (meet(written, {stage.loop.store.view.buffer})) return false;
      written.push_back(stage.loop.store.view.buffer);
      elements += kind_of(stage.loop) == StageKind::elements ? 1 : 0;
    }
    if (elements > kMostStored) return false;
    std::size_t views = 0;
    for (std::size_t s = 0; s < group.stages.size(); ++s) {
      for (const Pointwise::Leaf& leaf : group.stages[s].loop.leaves) {
        if (!is_memory(leaf) || product_of(group, leaf) != nullptr || maker_of(group, s, leaf) >= 0)
          continue;
        if (leaf.view.buffer == group.product->c.buffer ||
            (group.other && leaf.view.buffer == group.other->c.buffer) ||
            meet(written, {leaf.view.buffer}) || ++views > kMostViews)
          return false;
      }
    }
    return true;
  }

  // Returns the seconds that a fusion saves, or 0 where these are too few.
  double gain(const Fusion& f) const {
    const Rates rates = target_.rates();
    double before = 0.0, after = 0.0;
    for (const std::size_t i : f.members) before += predicted_seconds(p_.instructions[i], rates);
    // Picks are counted as sums, since they read one element of a row.
    after = predicted_seconds(Instruction{{}, f.group}, rates);
    for (const Pointwise& loop : f.after) after += predicted_seconds(Instruction{{}, loop}, rates);
    return after < kGain * before ? before - after : 0.0;
  }
};

}  // namespace

const Gemm* product_of(const RowGroup& group, const Pointwise::Leaf& leaf) {
  for (const std::optional<Gemm>* product : {&group.product, &group.other}) {
    if (*product && is_memory(leaf) && same_memory(leaf.view, (*product)->c)) return &**product;
  }
  return nullptr;
}

void fuse_products(Program& program, const Target& target) {
  const std::optional<ProductEngine> engine = target.product_engine();
  if (!engine) return;
  std::optional<Finder> finder(std::in_place, program, target, *engine);
  bool any = false;
  for (std::size_t at = 0; at < program.instructions.size(); ++at) {
    std::optional<Fusion> f = finder->find(at);
    if (!f) continue;
    any = true;
    const std::size_t last = f->members.back();
    const auto before = static_cast<std::size_t>(
        std::lower_bound(f->members.begin(), f->members.end(), at) - f->members.begin());
    const std::string name = program.instructions[last].name;
    const int node = program.instructions[last].node;
    if (const std::int64_t bytes = target.scratch_bytes(f->group); bytes > 0) {
      Buffer scratch;
      scratch.bytes = scratch.value_bytes = bytes;
      scratch.name = name + " parts";
      f->group.scratch = static_cast<int>(program.buffers.size());
      program.buffers.push_back(std::move(scratch));
    }
    std::vector<Instruction> list;
    for (std::size_t i = 0; i < program.instructions.size(); ++i) {
      const bool member = std::find(f->members.begin(), f->members.end(), i) != f->members.end();
      if (!member) list.push_back(std::move(program.instructions[i]));
      if (i != last) continue;
      list.push_back({name, std::move(f->group), node});
      for (Pointwise& loop : f->after) list.push_back({name, std::move(loop), node});
    }
    program.instructions = std::move(list);
    finder.emplace(program, target, *engine);
    at -= before + 1;  // another instruction is at this place now
  }
  if (any) drop_stores(program);
}

}  // namespace logitless::ir
