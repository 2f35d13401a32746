#include "compiler/passes/refine_axes.h"

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
#include "compiler/passes/eliminate.h"

namespace logitless::ir {
namespace {

using Sizes = std::vector<std::int64_t>;
// The factors of a dimension: row-major sizes whose product is its size.
using Factors = Sizes;
using Form = std::vector<Factors>;  // by dimension of a value

constexpr std::int64_t kMostParts = 8;  // of a dimension that slices divide

std::size_t at(int d) { return static_cast<std::size_t>(d); }
std::int64_t product(const Sizes& list) {
  return std::accumulate(list.begin(), list.end(), std::int64_t{1}, std::multiplies<>());
}

// Returns the numbers of elements behind each border between two factors.
std::set<std::int64_t> borders(const Factors& factors) {
  std::set<std::int64_t> list;
  std::int64_t behind = 1;
  for (std::size_t i = factors.size(); i-- > 1;) {
    behind *= factors[i];
    if (behind > 1) list.insert(behind);
  }
  list.erase(product(factors));
  return list;
}
// Returns nothing if they are not multiples of each other.
std::optional<Factors> factors_of(std::int64_t size, const std::set<std::int64_t>& borders) {
  Factors factors;
  std::int64_t behind = 1;
  for (const std::int64_t b : borders) {
    if (b <= 1 || b >= size) continue;
    if (b % behind != 0 || size % b != 0) return std::nullopt;
    if (b == behind) continue;
    factors.insert(factors.begin(), b / behind);
    behind = b;
  }
  factors.insert(factors.begin(), size / behind);
  return factors;
}

Sizes flat(const Form& form) {
  Sizes sizes;
  for (const Factors& f : form) sizes.insert(sizes.end(), f.begin(), f.end());
  return sizes;
}
Shape shape_of(const Sizes& sizes) { return {sizes.begin(), sizes.end()}; }
Form plain(const Type& type) {
  Form form;
  for (const std::int64_t s : sizes_of(type)) form.push_back({s});
  return form;
}
// Returns the first, and all, flat dimensions of dimension d in the form.
int first_of(const Form& form, int d) {
  int first = 0;
  for (int i = 0; i < d; ++i) first += static_cast<int>(form[at(i)].size());
  return first;
}
std::vector<int> all_of(const Form& form, const std::vector<int>& dims) {
  std::vector<int> list;
  for (const int d : dims) {
    for (std::size_t k = 0; k < form[at(d)].size(); ++k)
      list.push_back(first_of(form, d) + static_cast<int>(k));
  }
  return list;
}

// Returns the size of parts whose borders include those of the slice or pad [begin, end) of `size`.
std::int64_t part_of(std::int64_t begin, std::int64_t end, std::int64_t size) {
  const std::int64_t part = std::gcd(std::gcd(begin, end), size);
  return part > 1 && part < size && size / part <= kMostParts ? part : size;
}

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
    case Op::pick:  // several indices along the axis, which must stay one dimension
      return graph.type(n.operands[0]).rank() == n.results[0].rank();
    default:
      return true;
  }
}

class Refiner {
 public:
  Refiner(const Graph& graph, Value seed)
      : g_(graph), users_(graph.users()), seed_(seed), big_(elements_of(graph.type(seed))) {
    for (const Node& n : g_.nodes()) form_.push_back(plain(n.results[0]));
  }

  std::optional<Graph> run() && {
    find_scope();
    propagate();
    if (std::none_of(form_.begin(), form_.end(), [](const Form& form) {
          return std::any_of(form.begin(), form.end(),
                             [](const Factors& f) { return f.size() > 1; });
        }))
      return std::nullopt;
    out_.name = g_.name;
    for (int id = 0; id < g_.size(); ++id) write(id);
    for (const Output& o : g_.outputs())
      out_.add_output(o.name, in_form(o.value, plain_of(o.value)));
    return eliminate_common(std::move(out_));
  }

 private:
  const Graph& g_;
  const Lists<int> users_;
  const Value seed_;
  const std::int64_t big_;
  std::set<int> scope_;     // nodes whose results may be refined
  std::vector<Form> form_;  // by node: form of its first result
  Graph out_;
  std::map<Value, Value> made_;
  std::map<std::pair<Value, Sizes>, Value> shaped_;

