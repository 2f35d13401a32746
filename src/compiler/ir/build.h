// Shorthands for passes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "compiler/ir/graph.h"

namespace logitless::ir {

Value constant(Graph& g, double number, Type type);
Value iota(Graph& g, Type type, int axis);
Value map(Graph& g, Function function, std::vector<Value> operands, std::string hint = {});
// Return the operand itself if nothing changes.
Value cast(Graph& g, Value x, DType dtype);
Value reshape(Graph& g, Value x, Shape shape);
Value transpose(Graph& g, Value x, std::vector<int> dims);
Value broadcast(Graph& g, Value x, Shape shape, std::vector<int> dims);
// dtype i8: keeps that of x.
Value reduce(Graph& g, Reduce kind, Value x, std::vector<int> dims, DType dtype = DType::i8);
Value slice(Graph& g, Value x, Shape begin, Shape end);
Value pad(Graph& g, Value x, Shape low, Shape high);

// Returns the dimensions of 0 .. rank - 1 that are not in dims.
std::vector<int> other_dims(int rank, const std::vector<int>& dims);
bool is_identity(const std::vector<int>& dims);
// Returns the number that all elements of a broadcast constant are; nothing for other values.
std::optional<double> number_of(const Graph& graph, Value v);

}  // namespace logitless::ir
