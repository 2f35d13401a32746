// Text of the epilogue of a product's tile (product_kernel.cpp).
//
// A thread's sums are four blocks of 2 x 16. On Hopper these have the same two rows, 64 columns
// apart; by mma.sync the same columns, 16 rows apart. Sum 4 i + 2 h + j of a block is of row h and
// column 8 i + j. Of two products beside each other, the second has the last two blocks on Hopper,
// and the second half of each block by mma.sync.
#pragma once

#include <cstdint>
#include <span>

#include "compiler/exec/cuda/loop_text.h"
#include "compiler/exec/cuda/stage_reads.h"
#include "compiler/plan/program.h"
#include "kernels/device/tile_engine.h"

namespace logitless::ir {

const cuda::TileEngine& engine_of(const RowGroup& group);
// Returns the columns of each result in a tile.
std::int64_t tile_columns(const RowGroup& group);

bool is_narrow(DType dtype);
// Returns whether the stage leaves a state for each row and tile of columns.
bool is_sum(const RowGroup::Stage& stage);
bool stores_elements(const RowGroup::Stage& stage);
// Returns whether elements are stored by 16 bytes: in boxes by TMA, or in rows by four lanes.
// Otherwise threads store pairs: those of f32 fill sectors of memory, and boxes of f32 would wait
// for each other. alignments[b]: bytes that divide the address of buffer b.
bool in_chunks(const View& to, std::span<const std::int64_t> alignments);

// Adds the body of the engine's function `ahead`: it prefetches the elements that the stages read
// into L2, a line of 128 bytes at a time.
void add_prefetches(Lines& lines, const RowGroup& group, const StageReads& reads);
// Adds the body of the function that the engine calls with a tile's sums z.
void add_epilogue(Lines& lines, const RowGroup& group, const StageReads& reads,
                  std::span<const std::int64_t> alignments);

}  // namespace logitless::ir
