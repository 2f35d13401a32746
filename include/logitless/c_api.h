/* The C ABI of logitless: what other languages bind to. C99, no C++ type crosses it, no exception
 * leaves it.
 *
 * Conventions
 * - Every call that can fail returns a logitless_status; logitless_last_error() is the text of the
 * last failure on the calling thread. Outputs of a failed call are untouched.
 * - Handles are opaque; what _create, _compile, _prepare or _plan_* made is freed by the
 * matching _destroy. NULL may be destroyed. Any other NULL handle or missing required pointer is
 * LOGITLESS_INVALID_ARGUMENT.
 * - Memory is the caller's: tensors and one workspace of logitless_plan_workspace_bytes(plan)
 * bytes, aligned to 64. The library keeps no pointer to either after a call.
 * - Structs begin with struct_size. Fill them by logitless_<struct>_init(&s, sizeof s), then set
 * fields. A later library takes the smaller structs of an older header; a library given a larger
 * struct than it knows takes it as long as the bytes that it does not know are zero
 * (LOGITLESS_UNSUPPORTED otherwise). Zero in a field added later means: as before.
 * - Flags are int32_t: zero is no, anything else is yes.
 *
 * Threads: plans and programs are immutable and may be shared. A plan is for as many threads as the
 * context has that it was made with, and runs in contexts of as many alone
 * (LOGITLESS_INVALID_ARGUMENT). A context serves one call at a time: make one for each thread that
 * calls. Everything else may be called from any thread at any time.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "logitless/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when a binary made for an older header would no longer work. */
#define LOGITLESS_ABI_VERSION 1

#define LOGITLESS_MAX_RANK 4

typedef int32_t logitless_status;
enum {
  LOGITLESS_OK = 0,
  LOGITLESS_INVALID_ARGUMENT = 1, /* the caller's mistake: a shape, dtype, option, index, handle */
  LOGITLESS_UNSUPPORTED =
      2, /* valid, but no kernel or plan serves it; the text lists each reason */
  LOGITLESS_DEVICE_ERROR = 3,  /* the device or the operating system failed; out of memory */
  LOGITLESS_INTERNAL_ERROR = 4 /* a bug of the library */
};

typedef int32_t logitless_dtype;
enum {
  LOGITLESS_F32 = 0,
  LOGITLESS_BF16 = 1,
  LOGITLESS_F16 = 2,
  LOGITLESS_I32 = 3,
  LOGITLESS_I64 = 4,
  LOGITLESS_I8 = 5,
  LOGITLESS_F64 = 6
};

typedef int32_t logitless_reduction;
enum { LOGITLESS_REDUCTION_NONE = 0, LOGITLESS_REDUCTION_MEAN = 1, LOGITLESS_REDUCTION_SUM = 2 };

typedef int32_t logitless_plan_kind;
enum {
  LOGITLESS_PLAN_ANY = -1,         /* of a request only: the fastest that fits */
  LOGITLESS_PLAN_FORWARD = 0,      /* 1 pass over tokens * vocab * dim; no gradients */
  LOGITLESS_PLAN_DENSE = 1,        /* 3 passes, one chunk of tokens kept in 16 bit */
  LOGITLESS_PLAN_RECOMPUTE = 2,    /* 4 passes, least memory */
  LOGITLESS_PLAN_STORED = 3,       /* 4 - f passes, a fraction f kept */
  LOGITLESS_PLAN_FAR_BACKWARD = 4, /* 1 + 3k passes; c_far_field.h */
  LOGITLESS_PLAN_FAR_BOTH = 5      /* 4k passes */
};

typedef int32_t logitless_device;
enum {
  LOGITLESS_DEVICE_CPU = 0,
  LOGITLESS_DEVICE_CUDA = 1 /* all pointers of tensors and workspaces are the GPU's */
};

typedef struct logitless_context logitless_context;
typedef struct logitless_plan logitless_plan;
typedef struct logitless_program logitless_program;
typedef struct logitless_prepared_program logitless_prepared_program;
typedef struct logitless_vocab_order logitless_vocab_order;

/* ---- Version, status, errors ---- */

