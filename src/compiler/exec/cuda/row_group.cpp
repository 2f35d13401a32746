// Row groups. Lanes of one warp, or a few warps, own a row and keep its elements in registers from
// stage to stage. A long row is owned by the blocks of a cluster, which exchange the states of its
// sums. With column sums a block owns a fixed part of the rows, and a second kernel adds the parts
// in order.
#include <algorithm>
#include <bit>

#include "compiler/exec/cuda/group_mapping.h"
#include "compiler/exec/cuda/kernels.h"
#include "compiler/exec/cuda/loop_text.h"
#include "compiler/exec/cuda/stage_reads.h"
#include "compiler/exec/cuda/step_text.h"
#include "compiler/plan/group_rows.h"

namespace logitless::ir {
namespace {

bool is_memory(const Pointwise::Leaf& leaf) { return leaf.kind == Pointwise::Leaf::Kind::memory; }

class GroupText {
 public:
  GroupText(const RowGroup& group, std::span<const std::int64_t> alignments)
      : g_(group), reads_(group), sums_(column_sums(group)), parts_(parts_of(group)) {
    choose_mapping(alignments);
  }

  std::vector<GeneratedKernel> kernels() {
    Lines lines;
    begin(lines);
    loads(lines);
    for (std::size_t s = 0, next = 0; s < g_.stages.size(); s = next) {
      next = end_of_sums(s);
      if (next == s)
        stage(lines, next++);
      else
        row_sum_stages(lines, s, next);
    }
    // The next row's sums use the same shared memory.
    if (m_.threads > 32 && !sums_.empty() && has_row_sums()) lines.add("__syncthreads();");
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
  RowMapping m_;
  bool waited_ = false;  // for the other blocks of the cluster

  using Read = StageReads::Read;

  std::int64_t scratch_offset(std::size_t sum) const {
    return static_cast<std::int64_t>(sum) * parts_.count * g_.columns * 4;
  }

  void choose_mapping(std::span<const std::int64_t> alignments) {
    constexpr std::int64_t kMostWidth = 8, kAccess = 16, kMostItems = 8;
    constexpr std::int64_t kRegisters = 120;        // for elements, approximately
    constexpr std::int64_t kMostShared = 32 << 10;  // bytes
    const auto fits = [&](const View& v, std::int64_t width) {
      const auto size = static_cast<std::int64_t>(size_of(v.dtype));
      const std::int64_t access = std::min(width * size, kAccess);
      return v.strides[0] % width == 0 && v.offset * size % access == 0 &&
             alignments[static_cast<std::size_t>(v.buffer)] % access == 0;
    };
    std::vector<const View*> views;
    // Bytes of registers for each element of a row that a thread holds.
    std::int64_t bytes = 4 * static_cast<std::int64_t>(sums_.size() + 1);
    for (const View& v : reads_.elements()) bytes += static_cast<std::int64_t>(size_of(v.dtype));
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      const Pointwise& loop = g_.stages[s].loop;
      const StageKind kind = kind_of(loop);
      if (kind == StageKind::rows) continue;
      for (const Pointwise::Leaf& leaf : loop.leaves) {
        if (is_memory(leaf) && leaf.view.strides[1] == 1 && maker_of(g_, s, leaf) < 0)
          views.push_back(&leaf.view);
      }
      if (kind != StageKind::elements) continue;
      if (g_.stages[s].stored) views.push_back(&loop.store.view);
      if (reads_.is_forwarded(s)) bytes += 4;
    }
    m_.width = kMostWidth;
    while (m_.width > 1 && (g_.columns % m_.width != 0 ||
                            !std::all_of(views.begin(), views.end(),
                                         [&](const View* v) { return fits(*v, m_.width); })))
      m_.width /= 2;
    const std::int64_t row = ceil_div(g_.columns, m_.width);  // items
    if (g_.columns > RowGroup::kMostColumnsOfBlock) return choose_cluster(row);
    // Rows with sums use as few threads as can hold the row in registers, since threads exchange
    // sums. Other rows use as many threads as they have items, for more loads in flight.
    const std::int64_t some =
        has_row_sums()
            ? std::clamp<std::int64_t>(kRegisters * 4 / (bytes * m_.width), 1, kMostItems)
            : ceil_div(row, kMostGroupThreads);
    const auto is_possible = [](std::int64_t threads) {
      return threads <= 32 ? std::has_single_bit(static_cast<std::uint64_t>(threads))
                           : threads % 32 == 0 && threads <= kMostGroupThreads;
    };
    m_.threads = row <= 32 * some
                     ? std::min<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(row)), 32)
                     : ceil_div(row, 32 * some) * 32;
    for (std::int64_t items = some; items > 0; --items) {
      if (row % items != 0 || !is_possible(row / items)) continue;
      m_.threads = row / items;
      break;
    }
    m_.items = ceil_div(row, m_.threads);
    m_.rows = std::max<std::int64_t>(kGroupThreads / m_.threads, 1);
    while (!sums_.empty() && m_.rows > 1 && m_.rows * g_.columns * 4 > kMostShared) m_.rows /= 2;
  }

