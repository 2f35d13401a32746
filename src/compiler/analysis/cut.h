// Building blocks of the operations' cut rules.
#pragma once

#include <optional>
#include <vector>

#include "compiler/analysis/split.h"
#include "compiler/ir/build.h"

namespace logitless::ir {

// The node and the graph that a cut rule reads.
struct CutNode {
  const Graph& graph;
  const Node& node;
  const Attributes& a;
  std::vector<std::int64_t> shape(std::size_t operand) const {
    return sizes_of(graph.type(node.operands[operand]));
  }
  int rank(std::size_t operand) const { return graph.type(node.operands[operand]).rank(); }
  // Returns the same need for every operand.
  Needs each(const Need& need) const { return Needs(node.operands.size(), need); }
};

// The consequence of a cut operand: the cut of the result, or a partial result, or neither.
struct Lead {
  std::optional<Split> result = std::nullopt;
  std::optional<Chunked> merged = std::nullopt;
};

inline bool inside(int d, const Split& s) { return d >= s.dim && d < s.dim + s.count; }
inline Need part(const Split& s) { return {false, s}; }
inline Chunked cut(const Split& result, Needs needs) {
  return {Chunked::Kind::split, {result}, std::move(needs), false};
}
inline Chunked partial(Chunked::Kind kind, Needs needs) {
  return {kind, {}, std::move(needs), false};
}
// A sum over chunks of cut operand 0, whose indices count from the chunk's first element.
inline Lead shifted_sum(const Split& s) {
  if (s.count > 1) return {};
  Chunked c = partial(Chunked::Kind::sum, {part(s), Need{}});
  c.shifted = true;
  return {std::nullopt, c};
}

// Maps dimensions s of one value to list[s] of another. Returns nothing unless they are adjacent
// there.
std::optional<Split> through(const Split& s, const std::vector<int>& list);
// Maps in the other direction: dimension d becomes its index in `list`, or is not found.
enum class Found : std::uint8_t { all, none, mixed };
Found found(const Split& s, const std::vector<int>& list, Split& to);
// Returns the result's cut if all dimensions are found.
Lead lead_to(const Split& s, const std::vector<int>& list);

}  // namespace logitless::ir
