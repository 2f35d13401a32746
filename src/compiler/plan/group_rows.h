// Neighbouring loops over one space of rows and columns become row groups: a layer norm reads its
// rows once.
#pragma once

#include <cstdint>
#include <optional>

#include "compiler/plan/program.h"

namespace logitless::ir {

// What a stage of a row group makes.
enum class StageKind : std::uint8_t {
  elements,    // of [rows, columns]
  rows,        // of [rows], from numbers of rows
  row_sum,     // of [rows]: a reduction, of any kind
  column_sum,  // of [columns]
};
// Of a stage's loop in the form that stage_of() gives it.
StageKind kind_of(const Pointwise& loop);

// The loop as a stage over [rows, columns], or none when it cannot be one.
std::optional<Pointwise> stage_of(const Pointwise& loop, std::int64_t rows, std::int64_t columns);

// Where the stage that makes what a leaf reads is in the group, or -1: it is read from memory.
int maker_of(const RowGroup& group, std::size_t stage, const Pointwise::Leaf& leaf);

// Before memory is planned: runs of two loops and more become groups, in the same order; products
// between them go before a group or behind it; values that are read in their group alone lose their
// memory. Column sums get scratch of `target`.
class Target;
void group_rows(Program& program, const Target& target);

}  // namespace logitless::ir
