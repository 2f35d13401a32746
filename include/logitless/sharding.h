// Vocabulary-parallel heads, with tokens sharded or not: no rank holds the full weight, its
// gradient or the logits (docs/use/distributed.md).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "logitless/communicator.h"
#include "logitless/export.h"
#include "logitless/tensor_view.h"

namespace logitless {

// Dimension along which the weight is sharded: rows (vocabulary entries), or columns of all rows.
enum class WeightSharding : std::uint8_t { rows = 0, columns = 1 };

// The tensors that travel between ranks where tokens are sharded over the ranks of the vocabulary.
enum class ExchangeMode : std::uint8_t {
  planned = 0,  // the faster by prediction; LossPlan::explain() says why
  // Token-dispatched: hidden states travel to the vocabulary shards, and slices of their gradient
  // return. Bytes are proportional to the tokens.
  tokens = 1,
  // Weight-gathered: rows of weight travel to the tokens, a slice of each rank's at a time, and
  // slices of d_weight return. Bytes are proportional to the vocabulary. exp(z) is not saved, so
  // gradients take 4 GEMMs.
  weights = 2,
};

// Shards of a head; the default is no sharding. With `vocab_group`, plans and calls are collective:
// every rank of it makes the same calls in the same order. An error on one rank is thrown on all
// and names the rank. A rank whose plan was made without a sharding is missed only at the limit.
//
// Local to each rank's vocabulary shard are weight [rows, D], bias [rows], d_weight and d_bias;
// rows may differ between ranks and be 0. Global are targets, weights of the vocabulary [vocab],
// label smoothing, argmax and all sums over the vocabulary. Every rank gets the global loss of a
// mean or sum, in the same bits, and complete gradients of it.
//
// A weight sharded by columns is [vocab, columns] on each rank, and so is d_weight. bias and d_bias
// [vocab] are full and the same on all ranks. The weights are then gathered to each rank's own
// tokens, whose hidden has all columns: tokens is true, and there is no far field.
//
// Exact plans and, for rows, far-field plans support it on the CPU and, for bf16 and f16, on GPUs
// of compute capability 8.0 or more. Others throw Unsupported on every rank.
//
// On a GPU the communicators move its memory on the context's stream. One exchange between the
// hosts (all_gather_host) precedes each call, so that all ranks throw an argument error of one. A
// bad target makes the losses of all ranks NaN, and device_statistics throws. A failure after a
// call's first exchange aborts the group.
struct Sharding {
  // The ranks of the vocabulary shards; null: no sharding. Never a default group.
  std::shared_ptr<Communicator> vocab_group = {};
  std::int64_t vocab = 0;        // global vocabulary; the shards cover [0, vocab) exactly once
  std::int64_t vocab_begin = 0;  // the shard is entries [vocab_begin, vocab_begin + rows)
  // Alternatively, the shard's vocabulary entries: i32 [rows], ascending, in host memory. On a GPU
  // weights are not gathered then, and the first call of a plan takes 4 bytes of GPU memory a row.
  ConstTensorView vocab_ids = {};
  // Sequence-parallel input: hidden, targets and all per-token tensors are this rank's tokens, of
  // any number. Otherwise they are the same on all ranks, and so are the outputs. next_token is
  // refused with it, since a shard's last target belongs to its neighbour.
  bool tokens = false;
  // Further groups like this one that share a mean: its divisor includes the tokens of all of them.
  // Loss and gradients are then this group's part. null: none.
  std::shared_ptr<Communicator> replicas = {};
  WeightSharding weight = WeightSharding::rows;
  // Local columns of the weight, 0 or more, with WeightSharding::columns. Those of all ranks, in
  // order, are the columns of hidden.
  std::int64_t columns = 0;
  // Marks ranges of a vocabulary interleaved by interleave_vocab. Far-field plans then assume equal
  // numbers of selected tiles on all ranks, instead of nearly all on one. vocab_ids imply it.
  // The same on all ranks.
  bool interleaved = false;
  // Requires `tokens` unless planned, else InvalidArgument. The same on all ranks.
  ExchangeMode exchange = ExchangeMode::planned;
};

// Interleaves the vocabulary so that all ranks have as many frequent and rare entries. Token ids
// usually run from frequent to rare. With one range of ids a rank, the far field then selects
// nearly all tiles on the first rank (FarFieldStatistics::imbalance).
//
// Returns i32 [vocab], rank by rank: rank r's vocab_ids is [interleaved_begin(vocab, ranks, r),
// interleaved_begin(..., r + 1)) of it. Entries are taken from frequent to rare, by average [vocab]
// or, without it, by id. Of each `ranks` entries every rank gets one, at random. Row i of the
// interleaved weight is row `interleaved[i]` of a checkpoint. Throws InvalidArgument when vocab or
// ranks are below 1, vocab is above 2^31 - 1, or average has another size or no finite numbers.
LOGITLESS_API std::vector<std::int32_t> interleave_vocab(std::int64_t vocab, int ranks,
                                                         std::span<const float> average = {},
                                                         std::uint64_t seed = 0);
// Returns the number of entries of the ranks before `rank` in [0, ranks]: each has vocab / ranks,
// and one more where rank < vocab % ranks.
LOGITLESS_API std::int64_t interleaved_begin(std::int64_t vocab, int ranks, int rank);
// Returns the row of each entry in the interleaved weight: `inverse[interleaved[i]] = i`. Throws
// InvalidArgument where `interleaved` is no permutation.
LOGITLESS_API std::vector<std::int32_t> inverse_of_interleaved(
    std::span<const std::int32_t> interleaved);

}  // namespace logitless