/* "0.1.0", of the library that runs. */
LOGITLESS_API const char* logitless_version(void);
/* LOGITLESS_ABI_VERSION of the library that runs; a binding refuses one that is not its own. */
LOGITLESS_API int32_t logitless_abi_version(void);
/* sizeof of a struct of this header by its name ("logitless_tensor"), in the library that runs; 0
 * if it has none such. Lets a binding check the layouts that it declares. */
LOGITLESS_API size_t logitless_struct_size(const char* name);
/* "ok", "invalid argument", ... for any value. Static. */
LOGITLESS_API const char* logitless_status_name(logitless_status status);
/* Text of the last failure on this thread, "" before the first. Valid until the next failure on
 * this thread. */
LOGITLESS_API const char* logitless_last_error(void);

/* ---- Tensors ---- */

/* A strided view of the caller's memory. Strides count elements and may be zero or negative for
 * inputs. Tensors in the structs below are pointers: NULL is no tensor. Inputs are only read.
 * `[...]` in their comments stands for the leading sizes of hidden, at most two: [N] or [B, T]. */
typedef struct logitless_tensor {
  void* data;
  logitless_dtype dtype;
  int32_t rank; /* 0 to LOGITLESS_MAX_RANK; 0 is a scalar */
  int64_t shape[LOGITLESS_MAX_RANK];
  int64_t strides[LOGITLESS_MAX_RANK];
} logitless_tensor;

/* Fills in a contiguous tensor, last dimension fastest. shape has `rank` sizes; NULL for rank 0. */
LOGITLESS_API logitless_status logitless_tensor_init(logitless_tensor* tensor, void* data,
                                                     logitless_dtype dtype, int32_t rank,
                                                     const int64_t* shape);

/* ---- Contexts and kernels ---- */

typedef void (*logitless_trace_function)(const char* line, void* user);

typedef struct logitless_context_options {
  size_t struct_size;
  logitless_device device; /* default LOGITLESS_DEVICE_CPU */
  int32_t threads;         /* 0: OMP_NUM_THREADS, or all cores that the process may use */
  const char* kernel; /* the one kernel to use; NULL or "": LOGITLESS_CPU, or else the best for each
                         problem */
  logitless_trace_function trace; /* text of each decision, on the calling thread; NULL: none */
  void* trace_user;               /* handed to trace */
  void* stream;         /* cudaStream_t that work is enqueued on; must be NULL on the CPU */
  int32_t device_index; /* of GPUs: the thread's current one */
} logitless_context_options;
LOGITLESS_API void logitless_context_options_init(logitless_context_options* options,
                                                  size_t struct_size);

/* options may be NULL: the defaults. */
LOGITLESS_API logitless_status logitless_context_create(const logitless_context_options* options,
                                                        logitless_context** context);
LOGITLESS_API void logitless_context_destroy(logitless_context* context);
/* Threads of its parallel regions; 0 for NULL. */
LOGITLESS_API int32_t logitless_context_threads(const logitless_context* context);
/* 10 * major + minor of its GPU's compute capability; 0 of the CPU's, and for NULL. */
LOGITLESS_API int32_t logitless_context_compute_capability(const logitless_context* context);

/* Names of the kernels built in, best first; with `runnable`, those that this machine runs. Name
 * `index` is NULL past the end. Static. */
LOGITLESS_API size_t logitless_kernel_count(int32_t runnable);
LOGITLESS_API const char* logitless_kernel_name(int32_t runnable, size_t index);

/* ---- Plans ---- */

typedef struct logitless_plan_request {
  size_t struct_size;
  uint64_t memory_budget; /* bytes beyond inputs and outputs; 0: the least workspace within 3 % of
                             the best predicted time among plans of at most a quarter of the fp32
                             logits (16 MiB at least; 512 where the far field is allowed), three
                             tenths for a dense plan in one chunk, or the least plan if none is
                             that small; of words over a GPU's ranks as plan.h says */
  double
      stored_fraction; /* of LOGITLESS_PLAN_STORED: in (0, 1), or 0: as much as the budget holds */
  logitless_plan_kind kind;   /* default LOGITLESS_PLAN_ANY */
  int32_t accuracy;           /* logitless_accuracy of c_far_field.h; 0: exact */
  int64_t sample_every;       /* these three are of the far field: plan.h; 0: off */
  int64_t audit_rows;         /* 0: none */
  float tau;                  /* in (0, 1); 0: 0.003 */
  int32_t compute_capability; /* plan_head: of an absent GPU, 10 major + minor; 0: none */
} logitless_plan_request;
LOGITLESS_API void logitless_plan_request_init(logitless_plan_request* request, size_t struct_size);

