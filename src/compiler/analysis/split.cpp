#include "compiler/analysis/split.h"

#include <algorithm>

#include "compiler/analysis/cut.h"
#include "compiler/ops/op.h"
#include "core/check.h"

namespace logitless::ir {
namespace {

int position(const std::vector<int>& list, int d) {
  const auto at = std::find(list.begin(), list.end(), d);
  return at == list.end() ? -1 : static_cast<int>(at - list.begin());
}

}  // namespace

std::optional<Split> through(const Split& s, const std::vector<int>& list) {
  for (int k = 1; k < s.count; ++k) {
    if (list[static_cast<std::size_t>(s.dim + k)] != list[static_cast<std::size_t>(s.dim)] + k)
      return std::nullopt;
  }
  return Split{list[static_cast<std::size_t>(s.dim)], s.count, s.factor};
}

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

Lead lead_to(const Split& s, const std::vector<int>& list) {
  Split to;
  return found(s, list, to) == Found::all ? Lead{to} : Lead{};
}

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

std::optional<Chunked> chunked_by_result(const Graph& graph, int node, const Split& result) {
  const Node& n = graph.node(node);
  const auto rule = row_of(n.op).cut_by_result;
  return rule != nullptr ? rule({graph, n, n.attributes}, result) : std::nullopt;
}

std::optional<Chunked> chunked_by_operand(const Graph& graph, int node, std::size_t i,
                                          const Split& operand) {
  const Node& n = graph.node(node);
  const auto rule = row_of(n.op).cut_by_operand;
  if (rule == nullptr) return std::nullopt;
  const Lead to = rule({graph, n, n.attributes}, i, operand);
  if (to.merged) return to.merged;
  if (!to.result) return std::nullopt;
  std::optional<Chunked> c = chunked_by_result(graph, node, *to.result);
  // The relation must hold in both directions.
  if (!c || c->needs[i] != Need{false, operand}) return std::nullopt;
  return c;
}

}  // namespace logitless::ir
