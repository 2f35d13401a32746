#include "compiler/analysis/split.h"

#include <algorithm>

#include "compiler/ir/build.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

using Sizes = std::vector<std::int64_t>;

bool inside(int d, const Split& s) { return d >= s.dim && d < s.dim + s.count; }

int position(const std::vector<int>& list, int d) {
  const auto found = std::find(list.begin(), list.end(), d);
  return found == list.end() ? -1 : static_cast<int>(found - list.begin());
}

// Dimensions s of one value are list[s] of another: cut there, if they stand side by side there.
std::optional<Split> through(const Split& s, const std::vector<int>& list) {
  for (int k = 1; k < s.count; ++k) {
    if (list[static_cast<std::size_t>(s.dim + k)] != list[static_cast<std::size_t>(s.dim)] + k)
      return std::nullopt;
  }
  return Split{list[static_cast<std::size_t>(s.dim)], s.count, s.factor};
}
// The same in the other direction: dimension d here is position(list, d) there, or nowhere.
enum class Found : std::uint8_t { all, none, mixed };
Found found(const Split& s, const std::vector<int>& list, Split& to) {
  int hits = 0;
  bool side_by_side = true;
  to = {position(list, s.dim), s.count, s.factor};
  for (int k = 0; k < s.count; ++k) {
    const int at = position(list, s.dim + k);
    hits += at >= 0 ? 1 : 0;
    side_by_side = side_by_side && at == to.dim + k;
  }
  if (hits == 0) return Found::none;
  return hits == s.count && side_by_side ? Found::all : Found::mixed;
}

// The cut of a reshaped value: the same range of elements, as dimensions of `to`.
std::optional<Split> reshaped(const Sizes& from, const Sizes& to, const Split& s) {
  std::int64_t outer = 1, middle = 1;
  for (int d = 0; d < s.dim + s.count; ++d)
    (d < s.dim ? outer : middle) *= from[static_cast<std::size_t>(d)];
  if (middle == 0) return std::nullopt;
  const std::int64_t axis = middle / s.factor;
  std::int64_t before = 1;
  int first = 0;
  const int rank = static_cast<int>(to.size());
  while (first < rank && before < outer) before *= to[static_cast<std::size_t>(first++)];
  if (before != outer) return std::nullopt;
  std::int64_t group = 1;
  int last = first;
  while (last < rank && group % middle != 0) group *= to[static_cast<std::size_t>(last++)];
  if (last == first && middle == 1 && first < rank) group *= to[static_cast<std::size_t>(last++)];
  if (last == first || group == 0 || group % middle != 0) return std::nullopt;
  return normalized(to, {first, last - first, group / axis});
}

struct DotPlaces {
  int batch, free_a;
  std::vector<int> a, b;  // dimensions of the operands in the order of the result: batch, then free
};
DotPlaces places(const Graph& g, const Node& n) {
  const Attributes& at = n.attributes;
  std::vector<int> used_a = at.batch_a, used_b = at.batch_b;
  used_a.insert(used_a.end(), at.contract_a.begin(), at.contract_a.end());
  used_b.insert(used_b.end(), at.contract_b.begin(), at.contract_b.end());
  const std::vector<int> free_a = other_dims(g.type(n.operands[0]).rank(), used_a);
  const std::vector<int> free_b = other_dims(g.type(n.operands[1]).rank(), used_b);
  DotPlaces p{static_cast<int>(at.batch_a.size()), static_cast<int>(free_a.size()), at.batch_a,
              at.batch_b};
  p.a.insert(p.a.end(), free_a.begin(), free_a.end());
  p.b.insert(p.b.end(), free_b.begin(), free_b.end());
  return p;
}

bool uncut(const Node& n, const Sizes& operand, const Split& s) {
  for (int d = s.dim; d < s.dim + s.count; ++d) {
    const auto i = static_cast<std::size_t>(d);
    const std::int64_t begin = n.attributes.begin[i].value(), end = n.attributes.end[i].value();
    if (begin != 0 || end != (n.op == Op::slice ? operand[i] : 0)) return false;
  }
  return true;
}

// attention's operands and results: batch, heads, ... Keys and values may have fewer heads.
std::optional<Chunked> attention(const Graph& g, const Node& n, const Split& s) {
  if (s.count != 1 || s.dim > 1) return std::nullopt;
  const std::int64_t group = sizes_of(g.type(n.operands[0]))[1] /
                             std::max<std::int64_t>(sizes_of(g.type(n.operands[1]))[1], 1);
  Split kv = s;
  if (s.dim == 1) {
    if (s.factor % group != 0) return std::nullopt;
    kv.factor = s.factor / group;
  }
  Chunked c;
  for (std::size_t i = 0; i < n.operands.size(); ++i)
    c.needs.push_back({false, i == 1 || i == 2 ? kv : s});
  for (std::size_t i = 0; i < n.results.size(); ++i)
    c.results.push_back(n.op == Op::attention_grad && i > 0 ? kv : s);
  return c;
}