/* A plan as numbers. `kernel` lives as long as the plan. */
typedef struct logitless_plan_info {
  size_t struct_size;
  const char* kernel;
  uint64_t workspace_bytes;
  uint64_t
      logits_bytes; /* what the fp32 logits of the unfused loss would take: tokens * vocab * 4 */
  uint64_t memory_budget; /* as asked; 0: the default */
  int64_t tokens;         /* the most tokens of a call */
  int64_t dim;
  int64_t vocab;
  int64_t chunk_tokens; /* tokens of one turn of the outer loop */
  int64_t slab_vocab;   /* vocabulary entries whose logit gradients exist at a time */
  int64_t stored_vocab; /* vocabulary entries whose exponentials are kept per chunk */
  double passes;        /* over tokens * vocab * dim multiply-adds */
  double predicted_seconds;
  logitless_plan_kind kind;
  logitless_dtype dtype;
  int32_t threads;
  int32_t reserved;
} logitless_plan_info;
LOGITLESS_API void logitless_plan_info_init(logitless_plan_info* info, size_t struct_size);

/* A plan that was weighed. `reason` (why not, or "chosen") lives as long as the plan. */
typedef struct logitless_plan_candidate {
  size_t struct_size;
  const char* reason;
  uint64_t workspace_bytes; /* the least for it when it does not fit */
  double passes;
  double predicted_seconds;
  logitless_plan_kind kind;
  int32_t possible;
} logitless_plan_candidate;
LOGITLESS_API void logitless_plan_candidate_init(logitless_plan_candidate* candidate,
                                                 size_t struct_size);

LOGITLESS_API void logitless_plan_destroy(logitless_plan* plan);
/* Bytes of the workspace, exact; 0 for NULL. */
LOGITLESS_API size_t logitless_plan_workspace_bytes(const logitless_plan* plan);
LOGITLESS_API logitless_status logitless_plan_get_info(const logitless_plan* plan,
                                                       logitless_plan_info* info);
LOGITLESS_API size_t logitless_plan_candidate_count(const logitless_plan* plan);
LOGITLESS_API logitless_status logitless_plan_get_candidate(const logitless_plan* plan,
                                                            size_t index,
                                                            logitless_plan_candidate* candidate);
/* Strategy, kernel, chunk sizes, workspace and why not the others: several lines, living as long as
 * the plan; "" for NULL. */
LOGITLESS_API const char* logitless_plan_explain(const logitless_plan* plan);

/* Everything of a call that changes the work, for plans made before there are tensors. */
typedef struct logitless_head_features {
  size_t struct_size;
  int64_t tokens; /* hidden [tokens, dim], weight [vocab, dim]; tokens is an upper bound */
  int64_t dim;
  int64_t vocab;
  logitless_dtype dtype;     /* of hidden and weight: f32, bf16 or f16 */
  int32_t targets_per_token; /* default 1 */
  float logit_scale;         /* default 1 */
  float softcap;             /* 0: none */
  int32_t bias;
  int32_t label_smoothing;
  int32_t vocab_weight; /* class weights beside label smoothing, or vocab_weight of the head */
  int32_t entropy;
  int32_t argmax;
  int32_t d_hidden; /* the gradients asked for */
  int32_t d_weight;
  int32_t d_bias;
  logitless_dtype d_hidden_dtype; /* set where the gradient is asked for, else 0 */
  logitless_dtype d_weight_dtype;
  int32_t entropy_gradient; /* a cotangent of the entropy */
  int32_t accumulate;
} logitless_head_features;
LOGITLESS_API void logitless_head_features_init(logitless_head_features* features,
                                                size_t struct_size);

