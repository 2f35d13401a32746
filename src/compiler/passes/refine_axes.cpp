// A dimension is refined by splitting it into factors, as a reshape does: 6 into [2, 3]. A split
// point is named by its stride, the elements that follow it inside the dimension: here 3. There are
// three steps. find_scope finds the nodes around the seed whose results may be refined. propagate
// spreads split points between operands and results. write gives each node its refined dimensions,
// and reshapes an operand wherever it is refined in another way than the node needs. Such a reshape
// moves no data, so the result is correct however far refinements have spread.
#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include "compiler/analysis/region.h"
#include "compiler/analysis/same_dims.h"
#include "compiler/analysis/split.h"
#include "compiler/ir/build.h"
#include "compiler/passes/passes.h"

namespace logitless::ir {
namespace {

using Sizes = std::vector<std::int64_t>;
// Row-major sizes whose product is the size of one dimension; [size] if it is not refined.
using Factors = Sizes;
// The factors of each dimension of a value.
using Refinement = std::vector<Factors>;
// Strides of the split points of a dimension, ascending; each divides the next and the size.
using Strides = std::set<std::int64_t>;

constexpr std::int64_t kMostParts = 8;  // into which cuts of slices and pads split a dimension

std::size_t at(int d) { return static_cast<std::size_t>(d); }
std::int64_t elements_in(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

Strides strides_of(const Factors& factors) {
  Strides strides;
  std::int64_t stride = 1;
  for (std::size_t i = factors.size(); i-- > 1;) {
    stride *= factors[i];
    if (stride > 1) strides.insert(stride);
  }
  strides.erase(elements_in(factors));
  return strides;
}
// Returns the factors of a dimension that is split at these strides, or nothing where one does not
// divide the next.
std::optional<Factors> factors_from(std::int64_t size, const Strides& strides) {
  Factors factors;
  std::int64_t inner = 1;  // elements of the factors so far, innermost first
  for (const std::int64_t stride : strides) {
    if (stride <= 1 || stride >= size) continue;
    if (stride % inner != 0 || size % stride != 0) return std::nullopt;
    if (stride == inner) continue;
    factors.insert(factors.begin(), stride / inner);
    inner = stride;
  }
  factors.insert(factors.begin(), size / inner);
  return factors;
}

Refinement unrefined(const Type& type) {
  Refinement r;
  for (const std::int64_t s : sizes_of(type)) r.push_back({s});
  return r;
}
// Returns the sizes of the refined value: the factors of all its dimensions.
Sizes refined_sizes(const Refinement& r) {
  Sizes sizes;
  for (const Factors& f : r) sizes.insert(sizes.end(), f.begin(), f.end());
  return sizes;
}
Shape shape_of(const Sizes& sizes) { return {sizes.begin(), sizes.end()}; }
Shape shape_of(const Refinement& r) { return shape_of(refined_sizes(r)); }
// Returns the dimension of the refined value that holds the first factor of dimension d.
int first_of(const Refinement& r, int d) {
  int first = 0;
  for (int i = 0; i < d; ++i) first += static_cast<int>(r[at(i)].size());
  return first;
}
// Returns the dimensions of the refined value that hold the factors of `dims`.
std::vector<int> all_of(const Refinement& r, const std::vector<int>& dims) {
  std::vector<int> list;
  for (const int d : dims) {
    for (std::size_t k = 0; k < r[at(d)].size(); ++k)
      list.push_back(first_of(r, d) + static_cast<int>(k));
  }
  return list;
}

// Returns the largest size of equal parts of a dimension such that [begin, end) consists of whole
// parts; nothing where they would be single elements, or more than kMostParts.
std::optional<std::int64_t> aligned_part(std::int64_t begin, std::int64_t end, std::int64_t size) {
  const std::int64_t part = std::gcd(std::gcd(begin, end), size);
  if (part <= 1 || part >= size || size / part > kMostParts) return std::nullopt;
  return part;
}

// Returns whether the dimensions of a node's operands and result must stay as they are.
bool is_opaque(const Graph& graph, const Node& n) {
  switch (n.op) {
    case Op::map:
    case Op::cast:
    case Op::stop_gradient:
    case Op::constant:
    case Op::iota:
    case Op::broadcast:
    case Op::reshape:
    case Op::transpose:
    case Op::slice:
    case Op::pad:
    case Op::concat:
    case Op::reduce:
    case Op::dot:
      return false;
    case Op::pick:  // with several indices for each row they run along the axis: it stays one
      return graph.type(n.operands[0]).rank() == n.results[0].rank();
    default:
      return true;
  }
}

class Refiner {
 public:
  Refiner(const Graph& graph, Value seed)
      : g_(graph),
        users_(graph.users()),
        seed_(seed),
        seed_elements_(elements_of(graph.type(seed))) {
    for (const Node& n : g_.nodes()) refinements_.push_back(unrefined(n.results[0]));
  }

  std::optional<Graph> run() {
    find_scope();
    propagate();
    if (std::none_of(refinements_.begin(), refinements_.end(), [](const Refinement& r) {
          return std::any_of(r.begin(), r.end(), [](const Factors& f) { return f.size() > 1; });
        }))
      return std::nullopt;
    out_.name = g_.name;
    for (int id = 0; id < g_.size(); ++id) write(id);
    for (const Output& o : g_.outputs())
      out_.add_output(o.name, reshaped(o.value, unrefined(g_.type(o.value))));
    return eliminate_common(std::move(out_));
  }

 private:
  const Graph& g_;
  const Lists<int> users_;
  const Value seed_;
  const std::int64_t seed_elements_;
  std::set<int> scope_;                  // nodes whose results may be refined
  std::vector<Refinement> refinements_;  // by node: of its first result
  Graph out_;
  std::map<Value, Value> written_;                     // value of g_ -> of out_, refined
  std::map<std::pair<Value, Sizes>, Value> reshaped_;  // and in other sizes

  bool is_large(Value v) const { return is_big(elements_of(g_.type(v)), seed_elements_); }
  // Nodes with several results are opaque, so only first results are refined.
  Refinement refinement_of(Value v) const {
    return v.index == 0 ? refinements_[at(v.node)] : unrefined(g_.type(v));
  }

  // --- analysis

  // Collects the nodes that are connected with the seed. Parameters and other opaque nodes are left
  // out. Scalars and small results of a dot are in the scope, but the search ends there. It does
  // not follow small operands of a dot either: these are weights, which other products may read
  // too. The dot itself reshapes them as it needs (write_dot).
  void find_scope() {
    std::deque<int> queue = {seed_.node};
    scope_.insert(seed_.node);
    const auto visit = [&](int id) {
      const Node& n = g_.node(id);
      if (is_opaque(g_, n) || n.results.size() != 1 || !scope_.insert(id).second) return;
      const bool ends = elements_of(n.results[0]) <= 1 || (n.op == Op::dot && !is_large({id, 0}));
      if (!ends) queue.push_back(id);
    };
    while (!queue.empty()) {
      const int id = queue.front();
      queue.pop_front();
      for (const int u : users_[at(id)]) visit(u);
      for (const Value v : g_.node(id).operands) {
        if (g_.node(id).op != Op::dot || is_large(v)) visit(v.node);
      }
    }
  }

  // The functions from here to unify_part return whether they refined anything. If split points
  // cannot be combined, they leave both dimensions alone: write() then reshapes between them.

  // Gives both dimensions the split points of both.
  bool unify(Factors& a, Factors& b) {
    if (a == b || elements_in(a) != elements_in(b)) return false;
    Strides strides = strides_of(a);
    strides.merge(strides_of(b));
    const std::optional<Factors> factors = factors_from(elements_in(a), strides);
    if (!factors) return false;
    const bool changed = *factors != a || *factors != b;
    a = b = *factors;
    return changed;
  }
  bool split_at(Factors& f, std::int64_t stride) {
    Strides strides = strides_of(f);
    strides.insert(stride);
    const std::optional<Factors> factors = factors_from(elements_in(f), strides);
    if (!factors || *factors == f) return false;
    f = *factors;
    return true;
  }

  // Repeats until nothing changes; split points are only ever added, so this ends. To stop at
  // kMostRounds costs reshapes, not correctness.
  void propagate() {
    constexpr int kMostRounds = 50;
    bool changed = true;
    for (int round = 0; changed && round < kMostRounds; ++round) {
      changed = false;
      for (const int id : scope_) changed = unify_operands(id) || changed;
    }
  }

  // Unifies a node's result with its operands.
  bool unify_operands(int id) {
    const Node& n = g_.node(id);
    Refinement& result = refinements_[at(id)];
    bool changed = false;
    for (const SameDim& d : same_dims(g_, id)) {
      const Value v = n.operands[d.operand];
      if (scope_.contains(v.node))
        changed = unify(refinements_[at(v.node)][at(d.from)], result[at(d.to)]) || changed;
    }
    if (n.operands.empty() || !scope_.contains(n.operands[0].node)) return changed;
    Refinement& operand = refinements_[at(n.operands[0].node)];
    if (n.op == Op::reshape) changed = unify_reshape(operand, result) || changed;
    if (n.op == Op::slice) changed = unify_part(n, operand, result) || changed;
    if (n.op == Op::pad) changed = unify_part(n, result, operand) || changed;
    return changed;
  }

  // Unifies the two sides of a reshape, whose elements have the same row-major order. A boundary
  // between dimensions of one side may lie inside a dimension of the other, which is split there:
  // reshape [6, V] -> [2, 3, V] has a boundary of stride 3 V inside the 6, which becomes [2, 3].
  bool unify_reshape(Refinement& a, Refinement& b) {
    bool changed = false;
    const auto split_by = [&](const Refinement& from, Refinement& to) {
      Strides boundaries;  // of all factors of `from`, in elements of the value
      std::int64_t inner = 1;
      const Sizes sizes = refined_sizes(from);
      for (std::size_t i = sizes.size(); i-- > 0;) {
        boundaries.insert(inner);
        inner *= sizes[i];
      }
      inner = 1;  // elements of the dimensions after d
      for (std::size_t d = to.size(); d-- > 0;) {
        const std::int64_t size = elements_in(to[d]);
        for (const std::int64_t x : boundaries) {
          if (x > inner && x < inner * size && x % inner == 0)
            changed = split_at(to[d], x / inner) || changed;
        }
        inner *= size;
      }
    };
    split_by(a, b);
    split_by(b, a);
    return changed;
  }

  // Unifies the longer and the shorter side of a slice or pad, along the dimensions that it cuts.
  // If it cuts at multiples of a part, both are split into such parts. Inside of a part, both get
  // the split points of both.
  bool unify_part(const Node& n, Refinement& whole, Refinement& part) {
    bool changed = false;
    for (std::size_t d = 0; d < whole.size(); ++d) {
      const std::int64_t size = elements_in(whole[d]), cut_size = elements_in(part[d]);
      if (size == cut_size) continue;
      const std::int64_t begin = n.attributes->begin[d].value();
      const std::optional<std::int64_t> stride = aligned_part(begin, begin + cut_size, size);
      if (!stride) continue;
      changed = split_at(whole[d], *stride) || changed;
      changed = split_at(part[d], *stride) || changed;
      for (const std::int64_t s : strides_of(whole[d])) {
        if (s < *stride) changed = split_at(part[d], s) || changed;
      }
      for (const std::int64_t s : strides_of(part[d])) {
        if (s < *stride) changed = split_at(whole[d], s) || changed;
      }
    }
    return changed;
  }

  // --- writing

  Value reshaped(Value v, const Refinement& r) {
    Sizes sizes = refined_sizes(r);
    const auto [found, is_new] = reshaped_.emplace(std::pair(v, sizes), Value{});
    if (is_new) found->second = reshape(out_, written_.at(v), shape_of(sizes));
    return found->second;
  }

  // Returns how operand i must be refined for the node to give its result in `result`. Dimensions
  // that the result preserves have the result's factors. Reduced ones keep those of `present`, the
  // operand's refinement so far; argmax is the exception, since its index counts along a whole
  // dimension. All others are whole.
  Refinement needed_of_operand(int id, std::size_t i, const Refinement& present,
                               const Refinement& result) const {
    const Node& n = g_.node(id);
    Refinement needed = unrefined(g_.type(n.operands[i]));
    if (n.op == Op::reduce && n.attributes->reduce != Reduce::argmax) {
      for (const int d : n.attributes->dims) needed[at(d)] = present[at(d)];
    }
    for (const SameDim& d : same_dims(g_, id)) {
      if (d.operand == i) needed[at(d.from)] = result[at(d.to)];
    }
    return needed;
  }

  void write(int id) {
    const Node& n = g_.node(id);
    const Refinement& result = refinements_[at(id)];
    Value written;
    if (is_opaque(g_, n) || n.results.size() != 1) {
      std::vector<Value> operands;
      for (const Value v : n.operands) operands.push_back(reshaped(v, unrefined(g_.type(v))));
      written = out_.copy(g_, id, std::move(operands));
    } else if (n.op == Op::reshape) {
      written = reshape(out_, written_.at(n.operands[0]), shape_of(result));
    } else if (n.op == Op::iota) {
      written = write_iota(n, result);
    } else if (n.op == Op::dot) {
      written = write_dot(id, n, result);
    } else if (n.op == Op::concat) {
      written = write_concat(n, result);
    } else if (n.op == Op::slice || n.op == Op::pad) {
      written = write_part(id, n, result);
    } else {
      written = write_other(id, n, result);
    }
    for (std::size_t r = 0; r < n.results.size(); ++r)
      written_[{id, static_cast<std::int32_t>(r)}] = {written.node,
                                                      written.index + static_cast<std::int32_t>(r)};
  }

  Value write_other(int id, const Node& n, const Refinement& result) {
    Attributes a = n.attributes;
    std::vector<Value> operands;
    std::vector<Refinement> needed;
    for (std::size_t i = 0; i < n.operands.size(); ++i) {
      const Value v = n.operands[i];
      needed.push_back(needed_of_operand(id, i, refinement_of(v), result));
      operands.push_back(reshaped(v, needed.back()));
    }
    if (n.op == Op::broadcast) a.dims = all_of(result, a.dims);
    if (n.op == Op::transpose || n.op == Op::reduce) a.dims = all_of(needed[0], a.dims);
    if (n.op == Op::pick) a.axis = first_of(needed[0], a.axis);
    if (n.op == Op::broadcast || n.op == Op::constant) a.type.shape = shape_of(result);
    return out_.add(n.op, std::move(operands), std::move(a), n.name);
  }

  // An index along a refined dimension is the sum of the factors' indices times their strides.
  Value write_iota(const Node& n, const Refinement& result) {
    const Type type{n.results[0].dtype, shape_of(result)};
    const int first = first_of(result, n.attributes->axis);
    const Factors& factors = result[at(n.attributes->axis)];
    std::int64_t stride = elements_in(factors);
    Value sum;
    for (std::size_t k = 0; k < factors.size(); ++k) {
      stride /= factors[k];
      Value x = iota(out_, type, first + static_cast<int>(k));
      if (stride != 1)
        x = map(out_, Function::mul, {x, constant(out_, static_cast<double>(stride), type)});
      sum = sum.valid() ? map(out_, Function::add, {sum, x}) : x;
    }
    return sum;
  }

  // A pair of dimensions that the dot sums over is refined alike in both operands.
  Value write_dot(int id, const Node& n, const Refinement& result) {
    Refinement a = needed_of_operand(id, 0, {}, result), b = needed_of_operand(id, 1, {}, result);
    for (const auto& [i, j] : summed_dims(n)) {
      const Factors x = refinement_of(n.operands[0])[at(i)];
      const Factors y = refinement_of(n.operands[1])[at(j)];
      Strides strides = strides_of(x);
      strides.merge(strides_of(y));
      const std::optional<Factors> factors = factors_from(elements_in(x), strides);
      a[at(i)] = b[at(j)] = factors ? *factors : Factors{elements_in(x)};
    }
    Attributes attributes = n.attributes;
    attributes.batch_a = all_of(a, attributes.batch_a);
    attributes.batch_b = all_of(b, attributes.batch_b);
    attributes.contract_a = all_of(a, attributes.contract_a);
    attributes.contract_b = all_of(b, attributes.contract_b);
    return out_.add(n.op, {reshaped(n.operands[0], a), reshaped(n.operands[1], b)},
                    std::move(attributes), n.name);
  }

  // Writes a slice or a pad. Dimensions of unchanged size keep their factors. A dimension that it
  // cuts keeps them if the cut is at multiples of the outermost factor's stride: that factor alone
  // is cut then. Else its factors are merged into one dimension, and the last reshape splits it.
  Value write_part(int id, const Node& n, const Refinement& result) {
    const bool is_slice = n.op == Op::slice;
    const Refinement operand = needed_of_operand(id, 0, {}, result);
    // The longer and the shorter side: operand and result of a slice, result and operand of a pad.
    Refinement whole = is_slice ? operand : result, part = is_slice ? result : operand;
    const Type &operand_type = g_.type(n.operands[0]), &result_type = n.results[0];
    Shape begin, end;
    for (std::size_t d = 0; d < result.size(); ++d) {
      const std::int64_t first = n.attributes->begin[d].value();
      const std::int64_t size = (is_slice ? operand_type : result_type).shape[d].value();
      const std::int64_t part_size = (is_slice ? result_type : operand_type).shape[d].value();
      const bool cut = size != part_size;
      std::int64_t unit = 1;  // elements of the dimension for one index of the factor that is cut
      if (cut) {
        const Refinement present = is_slice ? refinement_of(n.operands[0]) : result;
        const Factors& factors = present[d];
        const std::int64_t stride = factors[0] > 0 ? size / factors[0] : size;
        const bool aligned =
            factors.size() > 1 && stride > 0 && first % stride == 0 && part_size % stride == 0;
        whole[d] = aligned ? factors : Factors{size};
        part[d] = aligned ? factors : Factors{part_size};
        unit = aligned ? stride : 1;
        if (aligned) part[d][0] = part_size / stride;
      }
      for (std::size_t k = 0; k < whole[d].size(); ++k) {
        const std::int64_t low = cut && k == 0 ? first / unit : 0;
        const std::int64_t count = part[d][k];
        begin.emplace_back(low);
        // `end` of a slice is an index; that of a pad is the number of elements added at the end.
        end.emplace_back(is_slice ? low + count : whole[d][k] - low - count);
      }
    }
    Attributes a = n.attributes;
    a.begin = std::move(begin);
    a.end = std::move(end);
    const Value x = reshaped(n.operands[0], is_slice ? whole : part);
    return reshape(out_, out_.add(n.op, {x}, std::move(a), n.name), shape_of(result));
  }

  // Keeps the axis's factors if each operand has whole indices of the outermost one.
  Value write_concat(const Node& n, const Refinement& result) {
    const auto axis = at(n.attributes->axis);
    const std::int64_t size = elements_in(result[axis]);
    const std::int64_t stride = size / std::max<std::int64_t>(result[axis][0], 1);
    bool aligned = result[axis].size() > 1;
    for (const Value v : n.operands)
      aligned = aligned && g_.type(v).shape[axis].value() % stride == 0;
    std::vector<Value> operands;
    for (const Value v : n.operands) {
      Refinement needed = result;
      const std::int64_t operand_size = g_.type(v).shape[axis].value();
      if (aligned) {
        needed[axis][0] = operand_size / stride;
      } else {
        needed[axis] = {operand_size};
      }
      operands.push_back(reshaped(v, needed));
    }
    Attributes a = n.attributes;
    a.axis = first_of(result, n.attributes->axis);
    return reshape(out_, out_.add(Op::concat, std::move(operands), std::move(a), n.name),
                   shape_of(result));
  }
};

}  // namespace

std::optional<Graph> refine_axes(const Graph& graph, Value seed) {
  // A size of 0 has no split points, so graphs with empty values are not supported.
  for (const Node& n : graph.nodes()) {
    if (elements_of(n.results[0]) == 0) return std::nullopt;
  }
  return Refiner(graph, seed).run();
}

Value largest_product(const Graph& graph) {
  Value largest;
  for (int id = 0; id < graph.size(); ++id) {
    if (graph.node(id).op != Op::dot) continue;
    if (!largest.valid() || elements_of(graph.type({id, 0})) > elements_of(graph.type(largest)))
      largest = {id, 0};
  }
  return largest;
}

}  // namespace logitless::ir
