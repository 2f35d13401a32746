// Types of results from operands and attributes: the typing rules of docs/ir.md.
#include <algorithm>
#include <set>

#include "compiler/ir/graph.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

using Operands = std::vector<const Type*>;

bool is_float(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f64;
}

struct Rule {
  const char* what;
  Operands operands;
  const Attributes& a;

  const Type& in(int i) const { return *operands[static_cast<std::size_t>(i)]; }
  template <typename... Parts>
  void expect(bool ok, const Parts&... parts) const {
    if (!ok) throw InvalidArgument(concat(what, ": ", parts...));
  }
  void count(std::size_t wanted) const {
    expect(operands.size() == wanted, "expected ", wanted, " operands, got ", operands.size());
  }
  void index(int i) const {
    expect(is_index(in(i).dtype), "operand ", i, " is ", text_of(in(i)), ", expected i32 or i64");
  }
  void floating(int i) const {
    expect(is_float(in(i).dtype), "operand ", i, " is ", text_of(in(i)), ", expected floats");
  }
  // Every entry in [0, rank), none twice.
  void dimensions(const std::vector<int>& dims, int rank, const char* name) const {
    std::set<int> seen;
    for (const int d : dims) {
      expect(d >= 0 && d < rank, name, " names dimension ", d, " of ", rank);
      expect(seen.insert(d).second, name, " names dimension ", d, " twice");
    }
  }
  void axis(int rank) const {
    expect(a.axis >= 0 && a.axis < rank, "axis is ", a.axis, ", expected 0 to ", rank - 1);
  }
  // The dtype asked for, or `natural`; wider sums alone are allowed.
  DType wider(DType natural) const {
    const DType wanted = a.type.dtype;
    if (wanted == natural) return natural;
    const bool ok = is_float(natural) && natural != DType::f64 &&
                    (wanted == DType::f64 || (wanted == DType::f32 && size_of(natural) == 2));
    expect(ok, "result of ", name_of(natural), " operands cannot be ", name_of(wanted));
    return wanted;
  }
};

Type map_type(const Rule& r) {
  const FunctionInfo& info = info_of(r.a.function);
  r.count(static_cast<std::size_t>(info.operands));
  const int first = info.kind == FunctionKind::choose ? 1 : 0;
  for (int i = 0; i < info.operands; ++i) {
    r.expect(r.in(i).shape == r.in(0).shape, "operands are ", text_of(r.in(0)), " and ",
             text_of(r.in(i)), ", expected equal shapes");
    if (i < first || info.kind == FunctionKind::logical) {
      r.expect(r.in(i).dtype == DType::i8, "operand ", i, " is ", text_of(r.in(i)),
               ", expected i8 (a condition)");
    } else {
      r.expect(r.in(i).dtype == r.in(first).dtype, "operands are ", text_of(r.in(first)), " and ",
               text_of(r.in(i)), ", expected equal dtypes");
    }
  }
  if (info.kind == FunctionKind::real) r.floating(0);
  const bool truth = info.kind == FunctionKind::compare || info.kind == FunctionKind::logical;
  return {truth ? DType::i8 : r.in(first).dtype, r.in(0).shape};
}

Type broadcast_type(const Rule& r) {
  r.count(1);
  const Shape& to = r.a.type.shape;
  r.expect(r.a.dims.size() == r.in(0).shape.size(), "dims has ", r.a.dims.size(),
           " entries for an operand of rank ", r.in(0).rank());
  r.dimensions(r.a.dims, static_cast<int>(to.size()), "dims");
  for (std::size_t i = 0; i < r.a.dims.size(); ++i) {
    r.expect(i == 0 || r.a.dims[i] > r.a.dims[i - 1], "dims does not ascend");
    const Dim& wanted = to[static_cast<std::size_t>(r.a.dims[i])];
    r.expect(r.in(0).shape[i] == wanted, "dimension ", i, " of ", text_of(r.in(0)),
             " goes to one of size ", wanted.text());
  }
  return {r.in(0).dtype, to};
}

Type slice_type(const Rule& r) {
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
             "dimension ", d, " of ", text_of(r.in(0)), " is cut from ", begin.text(), " to ",
             end.text());
    type.shape.push_back(extent);
  }
  return type;
}

Type pad_type(const Rule& r) {
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
  return type;
}

Type concat_type(const Rule& r) {
  r.expect(!r.operands.empty(), "expected operands");
  r.axis(r.in(0).rank());
  const auto axis = static_cast<std::size_t>(r.a.axis);
  Type type = r.in(0);
  for (std::size_t i = 1; i < r.operands.size(); ++i) {
    Type other = *r.operands[i];
    r.expect(other.rank() == type.rank(), "operands are ", text_of(r.in(0)), " and ",
             text_of(other));
    const Dim length = other.shape[axis];
    other.shape[axis] = r.in(0).shape[axis];
    r.expect(other == r.in(0), "operands are ", text_of(r.in(0)), " and ", text_of(*r.operands[i]),
             ", expected equal but for dimension ", r.a.axis);
    type.shape[axis] += length;
  }
  return type;
}

