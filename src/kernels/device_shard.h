// Words of a head over ranks, on a GPU: what a rank makes of the others' answers. Sums run in the
// order of ranks, so that all of them get the same bits.
#pragma once

#include "kernels/device_gradient.h"

namespace logitless::cuda {

// logits [slots] of target_logits of all ranks, all [ranks, slots]: a target is on one of them.
void merge_logits(const float* all, int ranks, std::int64_t slots, float* logits, Stream stream);

// The outputs of `chunk` for all words, from the records [ranks, tokens] of each rank's own and
// chunk.given_logits.
void merge_records(const ForwardCall& chunk, const TokenRecord* records, int ranks);

// What the calls of some words each leave of the same tokens, one after another: states [tokens] of
// all of them from chunk.records, logits [tokens, K] from target_logits' `found`. The first sets
// both.
void absorb_records(const ForwardCall& chunk, const float* found, bool first, TokenRecord* states,
                    float* logits);

// Of a rank without words, in place of a forward: its records, and bad_target.
void forward_nothing(const ForwardCall& chunk);

// This rank's part of a chunk of spread tokens: hidden [step, dim] of the dtype of `all` and
// targets [step, K] are its tokens [first, first + count), and then rows of 0 without a target. A
// target out of range is noted in all.bad_target.
struct OwnTokens {
  std::int64_t first = 0, count = 0, step = 0;
  const std::int32_t* rows = nullptr;  // [all tokens] which come first; null: as they are
  void* hidden = nullptr;
  std::int64_t* targets = nullptr;
};
void copy_own_tokens(const ForwardCall& all, const OwnTokens& own);

// values_of_rows [rows] = values of the words that a table [rows] says.
void take_words(const float* values, const std::int32_t* table, std::int64_t rows,
                float* values_of_rows, Stream stream);

// Words of rows that lie together, `each` of every rank: table [ranks * each], of row i of rank r
// first_words[r] + i.
struct FirstWords {
  int ranks = 0;
  std::int32_t of[64] = {};
};
void number_words(const FirstWords& first_words, std::int64_t each, std::int32_t* table,
                  Stream stream);

// rows x columns of sums over ranks of pieces [ranks, count], rounded to `out`; columns a multiple
// of 4, count of all rows and more.
void round_pieces(const float* pieces, int ranks, std::int64_t count, std::int64_t rows,
                  std::int64_t columns, const GradientOutput& out, Stream stream);

// sums [count] = sum over ranks of pieces [ranks, count].
void add_pieces(const float* pieces, int ranks, std::int64_t count, float* sums, Stream stream);
void add_pieces(const double* pieces, int ranks, std::int64_t count, double* sums, Stream stream);

}  // namespace logitless::cuda
