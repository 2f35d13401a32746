/* The far field over the C ABI: vocab_order.h and far_field.h in C. docs/use/far_field.md says when
 * to use it. The conventions are those of c_api.h, and this header is part of its ABI version. For
 * a call with the caller's own order, use logitless_cross_entropy with a plan of accuracy or kind
 * far_*. Set `order` and `sample_seed` of its inputs. */
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
  LOGITLESS_ACCURACY_FAR_BACKWARD = 1, /* exact loss; gradients may use the far field */
  LOGITLESS_ACCURACY_FAR_BOTH = 2      /* the loss may use it too */
};

/* ---- Orders of the vocabulary: immutable, for any number of threads ---- */

typedef struct logitless_order_options {
  size_t struct_size;
  int64_t strata; /* default 16; in [1, 4096] */
  uint64_t seed;
} logitless_order_options;
LOGITLESS_API void logitless_order_options_init(logitless_order_options* options,
                                                size_t struct_size);

/* Computes average[vocab], in host memory: the average probability of each vocabulary entry over
 * the rows of hidden [..., D]. weight is [V, D], bias [V] or NULL, softcap 0 for none.
 * memory_budget 0 is the default. */
LOGITLESS_API logitless_status logitless_average_probability(
    const logitless_context* context, const logitless_tensor* hidden,
    const logitless_tensor* weight, const logitless_tensor* bias, float logit_scale, float softcap,
    uint64_t memory_budget, float* average, int64_t vocab);
/* Makes the order for these weights and average[vocab] in host memory. options may be NULL. */
LOGITLESS_API logitless_status logitless_vocab_order_make(const logitless_context* context,
                                                          const logitless_tensor* weight,
                                                          const float* average, int64_t vocab,
                                                          const logitless_order_options* options,
                                                          logitless_vocab_order** order);
/* Makes an order from a permutation `vocab_ids[vocab]`, by position, and average[vocab], by
 * vocabulary entry; both are copied. */
LOGITLESS_API logitless_status logitless_vocab_order_create(const int64_t* vocab_ids,
                                                            const float* average, int64_t vocab,
                                                            logitless_vocab_order** order);
/* Makes a copy of the order with the moments of its tiles, which far_both needs. bias may be
 * NULL. */
LOGITLESS_API logitless_status logitless_vocab_order_measure(
    const logitless_context* context, const logitless_vocab_order* order,
    const logitless_tensor* hidden, const logitless_tensor* weight, const logitless_tensor* bias,
    float logit_scale, float tau, logitless_vocab_order** measured);
LOGITLESS_API void logitless_vocab_order_destroy(logitless_vocab_order* order);
/* Returns the number of vocabulary entries; 0 for NULL. */
LOGITLESS_API int64_t logitless_vocab_order_vocab(const logitless_vocab_order* order);
/* Returns D of its moments; 0 without them, and for NULL. */
LOGITLESS_API int64_t logitless_vocab_order_dim(const logitless_vocab_order* order);
/* Return the vocabulary entry at each position [vocab], and the average probability by vocabulary
 * entry [vocab]. Both live as long as the order; NULL for NULL. */
LOGITLESS_API const int64_t* logitless_vocab_order_ids(const logitless_vocab_order* order);
LOGITLESS_API const float* logitless_vocab_order_average(const logitless_vocab_order* order);
/* Save and load an order as a safetensors file. */
LOGITLESS_API logitless_status logitless_vocab_order_save(const logitless_vocab_order* order,
                                                          const char* path);
LOGITLESS_API logitless_status logitless_vocab_order_load(const char* path,
                                                          logitless_vocab_order** order);

/* ---- The head of a training run with a wanted error ---- */

typedef struct logitless_far_head logitless_far_head;

/* FarFieldOptions of far_field.h, which documents each. Counts are at most 2^40. */
typedef struct logitless_far_field_options {
  size_t struct_size;
  double error;                /* default 0.01; in (0, 1): wanted relative error of d_hidden */
  uint64_t memory_budget;      /* of each plan; 0: the default */
  int64_t sample_every;        /* default 16; >= 0 */
  int64_t audit_rows;          /* default 128; >= 1 */
  int64_t audit_every;         /* default 25; >= 1: steps between audits */
  int64_t refresh_every;       /* default 100; >= 1: steps between orders, at first */
  int64_t refresh_delay;       /* default 4; >= 0: steps until an order is used */
  int64_t sample_rows;         /* default 1024; >= 1: tokens that an order is made from */
  logitless_accuracy accuracy; /* default LOGITLESS_ACCURACY_FAR_BACKWARD */
  int32_t reserved;            /* 0 */
  /* Default NULL. Data-parallel ranks, each with the full vocabulary and its own tokens, that make
   * the same decisions (FarFieldOptions::replicas of far_field.h). Must live until the head is
   * created. */
  const logitless_communicator* replicas;
} logitless_far_field_options;
LOGITLESS_API void logitless_far_field_options_init(logitless_far_field_options* options,
                                                    size_t struct_size);