/* request may be NULL in every planning call. Errors: sizes that make no sense or a budget below
 * every plan, naming the least one (invalid argument); a kind that cannot serve (unsupported). */
LOGITLESS_API logitless_status logitless_plan_head(const logitless_context* context,
                                                   const logitless_head_features* features,
                                                   const logitless_plan_request* request,
                                                   logitless_plan** plan);

/* ---- Cross entropy ---- */

/* logitless/cross_entropy.h has the formula. */
typedef struct logitless_cross_entropy_options {
  size_t struct_size;
  int64_t ignore_index; /* default -100 */
  double normalizer; /* > 0: mean divides by it; 0: by the sum of the weights of the valid tokens */
  logitless_reduction reduction; /* default LOGITLESS_REDUCTION_MEAN */
  float label_smoothing;         /* in [0, 1] */
  float z_loss;                  /* >= 0 */
  float softcap;                 /* > 0; 0: none */
  float logit_scale;             /* default 1; finite, not 0 */
  int32_t
      next_token; /* hidden [B, T, D], targets [B, T] are the tokens: position t predicts t + 1 */
  int32_t nan_if_empty; /* mean over no token is NaN instead of 0 */
  int32_t accumulate;   /* gradients are added to what their tensors hold */
} logitless_cross_entropy_options;
LOGITLESS_API void logitless_cross_entropy_options_init(logitless_cross_entropy_options* options,
                                                        size_t struct_size);

typedef struct logitless_cross_entropy_inputs {
  size_t struct_size;
  const logitless_tensor* hidden;        /* [..., D] f32 | bf16 | f16 */
  const logitless_tensor* weight;        /* [V, D], the dtype of hidden */
  const logitless_tensor* targets;       /* i32 | i64 [...], or [..., K] with target_weight */
  const logitless_tensor* bias;          /* optional [V], f32 or the dtype of weight */
  const logitless_tensor* class_weight;  /* optional f32 [V] */
  const logitless_tensor* token_weight;  /* optional f32 [...] */
  const logitless_tensor* target_weight; /* optional f32 [..., K] */
  const logitless_tensor*
      grad_losses;                    /* optional f32 [...]: upstream gradients of reduction none */
  double grad_loss;                   /* default 1: upstream gradient */
  const logitless_vocab_order* order; /* of plans of the far field, which need one */
  uint64_t sample_seed;               /* of such plans with sample_every: another for each call */
  const struct logitless_sharding* sharding; /* words over ranks: c_sharding.h; NULL: none */
} logitless_cross_entropy_inputs;
LOGITLESS_API void logitless_cross_entropy_inputs_init(logitless_cross_entropy_inputs* inputs,
                                                       size_t struct_size);

/* What is not NULL is written; the rest is not computed. No overlap with inputs or each other:
   refused where it is certain (contiguous tensors that meet, the same first element), not of views
   that interleave. f16 has not the range for gradients that a loss scale reaches later; f32 has. */
typedef struct logitless_cross_entropy_outputs {
  size_t struct_size;
  const logitless_tensor* loss;         /* f32 [] for mean and sum, f32 [...] for none */
  const logitless_tensor* d_hidden;     /* [..., D], the dtype of hidden or f32 */
  const logitless_tensor* d_weight;     /* [V, D], the dtype of weight or f32 */
  const logitless_tensor* d_bias;       /* [V], f32 or the dtype of bias */
  const logitless_tensor* lse;          /* f32 [...]; 0 for ignored tokens, as in all below */
  const logitless_tensor* target_logit; /* f32 [...] */
  const logitless_tensor* log_prob;     /* f32 [...] */
  const logitless_tensor* entropy;      /* f32 [...] */
  const logitless_tensor* argmax;       /* i32 | i64 [...]; -1 for ignored tokens */
} logitless_cross_entropy_outputs;
LOGITLESS_API void logitless_cross_entropy_outputs_init(logitless_cross_entropy_outputs* outputs,
                                                        size_t struct_size);

