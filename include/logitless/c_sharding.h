/* A vocabulary-parallel head, with tokens sharded or not, over the C ABI: sharding.h in C. The
 * conventions are those of c_api.h, and this header is part of its ABI version.
 *
 * `sharding` of logitless_cross_entropy_inputs and logitless_head_inputs points to one. Planning
 * and calls are then collective: every rank of `vocab_group` makes the same calls in the same
 * order. If one rank's call fails, all fail and name the rank; the next call is possible. Only a
 * struct that cannot be read (a struct_size, a dtype, a rank) fails on one rank alone, and the
 * others time out. Exact and far-field plans and logitless_far_head_step support it, with
 * communicators of the device's memory: on the CPU, and for bf16 and f16 on GPUs of compute
 * capability 8.0 or more. Other cases are LOGITLESS_UNSUPPORTED. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "logitless/c_api.h"
#include "logitless/c_communicator.h"
#include "logitless/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The tensors that travel between ranks where tokens are sharded over the ranks of the
 * vocabulary. */
typedef int32_t logitless_exchange_mode;
enum {
  LOGITLESS_EXCHANGE_PLANNED = 0, /* the faster by prediction; logitless_plan_explain says why */
  LOGITLESS_EXCHANGE_TOKENS = 1, /* token-dispatched: hidden states, and slices of their gradient */
  LOGITLESS_EXCHANGE_WEIGHTS = 2 /* weight-gathered: slices of weight, and of d_weight */
};

/* The dimension along which the weight is sharded. */
typedef int32_t logitless_weight_sharding;
enum {
  LOGITLESS_WEIGHT_ROWS = 0,   /* rows: vocabulary entries */
  LOGITLESS_WEIGHT_COLUMNS = 1 /* [vocab, columns], with full bias and d_bias; needs `tokens` */
};

/* A rank's part of the head. Local to this rank's vocabulary shard are weight [rows, D], bias
 * [rows], d_weight and d_bias; rows may differ between ranks and be 0. Global are targets, weights
 * of the vocabulary [vocab], label smoothing, argmax and all sums over the vocabulary. */
typedef struct logitless_sharding {
  size_t struct_size;
  const logitless_communicator* vocab_group; /* the ranks of the vocabulary shards; required */
  int64_t vocab;                             /* global vocabulary */
  int64_t vocab_begin; /* the shard is vocabulary entries [vocab_begin, vocab_begin + rows) */
  const logitless_tensor* vocab_ids; /* or i32 [rows] ascending: the shard's vocabulary entries */
  /* Sequence-parallel: hidden, targets and all per-token tensors are this rank's own tokens, of any
   * number. Otherwise they are the same on all ranks. A mean or sum is global on each rank. */
  int32_t tokens;
  logitless_exchange_mode exchange; /* the same on all ranks; 0 without tokens */
  /* Further groups like this one whose tokens count in the divisor of a mean; NULL: none. */
  const logitless_communicator* replicas;
  logitless_weight_sharding weight;
  /* local columns of a weight sharded by columns; those of all ranks make up D */
  int64_t columns;
  /* Not 0: ranges of a vocabulary interleaved by logitless_interleave_vocab, so that the far field
   * selects about as many tiles on each rank. Without vocab_ids. The same on all ranks. */
  int32_t interleaved;
} logitless_sharding;
LOGITLESS_API void logitless_sharding_init(logitless_sharding* sharding, size_t struct_size);

/* Returns 1 where a kernel of the device takes heads of this dtype and width whose vocabulary is
 * sharded over ranks, else 0: such calls are LOGITLESS_UNSUPPORTED, and the weight has to be
 * gathered. Also 0 for a dtype or a width that no head has. compute_capability: of a GPU,
 * 10 major + minor; 0 for the CPU. dim: the columns of weight. */
LOGITLESS_API int32_t logitless_supports_vocab_parallel(logitless_device device,
                                                        int32_t compute_capability,
                                                        logitless_dtype dtype, int64_t dim);

/* Writes `interleaved[vocab]`, the interleaved vocabulary, rank by rank. Rank r's `vocab_ids` is
 * [first(r), first(r + 1)) of it, with logitless_interleaved_begin. All ranks then select about as
 * many tiles of the far field. Entries are interleaved by average[vocab] or, where that is NULL, by
 * id from frequent to rare. */
LOGITLESS_API logitless_status logitless_interleave_vocab(int64_t vocab, int32_t ranks,
                                                          const float* average, uint64_t seed,
                                                          int32_t* interleaved);
/* Returns the number of vocabulary entries of the ranks before `rank` in [0, ranks]. */
LOGITLESS_API logitless_status logitless_interleaved_begin(int64_t vocab, int32_t ranks,
                                                           int32_t rank, int64_t* first);

/* ---- Orders of the vocabulary for far-field plans: collective, like all calls with a sharding. A
 * logitless_far_head makes its own. ---- */

/* logitless_average_probability of the local vocabulary shard, normalised over all ranks. */
LOGITLESS_API logitless_status logitless_sharded_average_probability(
    const logitless_context* context, const logitless_sharding* sharding,
    const logitless_tensor* hidden, const logitless_tensor* weight, const logitless_tensor* bias,
    float logit_scale, float softcap, uint64_t memory_budget, float* average, int64_t rows);
/* logitless_vocab_order_measure of the local tiles, for hidden that is the same on all ranks. order
 * is NULL where this rank's shard is empty. */
LOGITLESS_API logitless_status logitless_sharded_vocab_order_measure(
    const logitless_context* context, const logitless_sharding* sharding,
    const logitless_vocab_order* order, const logitless_tensor* hidden,
    const logitless_tensor* weight, const logitless_tensor* bias, float logit_scale, float tau,
    logitless_vocab_order** measured);
/* Makes a copy of the order with the positions by which all ranks sort tokens alike; calls with a
 * sharding need it. order covers this rank's rows and is NULL where its shard is empty. */
LOGITLESS_API logitless_status logitless_vocab_order_share(const logitless_vocab_order* order,
                                                           const logitless_sharding* sharding,
                                                           logitless_vocab_order** shared);

#ifdef __cplusplus
}
#endif
