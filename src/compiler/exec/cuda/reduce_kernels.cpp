// Reductions. Rows: a group of lanes or a block owns a row or a part of one. Columns: a block owns
// neighbouring columns of a part of the rows. A second kernel merges the states of parts. The shape
// determines the order of all additions.
#include <algorithm>
#include <array>
#include <bit>

#include "compiler/exec/cuda/kernels.h"
#include "compiler/exec/cuda/loop_text.h"
#include "compiler/plan/integers.h"

namespace logitless::ir {
namespace {

constexpr std::int64_t kBlock = 256;
constexpr std::int64_t kWarpRow = 1024;     // a warp owns rows of at most so many elements
constexpr std::int64_t kFewRows = 16;       // of columns that one thread owns
constexpr std::int64_t kManyBlocks = 1024;  // enough to fill any GPU
constexpr std::int64_t kLongest = 1 << 16;  // elements of a row's part: bounds the rounding error

struct Sizes {
  std::size_t rank, border;    // dimensions; the first index of the second group of dimensions
  std::int64_t kept, reduced;  // elements
};
Sizes sizes_of(const Pointwise& loop) {
  const std::size_t rank = loop.shape.size(), reduced = static_cast<std::size_t>(loop.reduced);
  const std::size_t border = loop.columns ? reduced : rank - reduced;
  const std::int64_t before = count_of(loop.shape, 0, border),
                     after = count_of(loop.shape, border, rank);
  return {rank, border, loop.columns ? after : before, loop.columns ? before : after};
}

std::int64_t power_of_two(std::int64_t at_least) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(at_least)));
}

Parts cut(std::int64_t elements, std::int64_t parts, std::int64_t multiple) {
  const std::int64_t length = ceil_div(ceil_div(elements, parts), multiple) * multiple;
  return {ceil_div(elements, length), length};
}

// Returns the parameters of the result, or of the parts' states.
std::string target(const LoopText& text, const Pointwise& loop, bool to_scratch) {
  return to_scratch ? concat(state_type(loop), "* parts") : concat(text.stored_type(), "* to");
}
KernelArgument target_argument(const Pointwise& loop, bool to_scratch) {
  return to_scratch ? KernelArgument{KernelArgument::Kind::scratch, -1, 0} : stored_argument(loop);
}

// Loads the item at the declared coordinates and adds its elements to `state`, as one sum, or to
// state[j] separately.
void add_item(Lines& lines, const LoopText& text, int width, bool each) {
  text.declare_loads(lines, 1);
  text.loads(lines, "");
  const std::string_view type = text.registers().reduced_type();
  if (!each) lines.add(type, " v[", width, "];");
  lines.add("#pragma unroll");
  lines.add("for (int j = 0; j < ", width, "; ++j) {");
  const std::string value = text.steps(lines, "");
  if (each) {
    lines.add("const ", type, " v[1] = {", value, "};");
    lines.add("state[j].add(v);");
  } else {
    lines.add("v[j] = ", value, ";");
  }
  lines.add("}");
  if (!each) lines.add("state.add(v);");
}

