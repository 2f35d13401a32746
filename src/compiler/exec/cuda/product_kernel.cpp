// Matrix products whose epilogue is a row group: the tile engine of kernels/device/tile_engine.h
// computes tiles of sums in registers, and the group's stages run on them. Sums of rows leave a
// state for each row and tile of columns, which a second kernel merges in order.
#include <algorithm>
#include <numeric>

#include "compiler/exec/cuda/kernels.h"
#include "compiler/exec/cuda/loop_text.h"
#include "compiler/exec/cuda/stage_reads.h"
#include "compiler/plan/group_rows.h"
#include "kernels/device/tile_engine.h"

namespace logitless::ir {
namespace {

using Engine = cuda::TileEngine;

bool is_sum(const RowGroup::Stage& stage) {
  return stage.stored && kind_of(stage.loop) == StageKind::row_sum;
}

// The sums of a group by the type of their states, in order.
std::vector<std::vector<std::size_t>> sums_by_state(const RowGroup& g) {
  std::vector<std::vector<std::size_t>> list;
  for (std::size_t s = 0; s < g.stages.size(); ++s) {
    const Pointwise& loop = g.stages[s].loop;
    if (!is_sum(g.stages[s])) continue;
    const auto at = std::find_if(list.begin(), list.end(), [&](const auto& sums) {
      return state_type(g.stages[sums[0]].loop) == state_type(loop);
    });
    if (at == list.end())
      list.push_back({s});
    else
      at->push_back(s);
  }
  return list;
}

std::int64_t column_tiles(const RowGroup& g) { return ceil_div(g.columns, Engine::kColumns); }

std::int64_t parts_bytes(const RowGroup& g, std::size_t sum) {
  return column_tiles(g) * g.rows * state_bytes(g.stages[sum].loop);
}

// Returns the sum of a row's parts [tiles, rows] as a loop that sums columns.
Pointwise merged(const RowGroup& g, std::size_t sum) {
  const Pointwise& of = g.stages[sum].loop;
  Pointwise loop;
  loop.shape = {column_tiles(g), g.rows};
  loop.reduction = loop.columns = true;
  loop.reduced = 1;
  loop.reduce = of.reduce;
  loop.leaves.emplace_back().kind = Pointwise::Leaf::Kind::constant;
  loop.store = of.store;
  loop.store.source = 0;
  loop.store.view.shape = loop.shape;
  loop.store.view.strides = {0, of.store.view.strides[0]};
  return loop;
}

bool is_narrow(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16; }

class ProductText {
 public:
  ProductText(const RowGroup& group, std::span<const std::int64_t> alignments)
      : g_(group), p_(*group.product), reads_(group), alignments_(alignments) {}

  std::vector<GeneratedKernel> kernels() {
    GeneratedKernel kernel;
    const bool by_rows = p_.b.strides[0] == 1;  // b^T has contiguous rows
    std::string parameters;
    add_map(parameters, kernel, "rows", p_.a, {p_.m, p_.k, p_.a.strides[0], Engine::kRows});
    if (by_rows)
      add_map(parameters, kernel, "columns", p_.b,
              {p_.n, p_.k, p_.b.strides[1], Engine::kColumns / 2});
    else
      add_map(parameters, kernel, "columns", p_.b, {p_.k, p_.n, p_.b.strides[0], Engine::kStep});
    for (std::size_t s = 0; s < g_.stages.size(); ++s) add_result(parameters, kernel, s);
    reads_.add_parameters(parameters, kernel.arguments);
    const std::vector<std::vector<std::size_t>> sums = sums_by_state(g_);
    std::int64_t offset = 0;
    for (const std::vector<std::size_t>& of_state : sums) {
      for (const std::size_t s : of_state) {
        add_parameter(parameters, kernel.arguments,
                      concat(state_type(g_.stages[s].loop), "* __restrict__ p", s),
                      {KernelArgument::Kind::scratch, -1, offset});
        offset += parts_bytes(g_, s);
      }
    }

    Lines lines;
    lines.add("using namespace logitless::cuda;");
    lines.add("static_assert(kTileShared == ", Engine::kSharedBytes, ");");
    const std::int64_t pairs = ceil_div(g_.rows, Engine::kRows * Engine::kCtas);
    lines.add("product_of_tiles<", p_.a.dtype == DType::bf16 ? "__nv_bfloat16" : "__half", ", ",
              by_rows ? 0 : 1, ">(&rows, &columns, ProductTiles{", pairs, ", ", column_tiles(g_),
              ", ", ceil_div(p_.k, Engine::kStep), "}, [&](int first_row, int first_column) {");
    prefetches(lines);
    lines.add("}, [&](float (&z)[128], int first_row, int first_column, BoxWriter& writer) {");
    epilogue(lines);
    lines.add("});");
    const GeneratedKernel made = make_kernel(
        "product",
        concat("product ", p_.m, " x ", p_.n, " x ", p_.k, " with ", g_.stages.size(), " stages"),
        parameters, lines, Engine::kThreads, {1, Engine::kCtas});
    kernel.entry = made.entry;
    kernel.source = made.source;
    kernel.shape = made.shape;
    kernel.shape.grid[0] = static_cast<unsigned>(pairs * column_tiles(g_) * Engine::kCtas);
    kernel.shape.shared_bytes = Engine::kSharedBytes;
    kernel.shape.persistent = true;
    kernel.needs_tile_engine = true;
    std::vector<GeneratedKernel> list = {std::move(kernel)};
    add_merges(sums, list);
    return list;
  }

