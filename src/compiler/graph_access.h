// Access from the public handles to the graph behind them.
#pragma once

#include "compiler/ir/graph.h"
#include "logitless/graph.h"

namespace logitless {

struct GraphAccess {
  static ir::Graph& of(const Graph& graph) { return *graph.ir_; }
  static ir::Graph& of(Value v) { return *v.graph_; }
  static ir::Value id(Value v) { return {v.node_, v.index_}; }
  static Value value(ir::Graph& graph, ir::Value v) {
    Value result;
    result.graph_ = &graph;
    result.node_ = v.node;
    result.index_ = v.index;
    return result;
  }
};

}  // namespace logitless
