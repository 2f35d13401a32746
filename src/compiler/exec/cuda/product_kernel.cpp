// Matrix products whose epilogue is a row group: a tile engine of kernels/device/tile_engine.h
// computes tiles of sums in registers, of one product or two, and the group's stages run on them.
// Sums of rows leave a
// state for each row and tile of columns, which a second kernel merges in order.
#include <algorithm>

#include "compiler/exec/cuda/kernels.h"
#include "compiler/exec/cuda/loop_text.h"
#include "compiler/exec/cuda/product_epilogue.h"
#include "compiler/exec/cuda/stage_reads.h"
#include "compiler/plan/group_rows.h"
#include "kernels/device/tile_engine.h"

namespace logitless::ir {
namespace {

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

std::int64_t column_tiles(const RowGroup& g) { return ceil_div(g.columns, tile_columns(g)); }

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

class ProductText {
 public:
  ProductText(const RowGroup& group, std::span<const std::int64_t> alignments)
      : g_(group),
        p_(*group.product),
        engine_(engine_of(group)),
        sm90_(group.engine == ProductEngine::sm90),
        by_rows_(p_.b.strides[0] == 1),
        reads_(group),
        alignments_(alignments) {}

  std::vector<GeneratedKernel> kernels() {
    GeneratedKernel kernel;
    std::string parameters;
    add_operands(parameters, kernel);
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
    const std::int64_t row_tiles = ceil_div(g_.rows, engine_.rows * engine_.ctas);
    begin_product(lines, row_tiles);
    add_prefetches(lines, g_, reads_);
    lines.add("}, [&](const float (&z)[128], int first_row, int first_column, ",
              sm90_ ? "BoxWriter& writer" : "unsigned char* memory", ") {");
    add_epilogue(lines, g_, reads_, alignments_);
    lines.add("});");
    const GeneratedKernel made =
        make_kernel("product",
                    concat("product ", p_.m, " x ", p_.n, " x ", p_.k,
                           g_.other ? ", and another," : "", " with ", g_.stages.size(), " stages"),
                    parameters, lines, static_cast<unsigned>(engine_.threads),
                    sm90_ ? Blocks{1, static_cast<unsigned>(engine_.ctas)} : Blocks{2, 1});
    kernel.entry = made.entry;
    kernel.source = made.source;
    kernel.shape = made.shape;
    kernel.shape.grid[0] = static_cast<unsigned>(row_tiles * column_tiles(g_) * engine_.ctas);
    kernel.shape.shared_bytes = engine_.shared_bytes;
    kernel.shape.persistent = sm90_;
    kernel.product_engine = g_.engine;
    std::vector<GeneratedKernel> list = {std::move(kernel)};
    add_merges(sums, list);
    return list;
  }

 private:
  const RowGroup& g_;
  const Gemm& p_;
  const cuda::TileEngine& engine_;
  const bool sm90_;     // else by mma.sync
  const bool by_rows_;  // b^T has contiguous rows
  const StageReads reads_;
  const std::span<const std::int64_t> alignments_;

  const Pointwise& loop(std::size_t s) const { return g_.stages[s].loop; }

  void add_operands(std::string& parameters, GeneratedKernel& kernel) const {
    add_left(parameters, kernel, "a", p_);
    add_right(parameters, kernel, "b", p_);
    if (g_.difference) add_left(parameters, kernel, "c", *g_.other);
    if (g_.other) add_right(parameters, kernel, "d", *g_.other);
  }
  void add_left(std::string& parameters, GeneratedKernel& kernel, const std::string& name,
                const Gemm& of) const {
    add_operand(parameters, kernel, name, of.a, {of.m, of.k, of.a.strides[0], engine_.rows});
  }
  void add_right(std::string& parameters, GeneratedKernel& kernel, const std::string& name,
                 const Gemm& of) const {
    if (by_rows_)
      add_operand(parameters, kernel, name, of.b,
                  {of.n, of.k, of.b.strides[1], engine_.columns / 2});
    else
      add_operand(parameters, kernel, name, of.b, {of.k, of.n, of.b.strides[0], engine_.step});
  }
  void add_operand(std::string& parameters, GeneratedKernel& kernel, const std::string& name,
                   const View& v, const cuda::MatrixShape& shape) const {
    if (sm90_) return add_map(parameters, kernel, "of_" + name, v, shape);
    add_parameter(parameters, kernel.arguments, concat("const void* __restrict__ of_", name),
                  {KernelArgument::Kind::address, v.buffer,
                   v.offset * static_cast<std::int64_t>(size_of(v.dtype))});
  }
  // Opens the call of the engine, up to the body of its function `ahead`.
  void begin_product(Lines& lines, std::int64_t row_tiles) const {
    const std::string types =
        concat(p_.a.dtype == DType::bf16 ? "__nv_bfloat16" : "__half", ", ", by_rows_ ? 0 : 1);
    const std::string_view products = g_.difference ? "difference" : g_.other ? "beside" : "one";
    const std::int64_t other_k = g_.difference ? g_.other->k : 0;
    lines.add("using namespace logitless::cuda;");
    if (sm90_) {
      lines.add("static_assert(kTileShared == ", engine_.shared_bytes, ");");
      lines.add("products_of_tiles<", types, ", Products::", products, ">(ProductMaps{&of_a, &of_b",
                g_.difference ? ", &of_c" : ", nullptr", g_.other ? ", &of_d" : ", nullptr",
                "}, ProductTiles{", row_tiles, ", ", column_tiles(g_), ", ",
                ceil_div(p_.k, engine_.step), ", ", ceil_div(other_k, engine_.step),
                "}, [&](int first_row, int first_column) {");
      return;
    }
    lines.add("using namespace logitless::cuda::tiles_sm80;");
    lines.add("static_assert(kPipelineBytes == ", engine_.shared_bytes, ");");
    const bool whole = p_.k % engine_.step == 0 && other_k % engine_.step == 0;
    const auto left = [](const Gemm& of) { return of.a.strides[0]; };
    const auto right = [&](const Gemm& of) { return of.b.strides[by_rows_ ? 1 : 0]; };
    lines.add("products_of_tiles<", types, whole ? ", true" : ", false", ", Products::", products,
              ">(ProductOperands{{of_a, ", left(p_), "}, {of_b, ", right(p_), "}, ",
              g_.difference ? concat("{of_c, ", left(*g_.other), "}, ") : "{nullptr, 0}, ",
              g_.other ? concat("{of_d, ", right(*g_.other), "}") : "{nullptr, 0}",
              "}, ProductSizes{", p_.m, ", ", p_.n, ", ", p_.k, ", ", other_k,
              "}, [&](int first_row, int first_column) {");
  }
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
    const bool elements = stores_elements(g_.stages[s]);
    if (sm90_ && elements && in_chunks(to, alignments_)) {
      add_map(parameters, kernel, concat("m", s), to, {g_.rows, g_.columns, to.strides[0], 64});
    } else if (elements || (g_.stages[s].stored && kind_of(loop(s)) == StageKind::rows)) {
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