 private:
  using Read = StageReads::Read;

  const RowGroup& g_;
  const Gemm& p_;
  const StageReads reads_;
  const std::span<const std::int64_t> alignments_;

  const Pointwise& loop(std::size_t s) const { return g_.stages[s].loop; }
  bool stores_elements(std::size_t s) const {
    return g_.stages[s].stored && kind_of(loop(s)) == StageKind::elements;
  }
  // Returns whether TMA stores the elements. Otherwise threads do: their pairs of f32 fill sectors
  // of memory, and boxes of f32 would wait for each other.
  bool by_tma(std::size_t s) const {
    const View& to = loop(s).store.view;
    const auto size = static_cast<std::int64_t>(size_of(to.dtype));
    constexpr std::int64_t kAccess = 16;
    return is_narrow(to.dtype) && alignments_[static_cast<std::size_t>(to.buffer)] % kAccess == 0 &&
           to.offset * size % kAccess == 0 && to.strides[0] * size % kAccess == 0;
  }
  bool exact() const { return g_.columns % Engine::kColumns == 0; }
  std::string_view index() const { return reads_.wide_index() ? "long long" : "unsigned"; }

  static void add_map(std::string& parameters, GeneratedKernel& kernel, const std::string& name,
                      const View& v, cuda::MatrixShape shape) {
    shape.dtype = is_narrow(v.dtype) ? DType::bf16 : v.dtype;
    KernelArgument argument;
    argument.kind = KernelArgument::Kind::matrix;
    argument.buffer = v.buffer;
    argument.offset = v.offset * static_cast<std::int64_t>(size_of(v.dtype));
    argument.matrix = static_cast<int>(kernel.matrices.size());
    kernel.matrices.push_back(shape);
    add_parameter(parameters, kernel.arguments, "const __grid_constant__ CUtensorMap " + name,
                  argument);
  }
  void add_result(std::string& parameters, GeneratedKernel& kernel, std::size_t s) const {
    const View& to = loop(s).store.view;
    if (stores_elements(s) && by_tma(s)) {
      add_map(parameters, kernel, concat("m", s), to, {g_.rows, g_.columns, to.strides[0], 64});
    } else if (stores_elements(s) || (g_.stages[s].stored && kind_of(loop(s)) == StageKind::rows)) {
      add_parameter(parameters, kernel.arguments,
                    concat(cuda_type(to.dtype), "* __restrict__ o", s), stored_argument(loop(s)));
    }
  }
  void add_merges(const std::vector<std::vector<std::size_t>>& sums,
                  std::vector<GeneratedKernel>& list) const {
    std::int64_t offset = 0;
    for (const std::vector<std::size_t>& of_state : sums) {
      std::vector<Pointwise> loops;
      std::int64_t bytes = 0;
      for (const std::size_t s : of_state) {
        loops.push_back(merged(g_, s));
        bytes += parts_bytes(g_, s);
      }
      std::vector<const Pointwise*> pointers;
      for (const Pointwise& sum : loops) pointers.push_back(&sum);
      GeneratedKernel merge = merge_column_parts(pointers, {column_tiles(g_), 1});
      for (KernelArgument& a : merge.arguments) {
        if (a.kind == KernelArgument::Kind::scratch) a.offset += offset;
      }
      offset += bytes;
      list.push_back(std::move(merge));
    }
  }