Chunked cut(const Split& result, std::vector<Need> needs) {
  return {Chunked::Kind::split, {result}, std::move(needs), false};
}
Need part(const Split& s) { return {false, s}; }

}  // namespace

std::string text_of(const Split& split) {
  std::string text = concat("dimension ", split.dim);
  if (split.count > 1) text = concat("dimensions ", split.dim, " to ", split.dim + split.count - 1);
  return split.factor > 1 ? concat(text, " by ", split.factor) : text;
}

std::vector<std::int64_t> sizes_of(const Type& type) {
  std::vector<std::int64_t> sizes;
  for (const Dim& dim : type.shape) sizes.push_back(dim.value());
  return sizes;
}

Split normalized(const std::vector<std::int64_t>& shape, Split s) {
  const auto size = [&](int d) { return shape[static_cast<std::size_t>(d)]; };
  while (s.count > 1 && size(s.dim) == 1) {
    ++s.dim;
    --s.count;
  }
  while (s.count > 1 && size(s.dim + s.count - 1) != 0 &&
         s.factor % size(s.dim + s.count - 1) == 0) {
    s.factor /= size(s.dim + s.count - 1);
    --s.count;
  }
  return s;
}

std::optional<Chunked> chunked_by_result(const Graph& graph, int node, const Split& s) {
  const Node& n = graph.node(node);
  const auto shape = [&](std::size_t i) { return sizes_of(graph.type(n.operands[i])); };
  const Attributes& a = n.attributes;
  switch (n.op) {
    case Op::map:
    case Op::cast:
    case Op::stop_gradient:
      return cut(s, std::vector<Need>(n.operands.size(), part(s)));
    case Op::constant:
      return cut(s, {});
    case Op::iota: {
      if (inside(a.axis, s) && s.count > 1) return std::nullopt;
      Chunked c = cut(s, {});
      c.shifted = inside(a.axis, s);
      return c;
    }
    case Op::broadcast: {
      Split to;
      const Found where = found(s, a.dims, to);
      if (where == Found::mixed) return std::nullopt;
      return cut(s, {where == Found::none ? Need{} : part(to)});
    }
    case Op::reshape: {
      const std::optional<Split> to = reshaped(sizes_of(n.results[0]), shape(0), s);
      return to ? std::optional(cut(s, {part(*to)})) : std::nullopt;
    }
    case Op::transpose: {
      const std::optional<Split> to = through(s, a.dims);
      return to ? std::optional(cut(s, {part(*to)})) : std::nullopt;
    }
    case Op::slice:
    case Op::pad:
      return uncut(n, shape(0), s) ? std::optional(cut(s, {part(s)})) : std::nullopt;
    case Op::concat:
      return inside(a.axis, s)
                 ? std::nullopt
                 : std::optional(cut(s, std::vector<Need>(n.operands.size(), part(s))));
    case Op::reduce: {
      const std::optional<Split> to =
          through(s, other_dims(graph.type(n.operands[0]).rank(), a.dims));
      return to ? std::optional(cut(s, {part(*to)})) : std::nullopt;
    }
    case Op::dot: {
      const DotPlaces p = places(graph, n);
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
    case Op::take: {
      const int rank = graph.type(n.operands[1]).rank();
      if (s.dim + s.count <= rank) return cut(s, {Need{}, part(s)});
      if (s.dim >= rank) return cut(s, {part({s.dim - rank + 1, s.count, s.factor}), Need{}});
      return std::nullopt;
    }
    case Op::scatter_add: {
      if (s.dim == 0 && s.count > 1) return std::nullopt;
      Chunked c = cut(s, {Need{}, Need{}});
      c.shifted = s.dim == 0;
      if (s.dim > 0)
        c.needs[1] = part({s.dim - 1 + graph.type(n.operands[0]).rank(), s.count, s.factor});
      return c;
    }
    case Op::pick: {
      const std::optional<Split> to =
          through(s, other_dims(graph.type(n.operands[0]).rank(), {a.axis}));
      return to ? std::optional(cut(s, {part(*to), part(s)})) : std::nullopt;
    }
    case Op::attention:
    case Op::attention_grad:
      return attention(graph, n, s);
    case Op::parameter:
    case Op::loop:
    case Op::head:
      return std::nullopt;
  }
  return std::nullopt;
}

namespace {

Chunked partial(Chunked::Kind kind, std::vector<Need> needs) {
  return {kind, {}, std::move(needs), false};
}

// Where a cut operand leads: the cut of the result, or the partial result itself, or neither.
struct Lead {
  std::optional<Split> result;
  std::optional<Chunked> merged;
};

Lead lead(const Graph& graph, const Node& n, std::size_t i, const Split& s) {
  const Attributes& a = n.attributes;
  Split to;
  switch (n.op) {
    case Op::map:
    case Op::cast:
    case Op::stop_gradient:
    case Op::slice:
    case Op::pad:
    case Op::concat:
      return {s, {}};
    case Op::broadcast:
      return {through(s, a.dims), {}};
    case Op::reshape:
      return {reshaped(sizes_of(graph.type(n.operands[0])), sizes_of(n.results[0]), s), {}};
    case Op::transpose:
      return found(s, a.dims, to) == Found::all ? Lead{to, {}} : Lead{};
    case Op::reduce: {
      const Found where = found(s, other_dims(graph.type(n.operands[0]).rank(), a.dims), to);
      if (where == Found::all) return {to, {}};
      if (where == Found::mixed || a.reduce == Reduce::argmax) return {};
      constexpr Chunked::Kind kKinds[] = {Chunked::Kind::sum, Chunked::Kind::max,
                                          Chunked::Kind::lse};
      return {{}, partial(kKinds[static_cast<int>(a.reduce)], {part(s)})};
    }
    case Op::dot: {
      const DotPlaces p = places(graph, n);
      Found where = found(s, i == 0 ? p.a : p.b, to);
      if (where == Found::all) {
        if (i == 1 && to.dim >= p.batch) to.dim += p.free_a;
        if (i == 1 && to.dim < p.batch && to.dim + to.count > p.batch) return {};
        return {to, {}};
      }
      where = found(s, i == 0 ? a.contract_a : a.contract_b, to);
      if (where != Found::all) return {};
      const std::optional<Split> other = through(to, i == 0 ? a.contract_b : a.contract_a);
      if (!other) return {};
      std::vector<Need> needs = {part(i == 0 ? s : *other), part(i == 0 ? *other : s)};
      return {{}, partial(Chunked::Kind::sum, std::move(needs))};
    }
    case Op::take: {
      const int rank = graph.type(n.operands[1]).rank();
      if (i == 1) return {s, {}};
      if (s.dim > 0) return {Split{s.dim - 1 + rank, s.count, s.factor}, {}};
      if (s.count > 1) return {};
      Chunked c = partial(Chunked::Kind::sum, {part(s), Need{}});
      c.shifted = true;
      return {{}, c};
    }
    case Op::scatter_add: {
      const int rank = graph.type(n.operands[0]).rank();
      if (i == 0 || s.dim + s.count <= rank)
        return {{}, partial(Chunked::Kind::sum, {part(s), part(s)})};
      if (s.dim >= rank) return {Split{s.dim - rank + 1, s.count, s.factor}, {}};
      return {};
    }
    case Op::pick: {
      if (i == 1) return {s, {}};
      if (!inside(a.axis, s)) {
        return found(s, other_dims(graph.type(n.operands[0]).rank(), {a.axis}), to) == Found::all
                   ? Lead{to, {}}
                   : Lead{};
      }
      if (s.count > 1) return {};
      Chunked c = partial(Chunked::Kind::sum, {part(s), Need{}});
      c.shifted = true;
      return {{}, c};
    }
    case Op::attention:
    case Op::attention_grad: {
      Split q = s;
      if (s.dim == 1 && (i == 1 || i == 2))
        q.factor *= sizes_of(graph.type(n.operands[0]))[1] /
                    std::max<std::int64_t>(sizes_of(graph.type(n.operands[1]))[1], 1);
      return {q, {}};
    }
    case Op::parameter:
    case Op::constant:
    case Op::iota:
    case Op::loop:
    case Op::head:
      break;
  }
  return {};
}

}  // namespace

std::optional<Chunked> chunked_by_operand(const Graph& graph, int node, std::size_t i,
                                          const Split& operand) {
  const Lead to = lead(graph, graph.node(node), i, operand);
  if (to.merged) return to.merged;
  if (!to.result) return std::nullopt;
  std::optional<Chunked> c = chunked_by_result(graph, node, *to.result);
  // The relation holds in both directions, or not at all.
  if (!c || c->needs[i] != Need{false, operand}) return std::nullopt;
  return c;
}

}  // namespace logitless::ir