typedef struct logitless_loss_statistics {
  size_t struct_size;
  int64_t tokens;       /* rows of hidden */
  int64_t valid_tokens; /* not ignored */
  int64_t correct;      /* argmax is the target; -1 unless argmax was asked for */
  double normalizer;    /* what mean divided by, or would */
  double mean_lse;      /* over valid tokens */
  double mean_log_prob; /* of the targets, unweighted */
  /* Of the far field (FarFieldStatistics of cross_entropy.h); passes is 0 with exact plans. */
  double kept;    /* the fraction of pairs (tile of words, block of tokens) computed exactly */
  double sampled; /* of those pairs, for d_weight and d_bias alone */
  double passes;  /* over tokens * vocab * dim, from both */
  double bound;   /* of the relative error of d_hidden; -1: none */
  double audited_error; /* the same measured over audited_tokens; -1: not audited */
  int64_t audited_tokens;
  double audited_lse_error; /* root mean square, in nats */
  double audited_lse_error_max;
  int64_t dense_fallback; /* more than 2/3 to keep somewhere: exact there */
  double imbalance; /* of words over ranks: the most pairs kept on one over the mean; else 1 */
  double sampled_lse_error; /* of far_both, by the tiles sampled: root mean square, in nats */
  double sampled_most;      /* the most mass of one of those, of a token's total */
} logitless_loss_statistics;
LOGITLESS_API void logitless_loss_statistics_init(logitless_loss_statistics* statistics,
                                                  size_t struct_size);

/* options may be NULL: the defaults. Planning reads shapes, strides and dtypes, no data. */
LOGITLESS_API logitless_status logitless_plan_cross_entropy(
    const logitless_context* context, const logitless_cross_entropy_options* options,
    const logitless_cross_entropy_inputs* inputs, const logitless_cross_entropy_outputs* outputs,
    const logitless_plan_request* request, logitless_plan** plan);

/* Loss, statistics (may be NULL) and the gradients asked for. A plan serves any call of its
 * features and at most its tokens. Deterministic for any number of threads. */
LOGITLESS_API logitless_status logitless_cross_entropy(
    logitless_context* context, const logitless_plan* plan,
    const logitless_cross_entropy_options* options, const logitless_cross_entropy_inputs* inputs,
    const logitless_cross_entropy_outputs* outputs, void* workspace, size_t workspace_bytes,
    logitless_loss_statistics* statistics);

/* On a GPU logitless_cross_entropy only enqueues and fills tokens alone. This waits for the stream,
 * and returns what the last call that used the workspace found, a bad target as an error. */
LOGITLESS_API logitless_status logitless_device_statistics(const logitless_context* context,
                                                           const logitless_plan* plan,
                                                           void* workspace, size_t workspace_bytes,
                                                           logitless_loss_statistics* statistics);

/* ---- The loss of a token
 *
 * The formula of logitless_cross_entropy from a token's log-sum-exp on, in double: for callers that
 * make logits in a precision or a place that the library has no kernel for. */

/* Terms of the loss that one number adds. */
typedef struct logitless_loss_terms {
  size_t struct_size;
  double label_smoothing; /* in [0, 1]: the share of the loss that all words get, not the target */
  double z_loss;          /* >= 0: z_loss * lse^2 is added to each token's loss */
} logitless_loss_terms;
LOGITLESS_API void logitless_loss_terms_init(logitless_loss_terms* terms, size_t struct_size);

/* f64 tensors on the CPU, of any strides. */
typedef struct logitless_token_loss_inputs {
  size_t struct_size;
  const logitless_tensor* lse;          /* [N]: log sum_j exp z_ij */
  const logitless_tensor* target_logit; /* [N, K]: z of the targets */
  /* Optional [N, K]: class weight of the target times its target_weight; 0 for a target that is
   * ignored. NULL: 1. */
  const logitless_tensor* target_weight;
  const logitless_tensor* token_weight; /* optional [N]; 0 for a token that is ignored. NULL: 1 */
  const logitless_tensor* weighted_logit_sum; /* [N]: sum_j c_j z_ij; for label smoothing alone */
  double class_total;                         /* sum_j c_j, which is vocab without class weights */
  int64_t vocab;
} logitless_token_loss_inputs;
LOGITLESS_API void logitless_token_loss_inputs_init(logitless_token_loss_inputs* inputs,
                                                    size_t struct_size);

