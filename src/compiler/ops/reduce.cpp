// reduce: sum, max, log-sum-exp or argmax over dimensions, which vanish.
#include "compiler/analysis/chunk_clone.h"
#include "compiler/analysis/cut.h"
#include "compiler/analysis/linearity.h"
#include "compiler/ir/derivation.h"
#include "compiler/ir/evaluation.h"
#include "compiler/ir/typing.h"
#include "compiler/ops/families.h"
#include "compiler/ops/text_key.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

using oracle::at;
using oracle::each;
using oracle::Index;
using oracle::permuted;

std::vector<Type> reduce_type(const Typing& given) {
  const std::string what = concat("reduce_", name_of(given.a.reduce));
  const Typing r{what, given.operands, given.a};
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
  if (r.a.reduce == Reduce::lse) r.floating(0);
  r.expect(r.in(0).dtype != DType::i8, "an i8 is a condition: cast it first");
  type.dtype = r.wider(r.in(0).dtype);
  return {type};
}

// --- text: reduce_sum, reduce_max, reduce_lse, argmax

std::string spelling(const Attributes& a) {
  return a.reduce == Reduce::argmax ? "argmax" : concat("reduce_", name_of(a.reduce));
}
bool reads(std::string_view name, Attributes& a) {
  for (const Reduce kind : {Reduce::sum, Reduce::max, Reduce::lse, Reduce::argmax}) {
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
  const auto searched = static_cast<std::size_t>(e.node.attributes.dims[0]);
  each(x.shape, [&](const Index& index) {
    const std::size_t to = oracle::offset(out.shape, permuted(index, kept));
    const double v = at(x, index);
    // The first of equals; a NaN is greater than all.
    if (!seen[to] || v > best.data[to] || (std::isnan(v) && !std::isnan(best.data[to]))) {
      best.data[to] = v;
      out.data[to] = static_cast<double>(index[searched]);
      seen[to] = true;
    }
  });
  return out;
}

// Two passes: sums of exponentials against the maximum.
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
  });
  return {std::move(out)};
}

// --- gradient

std::vector<Value> reduce_gradient(Derivation& d) {
  const Type to = d.operand_type(0);
  const std::vector<int>& dims = d.n.attributes.dims;
  // Over the operand: the gradient or value of the result.
  const auto spread = [&](Value v) {
    return broadcast(d.g, cast(d.g, v, to.dtype), to.shape, other_dims(to.rank(), dims));
  };
  switch (d.n.attributes.reduce) {
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
    case Reduce::argmax:
      break;
  }
  return d.none();
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
  if (where == Found::mixed || c.a.reduce == Reduce::argmax) return {};
  constexpr Chunked::Kind kKinds[] = {Chunked::Kind::sum, Chunked::Kind::max, Chunked::Kind::lse};
  return {std::nullopt, partial(kKinds[static_cast<int>(c.a.reduce)], {part(s)})};
}
int reduce_degree(const Linearity& l) { return l.node.attributes.reduce == Reduce::sum ? 1 : -1; }
Value reduce_clone(ChunkClone& c) {
  c.a.dims = c.from[0].dims(c.a.dims);
  return c.merged(c.add());
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
    .cut_by_result = reduce_cut,
    .cut_by_operand = reduce_lead,
    .degree = reduce_degree,
    .clone = reduce_clone,
}};

}  // namespace

std::span<const Operation> reduce_operations() { return kOperations; }

}  // namespace logitless::ir
