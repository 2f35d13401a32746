// reduce: sum, max, log-sum-exp, argmax or product over dimensions, which are removed.
#include <algorithm>

#include "compiler/analysis/chunk_clone.h"
#include "compiler/analysis/cut.h"
#include "compiler/analysis/linearity.h"
#include "compiler/ir/derivation.h"
#include "compiler/ir/evaluation.h"
#include "compiler/ir/typing.h"
#include "compiler/ops/families.h"
#include "compiler/ops/text_key.h"
#include "compiler/plan/pointwise_builder.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

using oracle::at;
using oracle::each;
using oracle::Index;
using oracle::permuted;

// Names in errors, by kind.
constexpr std::string_view kNames[] = {"reduce_sum", "reduce_max", "reduce_lse", "reduce_argmax",
                                       "reduce_product"};

std::vector<Type> reduce_type(const Typing& given) {
  const Typing r{kNames[static_cast<std::size_t>(given.a.reduce)], given.operands, given.a};
  r.count(1);
  r.dimensions(r.a.dims, r.in(0).rank(), "dims");
  r.expect(!r.a.dims.empty(), "dims is empty");
  Type type{r.in(0).dtype, {}};
  for (const int d : other_dims(r.in(0).rank(), r.a.dims))
    type.shape.push_back(r.in(0).shape[static_cast<std::size_t>(d)]);
  if (r.a.reduce == Reduce::argmax) {
    r.expect(r.a.dims.size() == 1, "argmax runs over one dimension, got ", r.a.dims.size());
    type.dtype = DType::i64;
    return {type};
  }
  if (r.a.reduce == Reduce::lse || r.a.reduce == Reduce::product) r.floating(0);
  r.expect(r.in(0).dtype != DType::i8, "an i8 is a condition: cast it first");
  type.dtype = r.wider(r.in(0).dtype);
  return {type};
}

// --- text: reduce_sum, reduce_max, reduce_lse, reduce_product, argmax

std::string spelling(const Attributes& a) {
  return a.reduce == Reduce::argmax ? "argmax"
                                    : std::string(kNames[static_cast<std::size_t>(a.reduce)]);
}
bool reads(std::string_view name, Attributes& a) {
  for (const Reduce kind :
       {Reduce::sum, Reduce::max, Reduce::lse, Reduce::argmax, Reduce::product}) {
    a.reduce = kind;
    if (name == spelling(a)) return true;
  }
  a.reduce = Reduce::sum;
  return false;
}
constexpr TextKey kDims[] = {key<&Attributes::dims>("dims")};

// --- float64

Tensor argmax_value(const Evaluation& e, const std::vector<int>& kept) {
  const Tensor& x = e.in(0);
  Tensor out = oracle::tensor_of(e.node.results[0]), best = out;
  std::vector<bool> seen(out.data.size());
  const auto searched = static_cast<std::size_t>(e.node.attributes->dims[0]);
  each(x.shape, [&](const Index& index) {
    const std::size_t to = oracle::offset(out.shape, permuted(index, kept));
    const double v = at(x, index);
    // Takes the first of equal elements; a NaN is greater than all numbers.
    if (!seen[to] || v > best.data[to] || (std::isnan(v) && !std::isnan(best.data[to]))) {
      best.data[to] = v;
      out.data[to] = static_cast<double>(index[searched]);
      seen[to] = true;
    }
  });
  return out;
}

// Two passes: the maximum, then the sum of exponentials relative to it.
Tensor lse_value(const Evaluation& e, const std::vector<int>& kept) {
  const Tensor& x = e.in(0);
  Tensor top = oracle::tensor_of(e.node.results[0], oracle::start(Reduce::max));
  each(x.shape, [&](const Index& index) {
    double& to = at(top, permuted(index, kept));
    to = oracle::merged(Reduce::max, to, at(x, index));
  });
  Tensor out = oracle::tensor_of(e.node.results[0]);
  each(x.shape, [&](const Index& index) {
    const std::size_t to = oracle::offset(out.shape, permuted(index, kept));
    if (!std::isinf(top.data[to])) out.data[to] += std::exp(at(x, index) - top.data[to]);
  });
  for (std::size_t i = 0; i < out.data.size(); ++i)
    out.data[i] = std::isinf(top.data[i]) ? top.data[i] : top.data[i] + std::log(out.data[i]);
  return out;
}

