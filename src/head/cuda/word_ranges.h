// A chunk's exponentials in the memory that d_weight has not come to yet.
//
// d_weight is made in ranges of words, one after another. The exponentials of each range but the
// last lie where d_weight of the next range will be written, those of the last in the workspace: a
// range is written over what the range before it has just been made from. With g = tokens * 2 /
// (dim * element) each range is g times as long as the one before it, so that the workspace holds
// about 1 - 1 / g of the exponentials; where g is 1 or less, ranges are equally long.
#pragma once

#include "kernels/device_head.h"

namespace logitless::cuda {

// The ranges, without data, whose last one is least. `element`: bytes of an element of d_weight,
// [vocab, dim] without gaps. None where the vocabulary has no `count` ranges of 256 words.
WordRanges word_ranges(std::int64_t tokens, std::int64_t vocab, std::int64_t dim,
                       std::int64_t element, int count);

}  // namespace logitless::cuda