/* Counts since the head was made, including those of a state that it was given. */
typedef struct logitless_far_field_report {
  size_t struct_size;
  int64_t steps;
  int64_t dense_steps;    /* computed densely, including fallbacks and repeated steps */
  int64_t repeated_steps; /* of those, repeats of a far-field step whose audit missed the error */
  int64_t audits;
  int64_t refreshes; /* new orders put to use */
  double last_error; /* of the last audit; -1: none yet */
  /* Worst error of the audited far-field steps whose gradients were used, including misses that
   * were accumulated; infinity: one was not a number */
  double worst_accepted_error;
  double tau;           /* threshold of the next far-field step */
  double mean_selected; /* mean fraction of selected tiles over the far-field steps */
  int64_t vocab;        /* vocabulary entries of the current order; 0: none */
  int64_t far;          /* the next step is a far-field one */
} logitless_far_field_report;
LOGITLESS_API void logitless_far_field_report_init(logitless_far_field_report* report,
                                                   size_t struct_size);

/* Makes a head. It copies the context, which may be destroyed before it; data of its trace function
 * must live on. Like a context, a head serves one call at a time. options may be NULL. Errors: an
 * option out of its range (invalid argument); far_both on a GPU without cuBLAS or cuSOLVER
 * (unsupported). */
LOGITLESS_API logitless_status logitless_far_head_create(const logitless_context* context,
                                                         const logitless_far_field_options* options,
                                                         logitless_far_head** head);
LOGITLESS_API void logitless_far_head_destroy(logitless_far_head* head);

/* Runs logitless_cross_entropy with the plan that is due, in the head's own workspace. It ignores
 * inputs.order and sample_seed and requires d_hidden. options and statistics may be NULL. On a GPU
 * it enqueues, and waits only for decisions (far_field.h); statistics then holds only `tokens`.
 * Errors are those of logitless_cross_entropy, or an order of another vocabulary size; they leave
 * the state unchanged. */
LOGITLESS_API logitless_status logitless_far_head_step(
    logitless_far_head* head, const logitless_cross_entropy_options* options,
    const logitless_cross_entropy_inputs* inputs, const logitless_cross_entropy_outputs* outputs,
    logitless_loss_statistics* statistics);
/* Returns the statistics of the last step; on a GPU it waits. An error before the first step, and
 * after a failed one. */
LOGITLESS_API logitless_status logitless_far_head_statistics(const logitless_far_head* head,
                                                             logitless_loss_statistics* statistics);
LOGITLESS_API logitless_status logitless_far_head_report(const logitless_far_head* head,
                                                         logitless_far_field_report* report);
/* Explains the next step and the report in several lines that live until the head's next call; ""
 * for NULL. */
LOGITLESS_API const char* logitless_far_head_explain(logitless_far_head* head);
/* Returns the current order as a handle that the caller destroys; NULL before the first. */
LOGITLESS_API logitless_status logitless_far_head_order(const logitless_far_head* head,
                                                        logitless_vocab_order** order);

/* Save and load the state and orders as a safetensors file. Saving waits for an order in progress.
 * A run that resumes from the file has the same bits. Loading checks everything and leaves the head
 * unchanged on an error, which it names. Errors (invalid argument): truncated or foreign files or
 * bytes, another accuracy, impossible numbers, an order that is no permutation. */
LOGITLESS_API logitless_status logitless_far_head_save(const logitless_far_head* head,
                                                       const char* path);
LOGITLESS_API logitless_status logitless_far_head_load(logitless_far_head* head, const char* path);
/* The same as bytes in memory, which live until the head's next call. */
LOGITLESS_API logitless_status logitless_far_head_state(logitless_far_head* head,
                                                        const void** state, size_t* bytes);
LOGITLESS_API logitless_status logitless_far_head_set_state(logitless_far_head* head,
                                                            const void* state, size_t bytes);

#ifdef __cplusplus
}
#endif
