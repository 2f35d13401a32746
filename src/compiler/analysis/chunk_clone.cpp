#include "compiler/analysis/chunk_clone.h"

#include "compiler/ir/build.h"
#include "compiler/ops/op.h"

namespace logitless::ir {

std::vector<int> Collapse::dims(const std::vector<int>& list) const {
  std::vector<int> to;
  for (const int d : list) {
    if (to.empty() || dim(d) != to.back()) to.push_back(dim(d));
  }
  return to;
}

Shape Collapse::shape(const Shape& from, Dim group) const {
  if (!cut) return from;
  Shape to(from.begin(), from.begin() + s.dim);
  to.push_back(std::move(group));
  to.insert(to.end(), from.begin() + s.dim + s.count, from.end());
  return to;
}

Dim chunk_size(const Loop& loop, std::int64_t factor) {
  return Dim::symbol(loop.symbol) * Dim(factor);
}

Collapse collapse(const Loop& loop, const Split& s) {
  return {true, s, chunk_size(loop, s.factor)};
}

ChunkClone::ChunkClone(Loop& loop, Value first, const Node& node, const Chunked& chunked,
                       std::vector<Value> inputs, bool small)
    : n(node),
      how(chunked),
      a(node.attributes),
      operands(std::move(inputs)),
      loop_(loop),
      first_(first),
      small_(small) {
  if (how.kind == Chunked::Kind::split) result = collapse(loop, how.results[0]);
  for (const Need& need : how.needs)
    from.push_back(need.whole ? Collapse{} : collapse(loop, need.split));
}

Value ChunkClone::shift(Value index, std::int64_t factor, Function f) {
  Graph& body = loop_.body;
  const Type type = body.type(index);
  Value by = cast(body, first_, type.dtype);
  if (factor != 1)
    by = map(body, Function::mul,
             {by, constant(body, static_cast<double>(factor), {type.dtype, {}})});
  return map(body, f, {index, broadcast(body, by, type.shape, {})});
}

bool ChunkClone::is_sum() const {
  return how.kind == Chunked::Kind::sum || how.kind == Chunked::Kind::lse;
}

Value ChunkClone::add() {
  Graph& body = loop_.body;
  const DType dtype = n.results[0].dtype;
  const DType wide = dtype == DType::f64 ? DType::f64 : DType::f32;
  const bool sums = row_of(n.op).sums;
  if (is_sum() && sums && !is_index(dtype)) a.type.dtype = wide;
  const Value made = body.add(n.op, std::move(operands), std::move(a), n.name);
  return is_sum() && !sums && size_of(dtype) == 2 ? cast(body, made, wide) : made;
}

Value ChunkClone::merged(Value value) {
  const bool widened = is_sum() && small_ && !is_index(n.results[0].dtype);
  return widened ? cast(loop_.body, value, DType::f64) : value;
}

}  // namespace logitless::ir