  bool big(Value v) const { return is_big(elements_of(g_.type(v)), big_); }
  Form plain_of(Value v) const { return plain(g_.type(v)); }
  // Nodes with several results are opaque, so only first results are refined.
  Form form_of(Value v) const { return v.index == 0 ? form_[at(v.node)] : plain_of(v); }

  // --- analysis

  // Collects the nodes reachable from the seed, up to other matrix products, parameters and
  // scalars.
  void find_scope() {
    std::deque<int> queue = {seed_.node};
    scope_.insert(seed_.node);
    const auto visit = [&](int id) {
      const Node& n = g_.node(id);
      if (is_opaque(g_, n) || n.results.size() != 1 || !scope_.insert(id).second) return;
      const bool ends = elements_of(n.results[0]) <= 1 || (n.op == Op::dot && !big({id, 0}));
      if (!ends) queue.push_back(id);
    };
    while (!queue.empty()) {
      const int id = queue.front();
      queue.pop_front();
      for (const int u : users_[at(id)]) visit(u);
      for (const Value v : g_.node(id).operands) {
        if (g_.node(id).op != Op::dot || big(v)) visit(v.node);
      }
    }
  }

  // Gives both the borders of both, if possible.
  bool unite(Factors& a, Factors& b) {
    if (a == b || product(a) != product(b)) return false;
    std::set<std::int64_t> all = borders(a);
    all.merge(borders(b));
    const std::optional<Factors> factors = factors_of(product(a), all);
    if (!factors) return false;
    const bool changed = *factors != a || *factors != b;
    a = b = *factors;
    return changed;
  }
  bool border(Factors& f, std::int64_t behind) {
    std::set<std::int64_t> all = borders(f);
    all.insert(behind);
    const std::optional<Factors> factors = factors_of(product(f), all);
    if (!factors || *factors == f) return false;
    f = *factors;
    return true;
  }

  void propagate() {
    constexpr int kMostRounds = 50;
    bool changed = true;
    for (int round = 0; changed && round < kMostRounds; ++round) {
      changed = false;
      for (const int id : scope_) changed = relate(id) || changed;
    }
  }

  bool relate(int id) {
    const Node& n = g_.node(id);
    Form& to = form_[at(id)];
    bool changed = false;
    for (const SameDim& d : same_dims(g_, id)) {
      const Value v = n.operands[d.operand];
      if (scope_.contains(v.node))
        changed = unite(form_[at(v.node)][at(d.from)], to[at(d.to)]) || changed;
    }
    if (n.operands.empty() || !scope_.contains(n.operands[0].node)) return changed;
    Form& from = form_[at(n.operands[0].node)];
    if (n.op == Op::reshape) changed = relate_reshaped(from, to) || changed;
    if (n.op == Op::slice) changed = relate_part(n, from, to) || changed;
    if (n.op == Op::pad) changed = relate_part(n, to, from) || changed;
    return changed;
  }

  // Adds borders of one that lie inside a dimension of the other.
  bool relate_reshaped(Form& a, Form& b) {
    bool changed = false;
    const auto add = [&](const Form& from, Form& to) {
      std::set<std::int64_t> all;
      std::int64_t behind = 1;
      const Sizes sizes = flat(from);
      for (std::size_t i = sizes.size(); i-- > 0;) {
        all.insert(behind);
        behind *= sizes[i];
      }
      behind = 1;
      for (std::size_t d = to.size(); d-- > 0;) {
        const std::int64_t size = product(to[d]);
        for (const std::int64_t x : all) {
          if (x > behind && x < behind * size && x % behind == 0)
            changed = border(to[d], x / behind) || changed;
        }
        behind *= size;
      }
    };
    add(a, b);
    add(b, a);
    return changed;
  }

