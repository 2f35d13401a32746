// Parts that the operations' cut rules are made of.
#pragma once

#include <optional>
#include <vector>

#include "compiler/analysis/split.h"
#include "compiler/ir/build.h"

namespace logitless::ir {

// What a cut rule sees.
struct CutNode {
  const Graph& graph;
  const Node& node;
  const Attributes& a;
  std::vector<std::int64_t> shape(std::size_t operand) const {
    return sizes_of(graph.type(node.operands[operand]));
  }
  int rank(std::size_t operand) const { return graph.type(node.operands[operand]).rank(); }
  // The same of every operand.
  Needs each(const Need& need) const { return Needs(node.operands.size(), need); }
};

// Where a cut operand leads: the cut of the result, or the partial result itself, or neither.
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
// A sum over chunks of a cut operand 0 whose indices count from the chunk's first element.
inline Lead shifted_sum(const Split& s) {
  if (s.count > 1) return {};
  Chunked c = partial(Chunked::Kind::sum, {part(s), Need{}});
  c.shifted = true;
  return {std::nullopt, c};
}

// Dimensions s of one value are list[s] of another: cut there, if they stand side by side there.
std::optional<Split> through(const Split& s, const std::vector<int>& list);
// The same in the other direction: dimension d here is at list's index of d there, or nowhere.
enum class Found : std::uint8_t { all, none, mixed };
Found found(const Split& s, const std::vector<int>& list, Split& to);
// The result's cut where `found` has all of it.
Lead lead_to(const Split& s, const std::vector<int>& list);

}  // namespace logitless::ir
