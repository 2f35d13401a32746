#include "compiler/plan/row_alignment.h"

#include <algorithm>

#include "compiler/ops/op.h"

namespace logitless::ir {
namespace {

constexpr std::int64_t kLeastColumns = 256;

bool is_product(const Node& n) { return n.op == Op::dot || n.op == Op::fused_dot; }

// Returns whether the reader accepts rows with gaps between them.
bool takes_gaps(const Graph& g, const Node& reader, Value v) {
  switch (reader.op) {
    case Op::reshape: {
      // A broadcast of the dimensions before the last one.
      const Shape &from = g.type(v).shape, &to = reader.results[0].shape;
      return !to.empty() && !from.empty() && to.back().value() == from.back().value();
    }
    case Op::dot:
    case Op::fused_dot:
    case Op::reduce:
    case Op::transpose:
      return true;
    case Op::pick:
      return reader.operands[0] == v;
    default:
      return row_of(reader.op).work == Work::elementwise;
  }
}

}  // namespace

std::vector<Value> values_of_products(const Graph& g, std::int64_t bytes) {
  const auto at = [](int id) { return static_cast<std::size_t>(id); };
  std::vector<bool> wanted(at(g.size()), false), gaps(at(g.size()), true);
  for (const Output& o : g.outputs()) gaps[at(o.value.node)] = false;
  // Iterates from readers to operands. Marks values of matrix products, also through views, and
  // values with a reader that accepts no gaps.
  for (int id = g.size() - 1; id >= 0; --id) {
    const Node& n = g.node(id);
    const bool moves = n.op == Op::reshape || n.op == Op::transpose;
    wanted[at(id)] = wanted[at(id)] || is_product(n);
    for (const Value v : n.operands) {
      wanted[at(v.node)] = wanted[at(v.node)] || is_product(n) || (moves && wanted[at(id)]);
      gaps[at(v.node)] = gaps[at(v.node)] && takes_gaps(g, n, v) && (!moves || gaps[at(id)]);
    }
  }
  std::vector<Value> list;
  for (int id = 0; id < g.size(); ++id) {
    const Node& n = g.node(id);
    if (!wanted[at(id)] || !gaps[at(id)] || n.results.size() != 1) continue;
    const bool made = is_product(n) || row_of(n.op).work == Work::elementwise;
    const Type& type = n.results[0];
    if (!made || n.op == Op::parameter || type.rank() < 2) continue;
    const std::int64_t columns = type.shape.back().value();
    const auto size = static_cast<std::int64_t>(size_of(type.dtype));
    if (columns >= kLeastColumns && columns * size % bytes != 0 && bytes % size == 0)
      list.push_back({id, 0});
  }
  return list;
}

}  // namespace logitless::ir
