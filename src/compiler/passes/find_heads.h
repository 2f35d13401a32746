// Finds heads, their gradients and the rows that a program masks, for lower-heads.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// A head around one matrix product.
struct FoundHead {
  Value x, w, bias, targets;
  double scale = 1.0, softcap = 0.0;
  int dot = -1, spread_bias = -1;  // nodes that read x and w, and bias
  int z = -1;                      // the logits, after scale, bias and softcap
  int lse = -1;                    // reduce_lse z
  int pick = -1;
  bool pick_log_prob = false;  // pick of z - lse
};

// A wildcard of the pattern: its value in the graph, broadcast over the rows if it is smaller.
struct Cotangent {
  Value value;
  std::vector<int> dims;  // the rows' dimensions of the value's dimensions
  auto operator<=>(const Cotangent&) const = default;
};

// Returns the head whose logits begin with node `dot`, if there is one. users: graph.users().
std::optional<FoundHead> find_head(const Graph& graph, const Lists<int>& users, int dot);

struct HeadGradients {
  Cotangent d_lse, d_pick;  // invalid: 0
  // Matrix products and the sum over rows; -1: not in the graph.
  int d_x = -1, d_w = -1, d_bias = -1;
  bool any() const { return d_x >= 0 || d_w >= 0 || d_bias >= 0; }
};

// Returns the nodes that compute the head's gradients. The head alone is differentiated and
// compared with the graph, up to the order of sums and products.
HeadGradients find_head_gradients(const Graph& graph, const FoundHead& head);

// The rows whose results nothing reads and whose gradients are 0: the engine skips them.
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
