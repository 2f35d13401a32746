// dot: a general contraction. The result's dimensions are the batch, then the free dimensions of a,
// then those of b.
#include <algorithm>
#include <array>

#include "compiler/analysis/chunk_clone.h"
#include "compiler/analysis/cut.h"
#include "compiler/analysis/linearity.h"
#include "compiler/ir/derivation.h"
#include "compiler/ir/evaluation.h"
#include "compiler/ir/typing.h"
#include "compiler/ops/contraction.h"
#include "compiler/ops/families.h"
#include "compiler/ops/text_key.h"
#include "compiler/plan/lowering.h"

namespace logitless::ir {
namespace {

using oracle::each;
using oracle::Index;

std::vector<int> joined(std::vector<int> first, const std::vector<int>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

}  // namespace

std::vector<Type> dot_type(const Typing& r) {
  r.count(2);
  const Type &x = r.in(0), &y = r.in(1);
  r.floating(0);
  r.expect(x.dtype == y.dtype, "operands are ", x, " and ", y, ", expected equal dtypes");
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
             "dimension ", used_a[i], " of ", x, " meets dimension ", used_b[i], " of ", y);
  }
  Type type{r.wider(x.dtype), {}};
  for (const int d : r.a.batch_a) type.shape.push_back(x.shape[static_cast<std::size_t>(d)]);
  for (const int d : other_dims(x.rank(), used_a))
    type.shape.push_back(x.shape[static_cast<std::size_t>(d)]);
  for (const int d : other_dims(y.rank(), used_b))
    type.shape.push_back(y.shape[static_cast<std::size_t>(d)]);
  return {type};
}

