// Indexed reads and additions: take, scatter_add, pick, put. Indices outside the range read 0 and
// add nothing.
#include <algorithm>

#include "compiler/analysis/chunk_clone.h"
#include "compiler/analysis/cut.h"
#include "compiler/analysis/linearity.h"
#include "compiler/analysis/values.h"
#include "compiler/ir/derivation.h"
#include "compiler/ir/evaluation.h"
#include "compiler/ir/typing.h"
#include "compiler/ops/families.h"
#include "compiler/ops/text_key.h"
#include "compiler/plan/lowering.h"

namespace logitless::ir {
namespace {

using oracle::Index;

bool is_inside(double index, std::int64_t size) {
  return index >= 0 && index < static_cast<double>(size);
}

// --- take

std::vector<Type> take_type(const Typing& r) {
  r.count(2);
  r.index(1);
  r.expect(r.in(0).rank() >= 1, "the table is a scalar");
  Type type{r.in(0).dtype, r.in(1).shape};
  type.shape.insert(type.shape.end(), r.in(0).shape.begin() + 1, r.in(0).shape.end());
  return {type};
}
// Returns the elements of each of `rows` rows.
std::size_t width_of(const Tensor& t, std::int64_t rows) {
  return t.data.size() / static_cast<std::size_t>(std::max<std::int64_t>(rows, 1));
}
std::vector<Tensor> take_value(const Evaluation& e) {
  const Tensor &table = e.in(0), &index = e.in(1);
  Tensor out = oracle::tensor_of(e.node.results[0]);
  const std::int64_t rows = table.shape[0];
  const std::size_t width = width_of(table, rows);
  for (std::size_t i = 0; i < index.data.size(); ++i) {
    if (!is_inside(index.data[i], rows)) continue;
    const std::size_t row = static_cast<std::size_t>(index.data[i]) * width;
    for (std::size_t j = 0; j < width; ++j) out.data[i * width + j] = table.data[row + j];
  }
  return {std::move(out)};
}
std::vector<Value> take_gradient(Derivation& d) {
  Attributes scatter;
  scatter.type.shape = {d.operand_type(0).shape[0]};
  return {d.g.add(Op::scatter_add, {d.x(1), d.dy}, scatter), Value{}};
}

std::optional<Chunked> take_cut(const CutNode& c, const Split& s) {
  const int rank = c.rank(1);
  if (s.dim + s.count <= rank) return cut(s, {Need{}, part(s)});
  if (s.dim >= rank) return cut(s, {part({s.dim - rank + 1, s.count, s.factor}), Need{}});
  return std::nullopt;
}
Lead take_lead(const CutNode& c, std::size_t i, const Split& s) {
  if (i == 1) return {s};
  if (s.dim > 0) return {Split{s.dim - 1 + c.rank(1), s.count, s.factor}};
  return shifted_sum(s);
}
int indexed_degree(const Linearity& l) { return l.without(1); }
// Indices into a cut table are relative to its chunk.
Value take_clone(ChunkClone& c) {
  if (c.how.shifted)
    c.operands[1] = c.shift(c.operands[1], c.how.needs[0].split.factor, Function::sub);
  return c.merged(c.add());
}

// The sign of a zero index has no effect.
ZeroSign read_zeros(const Node&, std::size_t operand) {
  return operand == 0 ? ZeroSign::moves : ZeroSign::loses;
}

Rounding read_rounding(const Node&, std::size_t operand) {
  return operand == 0 ? Rounding::moves : Rounding::sees;
}
Rounding write_rounding(const Node&, std::size_t operand) {
  return operand == 1 ? Rounding::moves : Rounding::sees;
}

bool rows_contiguous(const View& v) {
  View row = v;
  row.shape.erase(row.shape.begin());
  row.strides.erase(row.strides.begin());
  return is_contiguous(row) && is_contiguous(v);
}
bool take_place(Lowering& l, Value v, const Destination& to) {
  return to.kind == Destination::Kind::write && is_contiguous(to.view) && l.write_there(v, to);
}
// Picks each element of the rows taken, of a table whose rows are not contiguous.
void pick_rows(Lowering& l, int id, const View& table, View index) {
  Pick pick;
  pick.x = table;
  pick.out = l.result_of({id, 0});
  pick.out.shape = table.shape;
  pick.out.shape[0] = elements_of(index);
  pick.out.strides = contiguous_strides(pick.out.shape);
  index.shape = pick.out.shape;
  index.strides.assign(table.shape.size(), 0);
  index.strides[0] = 1;
  pick.index = std::move(index);
  l.push(id, std::move(pick));
}
void take_emit(Lowering& l, int id) {
  constexpr std::int64_t kFew = 8;  // a picked element takes as long as that many copied ones
  const Node& n = l.node(id);
  const View table = l.memory_of(n.operands[0]), index = l.contiguous(n.operands[1]);
  const bool by_rows = rows_contiguous(table);
  if (!by_rows && kFew * elements_of(index) <= table.shape[0])
    return pick_rows(l, id, table, index);
  Take take;
  take.table = by_rows ? table : l.copied(table, l.name_of_node(id) + " table");
  take.index = index;
  take.out = l.result_of({id, 0});
  l.push(id, std::move(take));
}

// --- scatter_add

std::vector<Type> scatter_type(const Typing& r) {
  r.count(2);
  r.index(0);
  const Shape &index = r.in(0).shape, &updates = r.in(1).shape;
  r.expect(
      updates.size() >= index.size() && std::equal(index.begin(), index.end(), updates.begin()),
      "updates ", r.in(1), " do not begin with the shape of the index ", r.in(0));
  r.expect(r.a.type.shape.size() == 1, "expected rows");
  Type type{r.wider(r.in(1).dtype), r.a.type.shape};
  type.shape.insert(type.shape.end(), updates.begin() + static_cast<std::ptrdiff_t>(index.size()),
                    updates.end());
  return {type};
}
std::vector<Tensor> scatter_value(const Evaluation& e) {
  const Tensor &index = e.in(0), &updates = e.in(1);
  Tensor out = oracle::tensor_of(e.node.results[0]);
  const std::int64_t rows = out.shape[0];
  const std::size_t width = width_of(out, rows);
  for (std::size_t i = 0; i < index.data.size(); ++i) {
    if (!is_inside(index.data[i], rows)) continue;
    const std::size_t row = static_cast<std::size_t>(index.data[i]) * width;
    for (std::size_t j = 0; j < width; ++j) out.data[row + j] += updates.data[i * width + j];
  }
  return {std::move(out)};
}
std::vector<Value> scatter_gradient(Derivation& d) {
  return {Value{}, cast(d.g, d.g.add(Op::take, {d.dy, d.x(0)}), d.operand_type(1).dtype)};
}
std::optional<Chunked> scatter_cut(const CutNode& c, const Split& s) {
  if (s.dim == 0 && s.count > 1) return std::nullopt;
  Chunked chunked = cut(s, {Need{}, Need{}});
  chunked.shifted = s.dim == 0;
  if (s.dim > 0) chunked.needs[1] = part({s.dim - 1 + c.rank(0), s.count, s.factor});
  return chunked;
}
Lead scatter_lead(const CutNode& c, std::size_t i, const Split& s) {
  const int rank = c.rank(0);
  if (i == 0 || s.dim + s.count <= rank)
    return {std::nullopt, partial(Chunked::Kind::sum, {part(s), part(s)})};
  if (s.dim >= rank) return {Split{s.dim - rank + 1, s.count, s.factor}};
  return {};
}
int scatter_degree(const Linearity& l) { return l.without(0); }
Value scatter_clone(ChunkClone& c) {
  if (c.how.shifted) {
    c.a.type.shape = {c.size(c.how.results[0].factor)};
    c.operands[0] = c.shift(c.operands[0], c.how.results[0].factor, Function::sub);
  }
  return c.add();
}
bool scatter_place(Lowering& l, Value v, const Destination& to) {
  const bool adds = to.kind == Destination::Kind::write || to.kind == Destination::Kind::sum;
  return adds && is_contiguous(to.view) && size_of(to.view.dtype) >= 4 && l.write_there(v, to);
}
void scatter_emit(Lowering& l, int id) {
  const Node& n = l.node(id);
  const Value v{id, 0};
  ScatterAdd scatter;
  scatter.index = l.contiguous(n.operands[0]);
  scatter.updates = l.contiguous(n.operands[1]);
  const Type type = n.results[0];
  const bool narrow = size_of(type.dtype) == 2;
  // Sums of floats are fp32 at least, whatever the result's dtype.
  scatter.out =
      narrow ? l.new_view({DType::f32, type.shape}, l.name_of_node(id) + " sums") : l.result_of(v);
  if (!l.accumulates(v) || narrow) l.fill(scatter.out, 0.0);
  l.push(id, scatter);
  if (narrow) {
    const View out = l.result_of(v);
    l.push(id, copy_loop(scatter.out, out, l.accumulates(v)));
  }
}
constexpr TextKey kScatterKeys[] = {
    {"rows", [](TextReader& in, Attributes& a) { a.type.shape = in.sizes(); },
     [](const Attributes& a) { return written(a.type.shape); }}};

// --- pick

std::vector<Type> pick_type(const Typing& r) {
  r.count(2);
  r.index(1);
  r.axis(r.in(0).rank());
  Type type = r.in(0);
  if (r.in(1).rank() == type.rank()) {
    const auto axis = static_cast<std::size_t>(r.a.axis);
    type.shape[axis] = r.in(1).shape[axis];
    r.expect(type.shape == r.in(1).shape, "the index is ", r.in(1), " for ", r.in(0),
             ", expected equal but for dimension ", r.a.axis);
    return {type};
  }
  type.shape.erase(type.shape.begin() + r.a.axis);
  r.expect(type.shape == r.in(1).shape, "the index is ", r.in(1), ", expected the shape ",
           type.shape);
  return {type};
}
std::vector<Tensor> pick_value(const Evaluation& e) {
  const int axis = e.node.attributes->axis;
  const Tensor& x = e.in(0);
  const bool several = e.in(1).shape.size() == x.shape.size();
  return oracle::filled(e, [&](Index index) {
    const double k = oracle::at(e.in(1), index);
    if (!is_inside(k, x.shape[static_cast<std::size_t>(axis)])) return 0.0;
    if (several) {
      index[static_cast<std::size_t>(axis)] = static_cast<std::int64_t>(k);
    } else {
      index.insert(index.begin() + axis, static_cast<std::int64_t>(k));
    }
    return oracle::at(x, index);
  });
}
std::vector<Value> pick_gradient(Derivation& d) {
  const Type to = d.operand_type(0);
  const int axis = d.n.attributes->axis;
  if (d.operand_type(1).rank() == to.rank()) {
    Attributes put = d.n.attributes;
    put.type.shape = {to.shape[static_cast<std::size_t>(axis)]};
    return {d.g.add(Op::put, {d.x(1), d.dy}, put), Value{}};
  }
  const std::vector<int> others = other_dims(to.rank(), {axis});
  const Value at = iota(d.g, {d.operand_type(1).dtype, to.shape}, axis);
  const Value hit = d.op(Function::eq, at, broadcast(d.g, d.x(1), to.shape, others));
  return {
      d.op(Function::select, hit, broadcast(d.g, d.dy, to.shape, others), constant(d.g, 0.0, to)),
      Value{}};
}
std::vector<int> other_axes(const CutNode& c) { return other_dims(c.rank(0), {c.a.axis}); }
// Returns whether there are several indices along the axis, which the result then keeps.
bool picks_several(const CutNode& c) { return c.rank(0) == c.rank(1); }

std::optional<Chunked> pick_cut(const CutNode& c, const Split& s) {
  if (picks_several(c)) {
    if (!inside(c.a.axis, s)) return cut(s, {part(s), part(s)});
    return s.count == 1 ? std::optional(cut(s, {Need{}, part(s)})) : std::nullopt;
  }
  const std::optional<Split> to = through(s, other_axes(c));
  return to ? std::optional(cut(s, {part(*to), part(s)})) : std::nullopt;
}
Lead pick_lead(const CutNode& c, std::size_t i, const Split& s) {
  if (i == 1) return {s};
  if (inside(c.a.axis, s)) return shifted_sum(s);
  return picks_several(c) ? Lead{s} : lead_to(s, other_axes(c));
}
Value pick_clone(ChunkClone& c) {
  c.a.axis = c.from[0].dim(c.a.axis);
  return take_clone(c);
}
bool pick_place(Lowering& l, Value v, const Destination& to) {
  return to.kind == Destination::Kind::write && l.write_there(v, to);
}
void pick_emit(Lowering& l, int id) {
  const Node& n = l.node(id);
  Pick pick;
  pick.x = l.memory_of(n.operands[0]);
  pick.index = l.memory_of(n.operands[1]);
  pick.axis = n.attributes->axis;
  pick.out = l.result_of({id, 0});
  l.push(id, std::move(pick));
}
constexpr TextKey kAxis[] = {key<&Attributes::axis>("axis")};

// --- put

std::vector<Type> put_type(const Typing& r) {
  r.count(2);
  r.index(0);
  r.expect(r.in(1).dtype != DType::i8, "an i8 is a condition: cast it first");
  r.axis(r.in(1).rank());
  r.expect(r.in(0).shape == r.in(1).shape, "the index is ", r.in(0), " and the updates are ",
           r.in(1), ", expected equal shapes");
  r.expect(r.a.type.shape.size() == 1, "expected a size");
  const DType dtype = r.in(1).dtype;
  Type type{is_float(dtype) ? r.wider(dtype) : dtype, r.in(1).shape};
  type.shape[static_cast<std::size_t>(r.a.axis)] = r.a.type.shape[0];
  return {type};
}
std::vector<Tensor> put_value(const Evaluation& e) {
  const Tensor &index = e.in(0), &updates = e.in(1);
  Tensor out = oracle::tensor_of(e.node.results[0]);
  const auto axis = static_cast<std::size_t>(e.node.attributes->axis);
  oracle::each(updates.shape, [&](Index at) {
    const double k = oracle::at(index, at), x = oracle::at(updates, at);
    if (!is_inside(k, out.shape[axis])) return;
    at[axis] = static_cast<std::int64_t>(k);
    oracle::at(out, at) += x;
  });
  return {std::move(out)};
}
std::vector<Value> put_gradient(Derivation& d) {
  if (!is_float(d.operand_type(1).dtype)) return d.none();
  Attributes pick;
  pick.axis = d.n.attributes->axis;
  return {Value{}, cast(d.g, d.g.add(Op::pick, {d.dy, d.x(0)}, pick), d.operand_type(1).dtype)};
}
std::optional<Chunked> put_cut(const CutNode& c, const Split& s) {
  if (!inside(c.a.axis, s)) return cut(s, {part(s), part(s)});
  if (s.count > 1) return std::nullopt;
  Chunked chunked = cut(s, {Need{}, Need{}});
  chunked.shifted = true;
  return chunked;
}
Lead put_lead(const CutNode& c, std::size_t, const Split& s) {
  if (!inside(c.a.axis, s)) return {s};
  if (s.count > 1) return {};  // rows are no parts of one sum
  return {std::nullopt, partial(Chunked::Kind::sum, {part(s), part(s)})};
}
Value put_clone(ChunkClone& c) {
  if (c.how.shifted) {
    c.a.type.shape = {c.size(c.how.results[0].factor)};
    c.operands[0] = c.shift(c.operands[0], c.how.results[0].factor, Function::sub);
  } else {
    c.a.axis = c.from[0].dim(c.a.axis);
  }
  return c.add();
}
std::optional<std::int64_t> indices_of_put(const Graph& graph, const Node& n) {
  return distinct_along(graph, n.operands[0], n.attributes->axis);
}
bool put_place(Lowering& l, Value v, const Destination& to) {
  const bool adds = to.kind == Destination::Kind::write || to.kind == Destination::Kind::sum;
  const bool any = indices_of_put(l.graph(), l.graph().node(v)).has_value();
  return adds && (any || size_of(to.view.dtype) >= 4) && l.write_there(v, to);
}
void put_emit(Lowering& l, int id) {
  const Node& n = l.node(id);
  const Value v{id, 0};
  const std::optional<std::int64_t> indices = indices_of_put(l.graph(), n);
  Put put;
  put.index = l.memory_of(n.operands[0]);
  put.updates = l.memory_of(n.operands[1]);
  put.axis = n.attributes->axis;
  put.distinct = indices.has_value();
  const Type type = n.results[0];
  // Sums of floats are fp32 at least, whatever the result's dtype; one update needs no sum.
  const bool narrow = size_of(type.dtype) == 2 && !put.distinct;
  put.out =
      narrow ? l.new_view({DType::f32, type.shape}, l.name_of_node(id) + " sums") : l.result_of(v);
  const auto axis = static_cast<std::size_t>(put.axis);
  const std::int64_t size = put.out.shape[axis];
  put.whole = indices == size && put.updates.shape[axis] == size && !l.accumulates(v);
  if ((!l.accumulates(v) || narrow) && !put.whole) l.fill(put.out, 0.0);
  const View sums = put.out;
  l.push(id, std::move(put));
  if (narrow) {
    const View out = l.result_of(v);
    l.push(id, copy_loop(sums, out, l.accumulates(v)));
  }
}
constexpr TextKey kPutKeys[] = {
    key<&Attributes::axis>("axis"),
    {"size", [](TextReader& in, Attributes& a) { a.type.shape = in.sizes(); },
     [](const Attributes& a) { return written(a.type.shape); }}};

constexpr Operation kOperations[] = {
    {
        .op = Op::take,
        .name = "take",
        .infer = take_type,
        .evaluate = take_value,
        .gradient = take_gradient,
        .zero_sign = read_zeros,
        .rounding = read_rounding,
        .cut_by_result = take_cut,
        .cut_by_operand = take_lead,
        .degree = indexed_degree,
        .clone = take_clone,
        .place = take_place,
        .emit = take_emit,
    },
    {
        .op = Op::scatter_add,
        .name = "scatter_add",
        .sums = true,
        .infer = scatter_type,
        .keys = kScatterKeys,
        .evaluate = scatter_value,
        .gradient = scatter_gradient,
        .zero_sign = zeros<ZeroSign::loses>,
        .rounding = write_rounding,
        .cut_by_result = scatter_cut,
        .cut_by_operand = scatter_lead,
        .degree = scatter_degree,
        .clone = scatter_clone,
        .place = scatter_place,
        .emit = scatter_emit,
    },
    {
        .op = Op::pick,
        .name = "pick",
        .infer = pick_type,
        .keys = kAxis,
        .evaluate = pick_value,
        .gradient = pick_gradient,
        .zero_sign = read_zeros,
        .rounding = read_rounding,
        .cut_by_result = pick_cut,
        .cut_by_operand = pick_lead,
        .degree = indexed_degree,
        .clone = pick_clone,
        .place = pick_place,
        .emit = pick_emit,
    },
    {
        .op = Op::put,
        .name = "put",
        .sums = true,
        .infer = put_type,
        .keys = kPutKeys,
        .evaluate = put_value,
        .gradient = put_gradient,
        .zero_sign = zeros<ZeroSign::loses>,
        .rounding = write_rounding,
        .cut_by_result = put_cut,
        .cut_by_operand = put_lead,
        .degree = scatter_degree,
        .clone = put_clone,
        .place = put_place,
        .emit = put_emit,
    },
};

}  // namespace

std::span<const Operation> index_operations() { return kOperations; }

}  // namespace logitless::ir
