// Heads in a graph, and their gradients: what lower-heads looks for.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// A head around one product.
struct FoundHead {
  Value x, w, bias, targets;
  double scale = 1.0, softcap = 0.0;
  int dot = -1, spread_bias = -1;  // nodes that read x and w, and bias
  int z = -1;                      // the logits, after scale, bias and softcap
  int lse = -1;                    // reduce_lse z
  int pick = -1;
  bool pick_log_prob = false;  // pick of z - lse
};

// A wildcard of the pattern: what it stands for in the graph, spread over the rows where it is
// smaller.
struct Cotangent {
  Value value;
  std::vector<int> dims;  // of the rows, that the dimensions of value are
  auto operator<=>(const Cotangent&) const = default;
};

// The head whose logits begin with node `dot`, if there is one. users: graph.users().
std::optional<FoundHead> find_head(const Graph& graph, const Lists<int>& users, int dot);

struct HeadGradients {
  Cotangent d_lse, d_pick;              // invalid: 0
  int d_x = -1, d_w = -1, d_bias = -1;  // products and the sum over rows; -1: not in the graph
  bool any() const { return d_x >= 0 || d_w >= 0 || d_bias >= 0; }
};

// Where the graph computes the head's gradients: found by differentiating the head alone, and
// comparing up to the order of sums and products.
HeadGradients find_head_gradients(const Graph& graph, const FoundHead& head);

}  // namespace logitless::ir
