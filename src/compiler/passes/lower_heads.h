// lower-heads: losses over a large vocabulary become calls of the head engine.
#pragma once

#include <cstdint>

#include "compiler/ir/graph.h"

namespace logitless::ir {

inline constexpr std::int64_t kLeastLogits = 1 << 20;

// Replaces each head that the engine has a kernel for by the operation `head`:
//
//    z = dot x, w, with a scale, a bias along the vocabulary or a softcap;  f32
//    reduce_lse z, or pick of z or of z - lse, or both
//
// and the matrix products with the gradient of z if the graph differentiates them. Gradients are
// recognised by differentiating the head alone and comparing.
//
// A head stays as it is if its logits have other readers, or take less than `least_logits` bytes.
// Each head takes at most `workspace` bytes if a plan fits into them; 0: no limit, and nothing is
// recomputed. Expects bound sizes and common subexpressions eliminated.
Graph lower_heads(const Graph& graph, std::int64_t workspace,
                  std::int64_t least_logits = kLeastLogits);

// Limits the workspace of each head to `workspace` bytes.
Graph limit_heads(const Graph& graph, std::int64_t workspace);

}  // namespace logitless::ir