/* f64 tensors on the CPU; what is not NULL is written. The derivatives are the loss's with respect
 * to each input, the others held. No overlap with inputs or each other. */
typedef struct logitless_token_loss_outputs {
  size_t struct_size;
  const logitless_tensor* loss;                 /* [N] */
  const logitless_tensor* d_lse;                /* [N] */
  const logitless_tensor* d_target_logit;       /* [N, K] */
  const logitless_tensor* d_weighted_logit_sum; /* [N]; 0 without label smoothing */
} logitless_token_loss_outputs;
LOGITLESS_API void logitless_token_loss_outputs_init(logitless_token_loss_outputs* outputs,
                                                     size_t struct_size);

/* terms may be NULL: none. No memory beyond the arguments. Errors: a shape, dtype or term (invalid
 * argument). */
LOGITLESS_API logitless_status logitless_token_losses(const logitless_loss_terms* terms,
                                                      const logitless_token_loss_inputs* inputs,
                                                      const logitless_token_loss_outputs* outputs);

/* ---- The head: differentiable outputs of each token ---- */

typedef struct logitless_head_options {
  size_t struct_size;
  int64_t ignore_index; /* default -100 */
  float softcap;        /* > 0; 0: none */
  float logit_scale;    /* default 1 */
  int32_t accumulate;   /* head_backward adds to what the gradients hold */
  int32_t reserved;
} logitless_head_options;
LOGITLESS_API void logitless_head_options_init(logitless_head_options* options, size_t struct_size);

typedef struct logitless_head_inputs {
  size_t struct_size;
  const logitless_tensor* hidden;       /* [..., D] f32 | bf16 | f16 */
  const logitless_tensor* weight;       /* [V, D], the dtype of hidden */
  const logitless_tensor* targets;      /* i32 | i64 [...] or [..., K] */
  const logitless_tensor* bias;         /* optional [V], f32 or the dtype of weight */
  const logitless_tensor* vocab_weight; /* optional f32 [V]: omega of weighted_logit_sum; NULL: 1 */
  const struct logitless_sharding* sharding; /* words over ranks: c_sharding.h; NULL: none */
} logitless_head_inputs;
LOGITLESS_API void logitless_head_inputs_init(logitless_head_inputs* inputs, size_t struct_size);

/* f32 each; what is not NULL is written; 0 for rows whose targets are all ignored. */
typedef struct logitless_head_outputs {
  size_t struct_size;
  const logitless_tensor* lse;                /* [...]: log sum_j exp z_ij */
  const logitless_tensor* target_logit;       /* [...] or [..., K] */
  const logitless_tensor* log_prob;           /* [...] or [..., K]: target_logit - lse */
  const logitless_tensor* entropy;            /* [...] */
  const logitless_tensor* weighted_logit_sum; /* [...]: sum_j omega_j z_ij */
  const logitless_tensor* argmax;             /* i32 | i64 [...] */
} logitless_head_outputs;
LOGITLESS_API void logitless_head_outputs_init(logitless_head_outputs* outputs, size_t struct_size);

/* Gradients of a scalar by each output, f32, shaped like it. NULL is 0. */
typedef struct logitless_head_cotangents {
  size_t struct_size;
  const logitless_tensor* lse;
  const logitless_tensor* target_logit;
  const logitless_tensor* log_prob;
  const logitless_tensor* entropy;
  const logitless_tensor* weighted_logit_sum;
} logitless_head_cotangents;
LOGITLESS_API void logitless_head_cotangents_init(logitless_head_cotangents* cotangents,
                                                  size_t struct_size);

typedef struct logitless_head_gradients {
  size_t struct_size;
  const logitless_tensor* d_hidden; /* [..., D], the dtype of hidden or f32 */
  const logitless_tensor* d_weight; /* [V, D] */
  const logitless_tensor* d_bias;   /* [V] */
} logitless_head_gradients;
LOGITLESS_API void logitless_head_gradients_init(logitless_head_gradients* gradients,
                                                 size_t struct_size);

