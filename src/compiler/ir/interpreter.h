// Evaluates a graph in float64, one operation at a time. The oracle of all passes and of the
// executor.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// A row-major tensor. Every dtype is held as double; integers are exact to 2^53.
struct Tensor {
  std::vector<std::int64_t> shape;
  std::vector<double> data;
};
using Tensors = std::map<std::string, Tensor>;

// Computes an extern from the node and its operands; empty if there are none.
using ExternValue = std::function<Tensor(const Node&, const std::vector<const Tensor*>&)>;

// Returns results by name. Floating values are not rounded to their dtypes. Sizes must be bound.
// Throws InvalidArgument if a parameter is missing or has another shape, or an extern has no value.
Tensors interpret(const Graph& graph, const Tensors& parameters, const ExternValue& externs = {});
// Takes parameters and returns outputs in the graph's order.
std::vector<Tensor> evaluate_graph(const Graph& graph,
                                   const std::function<Tensor(const Node&)>& parameter,
                                   const ExternValue& externs);

}  // namespace logitless::ir
