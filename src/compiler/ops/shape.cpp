// Operations that move elements: broadcast, reshape, transpose, slice, pad, concat, flip.
#include "compiler/analysis/chunk_clone.h"
#include "compiler/analysis/cut.h"
#include "compiler/analysis/linearity.h"
#include "compiler/ir/derivation.h"
#include "compiler/ir/evaluation.h"
#include "compiler/ir/typing.h"
#include "compiler/ops/families.h"
#include "compiler/ops/text_key.h"
#include "compiler/plan/lowering.h"
#include "compiler/plan/pointwise_builder.h"

namespace logitless::ir {
namespace {

using oracle::at;
using oracle::each;
using oracle::filled;
using oracle::Index;
using oracle::permuted;

constexpr TextKey kDims[] = {key<&Attributes::dims>("dims")};

// --- broadcast

std::vector<Type> broadcast_type(const Typing& r) {
  r.count(1);
  const Shape& to = r.a.type.shape;
  r.expect(r.a.dims.size() == r.in(0).shape.size(), "dims has ", r.a.dims.size(),
           " entries for an operand of rank ", r.in(0).rank());
  r.dimensions(r.a.dims, static_cast<int>(to.size()), "dims");
  for (std::size_t i = 0; i < r.a.dims.size(); ++i) {
    r.expect(i == 0 || r.a.dims[i] > r.a.dims[i - 1], "dims does not ascend");
    const Dim& wanted = to[static_cast<std::size_t>(r.a.dims[i])];
    r.expect(r.in(0).shape[i] == wanted, "dimension ", i, " of ", r.in(0), " goes to one of size ",
             wanted.text());
  }
  return {Type{r.in(0).dtype, to}};
}
std::vector<Tensor> broadcast_value(const Evaluation& e) {
  return filled(
      e, [&](const Index& index) { return at(e.in(0), permuted(index, e.node.attributes->dims)); });
}
std::vector<Value> broadcast_gradient(Derivation& d) {
  return {reduce(d.g, Reduce::sum, d.dy, other_dims(d.g.type(d.dy).rank(), d.n.attributes->dims))};
}

std::optional<Chunked> broadcast_cut(const CutNode& c, const Split& s) {
  Split to;
  const Found where = found(s, c.a.dims, to);
  if (where == Found::mixed) return std::nullopt;
  return cut(s, {where == Found::none ? Need{} : part(to)});
}
Lead broadcast_lead(const CutNode& c, std::size_t, const Split& s) {
  return {through(s, c.a.dims)};
}
Value broadcast_clone(ChunkClone& c) {
  c.a.dims = c.result.dims(c.a.dims);
  c.a.type.shape = c.result.shape(c.n.results[0].shape);
  return c.add();
}

View broadcast_view(Lowering& l, Value v) {
  const Node& n = l.graph().node(v);
  return broadcasted(l.memory_of(n.operands[0]), sizes_of(n.results[0]), n.attributes->dims);
}

// --- reshape

std::vector<Type> reshape_type(const Typing& r) {
  r.count(1);
  r.expect(product(r.in(0).shape) == product(r.a.type.shape), r.in(0), " has not the elements of ",
           r.a.type.shape);
  return {Type{r.in(0).dtype, r.a.type.shape}};
}
std::vector<Tensor> reshape_value(const Evaluation& e) {
  return {Tensor{oracle::sizes(e.node.results[0]), e.in(0).data}};
}
std::vector<Value> reshape_gradient(Derivation& d) {
  return {reshape(d.g, d.dy, d.operand_type(0).shape)};
}

// Returns the same range of elements as a cut in the dimensions of `to`.
std::optional<Split> reshaped_cut(const std::vector<std::int64_t>& from,
                                  const std::vector<std::int64_t>& to, const Split& s) {
  std::int64_t outer = 1, middle = 1;
  for (int d = 0; d < s.dim + s.count; ++d)
    (d < s.dim ? outer : middle) *= from[static_cast<std::size_t>(d)];
  if (middle == 0) return std::nullopt;
  const std::int64_t axis = middle / s.factor;
  std::int64_t before = 1;
  int first = 0;
  const int rank = static_cast<int>(to.size());
  while (first < rank && before < outer) before *= to[static_cast<std::size_t>(first++)];
  if (before != outer) return std::nullopt;
  std::int64_t group = 1;
  int last = first;
  while (last < rank && group % middle != 0) group *= to[static_cast<std::size_t>(last++)];
  if (last == first && middle == 1 && first < rank) group *= to[static_cast<std::size_t>(last++)];
  if (last == first || group == 0 || group % middle != 0) return std::nullopt;
  return normalized(to, {first, last - first, group / axis});
}
std::optional<Chunked> reshape_cut(const CutNode& c, const Split& s) {
  const std::optional<Split> to = reshaped_cut(sizes_of(c.node.results[0]), c.shape(0), s);
  return to ? std::optional(cut(s, {part(*to)})) : std::nullopt;
}
Lead reshape_lead(const CutNode& c, std::size_t, const Split& s) {
  return {reshaped_cut(c.shape(0), sizes_of(c.node.results[0]), s)};
}
Value reshape_clone(ChunkClone& c) {
  c.a.type.shape = c.result.shape(c.n.results[0].shape);
  return c.add();
}

View reshape_view(Lowering& l, Value v) {
  const Node& n = l.graph().node(v);
  if (l.target().strided_gemms()) {
    if (std::optional<View> view = moved_view(l, v)) return std::move(*view);
  }
  const View& from = l.memory_of(n.operands[0]);
  const std::vector<std::int64_t> shape = sizes_of(n.results[0]);
  std::optional<View> to = reshaped(from, shape);
  return to ? std::move(*to) : *reshaped(l.copied(from, l.name_of_node(v.node)), shape);
}
bool reshape_place(Lowering& l, Value v, const Destination& to) {
  const Value from = l.graph().node(v).operands[0];
  const std::optional<View> view = reshaped(to.view, sizes_of(l.type(from)));
  return view && l.place(from, to.with(*view));
}

std::vector<int> inverse(const std::vector<int>& dims) {
  std::vector<int> back(dims.size());
  for (std::size_t i = 0; i < dims.size(); ++i)
    back[static_cast<std::size_t>(dims[i])] = static_cast<int>(i);
  return back;
}
// Returns the layout of the operand for which the result of moves is contiguous, or nothing if
// strides cannot express it. Sets `v` to the operand below the reshapes and transposes.
std::optional<View> place_of_moved(const Lowering& l, Value& v) {
  std::optional<View> view = View{};
  view->shape = sizes_of(l.type(v));
  view->strides = contiguous_strides(view->shape);
  for (;;) {
    const Node& n = l.graph().node(v);
    if (n.op == Op::reshape) {
      view = reshaped(*view, sizes_of(l.type(n.operands[0])));
    } else if (n.op == Op::transpose) {
      view = transposed(*view, inverse(n.attributes->dims));
    } else {
      return view;
    }
    if (!view) return view;
    v = n.operands[0];
  }
}
// Returns the value as a view of the operand below its moves, if that is contiguous.
std::optional<View> moved(const Lowering& l, Value v) {
  const Node& n = l.graph().node(v);
  if (n.op != Op::reshape && n.op != Op::transpose) {
    View view;
    view.shape = sizes_of(n.results[static_cast<std::size_t>(v.index)]);
    view.strides = contiguous_strides(view.shape);
    return view;
  }
  const std::optional<View> from = moved(l, n.operands[0]);
  if (!from) return from;
  return n.op == Op::reshape ? reshaped(*from, sizes_of(n.results[0]))
                             : transposed(*from, n.attributes->dims);
}
// A reshape that merges transposed dimensions would need a copy. Instead the operand's instruction
// writes its result in the transposed order, if that has contiguous rows.
void reshape_arrange(Lowering& l, int id) {
  const Value from = l.node(id).operands[0];
  const std::optional<View> operand = moved(l, from);
  if (!operand || reshaped(*operand, sizes_of(l.type({id, 0})))) return;
  Value made{id, 0};
  const std::optional<View> to = place_of_moved(l, made);
  if (!to || row_of(l.graph().node(made).op).work != Work::full) return;
  if (to->strides.back() == 1 || to->shape.back() == 1) l.place_view({id, 0}, made);
}

// --- transpose

std::vector<Type> transpose_type(const Typing& r) {
  r.count(1);
  r.dimensions(r.a.dims, r.in(0).rank(), "dims");
  r.expect(static_cast<int>(r.a.dims.size()) == r.in(0).rank(), "dims has ", r.a.dims.size(),
           " entries for rank ", r.in(0).rank());
  Type type{r.in(0).dtype, {}};
  for (const int d : r.a.dims) type.shape.push_back(r.in(0).shape[static_cast<std::size_t>(d)]);
  return {type};
}
std::vector<Tensor> transpose_value(const Evaluation& e) {
  Tensor out = oracle::tensor_of(e.node.results[0]);
  each(e.in(0).shape, [&](const Index& index) {
    at(out, permuted(index, e.node.attributes->dims)) = at(e.in(0), index);
  });
  return {std::move(out)};
}
std::vector<Value> transpose_gradient(Derivation& d) {
  return {transpose(d.g, d.dy, inverse(d.n.attributes->dims))};
}

std::optional<Chunked> transpose_cut(const CutNode& c, const Split& s) {
  const std::optional<Split> to = through(s, c.a.dims);
  return to ? std::optional(cut(s, {part(*to)})) : std::nullopt;
}
Lead transpose_lead(const CutNode& c, std::size_t, const Split& s) { return lead_to(s, c.a.dims); }
Value transpose_clone(ChunkClone& c) {
  c.a.dims = c.from[0].dims(c.a.dims);
  return c.add();
}

View transpose_view(Lowering& l, Value v) {
  const Node& n = l.graph().node(v);
  return transposed(l.memory_of(n.operands[0]), n.attributes->dims);
}
bool transpose_place(Lowering& l, Value v, const Destination& to) {
  const Node& n = l.graph().node(v);
  return l.place(n.operands[0], to.with(transposed(to.view, inverse(n.attributes->dims))));
}

// --- slice

std::vector<Type> slice_type(const Typing& r) {
  r.count(1);
  const std::size_t rank = r.in(0).shape.size();
  r.expect(r.a.begin.size() == rank && r.a.end.size() == rank, "begin and end have ",
           r.a.begin.size(), " and ", r.a.end.size(), " entries for rank ", rank);
  Type type{r.in(0).dtype, {}};
  for (std::size_t d = 0; d < rank; ++d) {
    const Dim &begin = r.a.begin[d], &end = r.a.end[d], &size = r.in(0).shape[d];
    const Dim extent = end - begin, rest = size - end;
    r.expect((!begin.is_constant() || begin.value() >= 0) &&
                 (!extent.is_constant() || extent.value() >= 0) &&
                 (!rest.is_constant() || rest.value() >= 0),
             "dimension ", d, " of ", r.in(0), " is cut from ", begin.text(), " to ", end.text());
    type.shape.push_back(extent);
  }
  return {type};
}
// Returns the index in the larger tensor.
Index shifted(Index index, const Shape& begin) {
  for (std::size_t d = 0; d < index.size(); ++d) index[d] += begin[d].value();
  return index;
}
std::vector<Tensor> slice_value(const Evaluation& e) {
  return filled(
      e, [&](const Index& index) { return at(e.in(0), shifted(index, e.node.attributes->begin)); });
}
std::vector<Value> slice_gradient(Derivation& d) {
  const Attributes& a = d.n.attributes;
  Shape high;
  for (std::size_t i = 0; i < a.end.size(); ++i)
    high.push_back(d.operand_type(0).shape[i] - a.end[i]);
  return {pad(d.g, d.dy, a.begin, high)};
}
std::optional<Chunked> slice_cut(const CutNode& c, const Split& s) {
  const std::vector<std::int64_t> shape = c.shape(0);
  for (int d = s.dim; d < s.dim + s.count; ++d) {
    const auto i = static_cast<std::size_t>(d);
    if (c.a.begin[i].value() != 0 || c.a.end[i].value() != shape[i]) return std::nullopt;
  }
  return cut(s, {part(s)});
}
Value slice_clone(ChunkClone& c) {
  c.a.begin = c.from[0].shape(c.a.begin, Dim(0));
  c.a.end = c.from[0].shape(c.a.end, c.from[0].size);
  return c.add();
}
std::vector<std::int64_t> numbers(const Shape& shape) {
  std::vector<std::int64_t> list;
  for (const Dim& d : shape) list.push_back(d.value());
  return list;
}
View slice_view(Lowering& l, Value v) {
  const Node& n = l.graph().node(v);
  return sliced(l.memory_of(n.operands[0]), numbers(n.attributes->begin), sizes_of(n.results[0]));
}
constexpr TextKey kSliceKeys[] = {key<&Attributes::begin>("begin"), key<&Attributes::end>("end")};

// --- pad

std::vector<Type> pad_type(const Typing& r) {
  r.count(1);
  const std::size_t rank = r.in(0).shape.size();
  r.expect(r.a.begin.size() == rank && r.a.end.size() == rank, "low and high have ",
           r.a.begin.size(), " and ", r.a.end.size(), " entries for rank ", rank);
  Type type = r.in(0);
  for (std::size_t d = 0; d < rank; ++d) {
    for (const Dim* side : {&r.a.begin[d], &r.a.end[d]}) {
      r.expect(!side->is_constant() || side->value() >= 0, "dimension ", d, " is padded by ",
               side->text());
      type.shape[d] += *side;
    }
  }
  return {type};
}
std::vector<Tensor> pad_value(const Evaluation& e) {
  Tensor out = oracle::tensor_of(e.node.results[0]);
  each(e.in(0).shape, [&](const Index& index) {
    at(out, shifted(index, e.node.attributes->begin)) = at(e.in(0), index);
  });
  return {std::move(out)};
}
std::vector<Value> pad_gradient(Derivation& d) {
  const Attributes& a = d.n.attributes;
  Shape end;
  for (std::size_t i = 0; i < a.begin.size(); ++i)
    end.push_back(a.begin[i] + d.operand_type(0).shape[i]);
  return {slice(d.g, d.dy, a.begin, end)};
}
std::optional<Chunked> pad_cut(const CutNode& c, const Split& s) {
  for (int d = s.dim; d < s.dim + s.count; ++d) {
    const auto i = static_cast<std::size_t>(d);
    if (c.a.begin[i].value() != 0 || c.a.end[i].value() != 0) return std::nullopt;
  }
  return cut(s, {part(s)});
}
Value pad_clone(ChunkClone& c) {
  c.a.begin = c.from[0].shape(c.a.begin, Dim(0));
  c.a.end = c.from[0].shape(c.a.end, Dim(0));
  return c.add();
}
bool write_place(Lowering& l, Value v, const Destination& to) {
  return to.kind == Destination::Kind::write && l.write_there(v, to);
}
void pad_arrange(Lowering& l, int id) {
  l.place_parts(id, {numbers(l.node(id).attributes->begin)});
}
// Fills the margins of one dimension after the other, then copies the operand between them.
void pad_emit(Lowering& l, int id) {
  const Node& n = l.node(id);
  View out = l.result_of({id, 0});
  const std::vector<std::int64_t> begin = numbers(n.attributes->begin);
  const std::vector<std::int64_t> inner = sizes_of(l.type(n.operands[0]));
  l.move_part(id, n.operands[0], out, begin);
  std::vector<std::int64_t> at(begin.size(), 0);
  const auto fill = [&](std::size_t d, std::int64_t from, std::int64_t to) {
    std::vector<std::int64_t> shape = out.shape;
    shape[d] = to - from;
    at[d] = from;
    const View margin = sliced(out, at, shape);
    at[d] = 0;
    if (elements_of(margin) > 0) l.fill(margin, 0.0);
  };
  for (std::size_t d = 0; d < begin.size(); ++d) {
    fill(d, 0, begin[d]);
    fill(d, begin[d] + inner[d], out.shape[d]);
    out.offset += begin[d] * out.strides[d];
    out.shape[d] = inner[d];
  }
}
constexpr TextKey kPadKeys[] = {key<&Attributes::begin>("low"), key<&Attributes::end>("high")};

// --- concat

std::vector<Type> concat_type(const Typing& r) {
  r.expect(!r.operands.empty(), "expected operands");
  r.axis(r.in(0).rank());
  const auto axis = static_cast<std::size_t>(r.a.axis);
  Type type = r.in(0);
  for (std::size_t i = 1; i < r.operands.size(); ++i) {
    Type other = *r.operands[i];
    r.expect(other.rank() == type.rank(), "operands are ", r.in(0), " and ", other);
    const Dim length = other.shape[axis];
    other.shape[axis] = r.in(0).shape[axis];
    r.expect(other == r.in(0), "operands are ", r.in(0), " and ", *r.operands[i],
             ", expected equal but for dimension ", r.a.axis);
    type.shape[axis] += length;
  }
  return {type};
}
std::vector<Tensor> concat_value(const Evaluation& e) {
  Tensor out = oracle::tensor_of(e.node.results[0]);
  const auto axis = static_cast<std::size_t>(e.node.attributes->axis);
  std::int64_t begin = 0;
  for (const Tensor* part : e.operands) {
    each(part->shape, [&](Index index) {
      const double x = at(*part, index);
      index[axis] += begin;
      at(out, index) = x;
    });
    begin += part->shape[axis];
  }
  return {std::move(out)};
}
std::vector<Value> concat_gradient(Derivation& d) {
  std::vector<Value> parts;
  const auto axis = static_cast<std::size_t>(d.n.attributes->axis);
  Dim at(0);
  for (std::size_t i = 0; i < d.n.operands.size(); ++i) {
    Shape begin(d.operand_type(i).shape.size(), Dim(0)), end = d.operand_type(i).shape;
    begin[axis] = at;
    at += d.operand_type(i).shape[axis];
    end[axis] = at;
    parts.push_back(is_float(d.operand_type(i).dtype) ? slice(d.g, d.dy, begin, end) : Value{});
  }
  return parts;
}
std::optional<Chunked> concat_cut(const CutNode& c, const Split& s) {
  return inside(c.a.axis, s) ? std::nullopt : cut_as_result(c, s);
}
int concat_degree(const Linearity& l) { return l.equal(0); }
Value concat_clone(ChunkClone& c) {
  c.a.axis = c.from[0].dim(c.a.axis);
  return c.add();
}
// Returns the first index of each part.
std::vector<std::vector<std::int64_t>> begins_of(const Lowering& l, const Node& n) {
  const auto axis = static_cast<std::size_t>(n.attributes->axis);
  std::vector<std::int64_t> at(n.results[0].shape.size(), 0);
  std::vector<std::vector<std::int64_t>> begins;
  for (const Value v : n.operands) {
    begins.push_back(at);
    at[axis] += sizes_of(l.type(v))[axis];
  }
  return begins;
}
void concat_arrange(Lowering& l, int id) { l.place_parts(id, begins_of(l, l.node(id))); }
void concat_emit(Lowering& l, int id) {
  const Node& n = l.node(id);
  const View out = l.result_of({id, 0});
  const std::vector<std::vector<std::int64_t>> begins = begins_of(l, n);
  for (std::size_t i = 0; i < begins.size(); ++i) l.move_part(id, n.operands[i], out, begins[i]);
}
constexpr TextKey kAxis[] = {key<&Attributes::axis>("axis")};

// --- flip

std::vector<Type> flip_type(const Typing& r) {
  r.count(1);
  r.axis(r.in(0).rank());
  return {r.in(0)};
}
std::vector<Tensor> flip_value(const Evaluation& e) {
  const auto axis = static_cast<std::size_t>(e.node.attributes->axis);
  return filled(e, [&](Index index) {
    index[axis] = e.in(0).shape[axis] - 1 - index[axis];
    return at(e.in(0), index);
  });
}
std::vector<Value> flip_gradient(Derivation& d) {
  return {d.g.add(Op::flip, {d.dy}, d.n.attributes)};
}
std::optional<Chunked> flip_cut(const CutNode& c, const Split& s) {
  return inside(c.a.axis, s) ? std::nullopt : cut_as_result(c, s);
}
bool flip_place(Lowering& l, Value v, const Destination& to) { return l.write_there(v, to); }
// Not a view: readers compute the operand backwards, which needs no memory.
int flip_register(PointwiseBuilder& b, Value v) {
  const Node& n = b.graph().node(v);
  return b.backwards(n.operands[0], n.attributes->axis);
}
void flip_emit(Lowering& l, int id) { l.emit_elementwise(id); }

constexpr Operation kOperations[] = {
    {
        .op = Op::broadcast,
        .name = "broadcast",
        .work = Work::none,
        .infer = broadcast_type,
        .typed = true,
        .keys = kDims,
        .evaluate = broadcast_value,
        .gradient = broadcast_gradient,
        .zero_sign = zeros<ZeroSign::moves>,
        .rounding = rounds<Rounding::moves>,
        .cut_by_result = broadcast_cut,
        .cut_by_operand = broadcast_lead,
        .degree = linear,
        .clone = broadcast_clone,
        .view = broadcast_view,
    },
    {
        .op = Op::reshape,
        .name = "reshape",
        .work = Work::none,
        .infer = reshape_type,
        .typed = true,
        .evaluate = reshape_value,
        .gradient = reshape_gradient,
        .zero_sign = zeros<ZeroSign::moves>,
        .rounding = rounds<Rounding::moves>,
        .cut_by_result = reshape_cut,
        .cut_by_operand = reshape_lead,
        .degree = linear,
        .clone = reshape_clone,
        .arrange = reshape_arrange,
        .place = reshape_place,
        .view = reshape_view,
    },
    {
        .op = Op::transpose,
        .name = "transpose",
        .work = Work::none,
        .infer = transpose_type,
        .keys = kDims,
        .evaluate = transpose_value,
        .gradient = transpose_gradient,
        .zero_sign = zeros<ZeroSign::moves>,
        .rounding = rounds<Rounding::moves>,
        .cut_by_result = transpose_cut,
        .cut_by_operand = transpose_lead,
        .degree = linear,
        .clone = transpose_clone,
        .place = transpose_place,
        .view = transpose_view,
    },
    {
        .op = Op::slice,
        .name = "slice",
        .work = Work::none,
        .infer = slice_type,
        .keys = kSliceKeys,
        .evaluate = slice_value,
        .gradient = slice_gradient,
        .zero_sign = zeros<ZeroSign::moves>,
        .rounding = rounds<Rounding::moves>,
        .cut_by_result = slice_cut,
        .cut_by_operand = cut_as_operand,
        .degree = linear,
        .clone = slice_clone,
        .view = slice_view,
    },
    {
        .op = Op::pad,
        .name = "pad",
        .infer = pad_type,
        .keys = kPadKeys,
        .evaluate = pad_value,
        .gradient = pad_gradient,
        .zero_sign = zeros<ZeroSign::moves>,
        .rounding = rounds<Rounding::moves>,
        .cut_by_result = pad_cut,
        .cut_by_operand = cut_as_operand,
        .degree = linear,
        .clone = pad_clone,
        .arrange = pad_arrange,
        .place = write_place,
        .emit = pad_emit,
    },
    {
        .op = Op::concat,
        .name = "concat",
        .infer = concat_type,
        .keys = kAxis,
        .evaluate = concat_value,
        .gradient = concat_gradient,
        .zero_sign = zeros<ZeroSign::moves>,
        .rounding = rounds<Rounding::moves>,
        .cut_by_result = concat_cut,
        .cut_by_operand = cut_as_operand,
        .degree = concat_degree,
        .clone = concat_clone,
        .arrange = concat_arrange,
        .place = write_place,
        .emit = concat_emit,
    },
    {
        .op = Op::flip,
        .name = "flip",
        .work = Work::elementwise,
        .infer = flip_type,
        .keys = kAxis,
        .evaluate = flip_value,
        .gradient = flip_gradient,
        .zero_sign = zeros<ZeroSign::moves>,
        .rounding = rounds<Rounding::moves>,
        .cut_by_result = flip_cut,
        .cut_by_operand = cut_as_operand,
        .degree = linear,
        .clone = concat_clone,
        .place = flip_place,
        .registers = flip_register,
        .emit = flip_emit,
    },
};

}  // namespace

std::span<const Operation> shape_operations() { return kOperations; }

}  // namespace logitless::ir