// Merges the states of parts, [rows, parts], into results; a warp owns a row.
GeneratedKernel merge_row_parts(const Pointwise& loop, const Parts& parts) {
  const Sizes n = sizes_of(loop);
  const LoopText text(loop, {});
  const std::int64_t rows_of_block = kBlock / 32;
  Lines lines;
  lines.add("const int lane = threadIdx.x % 32;");
  lines.add("const ", text.index(), " own = (", text.index(), ")blockIdx.x * ",
            text.number(rows_of_block), " + threadIdx.x / 32;");
  lines.add("const ", text.index(), " row = own < ", text.number(n.kept),
            " ? own : ", text.number(n.kept - 1), ";");
  text.coordinates(lines, 0, n.border, "row");
  lines.add(state_type(loop), " state;");
  lines.add("state.clear();");
  lines.add("for (int p = lane; p < ", parts.count, "; p += 32) state.merge(parts[row * ",
            text.number(parts.count), " + p]);");
  lines.add("across_lanes(state, 32);");
  lines.add("if (lane == 0 && own == row) {");
  text.store_one(lines, text.stored_offset(0, n.border), value_of("state", loop));
  lines.add("}");
  GeneratedKernel kernel = make_kernel(
      "merge_rows", concat(parts.count, " parts of each of ", n.kept, " rows"),
      concat("const ", state_type(loop), "* parts, ", text.stored_type(), "* to"), lines, kBlock);
  kernel.arguments = {target_argument(loop, true), target_argument(loop, false)};
  kernel.shape.grid[0] = static_cast<unsigned>(ceil_div(n.kept, rows_of_block));
  return kernel;
}

// Returns "x * n", or "x" if n is 1.
std::string times(const char* x, std::int64_t n) {
  return n == 1 ? std::string(x) : concat(x, " * ", n);
}

// Declares shared[ys][xs * width], fills it with state[j] of all threads and adds over y.
void sum_over_y(Lines& lines, const Pointwise& loop, std::int64_t xs, std::int64_t ys,
                std::int64_t width) {
  if (ys == 1) return;
  const std::int64_t all = xs * width;
  const std::string at = times("x", width);
  lines.add("__shared__ ", state_type(loop), " shared[", ys, "][", all, "];");
  lines.add("#pragma unroll");
  lines.add("for (int j = 0; j < ", width, "; ++j) shared[y][", at, " + j] = state[j];");
  lines.add("for (int half = ", ys / 2, "; half > 0; half /= 2) {");
  lines.add("__syncthreads();");
  lines.add("if (y < half) {");
  lines.add("#pragma unroll");
  lines.add("for (int j = 0; j < ", width, "; ++j) {");
  lines.add("state[j].merge(shared[y + half][", at, " + j]);");
  lines.add("shared[y][", at, " + j] = state[j];");
  lines.add("}");
  lines.add("}");
  lines.add("}");
}

}  // namespace

GeneratedKernel merge_column_parts(std::span<const Pointwise* const> loops, const Parts& parts) {
  constexpr std::int64_t kManyParts = 128, kManyThreads = 1024;
  const Pointwise& first = *loops[0];
  const Sizes n = sizes_of(first);
  const LoopText text(first, {});
  const std::int64_t block = parts.count < kManyParts ? kBlock : kManyThreads;
  const std::int64_t xs = std::min<std::int64_t>(power_of_two(n.kept), 32), ys = block / xs;
  Lines lines;
  lines.add("const int x = threadIdx.x % ", xs, ", y = threadIdx.x / ", xs, ";");
  const bool several = loops.size() > 1;
  const std::int64_t blocks = ceil_div(n.kept, xs);  // of one loop
  const std::string block_number =
      several ? concat("(blockIdx.x % ", text.number(blocks), ")") : std::string("blockIdx.x");
  lines.add("const ", text.index(), " own = (", text.index(), ")", block_number, " * ",
            text.number(xs), " + x;");
  lines.add("const ", text.index(), " column = own < ", text.number(n.kept),
            " ? own : ", text.number(n.kept - 1), ";");
  if (several) {
    lines.add("const unsigned loop = blockIdx.x / ", blocks, "u;");
    lines.add("parts += (long long)loop * ", parts.count * n.kept, ";");
  }
  text.coordinates(lines, n.border, n.rank, "column");
  lines.add(state_type(first), " state[1];");
  lines.add("state[0].clear();");
  lines.add("#pragma unroll 8");
  lines.add("for (int p = y; p < ", parts.count, "; p += ", ys, ") state[0].merge(parts[p * ",
            text.number(n.kept), " + column]);");
  sum_over_y(lines, first, xs, ys, 1);
  std::string parameters = concat("const ", state_type(first), "* parts");
  std::vector<KernelArgument> arguments = {target_argument(first, true)};
  lines.add("if (y == 0 && own == column) {");
  for (std::size_t i = 0; i < loops.size(); ++i) {
    const LoopText own(*loops[i], {});
    const std::string to = several ? concat("to", i) : "to";
    parameters += concat(", ", own.stored_type(), "* ", to);
    arguments.push_back(target_argument(*loops[i], false));
    if (several) {
      lines.add("if (loop == ", i, ") {");
      lines.add(own.stored_type(), "* const to = ", to, ";");
    }
    own.store_one(lines, own.stored_offset(n.border, n.rank), value_of("state[0]", *loops[i]));
    if (several) lines.add("}");
  }
  lines.add("}");
  GeneratedKernel kernel =
      make_kernel("merge_columns", concat(parts.count, " parts of each of ", n.kept, " columns"),
                  parameters, lines, static_cast<unsigned>(block));
  kernel.arguments = std::move(arguments);
  kernel.shape.grid[0] = static_cast<unsigned>(blocks * static_cast<std::int64_t>(loops.size()));
  return kernel;
}

