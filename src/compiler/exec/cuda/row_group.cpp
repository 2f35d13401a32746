// Row groups. Lanes of one warp, or a few warps, own a row and keep its elements in registers from
// stage to stage. A long row is owned by the blocks of a cluster, which exchange the states of its
// sums. With column sums a block owns a fixed part of the rows, and a second kernel adds the parts
// in order.
#include <algorithm>
#include <bit>
#include <map>
#include <set>

#include "compiler/exec/cuda/group_mapping.h"
#include "compiler/exec/cuda/group_values.h"
#include "compiler/exec/cuda/kernels.h"
#include "compiler/exec/cuda/loop_text.h"
#include "compiler/exec/cuda/stage_reads.h"
#include "compiler/exec/cuda/step_text.h"
#include "compiler/plan/cost.h"
#include "compiler/plan/group_rows.h"

namespace logitless::ir {
namespace {

bool is_memory(const Pointwise::Leaf& leaf) { return leaf.kind == Pointwise::Leaf::Kind::memory; }

class GroupText {
 public:
  GroupText(const RowGroup& group, std::span<const std::int64_t> alignments)
      : g_(group),
        reads_(group),
        sums_(column_sums(group)),
        parts_(parts_of(group)),
        m_(choose_mapping(group, reads_, alignments)) {}

  std::vector<GeneratedKernel> kernels() {
    Lines lines;
    begin(lines);
    loads(lines);
    for (std::size_t s = 0, next = 0; s < g_.stages.size(); s = next) {
      next = std::max(end_of_sums(s), end_of_elements(s));
      if (next == s)
        stage(lines, next++);
      else if (kind_of(g_.stages[s].loop) == StageKind::row_sum)
        row_sum_stages(lines, s, next);
      else
        element_stages(lines, s, next);
    }
    // The next row's sums use the same shared memory.
    if (m_.threads > 32 && !sums_.empty() && has_row_sums(g_)) lines.add("__syncthreads();");
    lines.add("}");
    for (const std::size_t s : sums_) finish_sum(lines, s);

    std::string parameters;
    GeneratedKernel kernel;
    reads_.add_parameters(parameters, kernel.arguments);
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      const Pointwise& loop = g_.stages[s].loop;
      if (!g_.stages[s].stored || kind_of(loop) == StageKind::column_sum) continue;
      add_parameter(parameters, kernel.arguments,
                    concat(cuda_type(loop.store.view.dtype), "* __restrict__ o", s),
                    stored_argument(loop));
    }
    for (std::size_t i = 0; i < sums_.size(); ++i)
      add_parameter(parameters, kernel.arguments, concat("float* __restrict__ p", sums_[i]),
                    {KernelArgument::Kind::scratch, -1, scratch_offset(i)});
    const GeneratedKernel made = make_kernel(
        "group", concat(g_.stages.size(), " stages of ", g_.rows, " rows of ", g_.columns),
        parameters, lines, static_cast<unsigned>(m_.threads * m_.rows),
        {static_cast<unsigned>(blocks_of_sm()), static_cast<unsigned>(m_.blocks)});
    kernel.entry = made.entry;
    kernel.source = made.source;
    kernel.shape = made.shape;
    kernel.shape.grid[0] = static_cast<unsigned>(
        sums_.empty() ? ceil_div(g_.rows, m_.rows) * m_.blocks : parts_.count);
    std::vector<GeneratedKernel> list = {std::move(kernel)};
    std::vector<const Pointwise*> sums;
    for (const std::size_t s : sums_) sums.push_back(&g_.stages[s].loop);
    if (!sums.empty()) list.push_back(merge_column_parts(sums, {parts_.count, parts_.rows}));
    return list;
  }

 private:
  const RowGroup& g_;
  const StageReads reads_;
  const std::vector<std::size_t> sums_;  // stages with column sums
  const RowParts parts_;
  const RowMapping m_;
  bool waited_ = false;  // for the other blocks of the cluster
  GroupValues values_;
  std::map<int, int> kept_;  // by stage: the value of its elements