namespace {

constexpr TextKey kKeys[] = {
    optional_pair_key<&Attributes::batch_a, &Attributes::batch_b>("batch"),
    pair_key<&Attributes::contract_a, &Attributes::contract_b>("contract")};

// --- float64

// Returns for each dimension d of an operand its position in the result, or -1 - i for contracted
// dimension i. `next` is the position of the operand's first free dimension, and is advanced past
// them.
std::vector<int> positions_of(std::size_t rank, const std::vector<int>& batch,
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

}  // namespace

std::vector<Tensor> dot_value(const Evaluation& e) {
  const Attributes& a = e.node.attributes;
  const Tensor &x = e.in(0), &y = e.in(1);
  Index contracted;
  for (const int d : a.contract_a) contracted.push_back(x.shape[static_cast<std::size_t>(d)]);
  int next = static_cast<int>(a.batch_a.size());
  const std::vector<int> place_x = positions_of(x.shape.size(), a.batch_a, a.contract_a, next);
  const std::vector<int> place_y = positions_of(y.shape.size(), a.batch_b, a.contract_b, next);
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

namespace {

// --- gradient

// One operand's dimensions in a dot.
struct Side {
  std::size_t operand;
  const std::vector<int>&batch, &contract;
  std::vector<int> free;
};

// Returns dy . other, contracted over the free dimensions of the other operand, which begin at
// first_contracted in dy. The dimensions are transposed to this operand's order.
Value side_gradient(Derivation& d, const Side& to, const Side& other, int first_contracted) {
  const DType dtype = d.operand_type(to.operand).dtype;
  Attributes a;
  for (int i = 0; i < static_cast<int>(to.batch.size()); ++i) a.batch_a.push_back(i);
  a.batch_b = other.batch;
  for (std::size_t i = 0; i < other.free.size(); ++i)
    a.contract_a.push_back(first_contracted + static_cast<int>(i));
  a.contract_b = other.free;
  const Value product = d.g.add(Op::dot, {cast(d.g, d.dy, dtype), d.x(other.operand)}, a);
  // The product's dimensions: batch, those free in `to`, then the contracted ones in the order of
  // the other operand.
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

// A cut follows a dimension of the result; along a contracted dimension it leads to a partial sum.
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
  Needs needs = {part(i == 0 ? s : *other), part(i == 0 ? *other : s)};
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

// --- instructions

bool dot_place(Lowering& l, Value v, const Destination& to) {
  const bool adds = to.kind == Destination::Kind::write || to.kind == Destination::Kind::sum;
  return adds && l.write_there(v, to);
}

// Dimensions that two of the three tensors share, with their strides in both.
struct Axes {
  std::vector<std::int64_t> size, first, second;
  void add(std::int64_t n, std::int64_t s, std::int64_t t) {
    size.push_back(n);
    first.push_back(s);
    second.push_back(t);
  }
  void merge() { merge_dims(size, {&first, &second}, std::vector<bool>(size.size(), false)); }
  // Removes the longest dimension and returns it; 1 and 0 if there is none.
  std::array<std::int64_t, 3> longest() {
    if (size.empty()) return {1, 0, 0};
    const auto at =
        static_cast<std::size_t>(std::max_element(size.begin(), size.end()) - size.begin());
    const std::array<std::int64_t, 3> one = {size[at], first[at], second[at]};
    size.erase(size.begin() + static_cast<std::ptrdiff_t>(at));
    first.erase(first.begin() + static_cast<std::ptrdiff_t>(at));
    second.erase(second.begin() + static_cast<std::ptrdiff_t>(at));
    return one;
  }
};

Axes contracted_axes(const Attributes& at, const View& a, const View& b) {
  Axes k;
  for (std::size_t i = 0; i < at.contract_a.size(); ++i)
    k.add(a.shape[static_cast<std::size_t>(at.contract_a[i])],
          a.strides[static_cast<std::size_t>(at.contract_a[i])],
          b.strides[static_cast<std::size_t>(at.contract_b[i])]);
  k.merge();
  return k;
}

// Returns whether the dimensions can be merged into one in memory.
bool is_one(const View& x, const std::vector<int>& dims) {
  Axes axes;
  for (const int d : dims)
    axes.add(x.shape[static_cast<std::size_t>(d)], x.strides[static_cast<std::size_t>(d)],
             x.strides[static_cast<std::size_t>(d)]);
  axes.merge();
  return axes.size.size() <= 1;
}

// Copies x with the dimensions `contract` at its end.
View together(Lowering& l, int id, const View& x, const std::vector<int>& contract) {
  const std::vector<int> order =
      joined(other_dims(static_cast<int>(x.shape.size()), contract), contract);
  std::vector<int> back(order.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    back[static_cast<std::size_t>(order[i])] = static_cast<int>(i);
  return transposed(l.copied(transposed(x, order), l.name_of_node(id) + " operand"), back);
}

// The batch dimensions around the m, n, k of a product, with strides in a, b and c.
struct Outer {
  std::vector<std::int64_t> size, a, b, c;
  void add(std::int64_t n, std::int64_t sa, std::int64_t sb, std::int64_t sc) {
    size.push_back(n);
    a.push_back(sa);
    b.push_back(sb);
    c.push_back(sc);
  }
  // Merges dimensions that are adjacent in memory.
  void merge() { merge_dims(size, {&a, &b, &c}, std::vector<bool>(size.size(), false)); }
};

void strides_of(View& view, std::vector<std::int64_t> outer, std::int64_t rows,
                std::int64_t columns) {
  view.shape = {};
  view.strides = std::move(outer);
  view.strides.push_back(rows);
  view.strides.push_back(columns);
}

// Returns the product with one dimension each for m, n and k and the others as batch.
Gemm gemm_of(const Attributes& at, const View& a, const View& b, const View& c, Axes k) {
  Outer outer;
  Axes m, n;
  std::size_t r = 0;  // dimension of the result
  for (std::size_t i = 0; i < at.batch_a.size(); ++i, ++r)
    outer.add(c.shape[r], a.strides[static_cast<std::size_t>(at.batch_a[i])],
              b.strides[static_cast<std::size_t>(at.batch_b[i])], c.strides[r]);
  for (const int d :
       other_dims(static_cast<int>(a.shape.size()), joined(at.batch_a, at.contract_a))) {
    m.add(c.shape[r], a.strides[static_cast<std::size_t>(d)], c.strides[r]);
    ++r;
  }
  for (const int d :
       other_dims(static_cast<int>(b.shape.size()), joined(at.batch_b, at.contract_b))) {
    n.add(c.shape[r], b.strides[static_cast<std::size_t>(d)], c.strides[r]);
    ++r;
  }
  m.merge();
  n.merge();
  const auto [m_size, m_a, m_c] = m.longest();
  const auto [n_size, n_b, n_c] = n.longest();
  const auto [k_size, k_a, k_b] = k.longest();
  for (std::size_t i = 0; i < m.size.size(); ++i) outer.add(m.size[i], m.first[i], 0, m.second[i]);
  for (std::size_t i = 0; i < n.size.size(); ++i) outer.add(n.size[i], 0, n.first[i], n.second[i]);
  outer.merge();
  Gemm gemm;
  gemm.m = m_size;
  gemm.n = n_size;
  gemm.k = k_size;
  gemm.a = a;
  gemm.b = b;
  gemm.c = c;
  gemm.outer = outer.size;
  strides_of(gemm.a, std::move(outer.a), m_a, k_a);
  strides_of(gemm.b, std::move(outer.b), k_b, n_b);
  strides_of(gemm.c, std::move(outer.c), m_c, n_c);
  return gemm;
}

// Returns the multiply-adds.
double work_of(const Gemm& gemm) {
  double work =
      static_cast<double>(gemm.m) * static_cast<double>(gemm.n) * static_cast<double>(gemm.k);
  for (const std::int64_t s : gemm.outer) work *= static_cast<double>(s);
  return work;
}

}  // namespace

Gemm dot_gemm(Lowering& l, int id) {
  const Node& n = l.node(id);
  const Attributes& at = n.attributes;
  View a = l.memory_of(n.operands[0]), b = l.memory_of(n.operands[1]);
  Axes k = contracted_axes(at, a, b);
  // Contracted dimensions that cannot be merged in memory: copies one operand, or both.
  if (k.size.size() > 1) {
    const bool one_a = is_one(a, at.contract_a), one_b = is_one(b, at.contract_b);
    if (one_a && (!one_b || elements_of(b) <= elements_of(a))) {
      b = together(l, id, b, at.contract_b);
    } else if (one_b) {
      a = together(l, id, a, at.contract_a);
    }
    k = contracted_axes(at, a, b);
  }
  if (k.size.size() > 1) {
    a = together(l, id, a, at.contract_a);
    b = together(l, id, b, at.contract_b);
    k = contracted_axes(at, a, b);
  }
  Gemm gemm = gemm_of(at, a, b, l.result_of({id, 0}), std::move(k));
  gemm.accumulate = l.accumulates({id, 0});
  l.count_work(work_of(gemm));
  return gemm;
}

namespace {

// Returns contracted dimensions that are split into separate products, one for each element, which
// accumulate. The longest dimension stays. Splitting pays if it moves less memory than a copy of an
// operand whose dimensions can be merged. Empty: one product, perhaps of a copy.
Axes slices_of(const Lowering& l, const Type& made, const View& a, const View& b, Axes k) {
  const bool adds = made.dtype == DType::f32 || made.dtype == DType::f64;
  if (!adds || !l.target().strided_gemms() || k.size.size() < 2) return {};
  constexpr std::int64_t kLeast = 16;  // shortest sum that is worth loading and storing the result
  const std::int64_t along = k.longest()[0];
  std::int64_t count = 1;
  for (const std::int64_t n : k.size) count *= n;
  const bool less = (count - 1) * elements_of(made) <= std::min(elements_of(a), elements_of(b));
  return count > 0 && along >= kLeast && less ? k : Axes{};
}

// Advances to the next index; false after the last one.
bool advance(std::vector<std::int64_t>& at, const std::vector<std::int64_t>& sizes) {
  for (std::size_t d = at.size(); d-- > 0;) {
    if (++at[d] < sizes[d]) return true;
    at[d] = 0;
  }
  return false;
}

void dot_emit(Lowering& l, int id) {
  const Node& n = l.node(id);
  const View a = l.memory_of(n.operands[0]), b = l.memory_of(n.operands[1]);
  const Axes k = contracted_axes(n.attributes, a, b);
  const Axes slices = slices_of(l, n.results[0], a, b, k);
  if (slices.size.empty()) return l.push(id, dot_gemm(l, id));
  const Gemm whole = gemm_of(n.attributes, a, b, l.result_of({id, 0}), k);
  bool adds = l.accumulates({id, 0});
  std::vector<std::int64_t> at(slices.size.size(), 0);
  do {
    Gemm slice = whole;
    slice.accumulate = adds;
    for (std::size_t d = 0; d < at.size(); ++d) {
      slice.a.offset += at[d] * slices.first[d];
      slice.b.offset += at[d] * slices.second[d];
    }
    l.count_work(work_of(slice));
    l.push(id, std::move(slice));
    adds = true;
  } while (advance(at, slices.size));
}

constexpr Operation kOperations[] = {{
    .op = Op::dot,
    .name = "dot",
    .sums = true,
    .infer = dot_type,
    .keys = kKeys,
    .evaluate = dot_value,
    .gradient = dot_gradient,
    .zero_sign = zeros<ZeroSign::loses>,
    .rounding = rounds<Rounding::loses>,
    .cut_by_result = dot_cut,
    .cut_by_operand = dot_lead,
    .degree = dot_degree,
    .clone = dot_clone,
    .place = dot_place,
    .emit = dot_emit,
}};

}  // namespace

std::span<const Operation> contract_operations() { return kOperations; }

}  // namespace logitless::ir