  // Relates a slice's operand and result, or a pad's result and operand.
  bool relate_part(const Node& n, Form& whole, Form& part) {
    bool changed = false;
    for (std::size_t d = 0; d < whole.size(); ++d) {
      const std::int64_t size = product(whole[d]), of = product(part[d]);
      if (size == of) continue;
      const std::int64_t begin = n.attributes->begin[d].value();
      const std::int64_t p = part_of(begin, begin + of, size);
      if (p == size) continue;
      changed = border(whole[d], p) || changed;
      changed = border(part[d], p) || changed;
      // Inside of a part the borders are the same.
      for (const std::int64_t b : borders(whole[d])) {
        if (b < p) changed = border(part[d], b) || changed;
      }
      for (const std::int64_t b : borders(part[d])) {
        if (b < p) changed = border(whole[d], b) || changed;
      }
    }
    return changed;
  }

  // --- writing

  Value in_form(Value v, const Form& form) {
    const Sizes sizes = flat(form);
    const auto [found, is_new] = shaped_.emplace(std::pair(v, sizes), Value{});
    if (is_new) found->second = reshape(out_, made_.at(v), shape_of(sizes));
    return found->second;
  }

  // Returns the form that the node needs of operand i with form `own`, if its result has form `to`.
  Form wanted(int id, std::size_t i, const Form& own, const Form& to) const {
    const Node& n = g_.node(id);
    Form form = plain_of(n.operands[i]);
    if (n.op == Op::reduce && n.attributes->reduce != Reduce::argmax) {
      for (const int d : n.attributes->dims) form[at(d)] = own[at(d)];
    }
    for (const SameDim& d : same_dims(g_, id)) {
      if (d.operand == i) form[at(d.from)] = to[at(d.to)];
    }
    return form;
  }

  void write(int id) {
    const Node& n = g_.node(id);
    const Form& to = form_[at(id)];
    Value made;
    if (is_opaque(g_, n) || n.results.size() != 1) {
      std::vector<Value> operands;
      for (const Value v : n.operands) operands.push_back(in_form(v, plain_of(v)));
      made = out_.copy(g_, id, std::move(operands));
    } else if (n.op == Op::reshape) {
      made = reshape(out_, made_.at(n.operands[0]), shape_of(flat(to)));
    } else if (n.op == Op::iota) {
      made = written_iota(n, to);
    } else if (n.op == Op::dot) {
      made = written_dot(id, n, to);
    } else if (n.op == Op::slice || n.op == Op::pad || n.op == Op::concat) {
      made = written_part(id, n, to);
    } else {
      made = written_plain(id, n, to);
    }
    for (std::size_t r = 0; r < n.results.size(); ++r)
      made_[{id, static_cast<std::int32_t>(r)}] = {made.node,
                                                   made.index + static_cast<std::int32_t>(r)};
  }

  Value written_plain(int id, const Node& n, const Form& to) {
    Attributes a = n.attributes;
    std::vector<Value> operands;
    std::vector<Form> forms;
    for (std::size_t i = 0; i < n.operands.size(); ++i) {
      const Value v = n.operands[i];
      forms.push_back(wanted(id, i, form_of(v), to));
      operands.push_back(in_form(v, forms.back()));
    }
    if (n.op == Op::broadcast) a.dims = all_of(to, a.dims);
    if (n.op == Op::transpose || n.op == Op::reduce) a.dims = all_of(forms[0], a.dims);
    if (n.op == Op::pick) a.axis = first_of(forms[0], a.axis);
    if (n.op == Op::broadcast || n.op == Op::constant) a.type.shape = shape_of(flat(to));
    return out_.add(n.op, std::move(operands), std::move(a), n.name);
  }

  Value written_iota(const Node& n, const Form& to) {
    const Type type{n.results[0].dtype, shape_of(flat(to))};
    const int first = first_of(to, n.attributes->axis);
    const Factors& factors = to[at(n.attributes->axis)];
    std::int64_t behind = product(factors);
    Value sum;
    for (std::size_t k = 0; k < factors.size(); ++k) {
      behind /= factors[k];
      Value x = iota(out_, type, first + static_cast<int>(k));
      if (behind != 1)
        x = map(out_, Function::mul, {x, constant(out_, static_cast<double>(behind), type)});
      sum = sum.valid() ? map(out_, Function::add, {sum, x}) : x;
    }
    return sum;
  }