  using Read = StageReads::Read;

  std::int64_t scratch_offset(std::size_t sum) const {
    return static_cast<std::int64_t>(sum) * parts_.count * g_.columns * 4;
  }

  // Without a bound a kernel of a cluster takes more registers, and fewer rows are in flight: 1.2
  // to 1.5 times the time for several losses on an H200.
  std::int64_t blocks_of_sm() const {
    const std::int64_t threads = m_.threads * m_.rows;
    if (m_.blocks > 1) return std::max<std::int64_t>(2 * kGroupThreads / threads, 1);
    // More blocks than there are would bound registers for nothing.
    return sums_.empty() ? 1
                         : std::min(blocks_at_a_time(threads),
                                    std::max<std::int64_t>(parts_.count / kMultiprocessors, 1));
  }

  std::string_view index() const { return reads_.wide_index() ? "long long" : "unsigned"; }
  std::string number(std::int64_t n) const { return concat(n, reads_.wide_index() ? "ll" : "u"); }
  // Returns the text of the factor from blocks to rows.
  std::string ratio() const {
    return m_.blocks > 1 ? concat(" / ", m_.blocks) : concat(" * ", number(m_.rows));
  }
  bool exact() const { return m_.is_exact(g_.columns); }

  // Opens the loop over a thread's items with first element `c`; `in` says whether the item is in
  // the row.
  void each_item(Lines& lines) const {
    lines.add("#pragma unroll");
    lines.add("for (int k = 0; k < ", m_.items, "; ++k) {");
    const std::string before = m_.blocks > 1 ? concat("rank * ", m_.items, " + ") : "";
    const std::string first =
        concat("((", before, "k) * ", m_.threads, " + lane) * ", m_.width, ";");
    if (exact()) {
      lines.add("const unsigned c = ", first);
    } else {
      lines.add("const unsigned ahead = ", first);
      lines.add("const bool in = ahead < ", g_.columns, "u;");
      lines.add("const unsigned c = in ? ahead : ", g_.columns - m_.width, "u;");
    }
  }
  void each_element(Lines& lines) {
    lines.add("#pragma unroll");
    lines.add("for (int j = 0; j < ", m_.width, "; ++j) {");
    values_.open_scope(true);
  }

  void begin(Lines& lines) {
    lines.add("const int lane = threadIdx.x % ", m_.threads, ", y = threadIdx.x / ", m_.threads,
              ";");
    for (const std::size_t s : sums_) {
      lines.add("float sum", s, "[", m_.items, "][", m_.width, "];");
      lines.add("#pragma unroll");
      lines.add("for (int k = 0; k < ", m_.items, "; ++k) {");
      each_element(lines);
      lines.add("sum", s, "[k][j] = 0.0f;");
      lines.add("}");
      lines.add("}");
    }
    if (m_.blocks > 1) lines.add("const unsigned rank = blockIdx.x % ", m_.blocks, ";");
    if (m_.blocks > 1 && has_row_sums(g_)) lines.add("cluster_arrive();");
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      if (kind_of(g_.stages[s].loop) != StageKind::row_sum) continue;
      const std::string type = state_type(g_.stages[s].loop);
      if (m_.threads > 32)
        lines.add("__shared__ ", type, " shared", s, "[", m_.rows, "][", m_.threads / 32, "];");
      if (m_.blocks > 1) lines.add("__shared__ ", type, " blocks", s, "[", m_.blocks, "];");
    }
    if (!sums_.empty() && m_.rows > 1)
      lines.add("__shared__ float sums[", m_.rows, "][", g_.columns, "];");
    // Lanes beyond the last row recompute the last row: full warps must take part in shuffles.
    if (sums_.empty()) {
      lines.add("{");
      lines.add("const ", index(), " own = (", index(), ")blockIdx.x", ratio(), " + y;");
    } else {
      lines.add("const ", index(), " end = (blockIdx.x + 1) * ", number(parts_.rows), " < ",
                number(g_.rows), " ? (blockIdx.x + 1) * ", number(parts_.rows), " : ",
                number(g_.rows), ";");
      lines.add("for (", index(), " base = blockIdx.x * ", number(parts_.rows),
                "; base < end; base += ", number(m_.rows), ") {");
      lines.add("const ", index(), " own = base + y;");
    }
    const std::string end = sums_.empty() ? number(g_.rows) : "end";
    lines.add("const bool valid = own < ", end, ";");
    lines.add("const ", index(), " row = valid ? own : ", end, " - 1;");
  }