Type reduce_type(const Rule& r) {
  r.count(1);
  r.dimensions(r.a.dims, r.in(0).rank(), "dims");
  r.expect(!r.a.dims.empty(), "dims is empty");
  Type type{r.in(0).dtype, {}};
  for (int d = 0; d < r.in(0).rank(); ++d) {
    if (std::find(r.a.dims.begin(), r.a.dims.end(), d) == r.a.dims.end())
      type.shape.push_back(r.in(0).shape[static_cast<std::size_t>(d)]);
  }
  if (r.a.reduce == Reduce::argmax) {
    r.expect(r.a.dims.size() == 1, "argmax runs over one dimension, got ", r.a.dims.size());
    type.dtype = DType::i64;
    return type;
  }
  if (r.a.reduce == Reduce::lse) r.floating(0);
  r.expect(r.in(0).dtype != DType::i8, "an i8 is a condition: cast it first");
  type.dtype = r.wider(r.in(0).dtype);
  return type;
}

Type dot_type(const Rule& r) {
  r.count(2);
  const Type &x = r.in(0), &y = r.in(1);
  r.floating(0);
  r.expect(x.dtype == y.dtype, "operands are ", text_of(x), " and ", text_of(y),
           ", expected equal dtypes");
  r.expect(r.a.batch_a.size() == r.a.batch_b.size(), "batch names ", r.a.batch_a.size(), " and ",
           r.a.batch_b.size(), " dimensions");
  r.expect(r.a.contract_a.size() == r.a.contract_b.size(), "contract names ", r.a.contract_a.size(),
           " and ", r.a.contract_b.size(), " dimensions");
  std::vector<int> used_a = r.a.batch_a, used_b = r.a.batch_b;
  used_a.insert(used_a.end(), r.a.contract_a.begin(), r.a.contract_a.end());
  used_b.insert(used_b.end(), r.a.contract_b.begin(), r.a.contract_b.end());
  r.dimensions(used_a, x.rank(), "the first operand");
  r.dimensions(used_b, y.rank(), "the second operand");
  for (std::size_t i = 0; i < used_a.size(); ++i) {
    r.expect(x.shape[static_cast<std::size_t>(used_a[i])] ==
                 y.shape[static_cast<std::size_t>(used_b[i])],
             "dimension ", used_a[i], " of ", text_of(x), " meets dimension ", used_b[i], " of ",
             text_of(y));
  }
  Type type{r.wider(x.dtype), {}};
  for (const int d : r.a.batch_a) type.shape.push_back(x.shape[static_cast<std::size_t>(d)]);
  const auto free = [&](const Type& from, const std::vector<int>& used) {
    for (int d = 0; d < from.rank(); ++d) {
      if (std::find(used.begin(), used.end(), d) == used.end())
        type.shape.push_back(from.shape[static_cast<std::size_t>(d)]);
    }
  };
  free(x, used_a);
  free(y, used_b);
  return type;
}

Type take_type(const Rule& r) {
  r.count(2);
  r.index(1);
  r.expect(r.in(0).rank() >= 1, "the table is a scalar");
  Type type{r.in(0).dtype, r.in(1).shape};
  type.shape.insert(type.shape.end(), r.in(0).shape.begin() + 1, r.in(0).shape.end());
  return type;
}

Type scatter_type(const Rule& r) {
  r.count(2);
  r.index(0);
  const Shape &index = r.in(0).shape, &updates = r.in(1).shape;
  r.expect(
      updates.size() >= index.size() && std::equal(index.begin(), index.end(), updates.begin()),
      "updates ", text_of(r.in(1)), " do not begin with the shape of the index ", text_of(r.in(0)));
  r.expect(r.a.type.shape.size() == 1, "expected rows");
  Type type{r.wider(r.in(1).dtype), r.a.type.shape};
  type.shape.insert(type.shape.end(), updates.begin() + static_cast<std::ptrdiff_t>(index.size()),
                    updates.end());
  return type;
}

Type pick_type(const Rule& r) {
  r.count(2);
  r.index(1);
  r.axis(r.in(0).rank());
  Type type = r.in(0);
  type.shape.erase(type.shape.begin() + r.a.axis);
  r.expect(type.shape == r.in(1).shape, "the index is ", text_of(r.in(1)), ", expected the shape ",
           text_of(type.shape));
  return type;
}