std::vector<Tensor> reduce_value(const Evaluation& e) {
  const Attributes& a = e.node.attributes;
  const Tensor& x = e.in(0);
  const std::vector<int> kept = other_dims(static_cast<int>(x.shape.size()), a.dims);
  if (a.reduce == Reduce::argmax) return {argmax_value(e, kept)};
  if (a.reduce == Reduce::lse) return {lse_value(e, kept)};
  Tensor out = oracle::tensor_of(e.node.results[0], oracle::start(a.reduce));
  each(x.shape, [&](const Index& index) {
    double& to = at(out, permuted(index, kept));
    to = oracle::merged(a.reduce, to, at(x, index));
    if (is_index(e.node.results[0].dtype) && a.reduce == Reduce::sum)
      to = oracle::wrapped(e.node.results[0].dtype, to);
  });
  return {std::move(out)};
}

// --- gradient

// Returns for each element the product of the other elements that are reduced with it: of those
// before it and those after it in a row. No quotient is taken, so that zeros count.
Value product_of_others(Derivation& d, const std::vector<int>& dims) {
  const Type to = d.operand_type(0);
  std::vector<int> order = other_dims(to.rank(), dims);
  Shape kept;
  Dim count(1);
  for (const int i : order) kept.push_back(to.shape[static_cast<std::size_t>(i)]);
  for (const int i : dims) {
    count = count * to.shape[static_cast<std::size_t>(i)];
    order.push_back(i);
  }
  const int axis = static_cast<int>(kept.size());
  Shape rows = kept;
  rows.push_back(count);
  if (count == Dim(0)) return d.x(0);  // no elements
  const Value moved = transpose(d.g, d.x(0), order);
  const Value x = reshape(d.g, moved, rows);
  Shape one = kept;
  one.push_back(Dim(1));
  const Value ones = constant(d.g, 1.0, Type{to.dtype, one});
  // Returns the products of the elements before each one, or after it.
  const auto beside = [&](bool after) {
    Shape begin(rows.size(), Dim(0)), end = rows;
    (after ? begin.back() : end.back()) = after ? Dim(1) : count - Dim(1);
    const Value others = slice(d.g, x, begin, end);
    Attributes scan;
    scan.axis = axis;
    scan.reduce = Reduce::product;
    scan.reverse = after;
    const std::vector<Value> parts = after ? std::vector{others, ones} : std::vector{ones, others};
    Attributes joined;
    joined.axis = axis;
    return d.g.add(Op::scan, {d.g.add(Op::concat, parts, joined)}, scan);
  };
  const Value others = d.op(Function::mul, beside(false), beside(true));
  std::vector<int> back(order.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    back[static_cast<std::size_t>(order[i])] = static_cast<int>(i);
  return transpose(d.g, reshape(d.g, others, d.g.type(moved).shape), back);
}

std::vector<Value> reduce_gradient(Derivation& d) {
  const Type to = d.operand_type(0);
  const std::vector<int>& dims = d.n.attributes->dims;
  // Broadcasts the gradient or value of the result over the operand.
  const auto spread = [&](Value v) {
    return broadcast(d.g, cast(d.g, v, to.dtype), to.shape, other_dims(to.rank(), dims));
  };
  switch (d.n.attributes->reduce) {
    case Reduce::sum:
      return {spread(d.dy)};
    case Reduce::max: {
      const Value equal = d.op(Function::eq, d.x(0), spread(d.y()));
      const Value zero = constant(d.g, 0.0, to), one = constant(d.g, 1.0, to);
      const Value ties = reduce(d.g, Reduce::sum, d.op(Function::select, equal, one, zero), dims);
      return {d.op(Function::select, equal, d.op(Function::div, spread(d.dy), spread(ties)), zero)};
    }
    case Reduce::lse:
      return {
          d.times(spread(d.dy), d.op(Function::exp, d.op(Function::sub, d.x(0), spread(d.y()))))};
    case Reduce::product:
      return {d.op(Function::mul, spread(d.dy), product_of_others(d, dims))};
    case Reduce::argmax:
      break;
  }
  return d.none();
}

ZeroSign reduce_zeros(const Node& n, std::size_t) {
  const Reduce reduce = n.attributes->reduce;
  if (reduce == Reduce::product) return ZeroSign::makes;
  return reduce == Reduce::max ? ZeroSign::moves : ZeroSign::loses;
}

Rounding reduce_rounding(const Node& n, std::size_t) {
  const Reduce reduce = n.attributes->reduce;
  if (reduce == Reduce::argmax) return Rounding::sees;
  return reduce == Reduce::max || reduce == Reduce::product ? Rounding::moves : Rounding::loses;
}

// --- chunks

std::vector<int> kept_dims(const CutNode& c) { return other_dims(c.rank(0), c.a.dims); }

std::optional<Chunked> reduce_cut(const CutNode& c, const Split& s) {
  const std::optional<Split> to = through(s, kept_dims(c));
  return to ? std::optional(cut(s, {part(*to)})) : std::nullopt;
}
Lead reduce_lead(const CutNode& c, std::size_t, const Split& s) {
  Split to;
  const Found where = found(s, kept_dims(c), to);
  if (where == Found::all) return {to};
  if (where == Found::mixed || c.a.reduce == Reduce::argmax || c.a.reduce == Reduce::product)
    return {};
  constexpr Chunked::Kind kKinds[] = {Chunked::Kind::sum, Chunked::Kind::max, Chunked::Kind::lse};
  return {std::nullopt, partial(kKinds[static_cast<int>(c.a.reduce)], {part(s)})};
}
int reduce_degree(const Linearity& l) { return l.node.attributes->reduce == Reduce::sum ? 1 : -1; }
Value reduce_clone(ChunkClone& c) {
  c.a.dims = c.from[0].dims(c.a.dims);
  return c.merged(c.add());
}

// --- instructions

bool reduce_place(Lowering& l, Value v, const Destination& to) {
  const bool sum = l.graph().node(v).attributes->reduce == Reduce::sum;
  const bool can =
      to.kind == Destination::Kind::write || (sum && to.kind == Destination::Kind::sum);
  return can && l.write_there(v, to);
}

void argmax_emit(Lowering& l, int id) {
  const Node& n = l.node(id);
  const View& x = l.memory_of(n.operands[0]);
  std::vector<int> order = other_dims(l.type(n.operands[0]).rank(), n.attributes->dims);
  order.push_back(n.attributes->dims[0]);
  l.push(id, ArgMax{transposed(x, order), l.result_of({id, 0})});
}

// Permutes the loop's dimensions to `order`.
void reorder(Pointwise& loop, const std::vector<int>& order) {
  std::vector<int> place(order.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    place[static_cast<std::size_t>(order[i])] = static_cast<int>(i);
  std::vector<std::int64_t> shape;
  for (const int d : order) shape.push_back(loop.shape[static_cast<std::size_t>(d)]);
  loop.shape = shape;
  for (Pointwise::Leaf& leaf : loop.leaves) {
    if (leaf.kind == Pointwise::Leaf::Kind::memory) leaf.view = transposed(leaf.view, order);
    if (leaf.kind == Pointwise::Leaf::Kind::iota)
      leaf.dim = place[static_cast<std::size_t>(leaf.dim)];
  }
}

// Returns the number of parts of a reduction with few results and many elements; parts are added in
// order. Each row is a task. Rows are split only if there are too few of them, into no more parts
// than needed.
std::int64_t parts_of(const Pointwise& loop, std::int64_t rows, std::int64_t reduced) {
  constexpr std::int64_t kPart = 8192, kTasks = 64, kMostColumns = 4096, kLeastOfRow = 512;
  if (loop.reduce == Reduce::lse || loop.reduced == 0 || rows * reduced <= 2 * kPart) return 1;
  const std::int64_t parts = rows * reduced / kPart;
  if (loop.columns)
    return rows > kMostColumns
               ? 1
               : std::clamp<std::int64_t>(parts, 1, std::min(kTasks, loop.shape[0]));
  const std::int64_t first = loop.shape[loop.shape.size() - static_cast<std::size_t>(loop.reduced)];
  const std::int64_t most = std::min({(kTasks + rows - 1) / rows, reduced / kLeastOfRow, first});
  return std::clamp<std::int64_t>(parts, 1, std::max<std::int64_t>(most, 1));
}

void reduce_emit(Lowering& l, int id) {
  const Node& n = l.node(id);
  if (n.attributes->reduce == Reduce::argmax) return argmax_emit(l, id);
  const View out = l.result_of({id, 0});
  const Type& from = l.type(n.operands[0]);
  std::vector<int> dims = n.attributes->dims;
  std::sort(dims.begin(), dims.end());
  const std::vector<std::int64_t> sizes = sizes_of(from);
  const std::vector<int> kept = other_dims(from.rank(), dims);
  std::int64_t rows = 1, reduced = 1;
  for (const int d : kept) rows *= sizes[static_cast<std::size_t>(d)];
  for (const int d : dims) reduced *= sizes[static_cast<std::size_t>(d)];

  PointwiseBuilder builder(l, sizes);
  const int r = builder.value(n.operands[0]);
  const int source = builder.final(r);
  Pointwise loop = builder.finish();
  loop.reduction = true;
  loop.reduce = n.attributes->reduce;
  loop.columns = !kept.empty() && dims.back() != from.rank() - 1 && rows > 1;
  loop.reduced = static_cast<int>(dims.size());
  // Dimensions in the loop's order: kept before reduced, or the reverse for columns.
  std::vector<int> order = loop.columns ? dims : kept;
  order.insert(order.end(), (loop.columns ? kept : dims).begin(),
               (loop.columns ? kept : dims).end());
  reorder(loop, order);
  std::vector<int> spread;  // current positions of the kept dimensions
  for (std::size_t i = 0; i < kept.size(); ++i)
    spread.push_back(static_cast<int>(loop.columns ? dims.size() + i : i));
  loop.store = {source, broadcasted(out, loop.shape, spread), l.accumulates({id, 0})};
  // An f64 log-sum-exp of f32 numbers has f32 exponentials: the result alone is wide.
  const bool narrow = loop.reduce == Reduce::lse && from.dtype != DType::f64;
  const DType stored = loop.store.view.dtype;
  if (narrow) loop.store.view.dtype = from.dtype;
  finish_pointwise(loop);
  loop.store.view.dtype = stored;
  loop.parts = parts_of(loop, rows, reduced);
  if (const std::int64_t bytes = l.target().parts_bytes(loop); bytes > 0)
    loop.scratch = l.add_buffer(Place::arena, bytes, l.name_of_node(id) + " parts");
  l.push(id, std::move(loop));
}

constexpr Operation kOperations[] = {{
    .op = Op::reduce,
    .name = "reduce",
    .sums = true,
    .infer = reduce_type,
    .keys = kDims,
    .reads = reads,
    .spelling = spelling,
    .evaluate = reduce_value,
    .gradient = reduce_gradient,
    .zero_sign = reduce_zeros,
    .rounding = reduce_rounding,
    .cut_by_result = reduce_cut,
    .cut_by_operand = reduce_lead,
    .degree = reduce_degree,
    .clone = reduce_clone,
    .place = reduce_place,
    .emit = reduce_emit,
}};

}  // namespace

std::span<const Operation> reduce_operations() { return kOperations; }

}  // namespace logitless::ir