  std::string offset_of_row(const View& v) const {
    return row_offset(v, "row", reads_.wide_index());
  }

  // Declares the loads, which come before any computation.
  void loads(Lines& lines) const {
    const std::vector<View>&rows = reads_.rows(), &elements = reads_.elements();
    for (std::size_t i = 0; i < rows.size(); ++i)
      lines.add("const ", cuda_type(rows[i].dtype), " w", i, " = a", reads_.source_of(rows[i]), "[",
                offset_of_row(rows[i]), "];");
    for (std::size_t i = 0; i < elements.size(); ++i)
      lines.add(cuda_type(elements[i].dtype), " x", i, "[", m_.items, "][", m_.width, "];");
    if (elements.empty()) return;
    each_item(lines);
    for (std::size_t i = 0; i < elements.size(); ++i) {
      const std::string from =
          concat("a", reads_.source_of(elements[i]), " + ", offset_of_row(elements[i]), " + c");
      if (m_.width == 1)
        lines.add("x", i, "[k][0] = *(", from, ");");
      else
        lines.add("load(x", i, "[k], ", from, ");");
    }
    lines.add("}");
  }

  // Writes the steps of a stage, for element j of item k or for the row. Returns the value's name,
  // and its number where it is no constant.
  struct Result {
    std::string name;
    int value = -1;
  };
  Result steps(Lines& lines, std::size_t s) {
    const Pointwise& loop = g_.stages[s].loop;
    const std::size_t leaves = loop.leaves.size(), registers = leaves + loop.steps.size();
    std::vector<std::string> names(registers);
    std::vector<int> values(registers, -1);
    const RegisterText text(loop, &names);
    const auto keep = [&](std::size_t r, int value) {
      values[r] = value;
      names[r] = GroupValues::name(value);
    };
    for (std::size_t i = 0; i < leaves; ++i) {
      if (loop.leaves[i].kind != Pointwise::Leaf::Kind::constant)
        keep(i, leaf_value(s, i, text.type(static_cast<int>(i))));
    }
    for (std::size_t i = 0; i < loop.steps.size(); ++i) {
      const Pointwise::Step& step = loop.steps[i];
      std::vector<int> operands;
      for (const int r : {step.a, step.b, step.c}) {
        if (r >= 0 && values[static_cast<std::size_t>(r)] >= 0)
          operands.push_back(values[static_cast<std::size_t>(r)]);
      }
      const bool costly = step.kind == Pointwise::Step::Kind::function &&
                          (is_slow(step.function) || is_random(step.function));
      keep(leaves + i, values_.number_of(text.type(static_cast<int>(leaves + i)), text.step(i),
                                         operands, costly));
    }
    const int result = text.result(), value = values[static_cast<std::size_t>(result)];
    if (value >= 0) values_.declare(lines, value);
    return {text.name(result), value};
  }

  // Returns the value of a leaf: that of the stage which made it, if it is worth keeping.
  int leaf_value(std::size_t s, std::size_t i, std::string_view type) {
    const Pointwise::Leaf& leaf = g_.stages[s].loop.leaves[i];
    if (is_memory(leaf)) {
      const auto kept = kept_.find(maker_of(g_, s, leaf));
      if (kept != kept_.end() && values_.type(kept->second) == type) return kept->second;
    }
    return values_.number_of(type, concat("(", type, ")", leaf_text(s, i)), {}, false);
  }