  // Without a bound a kernel of a cluster takes more registers, and fewer rows are in flight: 1.2
  // to 1.5 times the time for several losses on an H200.
  std::int64_t blocks_of_sm() const {
    const std::int64_t threads = m_.threads * m_.rows;
    if (m_.blocks > 1) return std::max<std::int64_t>(2 * kGroupThreads / threads, 1);
    return sums_.empty() ? 1 : blocks_at_a_time(threads);
  }

  // Returns the most bytes of registers that an element takes at a time: operands until a stage
  // reads them last, and values from the stage that makes them.
  std::int64_t held_bytes() const {
    std::vector<std::size_t> last_of_operand(reads_.elements().size(), 0);
    std::vector<std::size_t> last_of_stage(g_.stages.size(), 0);
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      for (const Pointwise::Leaf& leaf : g_.stages[s].loop.leaves) {
        if (!is_memory(leaf)) continue;
        if (const int maker = maker_of(g_, s, leaf); maker >= 0) {
          const auto made = static_cast<std::size_t>(maker);
          if (kind_of(g_.stages[made].loop) == StageKind::elements) last_of_stage[made] = s;
        } else if (reads_.read_of(s, leaf.view) == Read::element) {
          last_of_operand[reads_.element_of(leaf.view)] = s;
        }
      }
    }
    std::int64_t most = 0;
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      std::int64_t bytes = 0;
      for (std::size_t i = 0; i < last_of_operand.size(); ++i) {
        if (last_of_operand[i] >= s)
          bytes += static_cast<std::int64_t>(size_of(reads_.elements()[i].dtype));
      }
      for (std::size_t made = 0; made <= s; ++made)
        bytes += last_of_stage[made] >= s && last_of_stage[made] > made ? 4 : 0;
      most = std::max(most, bytes);
    }
    return most;
  }

  // Maps a row of so many items to the blocks of a cluster. Blocks of few threads are preferred:
  // an SM then holds several rows, of which one waits while another is loaded. Threads have half of
  // the elements where their registers would spill most.
  void choose_cluster(std::int64_t row) {
    constexpr std::int64_t kMostBlocks = 8, kMostThreadsOfBlock = 512;
    constexpr std::int64_t kElements = 32, kMostHeld = 16;
    const std::int64_t elements = held_bytes() <= kMostHeld ? kElements : kElements / 2;
    const std::int64_t few = std::max<std::int64_t>(elements / m_.width, 1);
    m_.blocks = 2;
    while (m_.blocks < kMostBlocks && ceil_div(row, m_.blocks * few) > kGroupThreads)
      m_.blocks *= 2;
    const std::int64_t own = ceil_div(row, m_.blocks);
    m_.items = std::max(few, ceil_div(own, kMostThreadsOfBlock));
    m_.threads = ceil_div(ceil_div(own, m_.items), 32) * 32;
    m_.rows = 1;
  }

  bool has_row_sums() const {
    return std::any_of(g_.stages.begin(), g_.stages.end(), [](const RowGroup::Stage& stage) {
      return kind_of(stage.loop) == StageKind::row_sum;
    });
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
  void each_element(Lines& lines) const {
    lines.add("#pragma unroll");
    lines.add("for (int j = 0; j < ", m_.width, "; ++j) {");
  }

  void begin(Lines& lines) const {
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
    if (m_.blocks > 1 && has_row_sums()) lines.add("cluster_arrive();");
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

  // Writes the steps of a stage, for element j of item k or for the row. Returns the value's name.
  std::string steps(Lines& lines, std::size_t s) {
    const Pointwise& loop = g_.stages[s].loop;
    const std::size_t leaves = loop.leaves.size();
    const RegisterText registers(loop);
    const auto declare = [&](std::size_t r, const std::string& value) {
      lines.add("const ", registers.type(static_cast<int>(r)), " r", r, " = ", value, ";");
    };
    for (std::size_t i = 0; i < leaves; ++i) {
      const Pointwise::Leaf& leaf = loop.leaves[i];
      if (leaf.kind == Pointwise::Leaf::Kind::constant) continue;
      declare(i, concat("(", registers.type(static_cast<int>(i)), ")", leaf_text(s, i)));
    }
    const int result = registers.result();
    for (std::size_t i = 0; i < loop.steps.size(); ++i) {
      const int r = static_cast<int>(leaves + i);
      if (r != loop.store.source || r == result) declare(leaves + i, registers.step(i));
    }
    return registers.name(result);
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
        return concat("number(u", i, "[j])");
      default:
        return concat("number(a", reads_.source_of(leaf.view), "[0])");
    }
  }

  // Loads the column values of an item.
  void column_loads(Lines& lines, std::size_t s) const {
    const Pointwise& loop = g_.stages[s].loop;
    for (std::size_t i = 0; i < loop.leaves.size(); ++i) {
      const Pointwise::Leaf& leaf = loop.leaves[i];
      if (!is_memory(leaf) || maker_of(g_, s, leaf) >= 0 ||
          reads_.read_of(s, leaf.view) != Read::column)
        continue;
      lines.add(cuda_type(leaf.view.dtype), " u", i, "[", m_.width, "];");
      const std::string from = concat("a", reads_.source_of(leaf.view), " + c");
      if (m_.width == 1)
        lines.add("u", i, "[0] = *(", from, ");");
      else
        lines.add("load(u", i, ", ", from, ");");
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
        return element_stage(lines, s);
      case StageKind::rows:
        declare_row(lines, s);
        lines.add("{");
        lines.add("q", s, " = ", read_back(loop.store.view.dtype, steps(lines, s)), ";");
        lines.add("}");
        return store_row(lines, s);
      case StageKind::row_sum:
        return row_sum_stages(lines, s, s + 1);
      case StageKind::column_sum:
        each_item(lines);
        column_loads(lines, s);
        each_element(lines);
        const std::string value = steps(lines, s);
        lines.add("sum", s, "[k][j] += valid", exact() ? "" : " && in", " ? ", value, " : 0.0f;");
        lines.add("}");
        lines.add("}");
    }
  }

  void element_stage(Lines& lines, std::size_t s) {
    const RowGroup::Stage& stage = g_.stages[s];
    const Pointwise::Store& to = stage.loop.store;
    const bool kept = reads_.is_forwarded(s);
    if (kept) lines.add("float e", s, "[", m_.items, "][", m_.width, "];");
    each_item(lines);
    column_loads(lines, s);
    const std::string type(cuda_type(to.view.dtype)),
        at = concat("o", s, " + ", offset_of_row(to.view), " + c");
    if (stage.stored) lines.add(type, " z[", m_.width, "];");
    if (to.accumulate) {
      if (m_.width == 1)
        lines.add("z[0] = *(", at, ");");
      else
        lines.add("load(z, ", at, ");");
    }
    each_element(lines);
    const std::string value = steps(lines, s);
    if (kept) lines.add("e", s, "[k][j] = ", read_back(to.view.dtype, value), ";");
    if (stage.stored) lines.add("z[j] = ", stored(stage.loop, "z[j]", value), ";");
    lines.add("}");
    if (stage.stored) {
      const std::string store =
          m_.width == 1 ? concat("*(", at, ") = z[0];") : concat("store(", at, ", z);");
      lines.add("if (valid", exact() ? "" : " && in", ") ", store);
    }
    lines.add("}");
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
      column_loads(lines, s);
      lines.add("float v[", m_.width, "];");
      each_element(lines);
      const std::string value = steps(lines, s);
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
  void finish_sum(Lines& lines, std::size_t s) const {
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
