// A chunk's exponentials, or blocks of its gradients, in the memory that d_weight has not come to
// yet.
//
// d_weight is made in ranges of words, one after another. The exponentials of each range but the
// last lie where d_weight of the next range will be written, those of the last in the workspace: a
// range is written over what the range before it has just been made from. With g = tokens * 2 /
// (bytes of a row of d_weight) each range is g times as long as the one before it, so that the
// workspace holds about 1 - 1 / g of the exponentials; where g is 1 or less, ranges are equally
// long. Where d_weight keeps lower bytes of its sums in the workspace (RunningSums), these are room
// of the same kind: a range may lie in both, in two parts.
//
// Where some words alone are kept, the rows of all the others are room too, until their gradients
// come: so about 1 / g of the words can be kept. The others come in slabs, whose blocks lie in the
// rows that follow them, or in the workspace where these are few.
#pragma once

#include <array>

#include "kernels/device_head.h"

namespace logitless::cuda {

// Bytes of a word's row.
struct RowBytes {
  std::int64_t weight = 0;  // of d_weight, without gaps
  std::int64_t low = 0;     // of the sums' lower bytes; 0: there are none
};
struct LentRanges {
  WordRanges ranges;  // the parts, without data; count 0: none
  struct Place {
    bool low = false;  // in the lower bytes
    std::int32_t row = 0;
  };
  std::array<Place, kMostWordRanges> places{};  // but for the last
};

// The ranges whose last one is least. None where the vocabulary has no `count` ranges of 256 words,
// or they come in more parts than kMostWordRanges.
LentRanges lent_ranges(std::int64_t tokens, std::int64_t vocab, const RowBytes& row, int count);
// The most words in `count` ranges, the last of which has at most `last` words. None where that is
// no more than `last`, or they come in fewer ranges.
LentRanges kept_ranges(std::int64_t tokens, std::int64_t vocab, const RowBytes& row, int count,
                       std::int64_t last);

// Words whose gradients exist at a time.
struct LentSlab {
  std::int64_t words = 0;
  bool in_weight = false;  // the block lies in d_weight's rows after the slab's own
};
// The slab from word `first` on; `least`: words that the workspace has room for.
LentSlab lent_slab(std::int64_t tokens, std::int64_t vocab, const RowBytes& row, std::int64_t first,
                   std::int64_t least);

}  // namespace logitless::cuda