  std::string leaf_text(std::size_t s, std::size_t i) {
    const Pointwise::Leaf& leaf = g_.stages[s].loop.leaves[i];
    if (leaf.kind == Pointwise::Leaf::Kind::first) return "first";
    if (leaf.kind == Pointwise::Leaf::Kind::iota) return leaf.dim == 0 ? "row" : "(c + j)";
    if (const int maker = maker_of(g_, s, leaf); maker >= 0) {
      const StageKind kind = kind_of(g_.stages[static_cast<std::size_t>(maker)].loop);
      return kind == StageKind::elements ? concat("e", maker, "[k][j]") : concat("q", maker);
    }
    switch (reads_.read_of(s, leaf.view)) {
      case Read::element:
        return concat("number(x", reads_.element_of(leaf.view), "[k][j])");
      case Read::row:
        return concat("number(w", reads_.row_of(leaf.view), ")");
      case Read::column:
        return concat("number(u", reads_.source_of(leaf.view), "[j])");
      default:
        return concat("number(a", reads_.source_of(leaf.view), "[0])");
    }
  }

  // Loads the column values of an item that stages [first, last) read.
  void column_loads(Lines& lines, std::size_t first, std::size_t last) const {
    std::set<std::size_t> loaded;
    for (std::size_t s = first; s < last; ++s) {
      for (const Pointwise::Leaf& leaf : g_.stages[s].loop.leaves) {
        if (!is_memory(leaf) || maker_of(g_, s, leaf) >= 0 ||
            reads_.read_of(s, leaf.view) != Read::column)
          continue;
        const std::size_t source = reads_.source_of(leaf.view);
        if (!loaded.insert(source).second) continue;
        lines.add(cuda_type(leaf.view.dtype), " u", source, "[", m_.width, "];");
        if (m_.width == 1)
          lines.add("u", source, "[0] = *(a", source, " + c);");
        else
          lines.add("load(u", source, ", a", source, " + c);");
      }
    }
  }

  // Returns the element that a loop stores: the value, or its sum with the old one.
  static std::string stored(const Pointwise& loop, const std::string& old,
                            const std::string& value) {
    return converted_to(loop.store.view.dtype,
                        loop.store.accumulate ? RegisterText(loop).added(old, value) : value);
  }
  // Declares the value of a row: a double where it is stored as one, as a log-sum-exp may be.
  void declare_row(Lines& lines, std::size_t s) const {
    lines.add(g_.stages[s].loop.store.view.dtype == DType::f64 ? "double q" : "float q", s, ";");
  }

  void stage(Lines& lines, std::size_t s) {
    const Pointwise& loop = g_.stages[s].loop;
    switch (kind_of(loop)) {
      case StageKind::elements:
        return element_stages(lines, s, s + 1);
      case StageKind::rows:
        declare_row(lines, s);
        lines.add("{");
        values_.open_scope(false);
        lines.add("q", s, " = ", read_back(loop.store.view.dtype, steps(lines, s).name), ";");
        lines.add("}");
        return store_row(lines, s);
      case StageKind::row_sum:
        return row_sum_stages(lines, s, s + 1);
      case StageKind::column_sum:
        each_item(lines);
        column_loads(lines, s, s + 1);
        each_element(lines);
        const std::string value = steps(lines, s).name;
        lines.add("sum", s, "[k][j] += valid", exact() ? "" : " && in", " ? ", value, " : 0.0f;");
        lines.add("}");
        lines.add("}");
    }
  }

  // Returns the end of the element stages from stage s on; s if it is none. One that adds to memory
  // begins a pass of its own.
  std::size_t end_of_elements(std::size_t s) const {
    const auto joins = [&](std::size_t next) {
      const Pointwise& loop = g_.stages[next].loop;
      return kind_of(loop) == StageKind::elements && (next == s || !loop.store.accumulate);
    };
    std::size_t end = s;
    while (end < g_.stages.size() && joins(end)) ++end;
    return end;
  }

