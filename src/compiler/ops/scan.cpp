// cumsum, cummax, cumprod, cumlse: running sums, maxima, products or log-sum-exps along an axis.
// recurrence: y[k] = a[k] y[k - 1] + b[k] along it.
#include <algorithm>
#include <cmath>
#include <limits>

#include "compiler/analysis/chunk_clone.h"
#include "compiler/analysis/cut.h"
#include "compiler/analysis/linearity.h"
#include "compiler/ir/derivation.h"
#include "compiler/ir/evaluation.h"
#include "compiler/ir/typing.h"
#include "compiler/ops/families.h"
#include "compiler/ops/text_key.h"
#include "compiler/plan/lowering.h"

namespace logitless::ir {
namespace {

using oracle::Index;

constexpr Reduce kKinds[] = {Reduce::sum, Reduce::max, Reduce::lse, Reduce::product};

std::string_view scan_name(Reduce kind) {
  switch (kind) {
    case Reduce::max:
      return "cummax";
    case Reduce::lse:
      return "cumlse";
    case Reduce::product:
      return "cumprod";
    default:
      return "cumsum";
  }
}

std::vector<Type> scan_type(const Typing& given) {
  const Typing r{scan_name(given.a.reduce), given.operands, given.a};
  r.count(1);
  r.axis(r.in(0).rank());
  r.expect(r.in(0).dtype != DType::i8, "an i8 is a condition: cast it first");
  if (r.a.reduce == Reduce::lse || r.a.reduce == Reduce::product) r.floating(0);
  return {r.in(0)};
}

bool reads(std::string_view name, Attributes& a) {
  for (const Reduce kind : kKinds) {
    a.reduce = kind;
    if (name == scan_name(kind)) return true;
  }
  a.reduce = Reduce::sum;
  return false;
}
std::string spelling(const Attributes& a) { return std::string(scan_name(a.reduce)); }
constexpr TextKey kKeys[] = {key<&Attributes::axis>("axis"), key<&Attributes::reverse>("reverse")};

// --- float64

// Calls visit(at, first) along each row, in the order of the scan.
template <typename F>
void along_rows(const Attributes& a, const Index& shape, F&& visit) {
  const auto axis = static_cast<std::size_t>(a.axis);
  const std::int64_t size = shape[axis];
  Index rows = shape;
  rows[axis] = std::min<std::int64_t>(size, 1);
  oracle::each(rows, [&](Index at) {
    for (std::int64_t k = 0; k < size; ++k) {
      at[axis] = a.reverse ? size - 1 - k : k;
      visit(at, k == 0);
    }
  });
}

std::vector<Tensor> scan_value(const Evaluation& e) {
  const Reduce kind = e.node.attributes->reduce;
  const Tensor& x = e.in(0);
  Tensor out = oracle::tensor_of(e.node.results[0]);
  double so_far = 0.0;
  along_rows(*e.node.attributes, x.shape, [&](const Index& at, bool first) {
    so_far = oracle::merged(kind, first ? oracle::start(kind) : so_far, oracle::at(x, at));
    oracle::at(out, at) = so_far;
  });
  return {std::move(out)};
}

std::vector<Tensor> recurrence_value(const Evaluation& e) {
  const Tensor &a = e.in(0), &b = e.in(1);
  Tensor out = oracle::tensor_of(e.node.results[0]);
  double last = 0.0;
  along_rows(*e.node.attributes, b.shape, [&](const Index& at, bool first) {
    last = first ? oracle::at(b, at) : oracle::at(a, at) * last + oracle::at(b, at);
    oracle::at(out, at) = last;
  });
  return {std::move(out)};
}

// --- gradients

Value scanned(Derivation& d, Reduce kind, Value x, bool reverse) {
  Attributes a = d.n.attributes;
  a.reduce = kind;
  a.reverse = reverse;
  return d.g.add(Op::scan, {x}, a);
}
Value scanned_back(Derivation& d, Reduce kind, Value x) {
  return scanned(d, kind, x, !d.n.attributes->reverse);
}

// Moves elements along the axis: to the place after theirs in the order of the scan, or before it
// with `back`. `fill` is in the place that becomes free.
Value moved(Derivation& d, Value x, double fill, bool back = false) {
  const Type type = d.g.type(x);
  const auto axis = static_cast<std::size_t>(d.n.attributes->axis);
  const Dim size = type.shape[axis];
  if (size == Dim(0)) return x;
  const bool up = d.n.attributes->reverse == back;  // to the next greater index
  Shape begin(type.shape.size(), Dim(0)), end = type.shape, one = type.shape;
  begin[axis] = Dim(up ? 0 : 1);
  end[axis] = up ? size - Dim(1) : size;
  one[axis] = Dim(1);
  const Value kept = slice(d.g, x, begin, end), free = constant(d.g, fill, {type.dtype, one});
  Attributes joined;
  joined.axis = d.n.attributes->axis;
  return d.g.add(Op::concat, up ? std::vector{free, kept} : std::vector{kept, free}, joined);
}

// Returns g[k] = dy[k] + a[k + 1] g[k + 1]: the gradient of all results by what is added at k.
Value recurred_back(Derivation& d, Value factors) {
  Attributes a = d.n.attributes;
  a.reduce = Reduce::sum;
  a.reverse = !a.reverse;
  return d.g.add(Op::recurrence, {moved(d, factors, 1.0, true), d.dy}, a);
}

// The gradient of log-sum-exps y at element x is the sum of dy exp(x - y) over the results that
// include x. Computed by logarithms of dy's positive and negative parts, so that no exponential
// overflows.
Value gradient_of_logs(Derivation& d) {
  using enum Function;
  const auto share = [&](Value part) {
    const Value logs = d.op(sub, d.op(log, d.op(max, part, d.number(0.0))), d.y());
    return d.op(exp, d.op(add, scanned_back(d, Reduce::lse, logs), d.x(0)));
  };
  return d.op(sub, share(d.dy), share(d.op(neg, d.dy)));
}

// The gradient of each running maximum is that of the last element that is equal to it, or NaN.
Value gradient_of_maxima(Derivation& d) {
  using enum Function;
  const Type whole{DType::i64, d.n.results[0].shape};
  const int axis = d.n.attributes->axis;
  const bool reverse = d.n.attributes->reverse;
  const Value number = iota(d.g, whole, axis);
  const Value place = reverse ? d.op(neg, number) : number;  // grows in the order of the scan
  const Value x = d.x(0);
  const Value hit = d.op(logical_or, d.op(eq, x, d.y()), d.op(ne, x, x));
  const Value hits = d.op(select, hit, place, constant(d.g, -0x1p62, whole));
  const Value last = scanned(d, Reduce::max, hits, reverse);
  Attributes put;
  put.axis = axis;
  put.type.shape = {whole.shape[static_cast<std::size_t>(axis)]};
  return d.g.add(Op::put, {reverse ? d.op(neg, last) : last, d.dy}, put);
}

std::vector<Value> scan_gradient(Derivation& d) {
  if (!is_float(d.n.results[0].dtype)) return d.none();
  switch (d.n.attributes->reduce) {
    case Reduce::sum:
      return {scanned_back(d, Reduce::sum, d.dy)};
    case Reduce::max:
      return {gradient_of_maxima(d)};
    case Reduce::product:  // no quotient is taken, so that zeros count
      return {d.times(recurred_back(d, d.x(0)), moved(d, d.y(), 1.0))};
    default:
      return {gradient_of_logs(d)};
  }
}

std::vector<Value> recurrence_gradient(Derivation& d) {
  const Value added = recurred_back(d, d.x(0));
  return {d.times(added, moved(d, d.y(), 0.0)), added};
}

// --- passes

int scan_degree(const Linearity& l) { return l.node.attributes->reduce == Reduce::sum ? 1 : -1; }

ZeroSign scan_zeros(const Node& n, std::size_t) {
  switch (n.attributes->reduce) {
    case Reduce::max:
      return ZeroSign::moves;
    case Reduce::product:
      return ZeroSign::makes;
    default:
      return ZeroSign::loses;
  }
}
Rounding scan_rounding(const Node& n, std::size_t) {
  const Reduce kind = n.attributes->reduce;
  return kind == Reduce::max || kind == Reduce::product ? Rounding::moves : Rounding::loses;
}

std::optional<Chunked> scan_cut(const CutNode& c, const Split& s) {
  return inside(c.a.axis, s) ? std::nullopt : cut_as_result(c, s);
}
Value scan_clone(ChunkClone& c) {
  c.a.axis = c.result.dim(c.a.axis);
  return c.add();
}

// --- instructions

bool scan_place(Lowering& l, Value v, const Destination& to) {
  return to.kind == Destination::Kind::write && l.write_there(v, to);
}
void scan_emit(Lowering& l, int id) {
  const Node& n = l.node(id);
  Scan scan;
  const bool recurs = n.op == Op::recurrence;
  scan.x = l.memory_of(n.operands[recurs ? 1 : 0]);
  if (recurs) scan.factors = l.memory_of(n.operands[0]);
  scan.axis = n.attributes->axis;
  scan.kind = n.attributes->reduce;
  scan.reverse = n.attributes->reverse;
  scan.out = l.result_of({id, 0});
  l.push(id, std::move(scan));
}

std::vector<Type> recurrence_type(const Typing& r) {
  r.count(2);
  r.axis(r.in(0).rank());
  r.floating(0);
  r.expect(r.in(1) == r.in(0), "operands are ", r.in(0), " and ", r.in(1),
           ", expected equal types");
  return {r.in(0)};
}

constexpr Operation kOperations[] = {
    {
        .op = Op::scan,
        .name = "scan",
        .infer = scan_type,
        .keys = kKeys,
        .reads = reads,
        .spelling = spelling,
        .evaluate = scan_value,
        .gradient = scan_gradient,
        .zero_sign = scan_zeros,
        .rounding = scan_rounding,
        .cut_by_result = scan_cut,
        .cut_by_operand = cut_as_operand,
        .degree = scan_degree,
        .clone = scan_clone,
        .place = scan_place,
        .emit = scan_emit,
    },
    {
        .op = Op::recurrence,
        .name = "recurrence",
        .infer = recurrence_type,
        .keys = kKeys,
        .evaluate = recurrence_value,
        .gradient = recurrence_gradient,
        .zero_sign = zeros<ZeroSign::makes>,
        .rounding = rounds<Rounding::moves>,
        .cut_by_result = scan_cut,
        .cut_by_operand = cut_as_operand,
        .clone = scan_clone,
        .place = scan_place,
        .emit = scan_emit,
    },
};

}  // namespace

std::span<const Operation> scan_operations() { return kOperations; }

}  // namespace logitless::ir