// q, k, v and, of the gradient, out, lse and d_out; returns the type of lse.
Type attention_lse(const Rule& r, std::size_t operands) {
  r.count(operands);
  const Type &q = r.in(0), &k = r.in(1);
  r.floating(0);
  r.expect(q.rank() == 4 && k.rank() == 4, "q is ", text_of(q), " and k is ", text_of(k),
           ", expected [batch, heads, length, dim]");
  r.expect(r.in(2) == k, "v is ", text_of(r.in(2)), ", expected the type of k, ", text_of(k));
  r.expect(q.dtype == k.dtype && q.shape[0] == k.shape[0] && q.shape[3] == k.shape[3], "q is ",
           text_of(q), " but k is ", text_of(k));
  r.expect(!q.shape[1].is_constant() || !k.shape[1].is_constant() ||
               (k.shape[1].value() > 0 && q.shape[1].value() % k.shape[1].value() == 0),
           "the heads of q, ", q.shape[1].text(), ", are no multiple of those of k, ",
           k.shape[1].text());
  const Type lse{q.dtype == DType::f64 ? DType::f64 : DType::f32,
                 {q.shape[0], q.shape[1], q.shape[2]}};
  if (operands > 3) {
    r.expect(r.in(3) == q && r.in(5) == q, "out and d_out are ", text_of(r.in(3)), " and ",
             text_of(r.in(5)), ", expected the type of q");
    r.expect(r.in(4) == lse, "lse is ", text_of(r.in(4)), ", expected ", text_of(lse));
  }
  return lse;
}

std::vector<Type> head_types(const Rule& r) {
  const Head& h = r.a.head;
  r.count(std::size_t{3} + (h.bias ? 1 : 0) + (h.gradients ? 2 : 0));
  const Type &x = r.in(0), &w = r.in(1);
  r.floating(0);
  r.index(2);
  r.expect(x.dtype != DType::f64 && x.dtype == w.dtype, "x is ", text_of(x), " and w ", text_of(w),
           ", expected f32, bf16 or f16, equal");
  r.expect(x.rank() >= 1 && x.rank() <= 4 && w.rank() == 2 && x.shape.back() == w.shape[1], "x is ",
           text_of(x), " and w ", text_of(w), ", expected [..., D] and [V, D]");
  const Type token{DType::f32, Shape(x.shape.begin(), x.shape.end() - 1)};
  r.expect(r.in(2).shape == token.shape, "targets are ", text_of(r.in(2)), ", expected the shape ",
           logitless::text_of(token.shape));
  const Type bias{h.bias ? r.in(3).dtype : x.dtype, {w.shape[0]}};
  r.expect(!h.bias || (r.in(3) == bias && (bias.dtype == DType::f32 || bias.dtype == x.dtype)),
           "bias is ", text_of(r.in(h.bias ? 3 : 0)), ", expected ", text_of(bias));
  for (std::size_t i = r.operands.size() - 2; h.gradients && i < r.operands.size(); ++i)
    r.expect(r.in(i) == token, "a gradient is ", text_of(r.in(i)), ", expected ", text_of(token));
  std::vector<Type> types = {token, token};
  const auto gradient = [&](DType dtype, Type type, std::string_view name) {
    if (dtype == DType::i8) return;
    r.expect(h.gradients && (dtype == DType::f32 || dtype == type.dtype), name, " is ",
             name_of(dtype), ", expected f32 or ", name_of(type.dtype));
    type.dtype = dtype;
    types.push_back(std::move(type));
  };
  gradient(h.d_x, x, "d_x");
  gradient(h.d_w, w, "d_w");
  gradient(h.d_bias, bias, "d_bias");
  r.expect(h.gradients == (types.size() > 2), "gradients are asked for with and without d_lse");
  return types;
}

