// The kinds of kernels that codegen.cpp puts together.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "compiler/exec/cuda/codegen.h"
#include "compiler/plan/program.h"

namespace logitless::ir {

// Each element by itself.
GeneratedKernel map_kernel(const Pointwise& loop, std::span<const std::int64_t> alignments);

// How a reduction's elements are cut into parts, whose states are merged in order: by its shape.
struct Parts {
  std::int64_t count = 1, length = 0;  // of reduced elements; the last part may be shorter
};
Parts row_parts(const Pointwise& loop);
Parts column_parts(const Pointwise& loop);
std::int64_t state_bytes(const Pointwise& loop);  // of a part of one result

// The last dimensions are reduced; more than one element is.
std::vector<GeneratedKernel> row_kernels(const Pointwise& loop,
                                         std::span<const std::int64_t> alignments);
// The first ones.
std::vector<GeneratedKernel> column_kernels(const Pointwise& loop,
                                            std::span<const std::int64_t> alignments);

// [loops, parts, columns] states in scratch become the results of reductions of columns over one
// shape, all of one kind.
GeneratedKernel merge_column_parts(std::span<const Pointwise* const> loops, const Parts& parts);

// The address of the result's first element.
KernelArgument stored_argument(const Pointwise& loop);
// Sizes as [a, b, c].
std::string shape_text(const std::vector<std::int64_t>& shape);
// Sum<float>, Max<double>, ...
std::string state_type(const Pointwise& loop);

}  // namespace logitless::ir
