// Generators of the kinds of kernels that codegen.cpp combines.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "compiler/exec/cuda/codegen.h"
#include "compiler/plan/program.h"

namespace logitless::ir {

// Generates the kernel of an elementwise loop.
GeneratedKernel map_kernel(const Pointwise& loop, std::span<const std::int64_t> alignments);
// Generates it with tiles in shared memory, if operands are contiguous along another dimension than
// the result; else nothing.
std::optional<GeneratedKernel> tile_kernel(const Pointwise& loop,
                                           std::span<const std::int64_t> alignments);

// How a reduction is split into parts, whose states are merged in order; depends on its shape
// alone.
struct Parts {
  std::int64_t count = 1, length = 0;  // in reduced elements; the last part may be shorter
};
Parts row_parts(const Pointwise& loop);
Parts column_parts(const Pointwise& loop);
std::int64_t state_bytes(const Pointwise& loop);  // of one part of one result

// Generates kernels that reduce the last dimensions, with more than one element.
std::vector<GeneratedKernel> row_kernels(const Pointwise& loop,
                                         std::span<const std::int64_t> alignments);
// Generates kernels that reduce the first dimensions.
std::vector<GeneratedKernel> column_kernels(const Pointwise& loop,
                                            std::span<const std::int64_t> alignments);

// Generates the kernel that merges states [loops, parts, columns] in scratch into the results of
// column reductions. These have one shape and one kind.
GeneratedKernel merge_column_parts(std::span<const Pointwise* const> loops, const Parts& parts);

// Generates the kernels of a product whose epilogue is a row group.
std::vector<GeneratedKernel> product_kernels(const RowGroup& group,
                                             std::span<const std::int64_t> alignments);
std::int64_t product_scratch_bytes(const RowGroup& group);

// Returns the argument with the address of the result's first element.
KernelArgument stored_argument(const Pointwise& loop);
// Formats sizes as [a, b, c].
std::string shape_text(const std::vector<std::int64_t>& shape);
// Returns the type of the states: Sum<float>, Max<double>, ...
std::string state_type(const Pointwise& loop);
// Returns the expression of a state's result. A log-sum-exp that is stored as f64 is a double.
std::string value_of(const char* state, const Pointwise& loop);

}  // namespace logitless::ir
