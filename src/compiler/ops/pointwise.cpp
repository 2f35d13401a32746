// Values without operands and elementwise operations: parameter, constant, iota, map, cast,
// stop_gradient.
#include <cmath>
#include <numbers>

#include "compiler/analysis/chunk_clone.h"
#include "compiler/analysis/cut.h"
#include "compiler/analysis/linearity.h"
#include "compiler/analysis/values.h"
#include "compiler/ir/derivation.h"
#include "compiler/ir/evaluation.h"
#include "compiler/ir/typing.h"
#include "compiler/ops/families.h"
#include "compiler/ops/text_key.h"
#include "compiler/plan/pointwise_builder.h"
#include "logitless/error.h"

namespace logitless::ir {
namespace {

using oracle::filled;
using oracle::Index;

// --- parameter, constant, iota

std::vector<Value> no_gradient(Derivation& d) { return d.none(); }

std::vector<Type> parameter_type(const Typing& r) {
  r.count(0);
  r.expect(!r.a.name.empty(), "no name");
  return {r.a.type};
}

std::vector<Type> constant_type(const Typing& r) {
  r.count(0);
  r.expect(r.a.begin.size() <= 1, "size has ", r.a.begin.size(), " entries");
  return {r.a.type};
}
std::vector<Tensor> constant_value(const Evaluation& e) {
  const Attributes& a = e.node.attributes;
  const double size = a.begin.empty() ? 1.0 : static_cast<double>(a.begin[0].value());
  return {oracle::tensor_of(e.node.results[0], a.number * size)};
}
constexpr TextKey kConstantKeys[] = {key<&Attributes::number>("value"),
                                     key<&Attributes::begin>("size", false)};

std::vector<Type> iota_type(const Typing& r) {
  r.count(0);
  r.axis(r.a.type.rank());
  r.expect(is_index(r.a.type.dtype), "the result is ", r.a.type, ", expected i32 or i64");
  return {r.a.type};
}
std::vector<Tensor> iota_value(const Evaluation& e) {
  const auto axis = static_cast<std::size_t>(e.node.attributes->axis);
  return filled(e, [&](const Index& at) { return static_cast<double>(at[axis]); });
}
std::optional<Chunked> cut_of_iota(const CutNode& c, const Split& s) {
  if (inside(c.a.axis, s) && s.count > 1) return std::nullopt;
  Chunked chunked = cut(s, {});
  chunked.shifted = inside(c.a.axis, s);
  return chunked;
}
int constant_register(PointwiseBuilder& b, Value v) {
  return b.constant(b.graph().node(v).attributes->number);
}
int iota_register(PointwiseBuilder& b, Value v) {
  return b.iota(b.graph().node(v).attributes->axis);
}
Value clone_constant(ChunkClone& c) {
  c.a.type.shape = c.result.shape(c.n.results[0].shape);
  return c.add();
}
Value clone_iota(ChunkClone& c) {
  c.a.axis = c.result.dim(c.a.axis);
  c.a.type.shape = c.result.shape(c.n.results[0].shape);
  const Value made = c.add();
  return c.how.shifted ? c.shift(made, c.how.results[0].factor, Function::add) : made;
}
constexpr TextKey kAxis[] = {key<&Attributes::axis>("axis")};

// --- map

bool is_function(std::string_view name, Attributes& a) {
  const std::optional<Function> function = find_function(name);
  if (function) a.function = *function;
  return function.has_value();
}
std::string function_name(const Attributes& a) { return std::string(info_of(a.function).name); }

std::vector<Type> counter_type(const Typing& r) {
  for (int i = 0; i < 3; ++i) {
    r.expect(r.in(i).dtype == DType::i64 && r.in(i).shape == r.in(0).shape, "operand ", i, " is ",
             r.in(i), ", expected i64 of the shape of ", r.in(0));
  }
  return {Type{DType::f32, r.in(0).shape}};
}
std::vector<Type> map_type(const Typing& r) {
  const FunctionInfo& info = info_of(r.a.function);
  r.count(static_cast<std::size_t>(info.operands));
  if (info.kind == FunctionKind::counter) return counter_type(r);
  const int first = info.kind == FunctionKind::choose ? 1 : 0;
  for (int i = 0; i < info.operands; ++i) {
    r.expect(r.in(i).shape == r.in(0).shape, "operands are ", r.in(0), " and ", r.in(i),
             ", expected equal shapes");
    if (i < first || info.kind == FunctionKind::logical) {
      r.expect(r.in(i).dtype == DType::i8, "operand ", i, " is ", r.in(i),
               ", expected i8 (a condition)");
    } else {
      r.expect(r.in(i).dtype == r.in(first).dtype, "operands are ", r.in(first), " and ", r.in(i),
               ", expected equal dtypes");
    }
  }
  if (info.kind == FunctionKind::real) r.floating(0);
  const bool truth = info.kind == FunctionKind::compare || info.kind == FunctionKind::logical;
  return {Type{truth ? DType::i8 : r.in(first).dtype, r.in(0).shape}};
}

std::vector<Tensor> map_value(const Evaluation& e) {
  Tensor out = oracle::tensor_of(e.node.results[0]);
  const auto in = [&](std::size_t operand, std::size_t i) {
    return operand < e.operands.size() ? e.in(operand).data[i] : 0.0;
  };
  const Function function = e.node.attributes->function;
  const DType dtype = e.node.results[0].dtype;
  for (std::size_t i = 0; i < out.data.size(); ++i) {
    out.data[i] = is_index(dtype)
                      ? oracle::evaluate_integers(function, dtype, in(0, i), in(1, i), in(2, i))
                      : evaluate(function, in(0, i), in(1, i), in(2, i));
  }
  return {std::move(out)};
}

// Returns the derivative of a function of one operand.
Value derivative_of_one(Derivation& d) {
  using enum Function;
  const Value x = d.x(0), y = d.y(), dy = d.dy;
  switch (d.n.attributes->function) {
    case neg:
      return d.op(neg, dy);
    case abs:
      return d.times(dy, d.op(sign, x));
    case exp:
      return d.times(dy, y);
    case log:
      return d.op(div, dy, x);
    case log1p:
      return d.op(div, dy, d.op(add, x, d.number(1.0)));
    case expm1:
      return d.times(dy, d.op(add, y, d.number(1.0)));
    case sqrt:
      return d.op(div, d.times(dy, d.number(0.5)), y);
    case rsqrt:
      return d.times(d.times(dy, d.number(-0.5)), d.times(y, d.times(y, y)));
    case tanh:
      return d.times(dy, d.op(sub, d.number(1.0), d.times(y, y)));
    case erf:
      return d.times(d.times(dy, d.number(2.0 * std::numbers::inv_sqrtpi)),
                     d.op(exp, d.op(neg, d.times(x, x))));
    case sigmoid:
      return d.times(dy, d.times(y, d.op(sub, d.number(1.0), y)));
    case sin:
      return d.times(dy, d.op(cos, x));
    case cos:
      return d.op(neg, d.times(dy, d.op(sin, x)));
    case atan:
      return d.op(div, dy, d.op(add, d.number(1.0), d.times(x, x)));
    case erfc:
      return d.times(d.times(dy, d.number(-2.0 * std::numbers::inv_sqrtpi)),
                     d.op(exp, d.op(neg, d.times(x, x))));
    case lgamma:
      return d.times(dy, d.op(digamma, x));
    case digamma:
      return d.times(dy, d.op(trigamma, x));
    case trigamma:
      throw InvalidArgument("trigamma has no gradient: it would be a polygamma of order 2");
    default:
      return {};  // floor, sign, logical functions
  }
}

// d/da = b a^(b - 1), 0 where b is 0; d/db = y log a, 0 where a is 0.
std::vector<Value> derivative_of_pow(Derivation& d) {
  using enum Function;
  const Value a = d.x(0), b = d.x(1), zero = d.number(0.0);
  const Value first = d.op(mul, d.op(mul, d.dy, b), d.op(pow, a, d.op(sub, b, d.number(1.0))));
  const Node& exponent = d.g.node(b);
  if (exponent.op == Op::constant)
    return {exponent.attributes->number == 0.0 ? zero : first, Value{}};
  return {d.op(select, d.op(eq, b, zero), zero, first),
          d.op(select, d.op(eq, a, zero), zero, d.op(mul, d.op(mul, d.dy, d.y()), d.op(log, a)))};
}

std::vector<Value> map_gradient(Derivation& d) {
  using enum Function;
  if (!is_float(d.n.results[0].dtype)) return d.none();
  const Function function = d.n.attributes->function;
  if (d.n.operands.size() == 1) return {derivative_of_one(d)};
  switch (function) {
    case add:
      return {d.dy, d.dy};
    case sub:
      return {d.dy, d.op(neg, d.dy)};
    case mul:
      return {d.times(d.dy, d.x(1)), d.times(d.dy, d.x(0))};
    case div: {
      const Value first = d.op(div, d.dy, d.x(1));
      return {first, d.op(neg, d.op(mul, first, d.y()))};
    }
    case pow:
      return derivative_of_pow(d);
    case fmod: {  // the quotient of a - fmod(a, b) is whole
      const Value quotient = d.op(div, d.op(sub, d.x(0), d.y()), d.x(1));
      return {d.dy, d.op(neg, d.op(mul, d.dy, quotient))};
    }
    case max:
    case min: {
      const Function wins = function == max ? gt : lt;
      const Value zero = d.number(0.0), half = d.op(mul, d.dy, d.number(0.5));
      const Value tie = d.op(select, d.op(eq, d.x(0), d.x(1)), half, zero);
      return {d.op(select, d.op(wins, d.x(0), d.x(1)), d.dy, tie),
              d.op(select, d.op(wins, d.x(1), d.x(0)), d.dy, tie)};
    }
    case select: {
      const Value zero = d.number(0.0);
      return {Value{}, d.op(select, d.x(0), d.dy, zero), d.op(select, d.x(0), zero, d.dy)};
    }
    default:
      return d.none();
  }
}

int map_degree(const Linearity& l) {
  switch (l.node.attributes->function) {
    case Function::neg:
      return 1;
    case Function::add:
    case Function::sub:
      return l.equal(0);
    case Function::mul:
      return l.product();
    case Function::div:
      return l.without(1);
    case Function::select:
      return l.in[0] == 0 ? l.equal(1) : -1;
    default:
      return -1;
  }
}

ZeroSign map_zeros(const Node& n, std::size_t operand) {
  switch (n.attributes->function) {
    case Function::abs:
    case Function::exp:
    case Function::log:
    case Function::cos:
    case Function::erfc:
    case Function::lgamma:
    case Function::trigamma:
    case Function::sigmoid:
    case Function::eq:
    case Function::ne:
    case Function::lt:
    case Function::le:
    case Function::gt:
    case Function::ge:
    case Function::logical_and:
    case Function::logical_or:
    case Function::logical_not:
      return ZeroSign::loses;
    case Function::div:
      return operand == 1 ? ZeroSign::sees : ZeroSign::makes;
    case Function::rsqrt:
    case Function::digamma:
    case Function::pow:
      return ZeroSign::sees;
    default:
      return ZeroSign::makes;
  }
}

Rounding map_rounding(const Node& n, std::size_t operand) {
  if (is_costly(n)) return Rounding::loses;
  switch (n.attributes->function) {
    case Function::sqrt:
    case Function::rsqrt:
      return Rounding::loses;
    case Function::neg:
    case Function::abs:
    case Function::add:
    case Function::sub:
    case Function::mul:
    case Function::div:
    case Function::max:
    case Function::min:
      return Rounding::moves;
    case Function::select:
      return operand == 0 ? Rounding::sees : Rounding::moves;
    default:
      return Rounding::sees;
  }
}

bool place_map(Lowering& l, Value v, const Destination& to) {
  return l.place_sum(v, to) || l.write_there(v, to);
}
void map_arrange(Lowering& l, int id) { l.arrange_put({id, 0}); }
int map_register(PointwiseBuilder& b, Value v) {
  const Node& n = b.graph().node(v);
  int r[3] = {PointwiseBuilder::kNone, PointwiseBuilder::kNone, PointwiseBuilder::kNone};
  for (std::size_t i = 0; i < n.operands.size(); ++i) {
    r[i] = b.value(n.operands[i]);
    if (!PointwiseBuilder::is_leaf(r[i]) && rounds_operand(b.graph(), n, n.operands[i]))
      r[i] = b.round(b.graph().type(n.operands[i]).dtype, r[i]);
  }
  return b.step(n.attributes->function, r[0], r[1], r[2], n.results[0].dtype);
}
void emit_elementwise(Lowering& l, int node) { l.emit_elementwise(node); }

// --- cast, stop_gradient

std::vector<Type> cast_type(const Typing& r) {
  r.count(1);
  return {Type{r.a.type.dtype, r.in(0).shape}};
}
bool is_whole(DType dtype) { return dtype == DType::i8 || is_index(dtype); }
std::vector<Tensor> cast_value(const Evaluation& e) {
  Tensor out = e.in(0);
  const DType to = e.node.attributes->type.dtype;
  if (is_whole(to) && !is_whole(e.graph.type(e.node.operands[0]).dtype)) {
    const double most = to == DType::i32 ? 0x1p31 : 0x1p63;
    for (double& x : out.data)
      x = !is_index(to) || (x >= -most && x < most) ? std::trunc(x) : -most;
  }
  if (e.node.results[0].dtype == DType::i32) {
    for (double& x : out.data) x = std::isfinite(x) ? oracle::wrapped(DType::i32, x) : x;
  }
  return {std::move(out)};
}
std::vector<Value> cast_gradient(Derivation& d) {
  if (!is_float(d.operand_type(0).dtype)) return d.none();
  return {cast(d.g, d.dy, d.operand_type(0).dtype)};
}

ZeroSign cast_zeros(const Node& n, std::size_t) {
  // Truncating -0.5 to an integer gives -0 in doubles.
  return is_whole(n.results[0].dtype) ? ZeroSign::makes : ZeroSign::moves;
}
Rounding cast_rounding(const Node& n, std::size_t) {
  const DType to = n.results[0].dtype;
  if (to == DType::bf16 || to == DType::f16) return Rounding::loses;
  return is_float(to) ? Rounding::moves : Rounding::sees;
}
int cast_degree(const Linearity& l) {
  const DType to = l.node.results[0].dtype;
  return to == DType::f32 || to == DType::bf16 || to == DType::f64 ? 1 : -1;
}

bool place_cast(Lowering& l, Value v, const Destination& to) { return l.write_there(v, to); }
int cast_register(PointwiseBuilder& b, Value v) {
  const Node& n = b.graph().node(v);
  const int x = b.value(n.operands[0]);
  const DType from = b.graph().type(n.operands[0]).dtype, to = n.results[0].dtype;
  const bool widens = to == DType::f64 || (to == DType::f32 && from != DType::f64);
  const bool same = is_index(to)     ? from == DType::i8 || from == DType::i32
                    : is_index(from) ? false  // choose_registers() drops what rounds nothing
                                     : widens;
  return from == to || same ? x : b.round(to, x);
}

std::vector<Type> same_type(const Typing& r) {
  r.count(1);
  return {r.in(0)};
}
View same_view(Lowering& l, Value v) { return l.memory_of(l.graph().node(v).operands[0]); }
bool place_same(Lowering& l, Value v, const Destination& to) {
  const Value from = l.graph().node(v).operands[0];
  std::optional<View> view = reshaped(to.view, sizes_of(l.type(from)));
  return view && l.place(from, to.with(*view));
}
std::vector<Tensor> same_value(const Evaluation& e) { return {e.in(0)}; }

constexpr Operation kOperations[] = {
    {
        .op = Op::parameter,
        .name = "parameter",
        .infer = parameter_type,
        .statement = false,
        .gradient = no_gradient,
    },
    {
        .op = Op::constant,
        .name = "constant",
        .work = Work::none,
        .of_nothing = true,
        .infer = constant_type,
        .typed = true,
        .keys = kConstantKeys,
        .evaluate = constant_value,
        .gradient = no_gradient,
        .cut_by_result = cut_as_result,
        .clone = clone_constant,
        .registers = constant_register,
    },
    {
        .op = Op::iota,
        .name = "iota",
        .work = Work::none,
        .of_nothing = true,
        .infer = iota_type,
        .typed = true,
        .keys = kAxis,
        .evaluate = iota_value,
        .gradient = no_gradient,
        .cut_by_result = cut_of_iota,
        .clone = clone_iota,
        .registers = iota_register,
    },
    {
        .op = Op::map,
        .name = "map",
        .work = Work::elementwise,
        .infer = map_type,
        .reads = is_function,
        .spelling = function_name,
        .evaluate = map_value,
        .gradient = map_gradient,
        .zero_sign = map_zeros,
        .rounding = map_rounding,
        .cut_by_result = cut_as_result,
        .cut_by_operand = cut_as_operand,
        .degree = map_degree,
        .arrange = map_arrange,
        .place = place_map,
        .registers = map_register,
        .emit = emit_elementwise,
    },
    {
        .op = Op::cast,
        .name = "cast",
        .work = Work::elementwise,
        .infer = cast_type,
        .typed = true,
        .evaluate = cast_value,
        .gradient = cast_gradient,
        .zero_sign = cast_zeros,
        .rounding = cast_rounding,
        .cut_by_result = cut_as_result,
        .cut_by_operand = cut_as_operand,
        .degree = cast_degree,
        .place = place_cast,
        .registers = cast_register,
        .emit = emit_elementwise,
    },
    {
        .op = Op::stop_gradient,
        .name = "stop_gradient",
        .work = Work::none,
        .infer = same_type,
        .evaluate = same_value,
        .gradient = no_gradient,
        .zero_sign = zeros<ZeroSign::moves>,
        .rounding = rounds<Rounding::moves>,
        .cut_by_result = cut_as_result,
        .cut_by_operand = cut_as_operand,
        .place = place_same,
        .view = same_view,
    },
};

}  // namespace

std::span<const Operation> pointwise_operations() { return kOperations; }

}  // namespace logitless::ir
