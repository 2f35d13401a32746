// Vocabulary-parallel head on a GPU: how a rank merges the results of all ranks. Sums run in rank
// order, so that all ranks get the same bits.
#pragma once

#include "kernels/device/gradient.h"

namespace logitless::cuda {

// Merges target logits of all ranks, all [ranks, slots], into logits [slots], by their sum: a
// target's logit is 0 on all ranks but that of its shard.
void merge_logits(const float* all, int ranks, std::int64_t slots, float* logits, Stream stream);

// Computes the outputs of `chunk` for the global vocabulary from the records [ranks, tokens] of all
// ranks and chunk.given_logits.
void merge_records(const ForwardCall& chunk, const TokenRecord* records, int ranks);

// Merges, call after call, the results of several vocabulary shards for the same tokens:
// chunk.records into states [tokens], `found` of target_logits into logits [tokens, K]. The first
// call initialises both.
void absorb_records(const ForwardCall& chunk, const float* found, bool first, TokenRecord* states,
                    float* logits);

// Replaces the forward on a rank with an empty shard: writes records of no entries, which change no
// merge, and bad_target.
void write_neutral_records(const ForwardCall& chunk);

// This rank's part of a chunk of sequence-parallel tokens. hidden [padded, dim], in the dtype of
// `all`, and targets [padded, K] are its tokens [first, first + count), padded with rows of 0
// without a target. A target out of range is noted in all.bad_target.
struct LocalTokens {
  std::int64_t first = 0, count = 0, padded = 0;
  const std::int32_t* rows = nullptr;  // [all tokens] their order; null: the identity
  void* hidden = nullptr;
  std::int64_t* targets = nullptr;
};
void copy_local_tokens(const ForwardCall& all, const LocalTokens& own);

// values_of_rows [rows] = values[table[row]] for each row of `table`.
void take_vocab(const float* values, const std::int32_t* table, std::int64_t rows,
                float* values_of_rows, Stream stream);

// Fills table [ranks * each] with token ids: row i of rank r is vocab_begins[r] + i.
struct VocabBegins {
  int ranks = 0;
  std::int32_t of[64] = {};
};
void fill_vocab_ids(const VocabBegins& vocab_begins, std::int64_t each, std::int32_t* table,
                    Stream stream);

// Sums shards [ranks, count] over ranks and rounds them to `out` [rows, columns]: the local step of
// a reduce-scatter. columns is a multiple of 4; count is at least rows * columns.
void round_slices(const float* slices, int ranks, std::int64_t count, std::int64_t rows,
                  std::int64_t columns, const GradientOutput& out, Stream stream);

// sums [count] = sum over ranks of [ranks, count].
void add_slices(const float* slices, int ranks, std::int64_t count, float* sums, Stream stream);
void add_slices(const double* slices, int ranks, std::int64_t count, double* sums, Stream stream);

}  // namespace logitless::cuda
