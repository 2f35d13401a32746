// Elementwise loops. Each thread processes one or a few items of neighbouring elements, and issues
// all loads before the first store.
#include <algorithm>
#include <optional>

#include "compiler/exec/cuda/kernels.h"
#include "compiler/exec/cuda/loop_text.h"

namespace logitless::ir {
namespace {

constexpr unsigned kBlock = 256;

// Returns the items of a thread: enough loads in flight if there are enough threads.
int items_of_thread(const Pointwise& loop, int width, std::int64_t items) {
  constexpr std::int64_t kInFlight = 64;        // bytes of a thread
  constexpr std::int64_t kManyItems = 1 << 20;  // threads for more than one wave of any GPU
  std::int64_t bytes = 0;
  for (const Pointwise::Leaf& leaf : loop.leaves) {
    if (leaf.kind == Pointwise::Leaf::Kind::memory && !leaf.view.strides.empty() &&
        leaf.view.strides.back() != 0)
      bytes += width * static_cast<std::int64_t>(size_of(leaf.view.dtype));
  }
  int count = 1;
  while (count < 4 && 2 * count * std::max<std::int64_t>(bytes, 1) <= kInFlight &&
         items / (2 * count) >= kManyItems)
    count *= 2;
  return count;
}

// Returns the loop over rows rounded up to full items, if the gap behind each row is long enough.
// The gap is read and never written.
std::optional<Pointwise> over_whole_items(const Pointwise& loop,
                                          std::span<const std::int64_t> alignments) {
  constexpr std::int64_t kItem = 8;  // the widest item
  const std::size_t rank = loop.shape.size();
  if (rank < 2 || loop.shape.back() % kItem == 0 || loop.shape.back() < kItem) return std::nullopt;
  Pointwise whole = loop;
  whole.shape.back() = ceil_div(loop.shape.back(), kItem) * kItem;
  const auto has_gaps = [&](const View& v) {
    return std::all_of(v.strides.begin(), v.strides.end() - 1, [&](std::int64_t stride) {
      return stride >= whole.shape.back() && stride % kItem == 0;
    });
  };
  for (const Pointwise::Leaf& leaf : loop.leaves) {
    if (leaf.kind != Pointwise::Leaf::Kind::memory || leaf.view.strides.back() == 0) continue;
    if (leaf.view.strides.back() != 1 || !has_gaps(leaf.view)) return std::nullopt;
  }
  const View& to = loop.store.view;
  if (to.strides.back() != 1 || !has_gaps(to)) return std::nullopt;
  const Vectors vectors = choose_vectors(whole, alignments, true);
  return vectors.width > 1 && !vectors.flat ? std::optional(whole) : std::nullopt;
}

}  // namespace

GeneratedKernel map_kernel(const Pointwise& given, std::span<const std::int64_t> alignments) {
  const std::optional<Pointwise> whole = over_whole_items(given, alignments);
  const Pointwise& loop = whole ? *whole : given;
  const std::size_t rank = loop.shape.size();
  const Vectors vectors = choose_vectors(loop, alignments, true);
  const LoopText text(loop, vectors);
  const std::int64_t items = count_of(loop.shape, 0, rank) / vectors.width;
  const int copies = items_of_thread(loop, vectors.width, items);
  const std::int64_t per_block = kBlock * copies;
  const std::string copy = copies > 1 ? "[u]" : "";
  const bool guarded = items % per_block != 0;

  Lines lines;
  // Declares the item's first element and its coordinates.
  const auto locate = [&] {
    if (guarded && copies > 1) lines.add("if (item >= ", text.number(items), ") break;");
    const std::string element =
        vectors.width > 1 ? concat("item * ", text.number(vectors.width)) : "item";
    lines.add("const ", text.index(), " at = ", element, ";");
    if (!vectors.flat) text.coordinates(lines, 0, rank, "at");
  };
  const auto for_each_item = [&] {
    if (copies == 1) return;
    lines.add("#pragma unroll");
    lines.add("for (int u = 0; u < ", copies, "; ++u) {");
    lines.add("const ", text.index(), " item = first_item + u * ", text.number(kBlock), ";");
    locate();
  };
  text.declare_loads(lines, copies);
  lines.add("const ", text.index(), copies > 1 ? " first_item" : " item", " = (", text.index(),
            ")blockIdx.x * ", text.number(per_block), " + threadIdx.x;");
  if (copies == 1) {
    if (guarded) lines.add("if (item >= ", text.number(items), ") return;");
    locate();
  }
  for_each_item();
  text.loads(lines, copy, "at");
  if (copies > 1) lines.add("}");
  for_each_item();
  if (vectors.width == 1) {
    const std::string value = text.steps(lines, copy);
    lines.add("to[", text.stored_offset(0, rank),
              "] = ", text.stored(concat("old", copy, "[0]"), value), ";");
  } else {
    lines.add(text.stored_type(), " y[", vectors.width, "];");
    lines.add("#pragma unroll");
    lines.add("for (int j = 0; j < ", vectors.width, "; ++j) {");
    const std::string value = text.steps(lines, copy, "at");
    lines.add("y[j] = ", text.stored(concat("old", copy, "[j]"), value), ";");
    lines.add("}");
    const std::string at = vectors.flat ? "at" : text.stored_offset(0, rank);
    if (text.stores_vectors()) {
      const std::string last = concat("i", rank - 1), columns = text.number(given.shape.back());
      if (whole) lines.add("if (", last, " + ", text.number(vectors.width), " <= ", columns, ")");
      lines.add(whole ? "  " : "", "store(to + (", at, "), y);");
      if (whole) {
        lines.add("else");
        lines.add("  for (int j = 0; j < ", vectors.width, "; ++j)");
        lines.add("    if (", last, " + j < ", columns, ") to[", at, " + j] = y[j];");
      }
    } else {
      lines.add("#pragma unroll");
      lines.add("for (int j = 0; j < ", vectors.width, "; ++j) to[", at, " + j * ",
                text.number(loop.store.view.strides.back()), "] = y[j];");
    }
  }
  if (copies > 1) lines.add("}");

  GeneratedKernel kernel =
      make_kernel("map", concat("each of ", shape_text(given.shape)),
                  concat(text.parameters(), text.stored_type(), "* to"), lines, kBlock);
  kernel.arguments = text.arguments();
  kernel.arguments.push_back(stored_argument(loop));
  kernel.shape.grid[0] = static_cast<unsigned>(ceil_div(items, per_block));
  return kernel;
}

}  // namespace logitless::ir
