// The far field of words over ranks, on a GPU. What ranks exchange is of a chunk's tokens in an
// order that all of them have; each computes in one of its own, by the tiles that it keeps:
// call.rows of its calls has the common row of each. Sums run in the order of ranks.
#pragma once

#include "kernels/device_far.h"

namespace logitless::cuda {

// Totals [tokens], log2, of no words; and of all ranks' words, from all [ranks, tokens].
void no_totals(float* totals, std::int64_t tokens, Stream stream);
void merge_totals(const float* all, int ranks, std::int64_t tokens, float* totals, Stream stream);

// `each` values of 32 bits of each token: from common rows [tokens, each] to the call's, and back.
void take_rows(const ForwardCall& call, const float* from, int each, float* to);
void put_rows(const ForwardCall& call, const float* from, int each, float* to);
// Back, with these weighted sums [tokens] of the call's rows; null: those that they have.
void put_records(const ForwardCall& call, const TokenRecord* from, const float* weighted,
                 TokenRecord* to);

// The bound of each token from those of all ranks' parts, all [ranks, tokens]; sums gets the sum of
// its squares, too.
void merge_bounds(const float* all, int ranks, std::int64_t tokens, float* bounds, FarSums* sums,
                  Stream stream);
// bounds [tokens] of a call's rows to their tokens' places in `output` [all tokens]; 0 for ignored
// ones.
void give_bounds(const ForwardCall& call, const float* bounds, float* output);

}  // namespace logitless::cuda