std::vector<Type> loop_types(const Rule& r) {
  r.expect(r.a.loop != nullptr, "no body");
  const Loop& loop = *r.a.loop;
  const std::vector<int> parameters = loop.body.parameters();
  r.expect(loop.chunk >= 1 && loop.extent >= 0, "chunks of ", loop.chunk, " of ", loop.extent);
  r.expect(parameters.size() == r.operands.size() + 1 && loop.inputs.size() == r.operands.size(),
           "the body has ", parameters.size(), " parameters and the loop ", r.operands.size(),
           " operands; expected one more");
  r.expect(loop.outputs.size() == loop.body.outputs().size(), "the body has ",
           loop.body.outputs().size(), " results and the loop ", loop.outputs.size());
  const Dim size = Dim::symbol(loop.symbol);
  const auto parameter = [&](std::size_t i) -> const Type& {
    return loop.body.node(parameters[i]).results[0];
  };
  r.expect(parameter(0) == Type{DType::i64, {}}, "the first parameter of the body is ",
           text_of(parameter(0)), ", expected i64[]");
  for (std::size_t i = 0; i < r.operands.size(); ++i) {
    Type expected = *r.operands[i];
    if (loop.inputs[i].kind == Loop::In::slice) {
      const auto axis = static_cast<std::size_t>(loop.inputs[i].axis);
      r.expect(axis < expected.shape.size(), "operand ", i, " is cut along dimension ", axis);
      r.expect(expected.shape[axis] == Dim(loop.extent) * Dim(loop.inputs[i].factor), "operand ", i,
               " is ", text_of(expected), ", expected ",
               (Dim(loop.extent) * Dim(loop.inputs[i].factor)).text(), " along dimension ", axis);
      expected.shape[axis] = size * Dim(loop.inputs[i].factor);
    }
    r.expect(parameter(i + 1) == expected, "parameter ", i + 1, " of the body is ",
             text_of(parameter(i + 1)), ", expected ", text_of(expected));
  }
  std::vector<Type> types;
  for (std::size_t i = 0; i < loop.outputs.size(); ++i) {
    Type type = loop.body.type(loop.body.outputs()[i].value);
    if (loop.outputs[i].kind == Loop::Out::stack) {
      const auto axis = static_cast<std::size_t>(loop.outputs[i].axis);
      r.expect(axis < type.shape.size() && type.shape[axis] == size * Dim(loop.outputs[i].factor),
               "result ", i, " is ", text_of(type), ", expected ",
               (size * Dim(loop.outputs[i].factor)).text(), " along dimension ", axis);
      type.shape[axis] = Dim(loop.extent) * Dim(loop.outputs[i].factor);
    }
    for (const Dim& dim : type.shape) {
      const std::vector<std::string> names = dim.symbols();
      r.expect(std::find(names.begin(), names.end(), loop.symbol) == names.end(), "result ", i,
               " has the size of a chunk in ", text_of(type));
    }
    types.push_back(type);
  }
  return types;
}

}  // namespace

std::vector<Type> infer_types(Op op, const std::vector<const Type*>& operands,
                              const Attributes& attributes) {
  std::string what(name_of(op));
  if (op == Op::map) what = info_of(attributes.function).name;
  if (op == Op::reduce) what = concat("reduce_", name_of(attributes.reduce));
  const Rule r{what.c_str(), operands, attributes};
  switch (op) {
    case Op::parameter:
      r.count(0);
      r.expect(!attributes.name.empty(), "no name");
      return {attributes.type};
    case Op::constant:
      r.count(0);
      r.expect(attributes.begin.size() <= 1, "size has ", attributes.begin.size(), " entries");
      return {attributes.type};
    case Op::iota:
      r.count(0);
      r.axis(attributes.type.rank());
      r.expect(is_index(attributes.type.dtype), "the result is ", text_of(attributes.type),
               ", expected i32 or i64");
      return {attributes.type};
    case Op::map:
      return {map_type(r)};
    case Op::cast:
      r.count(1);
      return {Type{attributes.type.dtype, r.in(0).shape}};
    case Op::stop_gradient:
      r.count(1);
      return {r.in(0)};
    case Op::broadcast:
      return {broadcast_type(r)};
    case Op::reshape:
      r.count(1);
      r.expect(product(r.in(0).shape) == product(attributes.type.shape), text_of(r.in(0)),
               " has not the elements of ", text_of(attributes.type.shape));
      return {Type{r.in(0).dtype, attributes.type.shape}};
    case Op::transpose: {
      r.count(1);
      r.dimensions(attributes.dims, r.in(0).rank(), "dims");
      r.expect(static_cast<int>(attributes.dims.size()) == r.in(0).rank(), "dims has ",
               attributes.dims.size(), " entries for rank ", r.in(0).rank());
      Type type{r.in(0).dtype, {}};
      for (const int d : attributes.dims)
        type.shape.push_back(r.in(0).shape[static_cast<std::size_t>(d)]);
      return {type};
    }
    case Op::slice:
      return {slice_type(r)};
    case Op::pad:
      return {pad_type(r)};
    case Op::concat:
      return {concat_type(r)};
    case Op::reduce:
      return {reduce_type(r)};
    case Op::dot:
      return {dot_type(r)};
    case Op::take:
      return {take_type(r)};
    case Op::scatter_add:
      return {scatter_type(r)};
    case Op::pick:
      return {pick_type(r)};
    case Op::attention: {
      const Type lse = attention_lse(r, 3);
      return {r.in(0), lse};
    }
    case Op::attention_grad:
      attention_lse(r, 6);
      return {r.in(0), r.in(1), r.in(2)};
    case Op::loop:
      return loop_types(r);
    case Op::head:
      return head_types(r);
  }
  throw InternalError("an operation without a typing rule");
}

}  // namespace logitless::ir
