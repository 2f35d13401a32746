// Fuses neighbouring loops over the same rows and columns into row groups, so that a layer norm
// reads its rows once. Loops over the result of a matrix product become its epilogue, and the
// product is not stored.
#pragma once

#include <cstdint>
#include <optional>

#include "compiler/plan/program.h"

namespace logitless::ir {

// The result of a stage of a row group.
enum class StageKind : std::uint8_t {
  elements,    // [rows, columns]
  rows,        // [rows], from values of rows
  row_sum,     // [rows], a reduction of any kind
  column_sum,  // [columns]
};
// Returns the kind of a stage's loop in the form of stage_of().
StageKind kind_of(const Pointwise& loop);

// Returns the loop as a stage over [rows, columns], or nothing if it cannot be one.
std::optional<Pointwise> stage_of(const Pointwise& loop, std::int64_t rows, std::int64_t columns);

// Returns the index of the stage that makes a leaf's value, or -1 if it is read from memory.
int maker_of(const RowGroup& group, std::size_t stage, const Pointwise::Leaf& leaf);

// Turns runs of two or more loops into groups, in the same order, before memory is planned. Matrix
// products in between move before or after a group. Values that only their group reads lose their
// memory. Column sums get scratch of `target`.
class Target;
void group_rows(Program& program, const Target& target);

// Removes the memory of values that only their own group reads.
void drop_stores(Program& program);

// --- equal_stages.cpp

// Merges stages of a group that store equal values in the arena. Recomputation makes them where a
// value's readers turn out to be close.
void merge_equal_stages(Program& program);

// --- fuse_products.cpp

// Fuses products with all that reads their results, after group_rows() and before memory is
// planned: row groups, loops over their elements, and picks of one element of each row, which
// become sums. What needs those sums stays behind in loops of its own. Two products that the same
// stages read may share a kernel (product_pairs.h). Not fused: products that are added to memory,
// in batches, or with an epilogue of the library; readers that use a sum of rows for each element,
// or sum columns; rows that are not aligned to 16 bytes; and where the predicted time is longer.
void fuse_products(Program& program, const Target& target);

// Returns the product of the group whose result a leaf reads, or null.
const Gemm* product_of(const RowGroup& group, const Pointwise::Leaf& leaf);

}  // namespace logitless::ir
