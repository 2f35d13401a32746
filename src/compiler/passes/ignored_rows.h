// Finds the rows of a head that a program masks, for lower-heads: the engine skips them.
#pragma once

#include <optional>

#include "compiler/passes/find_heads.h"

namespace logitless::ir {

// The rows whose results nothing reads and whose gradients are 0.
struct IgnoredRows {
  // The rows of this target, which is outside of [0, V).
  std::optional<std::int64_t> target;
  // Without a target: the rows where this value, i8 of the targets' shape or with dimensions of 1
  // beside those, is false, or is true if `negated`.
  Value counts;
  bool negated = false;
};

// Returns such rows of the head with these gradients, if the graph masks any. users: graph.users().
std::optional<IgnoredRows> ignored_rows(const Graph& graph, const Lists<int>& users,
                                        const FoundHead& head, const HeadGradients& gradients);

}  // namespace logitless::ir
