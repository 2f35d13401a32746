// Two products of one size in the kernel of a row group, which computes the same tiles of both.
#pragma once

#include <optional>
#include <utility>

#include "compiler/plan/program.h"

namespace logitless::ir {

// Each returns the group with `other` as its second product, or nothing if the stages do not allow
// it. They read its result from memory now, at least one of them. Results and operands are those
// of group.product's kernel, 16 bits with rows or columns in order.

// Both results: products of one left operand.
std::optional<RowGroup> beside(const RowGroup& group, const Gemm& other);

// The difference alone, on one set of sums: stages of f32 results that only subtract one from the
// other. Operands and their depth differ.
std::optional<RowGroup> difference_of(const RowGroup& group, const Gemm& other);

// Returns the products that make the left and the right half of the columns of one, if the kernel
// takes halves.
std::optional<std::pair<Gemm, Gemm>> halves_of(const Gemm& product);

}  // namespace logitless::ir