std::string value_of(const char* state, const Pointwise& loop) {
  const bool wide = loop.reduce == Reduce::lse && loop.store.view.dtype == DType::f64;
  const bool integer = holds_integers(loop, loop.store.source);
  return concat(integer ? "(long long)" : "", state, wide ? ".wide_value()" : ".value()");
}

std::string state_type(const Pointwise& loop) {
  const char* kind = loop.reduce == Reduce::sum       ? "Sum"
                     : loop.reduce == Reduce::max     ? "Max"
                     : loop.reduce == Reduce::product ? "Product"
                                                      : "LogSum";
  return concat(kind, "<", RegisterText(loop).reduced_type(), ">");
}
std::int64_t state_bytes(const Pointwise& loop) {
  const bool wide = loop.wide || holds_integers(loop, loop.store.source);
  return (wide ? 8 : 4) * (loop.reduce == Reduce::lse ? 2 : 1);
}

Parts row_parts(const Pointwise& loop) {
  constexpr std::int64_t kLeast = 4096, kMultiple = 512;
  const Sizes n = sizes_of(loop);
  if (n.reduced <= kWarpRow) return {1, n.reduced};
  const std::int64_t to_fill = std::min(ceil_div(kManyBlocks, n.kept), n.reduced / kLeast);
  return cut(n.reduced, std::max({to_fill, ceil_div(n.reduced, kLongest), std::int64_t{1}}),
             kMultiple);
}

Parts column_parts(const Pointwise& loop) {
  constexpr std::int64_t kColumns = 128;                        // of a block, approximately
  constexpr std::int64_t kElements = 1 << 14, kLeastRows = 64;  // of a part
  constexpr std::int64_t kMostParts = 256, kMostRows = 1 << 13;
  const Sizes n = sizes_of(loop);
  const std::int64_t least = std::max(kLeastRows, kElements / n.kept);
  const std::int64_t to_fill =
      std::min({ceil_div(kManyBlocks, ceil_div(n.kept, kColumns)), n.reduced / least, kMostParts});
  return cut(n.reduced, std::max({to_fill, ceil_div(n.reduced, kMostRows), std::int64_t{1}}), 8);
}

