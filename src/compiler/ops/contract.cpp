// dot: a general contraction. The result's dimensions are those of the batch, then those of a
// alone, then those of b alone.
#include <algorithm>

#include "compiler/analysis/chunk_clone.h"
#include "compiler/analysis/cut.h"
#include "compiler/analysis/linearity.h"
#include "compiler/ir/derivation.h"
#include "compiler/ir/evaluation.h"
#include "compiler/ir/typing.h"
#include "compiler/ops/families.h"
#include "compiler/ops/text_key.h"

namespace logitless::ir {
namespace {

using oracle::each;
using oracle::Index;

std::vector<int> joined(std::vector<int> first, const std::vector<int>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

std::vector<Type> dot_type(const Typing& r) {
  r.count(2);
  const Type &x = r.in(0), &y = r.in(1);
  r.floating(0);
  r.expect(x.dtype == y.dtype, "operands are ", text_of(x), " and ", text_of(y),
           ", expected equal dtypes");
  r.expect(r.a.batch_a.size() == r.a.batch_b.size(), "batch names ", r.a.batch_a.size(), " and ",
           r.a.batch_b.size(), " dimensions");
  r.expect(r.a.contract_a.size() == r.a.contract_b.size(), "contract names ", r.a.contract_a.size(),
           " and ", r.a.contract_b.size(), " dimensions");
  const std::vector<int> used_a = joined(r.a.batch_a, r.a.contract_a);
  const std::vector<int> used_b = joined(r.a.batch_b, r.a.contract_b);
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
  for (const int d : other_dims(x.rank(), used_a))
    type.shape.push_back(x.shape[static_cast<std::size_t>(d)]);
  for (const int d : other_dims(y.rank(), used_b))
    type.shape.push_back(y.shape[static_cast<std::size_t>(d)]);
  return {type};
}

constexpr TextKey kKeys[] = {
    optional_pair_key<&Attributes::batch_a, &Attributes::batch_b>("batch"),
    pair_key<&Attributes::contract_a, &Attributes::contract_b>("contract")};

// --- float64

// Where dimension d of an operand is found: in the result's index, or -1 - i: contracted one i.
// `next`: the first of its own dimensions in the result, then the one behind them.
std::vector<int> places_of(std::size_t rank, const std::vector<int>& batch,
                           const std::vector<int>& contract, int& next) {
  std::vector<int> place(rank, 0);
  std::vector<bool> used(rank);
  for (std::size_t i = 0; i < batch.size(); ++i) {
    place[static_cast<std::size_t>(batch[i])] = static_cast<int>(i);
    used[static_cast<std::size_t>(batch[i])] = true;
  }
  for (std::size_t i = 0; i < contract.size(); ++i) {
    place[static_cast<std::size_t>(contract[i])] = -1 - static_cast<int>(i);
    used[static_cast<std::size_t>(contract[i])] = true;
  }
  for (std::size_t d = 0; d < rank; ++d) {
    if (!used[d]) place[d] = next++;
  }
  return place;
}

std::vector<Tensor> dot_value(const Evaluation& e) {
  const Attributes& a = e.node.attributes;
  const Tensor &x = e.in(0), &y = e.in(1);
  Index contracted;
  for (const int d : a.contract_a) contracted.push_back(x.shape[static_cast<std::size_t>(d)]);
  int next = static_cast<int>(a.batch_a.size());
  const std::vector<int> place_x = places_of(x.shape.size(), a.batch_a, a.contract_a, next);
  const std::vector<int> place_y = places_of(y.shape.size(), a.batch_b, a.contract_b, next);
  const auto find = [](const Tensor& t, const std::vector<int>& place, const Index& at,
                       const Index& k) {
    Index index(place.size());
    for (std::size_t d = 0; d < place.size(); ++d)
      index[d] = place[d] >= 0 ? at[static_cast<std::size_t>(place[d])]
                               : k[static_cast<std::size_t>(-1 - place[d])];
    return oracle::at(t, index);
  };
  return oracle::filled(e, [&](const Index& at) {
    double sum = 0.0;
    each(contracted,
         [&](const Index& k) { sum += find(x, place_x, at, k) * find(y, place_y, at, k); });
    return sum;
  });
}

// --- gradient

// One operand's part in a dot.
struct Side {
  std::size_t operand;
  const std::vector<int>&batch, &contract;
  std::vector<int> free;
};

// dy . other over the free dimensions of the other operand, which begin at first_contracted in dy,
// with the dimensions brought into the order of this one.
Value side_gradient(Derivation& d, const Side& to, const Side& other, int first_contracted) {
  const DType dtype = d.operand_type(to.operand).dtype;
  Attributes a;
  for (int i = 0; i < static_cast<int>(to.batch.size()); ++i) a.batch_a.push_back(i);
  a.batch_b = other.batch;
  for (std::size_t i = 0; i < other.free.size(); ++i)
    a.contract_a.push_back(first_contracted + static_cast<int>(i));
  a.contract_b = other.free;
  const Value product = d.g.add(Op::dot, {cast(d.g, d.dy, dtype), d.x(other.operand)}, a);
  // The product's dimensions: batch, free of `to`, then the contracted ones as they stand in the
  // other operand.
  std::vector<int> place = joined(to.batch, to.free);
  std::vector<int> order(other.contract);
  std::sort(order.begin(), order.end());
  for (const int dim : order) {
    const auto at =
        std::find(other.contract.begin(), other.contract.end(), dim) - other.contract.begin();
    place.push_back(to.contract[static_cast<std::size_t>(at)]);
  }
  std::vector<int> dims(place.size());
  for (std::size_t i = 0; i < place.size(); ++i)
    dims[static_cast<std::size_t>(place[i])] = static_cast<int>(i);
  return transpose(d.g, product, dims);
}

std::vector<Value> dot_gradient(Derivation& d) {
  const Attributes& at = d.n.attributes;
  const auto free = [&](std::size_t operand, const std::vector<int>& batch,
                        const std::vector<int>& contract) {
    return other_dims(d.operand_type(operand).rank(), joined(batch, contract));
  };
  const Side a{0, at.batch_a, at.contract_a, free(0, at.batch_a, at.contract_a)};
  const Side b{1, at.batch_b, at.contract_b, free(1, at.batch_b, at.contract_b)};
  const int batch = static_cast<int>(at.batch_a.size());
  return {side_gradient(d, a, b, batch + static_cast<int>(a.free.size())),
          side_gradient(d, b, a, batch)};
}

// --- chunks

struct Places {
  int batch, free_a;
  std::vector<int> a, b;  // dimensions of the operands in the order of the result: batch, then free
};
Places places(const CutNode& c) {
  const Attributes& at = c.a;
  const std::vector<int> free_a = other_dims(c.rank(0), joined(at.batch_a, at.contract_a));
  const std::vector<int> free_b = other_dims(c.rank(1), joined(at.batch_b, at.contract_b));
  return {static_cast<int>(at.batch_a.size()), static_cast<int>(free_a.size()),
          joined(at.batch_a, free_a), joined(at.batch_b, free_b)};
}

std::optional<Chunked> dot_cut(const CutNode& c, const Split& s) {
  const Places p = places(c);
  const int last = s.dim + s.count;
  if (last <= p.batch) {
    const std::optional<Split> x = through(s, p.a), y = through(s, p.b);
    return x && y ? std::optional(cut(s, {part(*x), part(*y)})) : std::nullopt;
  }
  if (s.dim >= p.batch && last <= p.batch + p.free_a) {
    const std::optional<Split> x = through(s, p.a);
    return x ? std::optional(cut(s, {part(*x), Need{}})) : std::nullopt;
  }
  if (s.dim >= p.batch + p.free_a) {
    const std::optional<Split> y = through({s.dim - p.free_a, s.count, s.factor}, p.b);
    return y ? std::optional(cut(s, {Need{}, part(*y)})) : std::nullopt;
  }
  return std::nullopt;
}

// Along a dimension of the result, or a partial sum along a contracted one.
Lead dot_lead(const CutNode& c, std::size_t i, const Split& s) {
  const Places p = places(c);
  Split to;
  Found where = found(s, i == 0 ? p.a : p.b, to);
  if (where == Found::all) {
    if (i == 1 && to.dim >= p.batch) to.dim += p.free_a;
    if (i == 1 && to.dim < p.batch && to.dim + to.count > p.batch) return {};
    return {to};
  }
  where = found(s, i == 0 ? c.a.contract_a : c.a.contract_b, to);
  if (where != Found::all) return {};
  const std::optional<Split> other = through(to, i == 0 ? c.a.contract_b : c.a.contract_a);
  if (!other) return {};
  std::vector<Need> needs = {part(i == 0 ? s : *other), part(i == 0 ? *other : s)};
  return {std::nullopt, partial(Chunked::Kind::sum, std::move(needs))};
}
int dot_degree(const Linearity& l) { return l.product(); }
Value dot_clone(ChunkClone& c) {
  c.a.batch_a = c.from[0].dims(c.a.batch_a);
  c.a.batch_b = c.from[1].dims(c.a.batch_b);
  c.a.contract_a = c.from[0].dims(c.a.contract_a);
  c.a.contract_b = c.from[1].dims(c.a.contract_b);
  return c.add();
}

constexpr Operation kOperations[] = {{
    .op = Op::dot,
    .name = "dot",
    .sums = true,
    .infer = dot_type,
    .keys = kKeys,
    .evaluate = dot_value,
    .gradient = dot_gradient,
    .cut_by_result = dot_cut,
    .cut_by_operand = dot_lead,
    .degree = dot_degree,
    .clone = dot_clone,
}};

}  // namespace

std::span<const Operation> contract_operations() { return kOperations; }

}  // namespace logitless::ir
