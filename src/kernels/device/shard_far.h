// Far field of a vocabulary-parallel head on a GPU. Ranks exchange values of a chunk's tokens in an
// order common to all of them. Each rank computes in its own order, sorted by the tiles that it
// selects; call.rows maps its rows to the common ones. Sums run in rank order.
#pragma once

#include "kernels/device/far.h"

namespace logitless::cuda {

// Sets totals [tokens] (log2) to those of no vocabulary; merges the totals of all ranks, all
// [ranks, tokens].
void no_totals(float* totals, std::int64_t tokens, Stream stream);
void merge_totals(const float* all, int ranks, std::int64_t tokens, float* totals, Stream stream);

// Permute `each` 32-bit values per token between common rows [tokens, each] and the call's rows.
void take_rows(const ForwardCall& call, const float* from, int each, float* to);
void put_rows(const ForwardCall& call, const float* from, int each, float* to);
// Permutes records to common rows, with these weighted sums [tokens] of the call's rows; null: the
// records' own.
void put_records(const ForwardCall& call, const TokenRecord* from, const float* weighted,
                 TokenRecord* to);

// Merges the ranks' parts of each token's bound, all [ranks, tokens]; adds the sum of their squares
// to `sums`.
void merge_bounds(const float* all, int ranks, std::int64_t tokens, float* bounds, FarSums* sums,
                  Stream stream);
// Scatters bounds [tokens] of a call's rows to their tokens in `output` [all tokens]; 0 for ignored
// ones.
void give_bounds(const ForwardCall& call, const float* bounds, float* output);

}  // namespace logitless::cuda
