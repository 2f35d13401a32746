// sort: the first elements along an axis in sorted order, with their indices. Its gradient is put,
// which adds updates at indices along an axis.
#include <algorithm>
#include <cmath>
#include <numeric>

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

std::size_t axis_of(const Node& n) { return static_cast<std::size_t>(n.attributes->axis); }

// A size along the axis as an attribute: the number of sorted elements, or the size of the result.
constexpr TextKey size_key(std::string_view name) {
  return {name, [](TextReader& in, Attributes& a) { a.begin = in.sizes(); },
          [](const Attributes& a) { return written(a.begin); }};
}

// --- sort

std::vector<Type> sort_types(const Typing& r) {
  r.count(1);
  r.axis(r.in(0).rank());
  r.expect(r.in(0).dtype != DType::i8, "an i8 is a condition: cast it first");
  r.expect(r.a.begin.size() == 1, "expected one count, got ", r.a.begin.size());
  Type values = r.in(0);
  Dim& size = values.shape[static_cast<std::size_t>(r.a.axis)];
  const Dim& count = r.a.begin[0];
  r.expect(!size.is_constant() || !count.is_constant() || count.value() <= size.value(),
           count.text(), " of ", size.text(), " elements along dimension ", r.a.axis);
  size = count;
  return {values, {DType::i64, values.shape}};
}
constexpr TextKey kSortKeys[] = {key<&Attributes::axis>("axis"), size_key("count"),
                                 key<&Attributes::reverse>("descending")};

// Returns whether a precedes b: a NaN is greater than all numbers, equal elements stay in order.
bool goes_before(double a, double b, bool descending) {
  if (std::isnan(a) || std::isnan(b))
    return std::isnan(descending ? a : b) && !std::isnan(descending ? b : a);
  return descending ? a > b : a < b;
}
std::vector<Tensor> sort_value(const Evaluation& e) {
  const std::size_t axis = axis_of(e.node);
  const bool descending = e.node.attributes->reverse;
  const Tensor& x = e.in(0);
  Tensor values = oracle::tensor_of(e.node.results[0]),
         index = oracle::tensor_of(e.node.results[1]);
  const auto size = static_cast<std::size_t>(x.shape[axis]);
  Index rows = x.shape;
  rows[axis] = std::min<std::int64_t>(x.shape[axis], 1);
  oracle::each(rows, [&](Index at) {
    const auto element = [&](std::size_t k) {
      at[axis] = static_cast<std::int64_t>(k);
      return oracle::at(x, at);
    };
    std::vector<std::size_t> order(size);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return goes_before(element(a), element(b), descending);
    });
    for (std::int64_t k = 0; k < values.shape[axis]; ++k) {
      const std::size_t from = order[static_cast<std::size_t>(k)];
      const double value = element(from);
      at[axis] = k;
      oracle::at(values, at) = value;
      oracle::at(index, at) = static_cast<double>(from);
    }
  });
  return {std::move(values), std::move(index)};
}

std::vector<Value> sort_gradient(Derivation& d) {
  if (!is_float(d.operand_type(0).dtype)) return d.none();
  Attributes put;
  put.axis = d.n.attributes->axis;
  put.type.shape = {d.operand_type(0).shape[axis_of(d.n)]};
  return {d.g.add(Op::put, {d.y(1), d.dy}, put)};
}

std::optional<Chunked> sort_cut(const CutNode& c, const Split& s) {
  if (inside(c.a.axis, s)) return std::nullopt;
  Chunked chunked = cut(s, {part(s)});
  chunked.results.push_back(s);
  return chunked;
}
Lead sort_lead(const CutNode& c, std::size_t, const Split& s) {
  return inside(c.a.axis, s) ? Lead{} : Lead{s};
}
Value moved_axis(ChunkClone& c) {
  c.a.axis = c.result.dim(c.a.axis);
  return c.add();
}

bool written_anywhere(Lowering& l, Value v, const Destination& to) {
  return to.kind == Destination::Kind::write && l.write_there(v, to);
}
void sort_emit(Lowering& l, int id) {
  const Node& n = l.node(id);
  Sort sort;
  sort.x = l.memory_of(n.operands[0]);
  sort.axis = n.attributes->axis;
  sort.descending = n.attributes->reverse;
  sort.values = l.result_of({id, 0});
  sort.index = l.result_of({id, 1});
  l.push(id, std::move(sort));
}

constexpr Operation kOperations[] = {
    {
        .op = Op::sort,
        .name = "sort",
        .infer = sort_types,
        .keys = kSortKeys,
        .evaluate = sort_value,
        .gradient = sort_gradient,
        .cut_by_result = sort_cut,
        .cut_by_operand = sort_lead,
        .clone = moved_axis,
        .place = written_anywhere,
        .emit = sort_emit,
    },
};

}  // namespace

std::span<const Operation> sort_operations() { return kOperations; }

}  // namespace logitless::ir