  // Computes elements by one pass over the row.
  void element_stages(Lines& lines, std::size_t first, std::size_t last) {
    for (std::size_t s = first; s < last; ++s) {
      if (reads_.is_forwarded(s)) lines.add("float e", s, "[", m_.items, "][", m_.width, "];");
    }
    each_item(lines);
    column_loads(lines, first, last);
    const auto address = [&](std::size_t s) {
      return concat("o", s, " + ", offset_of_row(g_.stages[s].loop.store.view), " + c");
    };
    for (std::size_t s = first; s < last; ++s) {
      const Pointwise::Store& to = g_.stages[s].loop.store;
      if (g_.stages[s].stored) lines.add(cuda_type(to.view.dtype), " z", s, "[", m_.width, "];");
      if (!to.accumulate) continue;
      if (m_.width == 1)
        lines.add("z", s, "[0] = *(", address(s), ");");
      else
        lines.add("load(z", s, ", ", address(s), ");");
    }
    each_element(lines);
    for (std::size_t s = first; s < last; ++s) {
      const Result result = steps(lines, s);
      if (reads_.is_forwarded(s)) keep_element(lines, s, result);
      if (g_.stages[s].stored) {
        const std::string at = concat("z", s, "[j]");
        lines.add(at, " = ", stored(g_.stages[s].loop, at, result.name), ";");
      }
    }
    lines.add("}");
    for (std::size_t s = first; s < last; ++s) {
      if (!g_.stages[s].stored) continue;
      const std::string store = m_.width == 1 ? concat("*(", address(s), ") = z", s, "[0];")
                                              : concat("store(", address(s), ", z", s, ");");
      lines.add("if (valid", exact() ? "" : " && in", ") ", store);
    }
    lines.add("}");
  }

  // Keeps an element as later stages read it. They read a costly value again, whatever stage asks
  // for it.
  void keep_element(Lines& lines, std::size_t s, const Result& result) {
    const DType dtype = g_.stages[s].loop.store.view.dtype;
    const std::string element = concat("e", s, "[k][j]");
    const bool narrow = dtype == DType::bf16 || dtype == DType::f16;
    if (result.value < 0 || !values_.is_costly(result.value) || (dtype != DType::f32 && !narrow) ||
        values_.type(result.value) != "float") {
      lines.add(element, " = ", read_back(dtype, result.name), ";");
      return;
    }
    int value = result.value;
    if (narrow)  // as a step rounds
      value = values_.number_of(
          "float",
          concat(dtype == DType::bf16 ? "round_bf16" : "round_f16", "((float)", result.name, ")"),
          {value}, false);
    values_.declare(lines, value);
    lines.add(element, " = ", GroupValues::name(value), ";");
    values_.hold(value, element);
    kept_[static_cast<int>(s)] = value;
  }

  // Returns the end of the row sums from stage s on that do not read each other; s if it is none.
  std::size_t end_of_sums(std::size_t s) const {
    const auto joins = [&](std::size_t next) {
      const Pointwise& loop = g_.stages[next].loop;
      return kind_of(loop) == StageKind::row_sum &&
             std::all_of(loop.leaves.begin(), loop.leaves.end(), [&](const auto& leaf) {
               return !is_memory(leaf) || maker_of(g_, next, leaf) < static_cast<int>(s);
             });
    };
    std::size_t end = s;
    while (end < g_.stages.size() && joins(end)) ++end;
    return end;
  }

