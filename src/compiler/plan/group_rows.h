// Fuses neighbouring loops over the same rows and columns into row groups, so that a layer norm
// reads its rows once.
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

}  // namespace logitless::ir
