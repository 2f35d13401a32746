// Exponentials of a chunk, or blocks of its gradients, that reuse the memory of d_weight before it
// is computed.
//
// d_weight is computed in vocabulary blocks, one after another. The exponentials of each block but
// the last lie where d_weight of the next block will be written; those of the last are in the
// workspace. Each block's d_weight thus overwrites the exponentials of the block before, which are
// no longer needed. Let g = tokens * number / (bytes of a row of d_weight). Each block is g times
// as long as the one before it, and the workspace holds about 1 - 1 / g of the exponentials. If g
// is 1 or less, blocks are equally long. The lower bytes of d_weight's sums in the workspace
// (RunningSums), if any, are reused too. A block may then lie in both memories, in two parts.
//
// If only a part of the vocabulary is saved, the rows of all other entries are free until their
// gradients are computed. About 1 / g of the entries can then be saved. The others are processed in
// vocabulary blocks that lie in the rows after their own, or in the workspace if few rows are left.
#pragma once

#include <array>

#include "kernels/device/head.h"

namespace logitless::cuda {

// Bytes of the row of one vocabulary entry.
struct RowBytes {
  std::int64_t weight = 0;  // of d_weight, without gaps
  std::int64_t low = 0;     // of the sums' lower bytes; 0: there are none
  std::int64_t number = 2;  // of one exponential, or one gradient of a logit
};
struct AliasedRanges {
  VocabRanges ranges;  // the parts, without data; count 0: none
  struct Place {
    bool low = false;  // in the lower bytes
    std::int32_t row = 0;
  };
  std::array<Place, kMaxVocabRanges> places{};  // for all but the last
};

// Returns the blocks with the shortest last one. Returns none if the vocabulary has fewer than
// `count` tiles of 256, or there are more parts than kMaxVocabRanges.
AliasedRanges aliased_ranges(std::int64_t tokens, std::int64_t vocab, const RowBytes& row,
                             int count);
// Returns blocks that save the most entries with `count` blocks, the last of at most `last`
// entries. Returns none if that is no more than `last`, or takes fewer blocks.
AliasedRanges saved_ranges(std::int64_t tokens, std::int64_t vocab, const RowBytes& row, int count,
                           std::int64_t last);

// A vocabulary block whose gradients exist at one time.
struct AliasedBlock {
  std::int64_t vocab_count = 0;
  bool in_weight = false;  // in d_weight's rows after the block's own entries
};
// Returns the vocabulary block from entry `first` on; `least` entries fit in the workspace.
AliasedBlock aliased_block(std::int64_t tokens, std::int64_t vocab, const RowBytes& row,
                           std::int64_t first, std::int64_t least);

}  // namespace logitless::cuda