std::vector<GeneratedKernel> row_kernels(const Pointwise& loop,
                                         std::span<const std::int64_t> alignments) {
  const Sizes n = sizes_of(loop);
  const Vectors vectors = choose_vectors(loop, alignments, false);
  const LoopText text(loop, vectors);
  const Parts parts = row_parts(loop);
  const bool in_parts = parts.count > 1;
  const std::int64_t width = vectors.width;
  // Threads of a row and of a block.
  const bool by_lanes = n.reduced <= kWarpRow;
  const std::int64_t threads =
      by_lanes ? std::min<std::int64_t>(power_of_two(ceil_div(n.reduced, width)), 32) : kBlock;
  const std::int64_t rows_of_block = kBlock / threads, items = n.kept * parts.count;

  Lines lines;
  const auto number = [&](std::int64_t x) { return text.number(x); };
  if (rows_of_block > 1) {
    // Lanes beyond the last row recompute the last row: full warps must take part in shuffles.
    lines.add("const int lane = threadIdx.x % ", threads, ";");
    lines.add("const ", text.index(), " own = (", text.index(), ")blockIdx.x * ",
              number(rows_of_block), " + threadIdx.x / ", threads, ";");
    lines.add("const ", text.index(), " row = own < ", number(items),
              " ? own : ", number(items - 1), ";");
  } else {
    lines.add("const int lane = threadIdx.x;");
    if (in_parts) {
      lines.add("const ", text.index(), " row = blockIdx.x / ", number(parts.count),
                ", part = blockIdx.x % ", number(parts.count), ";");
    } else {
      lines.add("const ", text.index(), " row = blockIdx.x;");
    }
  }
  text.coordinates(lines, 0, n.border, "row");
  std::string begin, end = number(n.reduced);
  if (in_parts) {
    lines.add("const ", text.index(), " begin = part * ", number(parts.length), ";");
    begin = "begin + ";
    end = "end";
    lines.add("const ", text.index(), " end = begin + ", number(parts.length), " < ",
              number(n.reduced), " ? begin + ", number(parts.length), " : ", number(n.reduced),
              ";");
  }
  lines.add(state_type(loop), " state;");
  lines.add("state.clear();");
  if (width > 1) {
    lines.add("#pragma unroll 4");
    lines.add("for (", text.index(), " c = ", begin, "lane * ", number(width), "; c < ", end,
              "; c += ", number(threads * width), ") {");
    text.coordinates(lines, n.border, n.rank, "c");
    add_item(lines, text, static_cast<int>(width), false);
    lines.add("}");
  } else {
    // Loads four elements at a time. Elements beyond the end load the last one and are then masked
    // out, so that no load waits for a branch.
    const std::int64_t several = std::min<std::int64_t>(ceil_div(parts.length, threads), 4);
    lines.add("for (", text.index(), " some = ", begin, "lane; some < ", end,
              "; some += ", number(threads * several), ") {");
    lines.add(text.registers().reduced_type(), " v[", several, "];");
    lines.add("#pragma unroll");
    lines.add("for (int k = 0; k < ", several, "; ++k) {");
    lines.add("const ", text.index(), " ahead = some + k * ", number(threads), ";");
    lines.add("const ", text.index(), " c = ahead < ", end, " ? ahead : ", end, " - 1;");
    text.coordinates(lines, n.border, n.rank, "c");
    text.declare_loads(lines, 1);
    text.loads(lines, "");
    const std::string value = text.steps(lines, "");
    lines.add("v[k] = ahead == c ? ", value, " : ", text.registers().nothing(), ";");
    lines.add("}");
    lines.add("state.add(v);");
    lines.add("}");
  }
  if (rows_of_block > 1) {
    lines.add("across_lanes(state, ", threads, ");");
    lines.add("if (lane == 0 && own == row) {");
  } else {
    lines.add("__shared__ ", state_type(loop), " shared[", kBlock / 32, "];");
    lines.add("across_block(state, shared, ", kBlock / 32, ");");
    lines.add("if (lane == 0) {");
  }
  if (in_parts) {
    lines.add("parts[row * ", number(parts.count), " + part] = state;");
  } else {
    text.store_one(lines, text.stored_offset(0, n.border), value_of("state", loop));
  }
  lines.add("}");

  GeneratedKernel kernel =
      make_kernel("rows", concat(n.kept, " rows of ", n.reduced),
                  concat(text.parameters(), target(text, loop, in_parts)), lines, kBlock);
  kernel.arguments = text.arguments();
  kernel.arguments.push_back(target_argument(loop, in_parts));
  kernel.shape.grid[0] = static_cast<unsigned>(ceil_div(items, rows_of_block));
  std::vector<GeneratedKernel> kernels = {std::move(kernel)};
  if (in_parts) kernels.push_back(merge_row_parts(loop, parts));
  return kernels;
}

