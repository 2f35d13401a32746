// How row groups are split: rows into parts whose column sums are added in order, and a row into
// the threads that own it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "compiler/exec/cuda/loop_text.h"
#include "compiler/plan/group_rows.h"

namespace logitless::ir {

class StageReads;

inline constexpr std::int64_t kGroupThreads = 256;  // of a block, approximately
inline constexpr std::int64_t kMostGroupThreads = 1024;
inline constexpr std::int64_t kMultiprocessors = 128;  // of a large GPU, approximately

// Returns the blocks of so many threads that fit on an SM at a time, with enough registers for
// column sums.
inline std::int64_t blocks_at_a_time(std::int64_t threads) {
  constexpr std::int64_t kRegisters = 65536, kOfThread = 80, kMost = 8;
  return std::clamp<std::int64_t>(kRegisters / (kOfThread * threads), 1, kMost);
}

// How a column sum splits the rows, one block for each part; depends on the shape alone. There are
// as many parts as large GPUs run blocks at a time, so that they form one wave.
struct RowParts {
  std::int64_t count = 1, rows = 0;  // of a part
};
inline RowParts parts_of(const RowGroup& g) {
  constexpr std::int64_t kLeastRows = 16, kItem = 8, kMost = 512;
  const std::int64_t row = ceil_div(ceil_div(g.columns, kItem), 32) * 32;  // threads of a row
  const std::int64_t most =
      kMultiprocessors * blocks_at_a_time(row * std::max<std::int64_t>(kGroupThreads / row, 1));
  const std::int64_t wanted =
      std::clamp<std::int64_t>(g.rows / kLeastRows, 1, std::min(most, kMost));
  const std::int64_t rows = ceil_div(ceil_div(g.rows, wanted), 8) * 8;
  return {ceil_div(g.rows, rows), rows};
}

// Returns the stages that are column sums.
inline std::vector<std::size_t> column_sums(const RowGroup& g) {
  std::vector<std::size_t> list;
  for (std::size_t s = 0; s < g.stages.size(); ++s) {
    if (kind_of(g.stages[s].loop) == StageKind::column_sum) list.push_back(s);
  }
  return list;
}

// How a row is mapped to threads.
struct RowMapping {
  std::int64_t width = 1;    // neighbouring elements of an item
  std::int64_t items = 1;    // of a thread: its k-th begins at element (k * threads + lane) * width
  std::int64_t threads = 1;  // of a row: a power of two up to 32, or full warps
  std::int64_t rows = 1;     // of a block at a time
  std::int64_t blocks = 1;   // of a row: a cluster, each of whose blocks owns as many items

  bool is_exact(std::int64_t columns) const { return width * items * threads * blocks == columns; }
};

// Returns whether a stage sums rows.
bool has_row_sums(const RowGroup& group);
// Returns the mapping of a group without a product. alignments: bytes that divide the address of
// each buffer.
RowMapping choose_mapping(const RowGroup& group, const StageReads& reads,
                          std::span<const std::int64_t> alignments);

}  // namespace logitless::ir
