/* The far field over the C ABI: vocab_order.h and far_field.h in C; docs/far_field.md tells when to
 * use it. Conventions are c_api.h's, of whose ABI version this is a part. A call with an order of
 * the caller's is logitless_cross_entropy with a plan of accuracy or kind far_*, and the order and
 * sample_seed of its inputs. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "logitless/c_api.h"
#include "logitless/c_communicator.h"
#include "logitless/export.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t logitless_accuracy;
enum {
  LOGITLESS_ACCURACY_EXACT = 0,
  LOGITLESS_ACCURACY_FAR_BACKWARD = 1, /* the loss is exact, gradients may be the far field's */
  LOGITLESS_ACCURACY_FAR_BOTH = 2      /* the loss may be, too */
};

/* ---- Orders of the vocabulary: immutable, for any number of threads ---- */

typedef struct logitless_order_options {
  size_t struct_size;
  int64_t strata; /* default 16; in [1, 4096] */
  uint64_t seed;
} logitless_order_options;
LOGITLESS_API void logitless_order_options_init(logitless_order_options* options,
                                                size_t struct_size);

/* average[vocab], of the host: the average probability of each word over the rows of hidden
 * [..., D]; weight [V, D], bias [V] or NULL, softcap 0 for none. memory_budget 0: the default. */
LOGITLESS_API logitless_status logitless_average_probability(
    const logitless_context* context, const logitless_tensor* hidden,
    const logitless_tensor* weight, const logitless_tensor* bias, float logit_scale, float softcap,
    uint64_t memory_budget, float* average, int64_t vocab);
/* For these weights and average[vocab] of the host. options may be NULL. */
LOGITLESS_API logitless_status logitless_vocab_order_make(const logitless_context* context,
                                                          const logitless_tensor* weight,
                                                          const float* average, int64_t vocab,
                                                          const logitless_order_options* options,
                                                          logitless_vocab_order** order);
/* Of a permutation words[vocab], position by position, and average[vocab], by word; both copied. */
LOGITLESS_API logitless_status logitless_vocab_order_create(const int64_t* words,
                                                            const float* average, int64_t vocab,
                                                            logitless_vocab_order** order);
/* Another order: the same with the moments of its tiles, which far_both needs. bias may be NULL. */
LOGITLESS_API logitless_status logitless_vocab_order_measure(
    const logitless_context* context, const logitless_vocab_order* order,
    const logitless_tensor* hidden, const logitless_tensor* weight, const logitless_tensor* bias,
    float logit_scale, float tau, logitless_vocab_order** measured);
LOGITLESS_API void logitless_vocab_order_destroy(logitless_vocab_order* order);
/* Words; 0 for NULL. */
LOGITLESS_API int64_t logitless_vocab_order_vocab(const logitless_vocab_order* order);
/* D of its moments; 0 without them, and for NULL. */
LOGITLESS_API int64_t logitless_vocab_order_dim(const logitless_vocab_order* order);
/* [vocab] the word at each position, and [vocab] the average probability by word: they live as long
 * as the order; NULL for NULL. */
LOGITLESS_API const int64_t* logitless_vocab_order_words(const logitless_vocab_order* order);
LOGITLESS_API const float* logitless_vocab_order_average(const logitless_vocab_order* order);
/* A safetensors file. */
LOGITLESS_API logitless_status logitless_vocab_order_save(const logitless_vocab_order* order,
                                                          const char* path);
LOGITLESS_API logitless_status logitless_vocab_order_load(const char* path,
                                                          logitless_vocab_order** order);

/* ---- A head of a training run: one number in, the error wanted ---- */

typedef struct logitless_far_head logitless_far_head;

/* FarFieldOptions of far_field.h, which tells more of each. Counts are at most 2^40. */
typedef struct logitless_far_field_options {
  size_t struct_size;
  double error;                /* default 0.01; in (0, 1): of d_hidden, relative */
  uint64_t memory_budget;      /* of each plan; 0: the default */
  int64_t sample_every;        /* default 16; >= 0 */
  int64_t audit_rows;          /* default 128; >= 1 */
  int64_t audit_every;         /* default 25; >= 1: steps between audits */
  int64_t refresh_every;       /* default 100; >= 1: steps between orders at first */
  int64_t refresh_delay;       /* default 4; >= 0: steps until an order is taken over */
  int64_t sample_rows;         /* default 1024; >= 1: tokens an order is made from */
  logitless_accuracy accuracy; /* default LOGITLESS_ACCURACY_FAR_BACKWARD */
  int32_t reserved;            /* 0 */
  /* Default NULL. Ranks with a head of all words each and tokens of their own, which decide alike
   * (FarFieldOptions::replicas of far_field.h). Has to live until the head is created. */
  const logitless_communicator* replicas;
} logitless_far_field_options;
LOGITLESS_API void logitless_far_field_options_init(logitless_far_field_options* options,
                                                    size_t struct_size);