  // Sums by one pass over the row.
  void row_sum_stages(Lines& lines, std::size_t first, std::size_t last) {
    const bool several = last - first > 1;
    const auto each = [&](const auto& visit) {
      for (std::size_t s = first; s < last; ++s)
        visit(s, g_.stages[s].loop, several ? concat("state", s) : std::string("state"));
    };
    for (std::size_t s = first; s < last; ++s) declare_row(lines, s);
    lines.add("{");
    each([&](std::size_t, const Pointwise& loop, const std::string& state) {
      lines.add(state_type(loop), " ", state, ";");
      lines.add(state, ".clear();");
    });
    each_item(lines);
    each([&](std::size_t s, const Pointwise& loop, const std::string& state) {
      if (several) lines.add("{");
      column_loads(lines, s, s + 1);
      lines.add("float v[", m_.width, "];");
      each_element(lines);
      const std::string value = steps(lines, s).name;
      lines.add("v[j] = ",
                exact() ? value : concat("in ? ", value, " : ", RegisterText(loop).nothing()), ";");
      lines.add("}");
      lines.add(state, ".add(v);");
      if (several) lines.add("}");
    });
    lines.add("}");
    const std::int64_t warps = m_.threads / 32;
    each([&](std::size_t s, const Pointwise&, const std::string& state) {
      lines.add("across_lanes(", state, ", ", std::min<std::int64_t>(m_.threads, 32), ");");
      if (warps > 1) lines.add("if (lane % 32 == 0) shared", s, "[y][lane / 32] = ", state, ";");
    });
    if (warps > 1) lines.add("__syncthreads();");
    if (warps > 1)
      each([&](std::size_t s, const Pointwise&, const std::string& state) {
        lines.add("merge_shared(", state, ", shared", s, "[y], ", warps, ", ",
                  std::bit_ceil(static_cast<std::uint64_t>(warps)), ");");
      });
    if (m_.blocks > 1 && !waited_) lines.add("cluster_wait();");
    waited_ = true;
    each([&](std::size_t s, const Pointwise& loop, const std::string& state) {
      if (m_.blocks > 1)
        lines.add("across_cluster<", m_.blocks, ">(", state, ", blocks", s, ", rank);");
      lines.add("q", s, " = ", read_back(loop.store.view.dtype, value_of(state.c_str(), loop)),
                ";");
    });
    lines.add("}");
    for (std::size_t s = first; s < last; ++s) store_row(lines, s);
  }

  void store_row(Lines& lines, std::size_t s) const {
    const Pointwise::Store& to = g_.stages[s].loop.store;
    if (!g_.stages[s].stored) return;
    const std::string at = concat("o", s, "[", offset_of_row(to.view), "]");
    lines.add("if (valid && lane == 0", m_.blocks > 1 ? " && rank == 0" : "", ") ", at, " = ",
              stored(g_.stages[s].loop, at, concat("q", s)), ";");
  }

  // Adds the block's part of a column sum over the rows that the block computes at a time.
  void finish_sum(Lines& lines, std::size_t s) {
    const std::string to = concat("p", s, "[blockIdx.x * ", number(g_.columns), " + ");
    if (m_.rows == 1) {
      each_item(lines);
      each_element(lines);
      lines.add(exact() ? "" : "if (in) ", to, "c + j] = sum", s, "[k][j];");
      lines.add("}");
      lines.add("}");
      return;
    }
    each_item(lines);
    each_element(lines);
    lines.add(exact() ? "" : "if (in) ", "sums[y][c + j] = sum", s, "[k][j];");
    lines.add("}");
    lines.add("}");
    lines.add("__syncthreads();");
    lines.add("for (unsigned c = threadIdx.x; c < ", g_.columns, "u; c += ", m_.threads * m_.rows,
              ") {");
    lines.add("float all = sums[0][c];");
    lines.add("for (int i = 1; i < ", m_.rows, "; ++i) all += sums[i][c];");
    lines.add(to, "c] = all;");
    lines.add("}");
    lines.add("__syncthreads();");
  }
};

}  // namespace

std::vector<GeneratedKernel> generate(const RowGroup& group,
                                      std::span<const std::int64_t> alignments) {
  if (group.product) return product_kernels(group, alignments);
  return GroupText(group, alignments).kernels();
}

std::int64_t row_group_scratch_bytes(const RowGroup& group) {
  if (group.product) return product_scratch_bytes(group);
  return static_cast<std::int64_t>(column_sums(group).size()) * parts_of(group).count *
         group.columns * 4;
}

}  // namespace logitless::ir
