// A head whose words, and maybe tokens, are spread over ranks: no rank holds the whole weight, its
// gradient or the logits (docs/distributed.md).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "logitless/communicator.h"
#include "logitless/export.h"
#include "logitless/tensor_view.h"

namespace logitless {

// What a rank has of the weight: rows, which are words, or columns of all rows.
enum class WeightSharding : std::uint8_t { words = 0, columns = 1 };

// What goes from rank to rank where tokens are spread over the ranks that hold the words.
enum class Movement : std::uint8_t {
  planned = 0,  // what the planner predicts to be faster; LossPlan::explain() says why
  // Hidden states go to the words, and pieces of their gradient come back: bytes by the tokens.
  tokens = 1,
  // Rows of weight go to the tokens, a piece of each rank's at a time, and pieces of d_weight come
  // back: bytes by the words. exp(z) is not kept, so gradients take 4 passes.
  weights = 2,
};

// As it is here: no sharding. With `words`, plans and calls are collective: every rank of it makes
// the same ones in the same order, and all of them throw where one does, naming the rank.
// A rank that comes with a plan that was made without a sharding is missed at the limit alone.
//
// Of each rank's own words are weight [rows, D], bias [rows], d_weight and d_bias; rows may differ
// between ranks and be 0. Of the whole vocabulary are targets, class_weight [vocab], vocab_weight
// [vocab], label smoothing, argmax and everything that is summed over words. Of a mean or sum every
// rank gets the whole loss, in the same bits, and complete gradients of it.
//
// Of a weight by columns a rank has weight [vocab, columns] and d_weight like it, and all of bias
// and d_bias [vocab], the same on all ranks. Weights move then, to each rank's own tokens, whose
// hidden has all columns: tokens is true, and there is no far field.
//
// Served by exact and, of rows, far-field plans, on the CPU and, of bf16, on Hopper GPUs. Throws
// Unsupported, on every rank, on other GPUs.
//
// On a GPU the communicators move its memory on the context's stream, and one exchange between the
// hosts (all_gather_host) precedes each call: what is wrong with its arguments on one rank all
// ranks throw. A bad target makes the losses of all ranks NaN, and device_statistics throws; what
// fails after a call's first exchange gives the group up.
struct Sharding {
  // The ranks that hold the words; null: no sharding. Never a default group.
  std::shared_ptr<Communicator> words = {};
  std::int64_t vocab = 0;  // words of the whole vocabulary; those of all ranks are [0, vocab), once
  std::int64_t first_word = 0;  // rows are words [first_word, first_word + rows)
  // Or, i32 [rows] ascending, in the host's memory: which words they are. On a GPU weights do not
  // move then, and 4 bytes a row are taken of its memory at the first call of a plan.
  ConstTensorView word_table = {};
  // hidden, targets and everything per token are this rank's tokens, of any number:
  // sequence-parallel input. Otherwise they are the same on all ranks, and so are the outputs. The
  // last target of a shard is its neighbour's, so next_token is refused with it.
  bool tokens = false;
  // Groups like this one that a mean is over as well: it divides by the weights of the tokens of
  // all of them. Loss and gradients are this group's part then. null: none.
  std::shared_ptr<Communicator> replicas = {};
  WeightSharding weight = WeightSharding::words;
  // Of the weight here, 0 or more, with WeightSharding::columns: in the order of the ranks those of
  // all of them are the columns of hidden.
  std::int64_t columns = 0;
  // Ranges of words that were renamed as deal_words has them: far-field plans take all ranks to
  // keep as many tiles, and not one of them nearly all. A word_table says so without it. The same
  // on all ranks.
  bool dealt = false;
  // With `tokens`, else planned: an InvalidArgument says so. The same on all ranks.
  Movement moves = Movement::planned;
};

// Words dealt out so that all ranks have as many frequent and rare ones: with ids from frequent to
// rare, as those of tokenizers are, ranks of one range each are not alike, and the far field keeps
// nearly all tiles on the first (FarFieldStatistics::imbalance).
//
// i32 [vocab], rank by rank: rank r's word_table is [first_dealt(vocab, ranks, r), first_dealt(...,
// r + 1)) of it. Words are taken from frequent to rare, by average [vocab] or, without it, by id,
// `ranks` at a time; each of those goes to another rank, by chance. Row i of the dealt weight is
// row dealt[i] of a checkpoint, and so it is stored back. Throws InvalidArgument when vocab or
// ranks are below 1, vocab above 2^31 - 1, or average is of another size or no numbers.
LOGITLESS_API std::vector<std::int32_t> deal_words(std::int64_t vocab, int ranks,
                                                   std::span<const float> average = {},
                                                   std::uint64_t seed = 0);
// The words of the ranks before `rank` in [0, ranks]: each has vocab / ranks, and one more where
// rank < vocab % ranks.
LOGITLESS_API std::int64_t first_dealt(std::int64_t vocab, int ranks, int rank);
// The row of each word in the dealt weight: inverse[dealt[i]] = i. Throws InvalidArgument where
// dealt is no permutation.
LOGITLESS_API std::vector<std::int32_t> inverse_of_dealt(std::span<const std::int32_t> dealt);

}  // namespace logitless