/* Since the head was made, or of the state that it was given. */
typedef struct logitless_far_field_report {
  size_t struct_size;
  int64_t steps;
  int64_t dense_steps;    /* computed densely, fallbacks and steps done again included */
  int64_t repeated_steps; /* of those, after a far-field step whose audit missed the error */
  int64_t audits;
  int64_t refreshes;       /* orders taken over */
  double last_error;       /* of the last audit; -1: none yet */
  double worst_kept_error; /* of the audited far-field steps whose gradients were kept, misses that
                            * were accumulated included; infinity: one was not a number */
  double tau;              /* of the next far-field step */
  double mean_kept;        /* tiles kept, over the far-field steps */
  int64_t vocab;           /* words of the order there is; 0: none */
  int64_t far;             /* the next step is a far-field one */
} logitless_far_field_report;
LOGITLESS_API void logitless_far_field_report_init(logitless_far_field_report* report,
                                                   size_t struct_size);

/* The head has a copy of the context, which may be destroyed before it (what its trace needs may
 * not), and is used as a context is: one call at a time. options may be NULL. Errors: an option out
 * of its range (invalid argument); far_both on a GPU without cuBLAS or cuSOLVER (unsupported). */
LOGITLESS_API logitless_status logitless_far_head_create(const logitless_context* context,
                                                         const logitless_far_field_options* options,
                                                         logitless_far_head** head);
LOGITLESS_API void logitless_far_head_destroy(logitless_far_head* head);

/* logitless_cross_entropy by the plan that is due, in a workspace of the head's own; inputs.order
 * and sample_seed are left alone, d_hidden is needed. options and statistics may be NULL. On a GPU
 * it enqueues, and waits where something is to be decided (far_field.h); statistics then has no
 * more than tokens. Errors, after which the state is as it was: as logitless_cross_entropy; an
 * order of another number of words. */
LOGITLESS_API logitless_status logitless_far_head_step(
    logitless_far_head* head, const logitless_cross_entropy_options* options,
    const logitless_cross_entropy_inputs* inputs, const logitless_cross_entropy_outputs* outputs,
    logitless_loss_statistics* statistics);
/* Of the last step; on a GPU it waits. An error before the first, and after one that failed. */
LOGITLESS_API logitless_status logitless_far_head_statistics(const logitless_far_head* head,
                                                             logitless_loss_statistics* statistics);
LOGITLESS_API logitless_status logitless_far_head_report(const logitless_far_head* head,
                                                         logitless_far_field_report* report);
/* What the next step is and why, and the report: several lines, living until the head's next call;
 * "" for NULL. */
LOGITLESS_API const char* logitless_far_head_explain(logitless_far_head* head);
/* The order there is, a handle of the caller's; NULL before the first. */
LOGITLESS_API logitless_status logitless_far_head_order(const logitless_far_head* head,
                                                        logitless_vocab_order** order);

/* State and orders as a safetensors file, one being made included, for which it waits. A run that
 * goes on from it has the same bits. Loading checks all of it, and leaves the head as it was when
 * something is wrong, which is named: a file or bytes cut short or of something else, of another
 * accuracy, numbers that no head has, words that are no permutation (invalid argument). */
LOGITLESS_API logitless_status logitless_far_head_save(const logitless_far_head* head,
                                                       const char* path);
LOGITLESS_API logitless_status logitless_far_head_load(logitless_far_head* head, const char* path);
/* The same bytes in memory. They live until the head's next call. */
LOGITLESS_API logitless_status logitless_far_head_state(logitless_far_head* head,
                                                        const void** state, size_t* bytes);
LOGITLESS_API logitless_status logitless_far_head_set_state(logitless_far_head* head,
                                                            const void* state, size_t bytes);

#ifdef __cplusplus
}
#endif
