// Finds the rows of a head that a program masks, for lower-heads: the engine skips them.
#pragma once

#include <optional>
#include <vector>

#include "compiler/passes/find_heads.h"

namespace logitless::ir {

// The rows whose results nothing reads and whose gradients are 0.
struct IgnoredRows {
  // The rows of this target, which is outside of [0, V).
  std::optional<std::int64_t> target;
  // Without a target: the rows where this value is 0, or is not if `negated`. It has the targets'
  // shape, or dimensions of 1 beside those.
  Value counts;
  bool negated = false;
  // Products of a row's numbers with `counts`, which are 0 there. A head's results of 0 may give
  // such a number that is not finite.
  std::vector<int> products;
};

// Returns such rows of the head with these gradients, if the graph masks any. users: graph.users().
std::optional<IgnoredRows> ignored_rows(const Graph& graph, const Lists<int>& users,
                                        const FoundHead& head, const HeadGradients& gradients);

}  // namespace logitless::ir
