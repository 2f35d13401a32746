// Elementwise loops whose result and operands are contiguous along different dimensions. A block
// owns a tile of both dimensions, and operands that are not contiguous along the result's go
// through shared memory.
#include <algorithm>

#include "compiler/exec/cuda/kernels.h"
#include "compiler/exec/cuda/loop_text.h"
#include "compiler/exec/cuda/memory_order.h"

namespace logitless::ir {
namespace {

constexpr unsigned kBlock = 256;
constexpr std::int64_t kMostShared = 40 << 10;  // bytes of a block

// Returns the elements behind each row of a tile, which keep neighbouring rows in other banks.
std::int64_t gap_of(DType dtype) {
  return std::max<std::int64_t>(4 / static_cast<std::int64_t>(size_of(dtype)), 1);
}
std::int64_t shared_bytes(const Pointwise& loop, const std::vector<std::size_t>& leaves,
                          std::int64_t side) {
  std::int64_t bytes = 0;
  for (const std::size_t i : leaves) {
    const DType dtype = loop.leaves[i].view.dtype;
    bytes += side * (side + gap_of(dtype)) * static_cast<std::int64_t>(size_of(dtype));
  }
  return bytes;
}

// Returns the widest aligned accesses along the second last dimension, in elements.
std::int64_t width_across(const Pointwise& loop, const View& view,
                          std::span<const std::int64_t> alignments) {
  const std::size_t across = loop.shape.size() - 2;
  const auto size = static_cast<std::int64_t>(size_of(view.dtype));
  const auto fits = [&](std::int64_t width) {
    return loop.shape[across] % width == 0 && view.offset % width == 0 &&
           alignments[static_cast<std::size_t>(view.buffer)] % (width * size) == 0 &&
           std::all_of(view.strides.begin(), view.strides.end(), [&](const std::int64_t& stride) {
             return &stride == &view.strides[across] || stride % width == 0;
           });
  };
  std::int64_t width = 16 / size;
  while (width > 1 && !fits(width)) width /= 2;
  return width;
}

}  // namespace

std::optional<GeneratedKernel> tile_kernel(const Pointwise& given,
                                           std::span<const std::int64_t> alignments) {
  const MapOrder order = memory_order_of(given);
  if (order.leaves.empty()) return std::nullopt;
  const std::int64_t side = shared_bytes(given, order.leaves, 64) <= kMostShared ? 64 : 32;
  if (shared_bytes(given, order.leaves, side) > kMostShared) return std::nullopt;

  const std::size_t rank = given.shape.size(), across = rank - 2, along = rank - 1;
  std::vector<std::size_t> dims;
  for (std::size_t d = 0; d < rank; ++d) {
    if (d != order.inner && d != order.turned) dims.push_back(d);
  }
  dims.push_back(order.turned);
  dims.push_back(order.inner);
  const Pointwise loop = permuted(given, dims);
  Vectors vectors = choose_vectors(loop, alignments, true);
  if (vectors.flat) vectors = {};
  LoopText text(loop, vectors);
  for (const std::size_t i : order.leaves) text.read_from_tile(i, concat("tile", i));

  const auto number = [&](std::int64_t x) { return text.number(x); };
  const auto size_in_tiles = [&](std::size_t d) { return ceil_div(loop.shape[d], side); };
  const std::string inside = concat("i", across, " < ", number(loop.shape[across]), " && i", along,
                                    " < ", number(loop.shape[along]));
  Lines lines;
  for (const std::size_t i : order.leaves) {
    const DType dtype = loop.leaves[i].view.dtype;
    lines.add("__shared__ ", cuda_type(dtype), " tile", i, "[", side, "][", side + gap_of(dtype),
              "];");
  }
  lines.add("const ", text.index(), " tile = blockIdx.x;");
  lines.add("const ", text.index(), " first_q = tile % ", number(size_in_tiles(along)), " * ",
            number(side), ";");
  lines.add("const ", text.index(), " first_p = tile / ", number(size_in_tiles(along)), " % ",
            number(size_in_tiles(across)), " * ", number(side), ";");
  text.coordinates(lines, 0, across,
                   concat("tile / ", number(size_in_tiles(along) * size_in_tiles(across))));
  for (const std::size_t i : order.leaves) {
    const View& view = loop.leaves[i].view;
    const std::int64_t width = width_across(loop, view, alignments), of_row = side / width;
    lines.add("#pragma unroll");
    lines.add("for (int item = threadIdx.x; item < ", side * of_row, "; item += ", kBlock, ") {");
    lines.add("const int q = item / ", of_row, ", p = item % ", of_row, " * ", width, ";");
    lines.add("const ", text.index(), " i", across, " = first_p + p, i", along, " = first_q + q;");
    lines.add("if (", inside, ") {");
    lines.add(cuda_type(view.dtype), " x[", width, "];");
    lines.add(width > 1 ? "load(x, " : "x[0] = *(", text.address_of(i), ");");
    lines.add("#pragma unroll");
    lines.add("for (int j = 0; j < ", width, "; ++j) tile", i, "[q][p + j] = x[j];");
    lines.add("}");
    lines.add("}");
  }
  lines.add("__syncthreads();");
  const std::int64_t of_row = side / vectors.width;
  lines.add("#pragma unroll 2");
  lines.add("for (int item = threadIdx.x; item < ", side * of_row, "; item += ", kBlock, ") {");
  lines.add("const int q = item % ", of_row, " * ", vectors.width, ", p = item / ", of_row, ";");
  lines.add("const ", text.index(), " i", across, " = first_p + p, i", along, " = first_q + q;");
  lines.add("if (", inside, ") {");
  text.declare_loads(lines, 1);
  text.loads(lines, "");
  if (vectors.width == 1) {
    const std::string value = text.steps(lines, "");
    lines.add("to[", text.stored_offset(0, rank), "] = ", text.stored("old[0]", value), ";");
  } else {
    lines.add(text.stored_type(), " y[", vectors.width, "];");
    lines.add("#pragma unroll");
    lines.add("for (int j = 0; j < ", vectors.width, "; ++j) {");
    const std::string value = text.steps(lines, "");
    lines.add("y[j] = ", text.stored("old[j]", value), ";");
    lines.add("}");
    lines.add("store(to + (", text.stored_offset(0, rank), "), y);");
  }
  lines.add("}");
  lines.add("}");

  GeneratedKernel kernel =
      make_kernel("tile", concat("each of ", shape_text(given.shape)),
                  concat(text.parameters(), text.stored_type(), "* to"), lines, kBlock);
  kernel.arguments = text.arguments();
  kernel.arguments.push_back(stored_argument(loop));
  kernel.shape.grid[0] = static_cast<unsigned>(count_of(loop.shape, 0, across) *
                                               size_in_tiles(across) * size_in_tiles(along));
  return kernel;
}

}  // namespace logitless::ir