/* As for cross entropy: options and request may be NULL, planning does not read the data. */
LOGITLESS_API logitless_status logitless_plan_head_forward(const logitless_context* context,
                                                           const logitless_head_options* options,
                                                           const logitless_head_inputs* inputs,
                                                           const logitless_head_outputs* outputs,
                                                           const logitless_plan_request* request,
                                                           logitless_plan** plan);
LOGITLESS_API logitless_status logitless_head_forward(logitless_context* context,
                                                      const logitless_plan* plan,
                                                      const logitless_head_options* options,
                                                      const logitless_head_inputs* inputs,
                                                      const logitless_head_outputs* outputs,
                                                      void* workspace, size_t workspace_bytes);
LOGITLESS_API logitless_status logitless_plan_head_backward(
    const logitless_context* context, const logitless_head_options* options,
    const logitless_head_inputs* inputs, const logitless_head_cotangents* cotangents,
    const logitless_head_gradients* gradients, const logitless_plan_request* request,
    logitless_plan** plan);
LOGITLESS_API logitless_status logitless_head_backward(
    logitless_context* context, const logitless_plan* plan, const logitless_head_options* options,
    const logitless_head_inputs* inputs, const logitless_head_cotangents* cotangents,
    const logitless_head_gradients* gradients, void* workspace, size_t workspace_bytes);

/* gradients *= factor, an f32 scalar, in place; on a GPU one kernel that reads the factor there and
 * writes nothing where it is 1. For gradients made for an upstream gradient of 1. */
LOGITLESS_API logitless_status logitless_scale_gradients(logitless_context* context,
                                                         const logitless_tensor* factor,
                                                         const logitless_head_gradients* gradients);

/* ---- Tensor programs ---- */

/* logitless/compiler.h tells more of each. */
typedef struct logitless_program_options {
  size_t struct_size;
  const char* const* size_names; /* what the program's sizes are: size_count names */
  const int64_t* size_values;    /* and as many values; both NULL where size_count is 0 */
  size_t size_count;
  uint64_t memory_budget; /* bytes of values in the arena; 0: chunk wherever that computes nothing
                             twice */
  int64_t chunks;         /* of every loop; 0: chosen */
  int32_t threads;     /* that run it; 0: OMP_NUM_THREADS, or all cores that the process may use */
  int32_t chunk;       /* default 1; 0: no loops */
  int32_t head_engine; /* default 1; 0: heads are loops like the rest */
  int32_t strict;      /* a budget not met, or a big value that could not be cut, is an error */
  /* That runs it: default LOGITLESS_DEVICE_CPU. A GPU need not be here; its programs are run by
   * logitless_program_enqueue, and threads is 0. */
  logitless_device device;
  /* Of a GPU: 10 * major + minor, 80 or more (logitless_context_compute_capability); 0 of the CPU.
   */
  int32_t compute_capability;
  int32_t externs; /* default 0; 1: the caller runs the program's text: `extern` operations are
                      taken, and with one it is described and not run */
} logitless_program_options;
LOGITLESS_API void logitless_program_options_init(logitless_program_options* options,
                                                  size_t struct_size);

/* A parameter or a result. `name` and `shape` live as long as the program. */
typedef struct logitless_program_tensor {
  size_t struct_size;
  const char* name;
  const int64_t* shape; /* rank sizes */
  uint64_t bytes;
  logitless_dtype dtype;
  int32_t rank;
} logitless_program_tensor;
LOGITLESS_API void logitless_program_tensor_init(logitless_program_tensor* tensor,
                                                 size_t struct_size);

/* Compiles the text form of docs/ir.md for the CPU, or the GPU of the options. options may be NULL:
 * the defaults. Errors name line and column of the text, a size without a value, what strict
 * forbids, a device or capability that is none (invalid argument), an operation and dtype without a
 * kernel (unsupported). A build without CUDA compiles for a GPU as well. */
LOGITLESS_API logitless_status logitless_program_compile(const char* text,
                                                         const logitless_program_options* options,
                                                         logitless_program** program);
