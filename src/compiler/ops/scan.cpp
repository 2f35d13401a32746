// cumsum, cumlse: running sums or log-sum-exps along an axis.
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

std::string_view scan_name(Reduce kind) { return kind == Reduce::lse ? "cumlse" : "cumsum"; }

std::vector<Type> scan_type(const Typing& given) {
  const Typing r{scan_name(given.a.reduce), given.operands, given.a};
  r.count(1);
  r.axis(r.in(0).rank());
  r.expect(r.in(0).dtype != DType::i8, "an i8 is a condition: cast it first");
  if (r.a.reduce == Reduce::lse) r.floating(0);
  return {r.in(0)};
}

bool reads(std::string_view name, Attributes& a) {
  for (const Reduce kind : {Reduce::sum, Reduce::lse}) {
    a.reduce = kind;
    if (name == scan_name(kind)) return true;
  }
  a.reduce = Reduce::sum;
  return false;
}
std::string spelling(const Attributes& a) { return std::string(scan_name(a.reduce)); }
constexpr TextKey kKeys[] = {key<&Attributes::axis>("axis"), key<&Attributes::reverse>("reverse")};

std::vector<Tensor> scan_value(const Evaluation& e) {
  const Attributes& a = e.node.attributes;
  const Tensor& x = e.in(0);
  const auto axis = static_cast<std::size_t>(a.axis);
  const std::int64_t size = x.shape[axis];
  Index rows = x.shape;
  rows[axis] = std::min<std::int64_t>(size, 1);
  Tensor out = oracle::tensor_of(e.node.results[0]);
  oracle::each(rows, [&](Index at) {
    double so_far = oracle::start(a.reduce);
    for (std::int64_t k = 0; k < size; ++k) {
      at[axis] = a.reverse ? size - 1 - k : k;
      so_far = oracle::merged(a.reduce, so_far, oracle::at(x, at));
      oracle::at(out, at) = so_far;
    }
  });
  return {std::move(out)};
}

Value scanned(Derivation& d, Reduce kind, Value x) {
  Attributes back = d.n.attributes;
  back.reduce = kind;
  back.reverse = !back.reverse;
  return d.g.add(Op::scan, {x}, back);
}
// The gradient of log-sum-exps y at element x is the sum of dy exp(x - y) over the results that
// include x. Computed by logarithms of dy's positive and negative parts, so that no exponential
// overflows.
std::vector<Value> scan_gradient(Derivation& d) {
  using enum Function;
  if (!is_float(d.n.results[0].dtype)) return d.none();
  if (d.n.attributes->reduce == Reduce::sum) return {scanned(d, Reduce::sum, d.dy)};
  const auto share = [&](Value part) {
    const Value logs = d.op(sub, d.op(log, d.op(max, part, d.number(0.0))), d.y());
    return d.op(exp, d.op(add, scanned(d, Reduce::lse, logs), d.x(0)));
  };
  return {d.op(sub, share(d.dy), share(d.op(neg, d.dy)))};
}

int scan_degree(const Linearity& l) { return l.node.attributes->reduce == Reduce::sum ? 1 : -1; }

std::optional<Chunked> scan_cut(const CutNode& c, const Split& s) {
  return inside(c.a.axis, s) ? std::nullopt : cut_as_result(c, s);
}
Value scan_clone(ChunkClone& c) {
  c.a.axis = c.result.dim(c.a.axis);
  return c.add();
}

bool scan_place(Lowering& l, Value v, const Destination& to) {
  return to.kind == Destination::Kind::write && l.write_there(v, to);
}
void scan_emit(Lowering& l, int id) {
  const Node& n = l.node(id);
  Scan scan;
  scan.x = l.memory_of(n.operands[0]);
  scan.axis = n.attributes->axis;
  scan.kind = n.attributes->reduce;
  scan.reverse = n.attributes->reverse;
  scan.out = l.result_of({id, 0});
  l.push(id, std::move(scan));
}

constexpr Operation kOperations[] = {{
    .op = Op::scan,
    .name = "scan",
    .infer = scan_type,
    .keys = kKeys,
    .reads = reads,
    .spelling = spelling,
    .evaluate = scan_value,
    .gradient = scan_gradient,
    .zero_sign = zeros<ZeroSign::loses>,
    .rounding = rounds<Rounding::loses>,
    .cut_by_result = scan_cut,
    .cut_by_operand = cut_as_operand,
    .degree = scan_degree,
    .clone = scan_clone,
    .place = scan_place,
    .emit = scan_emit,
}};

}  // namespace

std::span<const Operation> scan_operations() { return kOperations; }

}  // namespace logitless::ir
