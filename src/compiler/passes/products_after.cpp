#include <algorithm>
#include <utility>
#include <vector>

#include "compiler/passes/form_loops.h"

namespace logitless::ir {
namespace {

// Returns whether a chunk computes a part of a big value by the node.
bool makes_big(const Graph& graph, int node, const Chunked& how, std::int64_t seed) {
  return how.kind == Chunked::Kind::split && is_big(elements_of(graph.type({node, 0})), seed);
}

// Returns whether the node contracts a big 16-bit value that a chunk computes.
bool contracts(const Graph& graph, const Region& region, int node, std::int64_t seed) {
  const Node& n = graph.node(node);
  if (n.op != Op::dot) return false;
  return std::any_of(n.operands.begin(), n.operands.end(), [&](Value v) {
    return region.split(v) != nullptr && is_big(elements_of(graph.type(v)), seed) &&
           size_of(graph.type(v).dtype) == 2;
  });
}

}  // namespace

std::optional<Region> products_after(const Graph& graph, const Region& region) {
  if (region.phases != 1) return std::nullopt;
  const std::int64_t seed = elements_of(graph.type(region.seed));
  std::vector<bool> keep(static_cast<std::size_t>(graph.size()), false);
  bool any = false;
  for (const auto& [node, how] : region.nodes) {
    const Node& n = graph.node(node);
    const bool big = makes_big(graph, node, how, seed);
    bool out = !big && contracts(graph, region, node, seed);
    for (std::size_t i = 0; !out && i < n.operands.size(); ++i)
      out =
          region.inside(n.operands[i].node) && !keep[static_cast<std::size_t>(n.operands[i].node)];
    if (out && big) return std::nullopt;
    keep[static_cast<std::size_t>(node)] = !out;
    any = any || out;
  }
  if (!any) return std::nullopt;
  Region rest = region;
  rest.nodes.keep(keep);
  return rest;
}

}  // namespace logitless::ir
