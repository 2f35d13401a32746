#include "compiler/exec/cuda/product_epilogue.h"

#include <numeric>
#include <string>

#include "compiler/exec/cuda/kernels.h"
#include "compiler/plan/group_rows.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

std::string_view index_type(const StageReads& reads) {
  return reads.wide_index() ? "long long" : "unsigned";
}

class EpilogueText {
 public:
  EpilogueText(const RowGroup& group, const StageReads& reads,
               std::span<const std::int64_t> alignments)
      : g_(group),
        engine_(engine_of(group)),
        sm90_(group.engine == ProductEngine::sm90),
        beside_(group.other && !group.difference),
        blocks_(sm90_ && beside_ ? 2 : 4),
        columns_(!sm90_ && beside_ ? 4 : 8),
        reads_(reads),
        alignments_(alignments) {}

  void add(Lines& lines) const {
    if (sm90_) begin_rows(lines);
    unrolled(lines, "b", blocks_);
    if (!sm90_) begin_rows(lines);
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      if (stores_in_chunks(s)) lines.add("unsigned y", s, "[", 2 * columns_, "];");
    }
    each_sum([&](std::size_t s) { lines.add("float v", s, "[2][", 2 * columns_, "];"); });
    element_loads(lines);
    unrolled(lines, "i", columns_);
    begin_columns(lines);
    column_loads(lines);
    unrolled(lines, "h", 2);
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      if (stores_elements(g_.stages[s])) lines.add("float n", s, "[2];");
    }
    unrolled(lines, "j", 2);
    const auto sum = [&](int block, int column) {
      return concat("z[4 * (8 * (b + ", block, ") + i + ", column, ") + 2 * h + j]");
    };
    lines.add("const float product = ", read_back(g_.product->c.dtype, sum(0, 0)), ";");
    if (beside_)
      lines.add("const float other = ",
                read_back(g_.other->c.dtype, sm90_ ? sum(blocks_, 0) : sum(0, columns_)), ";");
    for (std::size_t s = 0; s < g_.stages.size(); ++s) element_stage(lines, s);
    lines.add("}");
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      if (stores_elements(g_.stages[s])) collect(lines, s);
    }
    lines.add("}");
    lines.add("}");
    each_sum([&](std::size_t s) {
      lines.add("state", s, "[0].add(v", s, "[0]);");
      lines.add("state", s, "[1].add(v", s, "[1]);");
    });
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      if (stores_in_chunks(s)) put_elements(lines, s);
    }
    if (sm90_) {
      lines.add("}");
      each_sum([&](std::size_t s) { put_state(lines, s); });
      return;
    }
    std::int64_t offset = 0;
    each_sum([&](std::size_t s) {
      share_state(lines, s, offset);
      offset += bytes_of_tile(s);
    });
    lines.add("}");
    if (offset == 0) return;
    check(offset <= engine_.shared_bytes, "sums of a tile in shared memory");
    lines.add("__syncthreads();");
    offset = 0;
    each_sum([&](std::size_t s) {
      put_shared_state(lines, s, offset);
      offset += bytes_of_tile(s);
    });
  }

 private:
  using Read = StageReads::Read;

  const RowGroup& g_;
  const cuda::TileEngine& engine_;
  const bool sm90_;    // else by mma.sync
  const bool beside_;  // two products have sums
  const int blocks_;   // of a result
  const int columns_;  // pairs of adjacent columns of a result in a block
  const StageReads& reads_;
  const std::span<const std::int64_t> alignments_;

  const Pointwise& loop(std::size_t s) const { return g_.stages[s].loop; }
  bool stores_in_chunks(std::size_t s) const {
    return stores_elements(g_.stages[s]) && in_chunks(loop(s).store.view, alignments_);
  }
  bool exact() const { return g_.columns % tile_columns(g_) == 0; }

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

  // Declares the two rows, their values and the states of their sums.
  void begin_rows(Lines& lines) const {
    lines.add(index_type(reads_), " row[2];");
    lines.add("bool valid[2];");
    for (std::size_t i = 0; i < reads_.rows().size(); ++i)
      lines.add(cuda_type(reads_.rows()[i].dtype), " w", i, "[2];");
    unrolled(lines, "h", 2);
    lines.add("const int own = first_row + ",
              sm90_ ? "accumulator_row() + 8 * h;" : "row_of(b, h);");
    lines.add("valid[h] = own < ", g_.rows, ";");
    lines.add("row[h] = valid[h] ? own : ", g_.rows - 1, ";");
    for (std::size_t i = 0; i < reads_.rows().size(); ++i) {
      const View& v = reads_.rows()[i];
      lines.add("w", i, "[h] = a", reads_.source_of(v), "[", offset_of_row(v), "];");
    }
    lines.add("}");
    for (std::size_t s = 0; s < g_.stages.size(); ++s) {
      if (kind_of(loop(s)) == StageKind::rows) row_stage(lines, s);
    }
    each_sum([&](std::size_t s) {
      lines.add(state_type(loop(s)), " state", s, "[2];");
      lines.add("state", s, "[0].clear();");
      lines.add("state", s, "[1].clear();");
    });
  }
  void row_stage(Lines& lines, std::size_t s) const {
    const View& to = loop(s).store.view;
    lines.add(to.dtype == DType::f64 ? "double q" : "float q", s, "[2];");
    unrolled(lines, "h", 2);
    const std::string value = steps(lines, s);
    lines.add("q", s, "[h] = ", read_back(to.dtype, value), ";");
    if (g_.stages[s].stored)
      lines.add("if (first_column == 0 && valid[h] && threadIdx.x % ",
                sm90_ ? "4" : "64 / 32 == 0 && threadIdx.x % 4", " == 0) o", s, "[",
                offset_of_row(to), "] = ", converted_to(to.dtype, concat("q", s, "[h]")), ";");
    lines.add("}");
  }

  // Declares the column c of a pair.
  void begin_columns(Lines& lines) const {
    lines.add("const int ahead = first_column + ", sm90_ ? "accumulator_column() + 64 * b + 8 * i;"
                                                   : beside_
                                                       ? "column_of_result<Products::beside>(i);"
                                                       : "column_of(i);");
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
      lines.add(cuda_type(reads_.elements()[i].dtype), " x", i, "[", columns_, "][2][2];");
    unrolled(lines, "i", columns_);
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
           product_of(g_, leaf) == nullptr && maker_of(g_, s, leaf) < 0;
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
    else if (stores_elements(g_.stages[s]))
      lines.add("n", s, "[j] = ", value, ";");
    lines.add("}");
  }
  // Keeps the pair for a box, or stores it.
  void collect(Lines& lines, std::size_t s) const {
    const View& to = loop(s).store.view;
    const std::string name = concat("n", s);
    if (stores_in_chunks(s)) {
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
  // Stores a block of elements of 16 bits.
  void put_elements(Lines& lines, std::size_t s) const {
    if (sm90_) {
      lines.add("writer.put(y", s, ", &m", s,
                ", first_column + 64 * b, first_row + ((int)threadIdx.x / 128 - 1) * 64);");
      return;
    }
    const View& to = loop(s).store.view;
    const auto row = [&](const char* name) {
      return concat("o", s, " + ", row_offset(to, name, reads_.wide_index()), " + first_column");
    };
    lines.add("store_rows(y", s, ", {", row("row[0]"), ", ", row("row[1]"), "}, valid, ",
              g_.columns, " - first_column);");
  }
  // Bytes of a sum's states of a tile by mma.sync: two warps share a row.
  std::int64_t bytes_of_tile(std::size_t s) const {
    return 2 * engine_.rows * state_bytes(loop(s));
  }
  void share_state(Lines& lines, std::size_t s, std::int64_t offset) const {
    unrolled(lines, "h", 2);
    lines.add("across_lanes(state", s, "[h], 4);");
    lines.add("if (threadIdx.x % 4 == 0) ((", state_type(loop(s)), "*)(memory + ", offset,
              "))[threadIdx.x / 32 % 2 * ", engine_.rows, " + row_of(b, h)] = state", s, "[h];");
    lines.add("}");
  }
  // Merges both warps' parts of a row; a thread has one.
  void put_shared_state(Lines& lines, std::size_t s, std::int64_t offset) const {
    lines.add("if (first_row + (int)threadIdx.x < ", g_.rows, ") {");
    lines.add("const ", state_type(loop(s)), "* const of = (const ", state_type(loop(s)),
              "*)(memory + ", offset, ") + threadIdx.x;");
    lines.add(state_type(loop(s)), " state = of[0];");
    lines.add("state.merge(of[", engine_.rows, "]);");
    lines.add("p", s, "[(long long)(first_column / ", tile_columns(g_), ") * ", g_.rows,
              " + first_row + threadIdx.x] = state;");
    lines.add("}");
  }
  void put_state(Lines& lines, std::size_t s) const {
    unrolled(lines, "h", 2);
    lines.add("across_lanes(state", s, "[h], 4);");
    lines.add("if (valid[h] && threadIdx.x % 4 == 0) p", s, "[(long long)(first_column / ",
              tile_columns(g_), ") * ", g_.rows, " + row[h]] = state", s, "[h];");
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
    if (const Gemm* const of = product_of(g_, leaf))
      return of == &*g_.product ? "product" : "other";
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

const cuda::TileEngine& engine_of(const RowGroup& group) {
  return group.engine == ProductEngine::sm90 ? cuda::kSm90Engine : cuda::kSm80Engine;
}
std::int64_t tile_columns(const RowGroup& group) {
  const int columns = engine_of(group).columns;
  return group.other && !group.difference ? columns / 2 : columns;
}

bool is_narrow(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16; }
bool is_sum(const RowGroup::Stage& stage) {
  return stage.stored && kind_of(stage.loop) == StageKind::row_sum;
}
bool stores_elements(const RowGroup::Stage& stage) {
  return stage.stored && kind_of(stage.loop) == StageKind::elements;
}
bool in_chunks(const View& to, std::span<const std::int64_t> alignments) {
  const auto size = static_cast<std::int64_t>(size_of(to.dtype));
  constexpr std::int64_t kAccess = 16;
  return is_narrow(to.dtype) && alignments[static_cast<std::size_t>(to.buffer)] % kAccess == 0 &&
         to.offset * size % kAccess == 0 && to.strides[0] * size % kAccess == 0;
}

void add_prefetches(Lines& lines, const RowGroup& group, const StageReads& reads) {
  const cuda::TileEngine& engine = engine_of(group);
  for (const View& v : reads.elements()) {
    const std::int64_t line = 128 / static_cast<std::int64_t>(size_of(v.dtype)),
                       of_row = tile_columns(group) / line;
    lines.add("for (int l = threadIdx.x - ", engine.threads - engine.consumers, "; l < ",
              engine.rows * of_row, "; l += ", engine.consumers, ") {");
    lines.add("const ", index_type(reads), " row = first_row + l / ", of_row, ";");
    lines.add("const int c = first_column + l % ", of_row, " * ", line, ";");
    lines.add("if (row < ", group.rows, " && c < ", group.columns, ") prefetch(a",
              reads.source_of(v), " + ", row_offset(v, "row", reads.wide_index()), " + c);");
    lines.add("}");
  }
}

void add_epilogue(Lines& lines, const RowGroup& group, const StageReads& reads,
                  std::span<const std::int64_t> alignments) {
  EpilogueText(group, reads, alignments).add(lines);
}

}  // namespace logitless::ir
