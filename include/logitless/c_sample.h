/* Sampling over the C ABI: sample.h in C, which has the formulas. The conventions are those of
 * c_api.h, and this header is part of its ABI version. The vocabulary is whole: inputs have no
 * sharding. Python samples from a vocabulary over ranks. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "logitless/c_api.h"
#include "logitless/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The programs and the head's plan of calls of the same shapes and dtypes. Immutable. */
typedef struct logitless_sample_plan logitless_sample_plan;
LOGITLESS_API void logitless_sample_plan_destroy(logitless_sample_plan* plan);
/* Returns the exact workspace size in bytes; 0 for NULL. */
LOGITLESS_API size_t logitless_sample_plan_workspace_bytes(const logitless_sample_plan* plan);
/* Explains the plan. The text lives as long as the plan; "" for NULL. */
LOGITLESS_API const char* logitless_sample_plan_explain(const logitless_sample_plan* plan);

/* ---- Tokens ---- */

typedef struct logitless_sample_options {
  size_t struct_size;
  int64_t top_k; /* default 0: all; else 1 to V */
  uint64_t seed;
  float temperature; /* default 1; >= 0: 0 takes the largest entry, the first of equal ones */
  float top_p;       /* default 1: all; above 0 and at most 1 */
  float min_p;       /* default 0: all; at most 1 */
  float softcap;     /* > 0; 0: none */
  float logit_scale; /* default 1 */
  int32_t reserved;  /* 0 */
} logitless_sample_options;
LOGITLESS_API void logitless_sample_options_init(logitless_sample_options* options,
                                                 size_t struct_size);

/* Contiguous tensors; on a GPU in its memory, aligned to 16 bytes. */
typedef struct logitless_sample_inputs {
  size_t struct_size;
  const logitless_tensor* hidden; /* [..., D] f32 | bf16 | f16 */
  /* [V, D], the dtype of hidden; on a CPU f32 beside 16 bits, or 16 bits beside f32 */
  const logitless_tensor* weight;
  const logitless_tensor* bias;       /* optional [V], f32, or on a CPU the dtype of weight */
  const logitless_tensor* logit_bias; /* optional f32 [V]; -inf forbids an entry */
  /* optional f32 [...], instead of the option; as the two below */
  const logitless_tensor* temperature;
  const logitless_tensor* top_p;
  const logitless_tensor* min_p;
  const logitless_tensor* counter; /* optional i32 | i64 [...]; NULL: the index of the token */
  const logitless_tensor* key;     /* optional i64 [2]: the noise's key, instead of the seed's */
} logitless_sample_inputs;
LOGITLESS_API void logitless_sample_inputs_init(logitless_sample_inputs* inputs,
                                                size_t struct_size);

typedef struct logitless_sample_outputs {
  size_t struct_size;
  const logitless_tensor* tokens; /* i32 | i64 [...] */
  /* optional f32 [...]: without temperature, filters and logit_bias */
  const logitless_tensor* log_prob;
} logitless_sample_outputs;
LOGITLESS_API void logitless_sample_outputs_init(logitless_sample_outputs* outputs,
                                                 size_t struct_size);

/* Plans calls within memory_budget bytes of workspace; 0: the default. options may be NULL, which
 * means the defaults. Errors: an argument, or a budget below the least plan (invalid argument); a
 * device without the kernels or libraries (unsupported). */
LOGITLESS_API logitless_status logitless_plan_sample(const logitless_context* context,
                                                     const logitless_sample_options* options,
                                                     const logitless_sample_inputs* inputs,
                                                     const logitless_sample_outputs* outputs,
                                                     uint64_t memory_budget,
                                                     logitless_sample_plan** plan);
/* Samples a token at each position. The seed, temperature, top_p and min_p may differ from those of
 * the plan. On a GPU it enqueues and returns. A CUDA graph may capture it, with the options'
 * numbers of then; other counters draw other tokens in its replays. The workspace is aligned to 64,
 * on a GPU to 256. */
LOGITLESS_API logitless_status logitless_sample(logitless_context* context,
                                                const logitless_sample_plan* plan,
                                                const logitless_sample_options* options,
                                                const logitless_sample_inputs* inputs,
                                                const logitless_sample_outputs* outputs,
                                                void* workspace, size_t workspace_bytes);

/* ---- The best entries ---- */

typedef struct logitless_top_logprobs_options {
  size_t struct_size;
  int64_t k;         /* default 1; 1 to V */
  float softcap;     /* > 0; 0: none */
  float logit_scale; /* default 1 */
} logitless_top_logprobs_options;
LOGITLESS_API void logitless_top_logprobs_options_init(logitless_top_logprobs_options* options,
                                                       size_t struct_size);

typedef struct logitless_top_logprobs_inputs {
  size_t struct_size;
  const logitless_tensor* hidden;  /* as in logitless_sample_inputs */
  const logitless_tensor* weight;  /* [V, D] */
  const logitless_tensor* bias;    /* optional [V] */
  const logitless_tensor* targets; /* optional i32 | i64 [...], for log_prob */
} logitless_top_logprobs_inputs;
LOGITLESS_API void logitless_top_logprobs_inputs_init(logitless_top_logprobs_inputs* inputs,
                                                      size_t struct_size);

typedef struct logitless_top_logprobs_outputs {
  size_t struct_size;
  const logitless_tensor* top_log_probs; /* f32 [..., K], the largest first */
  const logitless_tensor* top_ids;       /* i32 | i64 [..., K] */
  const logitless_tensor* log_prob;      /* f32 [...], of the targets; NULL without them */
} logitless_top_logprobs_outputs;
LOGITLESS_API void logitless_top_logprobs_outputs_init(logitless_top_logprobs_outputs* outputs,
                                                       size_t struct_size);

/* Plan and run as the two above. */
LOGITLESS_API logitless_status logitless_plan_top_logprobs(
    const logitless_context* context, const logitless_top_logprobs_options* options,
    const logitless_top_logprobs_inputs* inputs, const logitless_top_logprobs_outputs* outputs,
    uint64_t memory_budget, logitless_sample_plan** plan);
LOGITLESS_API logitless_status logitless_top_logprobs(logitless_context* context,
                                                      const logitless_sample_plan* plan,
                                                      const logitless_top_logprobs_options* options,
                                                      const logitless_top_logprobs_inputs* inputs,
                                                      const logitless_top_logprobs_outputs* outputs,
                                                      void* workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