LOGITLESS_API void logitless_program_destroy(logitless_program* program);
/* The program after the last pass, what was done and why, and the same as JSON. They live as long
 * as the program; "" for NULL. */
LOGITLESS_API const char* logitless_program_text(const logitless_program* program);
LOGITLESS_API const char* logitless_program_explain(const logitless_program* program);
LOGITLESS_API const char* logitless_program_report_json(const logitless_program* program);
/* In the order of the program; 0 for NULL. */
LOGITLESS_API size_t logitless_program_parameter_count(const logitless_program* program);
LOGITLESS_API size_t logitless_program_result_count(const logitless_program* program);
LOGITLESS_API logitless_status logitless_program_get_parameter(const logitless_program* program,
                                                               size_t index,
                                                               logitless_program_tensor* tensor);
LOGITLESS_API logitless_status logitless_program_get_result(const logitless_program* program,
                                                            size_t index,
                                                            logitless_program_tensor* tensor);
/* Bytes of everything but parameters and results, exact: with loops, and without; 0 for NULL. */
LOGITLESS_API size_t logitless_program_arena_bytes(const logitless_program* program);
LOGITLESS_API size_t logitless_program_unchunked_arena_bytes(const logitless_program* program);
/* Threads that run it; 0 of a GPU's, and for NULL. */
LOGITLESS_API int32_t logitless_program_threads(const logitless_program* program);
/* Runs a program of the CPU on contiguous tensors, in the order of the program. Results overlap
 * neither each other nor parameters. The arena has at least logitless_program_arena_bytes(program)
 * bytes, aligned to 64; no other call may use it meanwhile. */
LOGITLESS_API logitless_status logitless_program_run(const logitless_program* program,
                                                     const void* const* parameters,
                                                     size_t parameter_count, void* const* results,
                                                     size_t result_count, void* arena,
                                                     size_t arena_bytes);

/* Makes a program ready to be enqueued where the context is: of a GPU the one call that compiles
 * kernels, loads them and chooses the algorithms of products, with memory of the device and files
 * of the cache (docs/gpu.md: the libraries that it needs). `prepared` needs neither the program nor
 * the context afterwards, never changes, and may be shared by threads. Not while the thread
 * captures a stream. Errors: a context of another kind of device or compute capability than the
 * program's (invalid argument), a library that is missing, by name, or a build without CUDA
 * (unsupported), the device's. */
LOGITLESS_API logitless_status logitless_program_prepare(const logitless_program* program,
                                                         const logitless_context* context,
                                                         logitless_prepared_program** prepared);
/* Of a GPU's: not before all that it enqueued is done, and no CUDA graph that has captured it will
 * be launched. */
LOGITLESS_API void logitless_prepared_program_destroy(logitless_prepared_program* prepared);
/* Enqueues it. Pointers, their order and what must not overlap are those of logitless_program_run,
 * but of a GPU in its memory, tensors aligned to 16 bytes and the arena to 256; the thread's
 * current device is that of `prepared`. stream: the cudaStream_t, NULL the default one. Returns
 * before the work is done, and neither waits nor allocates memory of the device: the call may be
 * captured into a CUDA graph, which then reads and writes these addresses. Of the CPU the stream is
 * NULL, and the results stand when the call returns. The same inputs give the same bits on the same
 * kind of device with the same libraries. Errors: numbers, alignment or overlap of pointers, an
 * arena too small (invalid argument), the device's. */
LOGITLESS_API logitless_status logitless_program_enqueue(const logitless_prepared_program* prepared,
                                                         const void* const* parameters,
                                                         size_t parameter_count,
                                                         void* const* results, size_t result_count,
                                                         void* arena, size_t arena_bytes,
                                                         void* stream);

/* ---- Bytes ---- */

/* "512MiB", "1.5GB", "4096" -> bytes; units in any case. */
LOGITLESS_API logitless_status logitless_parse_bytes(const char* text, uint64_t* bytes);
/* Highest resident size of this process so far; 0 where unknown. */
LOGITLESS_API uint64_t logitless_process_peak_bytes(void);

#ifdef __cplusplus
}
#endif
