// Runs a graph in float64, one operation after another: the oracle of every pass and of the
// executor.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

// Row-major. Every dtype is held as double; integers are exact to 2^53.
struct Tensor {
  std::vector<std::int64_t> shape;
  std::vector<double> data;
};
using Tensors = std::map<std::string, Tensor>;

// What externs compute, of the node and its operands; none where it is empty.
using ExternValue = std::function<Tensor(const Node&, const std::vector<const Tensor*>&)>;

// Results by name. Floating values are not rounded to their dtypes. Sizes must be bound. Throws
// InvalidArgument when a parameter is missing or has another shape, or an extern has no value.
Tensors interpret(const Graph& graph, const Tensors& parameters, const ExternValue& externs = {});
// The same with outputs in their order, and parameters asked for in theirs.
std::vector<Tensor> evaluate_graph(const Graph& graph,
                                   const std::function<Tensor(const Node&)>& parameter,
                                   const ExternValue& externs);

}  // namespace logitless::ir
