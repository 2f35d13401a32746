#include <algorithm>
#include <utility>
#include <vector>

#include "compiler/analysis/dim_parts.h"
#include "compiler/analysis/split.h"
#include "compiler/plan/lowering.h"
#include "compiler/plan/views.h"

namespace logitless::ir {
namespace {

struct Moved {
  View memory;
  std::vector<DimParts> dims;
};

bool moves(const Lowering& l, Value v) {
  const Op op = l.node(v.node).op;
  return (op == Op::reshape || op == Op::transpose) && !l.has_memory(v);
}

// strided: stays true if all intermediate values have strides.
std::optional<Moved> moved_of(Lowering& l, Value v, bool& strided) {
  if (!moves(l, v)) {
    const View& memory = l.memory_of(v);
    return Moved{memory, parts_of(memory.shape, memory.strides)};
  }
  const Node& n = l.node(v.node);
  std::optional<Moved> moved = moved_of(l, n.operands[0], strided);
  if (!moved) return moved;
  if (n.op == Op::transpose) {
    moved->dims = transposed_parts(moved->dims, n.attributes->dims);
  } else {
    std::optional<std::vector<DimParts>> dims = reshaped_parts(moved->dims, sizes_of(n.results[0]));
    if (!dims) return std::nullopt;
    moved->dims = std::move(*dims);
  }
  strided = strided && std::all_of(moved->dims.begin(), moved->dims.end(),
                                   [](const DimParts& parts) { return stride_of(parts); });
  return moved;
}

}  // namespace

std::optional<View> moved_view(Lowering& l, Value v) {
  if (elements_of(l.type(v)) == 0 || !moves(l, l.node(v.node).operands[0])) return std::nullopt;
  bool strided = true;
  if (!moved_of(l, l.node(v.node).operands[0], strided) || strided) return std::nullopt;
  const std::optional<Moved> moved = moved_of(l, v, strided);
  if (!moved) return std::nullopt;
  View view = moved->memory;
  view.shape = sizes_of(l.type(v));
  view.strides.clear();
  for (const DimParts& parts : moved->dims) {
    const std::optional<std::int64_t> stride = stride_of(parts);
    if (!stride) return std::nullopt;
    view.strides.push_back(*stride);
  }
  return view;
}

}  // namespace logitless::ir