  Value written_dot(int id, const Node& n, const Form& to) {
    Form a = wanted(id, 0, {}, to), b = wanted(id, 1, {}, to);
    for (const auto& [i, j] : summed_dims(n)) {
      Factors x = form_of(n.operands[0])[at(i)], y = form_of(n.operands[1])[at(j)];
      std::set<std::int64_t> all = borders(x);
      all.merge(borders(y));
      const std::optional<Factors> factors = factors_of(product(x), all);
      a[at(i)] = b[at(j)] = factors ? *factors : Factors{product(x)};
    }
    Attributes attributes = n.attributes;
    attributes.batch_a = all_of(a, attributes.batch_a);
    attributes.batch_b = all_of(b, attributes.batch_b);
    attributes.contract_a = all_of(a, attributes.contract_a);
    attributes.contract_b = all_of(b, attributes.contract_b);
    return out_.add(n.op, {in_form(n.operands[0], a), in_form(n.operands[1], b)},
                    std::move(attributes), n.name);
  }

  // Writes a slice, a pad or a concat along a dimension whose parts it takes whole. Along other
  // dimensions the factors are merged.
  Value written_part(int id, const Node& n, const Form& to) {
    Form small = to, large = to;  // of the operand of a pad or concat, and of its result
    if (n.op == Op::slice) large = wanted(id, 0, {}, to);
    if (n.op == Op::pad) small = wanted(id, 0, {}, to);
    Attributes a = n.attributes;
    if (n.op == Op::concat) return written_concat(n, to);
    Shape begin, end;
    for (std::size_t d = 0; d < to.size(); ++d) {
      const std::int64_t first = n.attributes->begin[d].value();
      const std::int64_t size = n.op == Op::slice ? g_.type(n.operands[0]).shape[d].value()
                                                  : n.results[0].shape[d].value();
      const std::int64_t of = n.op == Op::slice ? n.results[0].shape[d].value()
                                                : g_.type(n.operands[0]).shape[d].value();
      std::int64_t unit = 1;
      if (size != of) {
        const Form own = n.op == Op::slice ? form_of(n.operands[0]) : to;
        const std::int64_t inner = own[d][0] > 0 ? size / own[d][0] : size;
        const bool parts = own[d].size() > 1 && inner > 0 && first % inner == 0 && of % inner == 0;
        large[d] = parts ? own[d] : Factors{size};
        small[d] = parts ? own[d] : Factors{of};
        unit = parts ? inner : 1;
        if (parts) small[d][0] = of / inner;
      }
      for (std::size_t k = 0; k < large[d].size(); ++k) {
        const bool cut = k == 0 && size != of;
        const std::int64_t low = cut ? first / unit : 0, part = small[d][k];
        begin.emplace_back(low);
        end.emplace_back(n.op == Op::slice ? low + part : large[d][k] - low - part);
      }
    }
    a.begin = std::move(begin);
    a.end = std::move(end);
    const Value x = in_form(n.operands[0], n.op == Op::slice ? large : small);
    const Value made = out_.add(n.op, {x}, std::move(a), n.name);
    return reshape(out_, made, shape_of(flat(to)));
  }

  Value written_concat(const Node& n, const Form& to) {
    const auto axis = at(n.attributes->axis);
    const std::int64_t size = product(to[axis]);
    const std::int64_t inner = size / std::max<std::int64_t>(to[axis][0], 1);
    bool parts = to[axis].size() > 1;
    for (const Value v : n.operands) parts = parts && g_.type(v).shape[axis].value() % inner == 0;
    std::vector<Value> operands;
    for (const Value v : n.operands) {
      Form form = to;
      const std::int64_t of = g_.type(v).shape[axis].value();
      if (parts) {
        form[axis][0] = of / inner;
      } else {
        form[axis] = {of};
      }
      operands.push_back(in_form(v, form));
    }
    Attributes a = n.attributes;
    a.axis = first_of(to, n.attributes->axis);
    return reshape(out_, out_.add(Op::concat, std::move(operands), std::move(a), n.name),
                   shape_of(flat(to)));
  }
};

}  // namespace

std::optional<Graph> refine_axes(const Graph& graph, Value seed) {
  // Empty values have no factors.
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