  // Opens an unrolled loop.
  static void unrolled(Lines& lines, const char* name, int count) {
    lines.add("#pragma unroll");
    lines.add("for (int ", name, " = 0; ", name, " < ", count, "; ++", name, ") {");
  }
  void each_sum(const auto& visit) const {
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      if (is_sum(g_.stages[s])) visit(s);
    }
  }

  void epilogue(Lines& lines) const {
    begin_rows(lines);
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      if (kind_of(loop(s)) == StageKind::rows) row_stage(lines, s);
    }
    each_sum([&](std::size_t s) {
      lines.add(state_type(loop(s)), " state", s, "[2];");
      lines.add("state", s, "[0].clear();");
      lines.add("state", s, "[1].clear();");
    });
    unrolled(lines, "b", 4);
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      if (stores_elements(s) && by_tma(s)) lines.add("unsigned y", s, "[16];");
    }
    each_sum([&](std::size_t s) { lines.add("float v", s, "[2][16];"); });
    element_loads(lines);
    unrolled(lines, "i", 8);
    begin_columns(lines);
    column_loads(lines);
    unrolled(lines, "h", 2);
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      if (stores_elements(s)) lines.add("float n", s, "[2];");
    }
    unrolled(lines, "j", 2);
    const std::string sum = "z[4 * (8 * b + i) + 2 * h + j]";
    lines.add("const float product = ", read_back(p_.c.dtype, sum), ";");
    for (std::size_t s = 0; s < g_.stages.size(); ++s) element_stage(lines, s);
    lines.add("}");
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      if (stores_elements(s)) collect(lines, s);
    }
    lines.add("}");
    lines.add("}");
    each_sum([&](std::size_t s) {
      lines.add("state", s, "[0].add(v", s, "[0]);");
      lines.add("state", s, "[1].add(v", s, "[1]);");
    });
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      if (stores_elements(s) && by_tma(s))
        lines.add("writer.put(y", s, ", &m", s,
                  ", first_column + 64 * b, first_row + ((int)threadIdx.x / 128 - 1) * 64);");
    }
    lines.add("}");
    each_sum([&](std::size_t s) { put_state(lines, s); });
  }

  // Prefetches the elements of a tile into L2, a line of 128 bytes at a time.
  void prefetches(Lines& lines) const {
    for (const View& v : reads_.elements()) {
      const std::int64_t line = 128 / static_cast<std::int64_t>(size_of(v.dtype)),
                         of_row = Engine::kColumns / line;
      lines.add("for (int l = threadIdx.x - 128; l < ", Engine::kRows * of_row, "; l += 256) {");
      lines.add("const ", index(), " row = first_row + l / ", of_row, ";");
      lines.add("const int c = first_column + l % ", of_row, " * ", line, ";");
      lines.add("if (row < ", g_.rows, " && c < ", g_.columns, ") prefetch(a", reads_.source_of(v),
                " + ", row_offset(v, "row", reads_.wide_index()), " + c);");
      lines.add("}");
    }
  }
  void begin_rows(Lines& lines) const {
    lines.add(index(), " row[2];");
    lines.add("bool valid[2];");
    for (std::size_t i = 0; i < reads_.rows().size(); ++i)
      lines.add(cuda_type(reads_.rows()[i].dtype), " w", i, "[2];");
    unrolled(lines, "h", 2);
    lines.add("const int own = first_row + accumulator_row() + 8 * h;");
    lines.add("valid[h] = own < ", g_.rows, ";");
    lines.add("row[h] = valid[h] ? own : ", g_.rows - 1, ";");
    for (std::size_t i = 0; i < reads_.rows().size(); ++i) {
      const View& v = reads_.rows()[i];
      lines.add("w", i, "[h] = a", reads_.source_of(v), "[", offset_of_row(v), "];");
    }
    lines.add("}");
  }
  void row_stage(Lines& lines, std::size_t s) const {
    const View& to = loop(s).store.view;
    lines.add(to.dtype == DType::f64 ? "double q" : "float q", s, "[2];");
    unrolled(lines, "h", 2);
    const std::string value = steps(lines, s);
    lines.add("q", s, "[h] = ", read_back(to.dtype, value), ";");
    if (g_.stages[s].stored)
      lines.add("if (first_column == 0 && valid[h] && threadIdx.x % 4 == 0) o", s, "[",
                offset_of_row(to), "] = ", converted_to(to.dtype, concat("q", s, "[h]")), ";");
    lines.add("}");
  }

  // Declares the column c of a pair.
  void begin_columns(Lines& lines) const {
    lines.add("const int ahead = first_column + accumulator_column() + 64 * b + 8 * i;");
    if (!exact()) lines.add("const bool in = ahead < ", g_.columns, ";");
    lines.add("const int c = ", exact() ? "ahead" : concat("in ? ahead : ", g_.columns - 2), ";");
  }
  void column_loads(Lines& lines) const {
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      for (std::size_t i = 0; i < loop(s).leaves.size(); ++i) {
        const Pointwise::Leaf& leaf = loop(s).leaves[i];
        if (!is_loaded(s, leaf) || reads_.read_of(s, leaf.view) != Read::column) continue;
        const std::string name = concat("u", s, "_", i);
        lines.add(cuda_type(leaf.view.dtype), " ", name, "[2];");
        load_pair(lines, name, leaf.view, "");
      }
    }
  }
  // Loads all elements of a box before any is used.
  void element_loads(Lines& lines) const {
    if (reads_.elements().empty()) return;
    for (std::size_t i = 0; i < reads_.elements().size(); ++i)
      lines.add(cuda_type(reads_.elements()[i].dtype), " x", i, "[8][2][2];");
    unrolled(lines, "i", 8);
    begin_columns(lines);
    unrolled(lines, "h", 2);
    for (std::size_t i = 0; i < reads_.elements().size(); ++i) {
      const View& v = reads_.elements()[i];
      load_pair(lines, concat("x", i, "[i][h]"), v, concat(offset_of_row(v), " + "));
    }
    lines.add("}");
    lines.add("}");
  }
  // Bytes that divide the address of each row of a view.
  std::int64_t row_alignment(const View& v) const {
    const auto size = static_cast<std::int64_t>(size_of(v.dtype));
    return std::gcd(alignments_[static_cast<std::size_t>(v.buffer)],
                    std::gcd(v.offset * size, v.strides[0] * size));
  }
  bool takes_pairs(const View& v) const {
    return row_alignment(v) % (2 * static_cast<std::int64_t>(size_of(v.dtype))) == 0;
  }
  void load_pair(Lines& lines, const std::string& name, const View& v,
                 const std::string& before) const {
    const std::string from = concat("a", reads_.source_of(v), " + ", before, "c");
    if (takes_pairs(v)) {
      lines.add("load(", name, ", ", from, ");");
    } else {
      lines.add(name, "[0] = *(", from, ");");
      lines.add(name, "[1] = *(", from, " + 1);");
    }
  }
  bool is_loaded(std::size_t s, const Pointwise::Leaf& leaf) const {
    return leaf.kind == Pointwise::Leaf::Kind::memory && kind_of(loop(s)) != StageKind::rows &&
           !reads_product(g_, leaf) && maker_of(g_, s, leaf) < 0;
  }

  // A stage at row row[h] and column c + j.
  void element_stage(Lines& lines, std::size_t s) const {
    const StageKind kind = kind_of(loop(s));
    if (kind == StageKind::rows || (kind == StageKind::row_sum && !g_.stages[s].stored)) return;
    const DType dtype = loop(s).store.view.dtype;
    if (reads_.is_forwarded(s)) lines.add("float e", s, ";");
    lines.add("{");
    const std::string value = steps(lines, s);
    if (reads_.is_forwarded(s)) lines.add("e", s, " = ", read_back(dtype, value), ";");
    if (kind == StageKind::row_sum)
      lines.add("v", s, "[h][2 * i + j] = ",
                exact() ? value : concat("in ? ", value, " : ", RegisterText(loop(s)).nothing()),
                ";");
    else if (stores_elements(s))
      lines.add("n", s, "[j] = ", value, ";");
    lines.add("}");
  }
  // Keeps the pair for a box, or stores it.
  void collect(Lines& lines, std::size_t s) const {
    const View& to = loop(s).store.view;
    const std::string name = concat("n", s);
    if (by_tma(s)) {
      lines.add("y", s, "[2 * i + h] = ", to.dtype == DType::bf16 ? "two_bf16(" : "two_f16(", name,
                "[0], ", name, "[1]);");
      return;
    }
    const std::string at = concat("o", s, " + ", offset_of_row(to), " + c");
    lines.add(exact() ? "if (valid[h]) {" : "if (valid[h] && in) {");
    if (to.dtype == DType::f32 && takes_pairs(to)) {
      lines.add("store(", at, ", ", name, ");");
    } else {
      for (int j = 0; j < 2; ++j)
        lines.add("*(", at, " + ", j, ") = ", converted_to(to.dtype, concat(name, "[", j, "]")),
                  ";");
    }
    lines.add("}");
  }
  void put_state(Lines& lines, std::size_t s) const {
    unrolled(lines, "h", 2);
    lines.add("across_lanes(state", s, "[h], 4);");
    lines.add("if (valid[h] && threadIdx.x % 4 == 0) p", s, "[(long long)(first_column / ",
              Engine::kColumns, ") * ", g_.rows, " + row[h]] = state", s, "[h];");
    lines.add("}");
  }

  std::string offset_of_row(const View& v) const {
    return row_offset(v, "row[h]", reads_.wide_index());
  }

  // Writes the steps of a stage. Returns the value's name.
  std::string steps(Lines& lines, std::size_t s) const {
    const std::size_t leaves = loop(s).leaves.size();
    const RegisterText registers(loop(s));
    const auto declare = [&](std::size_t r, const std::string& value) {
      lines.add("const ", registers.type(static_cast<int>(r)), " r", r, " = ", value, ";");
    };
    for (std::size_t i = 0; i < leaves; ++i) {
      if (loop(s).leaves[i].kind == Pointwise::Leaf::Kind::constant) continue;
      declare(i, concat("(", registers.type(static_cast<int>(i)), ")", leaf_text(s, i)));
    }
    const int result = registers.result();
    for (std::size_t i = 0; i < loop(s).steps.size(); ++i) {
      const int r = static_cast<int>(leaves + i);
      if (r != loop(s).store.source || r == result) declare(leaves + i, registers.step(i));
    }
    return registers.name(result);
  }
  std::string leaf_text(std::size_t s, std::size_t i) const {
    const Pointwise::Leaf& leaf = loop(s).leaves[i];
    if (leaf.kind == Pointwise::Leaf::Kind::first) return "first";
    if (leaf.kind == Pointwise::Leaf::Kind::iota) return leaf.dim == 0 ? "row[h]" : "(c + j)";
    if (reads_product(g_, leaf)) return "product";
    if (const int maker = maker_of(g_, s, leaf); maker >= 0) {
      const bool element = kind_of(loop(static_cast<std::size_t>(maker))) == StageKind::elements;
      return element ? concat("e", maker) : concat("q", maker, "[h]");
    }
    switch (reads_.read_of(s, leaf.view)) {
      case Read::element:
        return concat("number(x", reads_.element_of(leaf.view), "[i][h][j])");
      case Read::row:
        return concat("number(w", reads_.row_of(leaf.view), "[h])");
      case Read::column:
        return concat("number(u", s, "_", i, "[j])");
      default:
        return concat("number(a", reads_.source_of(leaf.view), "[0])");
    }
  }
};

}  // namespace

std::vector<GeneratedKernel> product_kernels(const RowGroup& group,
                                             std::span<const std::int64_t> alignments) {
  return ProductText(group, alignments).kernels();
}

std::int64_t product_scratch_bytes(const RowGroup& group) {
  std::int64_t bytes = 0;
  for (const std::vector<std::size_t>& of_state : sums_by_state(group)) {
    for (const std::size_t s : of_state) bytes += parts_bytes(group, s);
  }
  return bytes;
}

}  // namespace logitless::ir
