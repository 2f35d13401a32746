/* A head whose words, and maybe tokens, are spread over ranks, over the C ABI: sharding.h in C.
 * Conventions are c_api.h's, of whose ABI version this is a part.
 *
 * `sharding` of logitless_cross_entropy_inputs and logitless_head_inputs points to one. Planning
 * and calls are collective then: every rank of `words` makes the same ones in the same order, and
 * all of them fail where one does, naming the rank; the next call is possible. Only a struct that
 * cannot be read (a struct_size, a dtype, a rank) fails alone, and is missed by the others at their
 * limit. By exact and far-field plans and logitless_far_head_step, on the CPU and, of bf16, on
 * Hopper GPUs, with communicators of their memory: LOGITLESS_UNSUPPORTED on others. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "logitless/c_api.h"
#include "logitless/c_communicator.h"
#include "logitless/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What goes from rank to rank where tokens are spread over the ranks that hold the words. */
typedef int32_t logitless_movement;
enum {
  LOGITLESS_MOVES_PLANNED = 0, /* what is predicted to be faster; logitless_plan_explain says why */
  LOGITLESS_MOVES_TOKENS = 1,  /* hidden states, and pieces of their gradient */
  LOGITLESS_MOVES_WEIGHTS = 2  /* rows of weight, a piece at a time, and pieces of d_weight */
};

/* What a rank has of the weight. */
typedef int32_t logitless_weight_sharding;
enum {
  LOGITLESS_WEIGHT_WORDS = 0,  /* rows, which are words */
  LOGITLESS_WEIGHT_COLUMNS = 1 /* [vocab, columns], and all of bias and d_bias; with tokens */
};

/* Of this rank's own words are weight [rows, D], bias [rows], d_weight and d_bias; rows may differ
 * between ranks and be 0. Of the whole vocabulary are targets, class_weight [vocab], vocab_weight
 * [vocab], label smoothing, argmax and everything that is summed over words. */
typedef struct logitless_sharding {
  size_t struct_size;
  const logitless_communicator* words; /* that hold the words; required */
  int64_t vocab;                       /* words of all ranks */
  int64_t first_word;                  /* rows are words [first_word, first_word + rows) */
  const logitless_tensor* word_table;  /* or, i32 [rows] ascending: which words they are */
  /* hidden, targets and everything per token are this rank's own tokens, of any number; else they
   * are the same on all ranks. A mean or sum is the whole one on each rank. */
  int32_t tokens;
  logitless_movement moves; /* the same on all ranks; without tokens 0 */
  /* Groups like this one whose tokens a mean divides by as well; NULL: none. */
  const logitless_communicator* replicas;
  logitless_weight_sharding weight;
  int64_t columns; /* of the weight here, where it is by columns; those of all ranks are hidden's */
  /* Not 0: ranges of words that were renamed as logitless_deal_words has them, so that a far field
   * is taken to keep as many tiles on each rank; without word_table. The same on all ranks. */
  int32_t dealt;
} logitless_sharding;
LOGITLESS_API void logitless_sharding_init(logitless_sharding* sharding, size_t struct_size);

/* dealt[vocab], rank by rank: rank r's word table is [first, its next rank's first) of it, for
 * which all ranks keep about as many tiles of the far field. By average[vocab] or, where that is
 * NULL, by id from frequent to rare. */
LOGITLESS_API logitless_status logitless_deal_words(int64_t vocab, int32_t ranks,
                                                    const float* average, uint64_t seed,
                                                    int32_t* dealt);
/* The words of the ranks before `rank` in [0, ranks]. */
LOGITLESS_API logitless_status logitless_first_dealt(int64_t vocab, int32_t ranks, int32_t rank,
                                                     int64_t* first);

/* ---- Orders of the vocabulary for far-field plans: collective, as calls are. A
 * logitless_far_head makes its own. ---- */

/* logitless_average_probability of this rank's words, against those of all ranks. */
LOGITLESS_API logitless_status logitless_sharded_average_probability(
    const logitless_context* context, const logitless_sharding* sharding,
    const logitless_tensor* hidden, const logitless_tensor* weight, const logitless_tensor* bias,
    float logit_scale, float softcap, uint64_t memory_budget, float* average, int64_t rows);
/* logitless_vocab_order_measure of this rank's tiles, for hidden that is the same on all ranks.
 * order: NULL where this rank has no words. */
LOGITLESS_API logitless_status logitless_sharded_vocab_order_measure(
    const logitless_context* context, const logitless_sharding* sharding,
    const logitless_vocab_order* order, const logitless_tensor* hidden,
    const logitless_tensor* weight, const logitless_tensor* bias, float logit_scale, float tau,
    logitless_vocab_order** measured);
/* Another order: the same, by which all ranks take tokens alike; what calls with a sharding need.
 * order: of this rank's rows, NULL where it has no words. */
LOGITLESS_API logitless_status logitless_vocab_order_share(const logitless_vocab_order* order,
                                                           const logitless_sharding* sharding,
                                                           logitless_vocab_order** shared);

#ifdef __cplusplus
}
#endif