std::vector<GeneratedKernel> column_kernels(const Pointwise& loop,
                                            std::span<const std::int64_t> alignments) {
  const Sizes n = sizes_of(loop);
  const Vectors vectors = choose_vectors(loop, alignments, false);
  const LoopText text(loop, vectors);
  const Parts parts = column_parts(loop);
  const bool in_parts = parts.count > 1;
  const std::int64_t width = vectors.width;
  // A thread reduces all of a few rows.
  const bool alone = parts.length <= kFewRows && n.kept >= kBlock * width;
  const std::int64_t xs = std::min<std::int64_t>(power_of_two(ceil_div(n.kept, width)),
                                                 alone ? kBlock : 32),
                     ys = kBlock / xs, blocks = ceil_div(n.kept, xs * width);

  Lines lines;
  const auto number = [&](std::int64_t x) { return text.number(x); };
  lines.add("const int x = threadIdx.x % ", xs, ", y = threadIdx.x / ", xs, ";");
  lines.add("const ", text.index(), " part = blockIdx.x / ", number(blocks), ";");
  lines.add("const ", text.index(), " own = (blockIdx.x % ", number(blocks), " * ", number(xs),
            " + x) * ", number(width), ";");
  lines.add("const ", text.index(), " column = own < ", number(n.kept), " ? own : 0;");
  text.coordinates(lines, n.border, n.rank, "column");
  lines.add(state_type(loop), " state[", width, "];");
  lines.add("#pragma unroll");
  lines.add("for (int j = 0; j < ", width, "; ++j) state[j].clear();");
  std::string begin, end = number(n.reduced);
  if (in_parts) {
    lines.add("const ", text.index(), " begin = part * ", number(parts.length), ";");
    lines.add("const ", text.index(), " end = begin + ", number(parts.length), " < ",
              number(n.reduced), " ? begin + ", number(parts.length), " : ", number(n.reduced),
              ";");
    begin = "begin + ";
    end = "end";
  }
  lines.add("#pragma unroll 4");
  lines.add("for (", text.index(), " row = ", begin, "y; row < ", end, "; row += ", number(ys),
            ") {");
  text.coordinates(lines, 0, n.border, "row");
  add_item(lines, text, static_cast<int>(width), true);
  lines.add("}");
  sum_over_y(lines, loop, xs, ys, width);
  lines.add("if (y == 0 && own == column) {");
  lines.add("#pragma unroll");
  lines.add("for (int j = 0; j < ", width, "; ++j) {");
  if (in_parts) {
    lines.add("parts[part * ", number(n.kept), " + column + j] = state[j];");
  } else {
    const std::int64_t stride = loop.store.view.strides.back();
    text.store_one(lines, concat(text.stored_offset(n.border, n.rank), " + j * ", number(stride)),
                   value_of("state[j]", loop));
  }
  lines.add("}");
  lines.add("}");

  GeneratedKernel kernel =
      make_kernel("columns", concat(n.kept, " columns of ", n.reduced),
                  concat(text.parameters(), target(text, loop, in_parts)), lines, kBlock);
  kernel.arguments = text.arguments();
  kernel.arguments.push_back(target_argument(loop, in_parts));
  kernel.shape.grid[0] = static_cast<unsigned>(blocks * parts.count);
  std::vector<GeneratedKernel> kernels = {std::move(kernel)};
  if (in_parts) kernels.push_back(merge_column_parts(std::array{&loop}, parts));
  return kernels;
}

}  // namespace logitless::ir
