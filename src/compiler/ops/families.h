// The operations of each family; each family has its own file.
#pragma once

#include <span>

#include "compiler/ops/op.h"

namespace logitless::ir {

std::span<const Operation> pointwise_operations();  // parameter, constant, iota, map, cast, ...
std::span<const Operation> shape_operations();      // broadcast, reshape, transpose, slice, ...
std::span<const Operation> reduce_operations();
std::span<const Operation> contract_operations();  // dot
std::span<const Operation> index_operations();     // take, scatter_add, pick
std::span<const Operation> scan_operations();
std::span<const Operation> sort_operations();
std::span<const Operation> attention_operations();
std::span<const Operation> loop_operations();
std::span<const Operation> head_operations();
std::span<const Operation> fused_dot_operations();
std::span<const Operation> extern_operations();

// --- functions that several operations share

// Throws InvalidArgument: operations that only the compiler makes have no gradient.
std::vector<Value> compiled_gradient(Derivation& derivation);
// Elementwise operations: every operand is cut like the result.
std::optional<Chunked> cut_as_result(const CutNode& c, const Split& result);
Lead cut_as_operand(const CutNode& c, std::size_t i, const Split& operand);
// Degree of operations that are linear in their operands.
int linear(const Linearity& operands);

}  // namespace logitless::ir
