// x - reduce_lse(y)  ->  (x - high) - low
//
// The log-sum-exp is made in f64; high is its f32 and low what that leaves. An offset that all
// logits have cancels in x - high, so losses and probabilities are as exact with it as without.
// Differences are found through views and selects of either side. Other readers get high. Keeps
// results and their types; log-sum-exps that no difference reads stay as they are.
//
// widen_lse is for programs that a framework runs, whose own operations take a log-sum-exp from
// logits: it computes differences of rows in f64 and leaves those of the logits alone.
#pragma once

#include "compiler/ir/graph.h"

namespace logitless::ir {

Graph split_lse(const Graph& graph);
Graph widen_lse(const Graph& graph);

}  // namespace logitless::ir
