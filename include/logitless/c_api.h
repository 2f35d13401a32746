/* The C ABI of logitless, to which other languages bind. It is C99: no C++ type crosses it and no
 * exception leaves it.
 *
 * Conventions
 * - Every call that can fail returns a logitless_status. logitless_last_error() returns the text of
 *   the last failure on the calling thread. Outputs of a failed call are untouched.
 * - Handles are opaque. Each handle from a _create, _compile, _prepare or _plan_* call is freed by
 *   the matching _destroy. NULL may be destroyed. Any other NULL handle or missing required pointer
 *   is LOGITLESS_INVALID_ARGUMENT.
 * - The caller owns all memory: tensors and one workspace of logitless_plan_workspace_bytes(plan)
 *   bytes, aligned to 64. The library keeps no pointer to either after a call.
 * - Structs begin with struct_size. Fill them by logitless_<struct>_init(&s, sizeof s), then set
 *   fields. A later library accepts the smaller structs of an older header. A larger struct than
 *   the library knows is accepted if its unknown bytes are zero (LOGITLESS_UNSUPPORTED otherwise).
 *   Zero in a later field keeps the earlier behaviour.
 * - Flags are int32_t: zero is no, anything else is yes.
 *
 * Threads: plans and programs are immutable and may be shared. A plan runs only in contexts with as
 * many threads as the context that made it (LOGITLESS_INVALID_ARGUMENT otherwise). A context serves
 * one call at a time: make one for each thread that calls. Everything else may be called from any
 * thread at any time. */
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
  LOGITLESS_UNSUPPORTED = 2,      /* no kernel or plan serves it; the text lists the reasons */
  LOGITLESS_DEVICE_ERROR = 3,     /* the device or the operating system failed; out of memory */
  LOGITLESS_INTERNAL_ERROR = 4    /* a bug of the library */
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

typedef int32_t logitless_precision; /* of f32 on a GPU; other tensors: ieee */
enum { LOGITLESS_PRECISION_IEEE = 0, LOGITLESS_PRECISION_TF32 = 1, LOGITLESS_PRECISION_BF16X3 = 2 };

typedef int32_t logitless_plan_kind;
enum {
  LOGITLESS_PLAN_ANY = -1,         /* only in a request: as its budget says */
  LOGITLESS_PLAN_FORWARD = 0,      /* 1 GEMM of tokens * vocab * dim; no gradients */
  LOGITLESS_PLAN_DENSE = 1,        /* 3 GEMMs; one chunk's exponentials saved in 16 bit */
  LOGITLESS_PLAN_RECOMPUTE = 2,    /* 4 GEMMs; least memory */
  LOGITLESS_PLAN_STORED = 3,       /* 4 - f GEMMs; a fraction f of the exponentials saved */
  LOGITLESS_PLAN_FAR_BACKWARD = 4, /* 1 + 3k GEMMs; c_far_field.h */
  LOGITLESS_PLAN_FAR_BOTH = 5      /* 4k GEMMs */
};

typedef int32_t logitless_device;
enum {
  LOGITLESS_DEVICE_CPU = 0,
  LOGITLESS_DEVICE_CUDA = 1 /* tensors and workspaces are in GPU memory */
};

typedef struct logitless_context logitless_context;
typedef struct logitless_plan logitless_plan;
typedef struct logitless_program logitless_program;
typedef struct logitless_prepared_program logitless_prepared_program;
typedef struct logitless_vocab_order logitless_vocab_order;

/* ---- Version, status, errors ---- */

/* Returns the version of the library that runs: "0.1.0". */
LOGITLESS_API const char* logitless_version(void);
/* Returns LOGITLESS_ABI_VERSION of the library that runs; a binding refuses any other version. */
LOGITLESS_API int32_t logitless_abi_version(void);
/* Returns sizeof a struct of this header by its name ("logitless_tensor") in the library that runs;
 * 0 for an unknown name. */
LOGITLESS_API size_t logitless_struct_size(const char* name);
/* Returns "ok", "invalid argument", ... for any value. Static. */
LOGITLESS_API const char* logitless_status_name(logitless_status status);
/* Returns the text of this thread's last failure, until the next one; "" before the first. */
LOGITLESS_API const char* logitless_last_error(void);

/* ---- Tensors ---- */

/* A strided view of the caller's memory. Strides count elements and may be zero or negative for
 * inputs. The structs below hold pointers to tensors: NULL is no tensor. Inputs are only read.
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
  logitless_device device;        /* default LOGITLESS_DEVICE_CPU */
  int32_t threads;                /* 0: OMP_NUM_THREADS, or all cores that the process may use */
  const char* kernel;             /* the only one; NULL or "": of the environment, or the best */
  logitless_trace_function trace; /* text of each decision, on the calling thread; NULL: none */
  void* trace_user;               /* handed to trace */
  void* stream;         /* cudaStream_t that work is enqueued on; must be NULL on the CPU */
  int32_t device_index; /* index of the GPU; must be the thread's current one */
} logitless_context_options;
LOGITLESS_API void logitless_context_options_init(logitless_context_options* options,
                                                  size_t struct_size);

/* options may be NULL, which means the defaults. */
LOGITLESS_API logitless_status logitless_context_create(const logitless_context_options* options,
                                                        logitless_context** context);
LOGITLESS_API void logitless_context_destroy(logitless_context* context);
/* Returns the number of threads of its parallel regions; 0 for NULL. */
LOGITLESS_API int32_t logitless_context_threads(const logitless_context* context);
/* Returns 10 * major + minor of its GPU's compute capability; 0 for a CPU context and for NULL. */
LOGITLESS_API int32_t logitless_context_compute_capability(const logitless_context* context);

/* Static names of the kernels, best first, then NULL; `runnable`: only those that run here. */
LOGITLESS_API size_t logitless_kernel_count(int32_t runnable);
LOGITLESS_API const char* logitless_kernel_name(int32_t runnable, size_t index);

/* ---- Plans ---- */

typedef struct logitless_plan_request {
  size_t struct_size;
  uint64_t memory_budget;     /* bytes of workspace at most, as in plan.h; 0: its default */
  double stored_fraction;     /* LOGITLESS_PLAN_STORED: in (0, 1), or 0: all that fits */
  logitless_plan_kind kind;   /* default LOGITLESS_PLAN_ANY */
  int32_t accuracy;           /* logitless_accuracy of c_far_field.h; 0: exact */
  int64_t sample_every;       /* these three are of the far field: plan.h; 0: off */
  int64_t audit_rows;         /* 0: none */
  float tau;                  /* in (0, 1); 0: 0.003 */
  int32_t compute_capability; /* plan_head: of an absent GPU, 10 major + minor; 0: none */
  const char* card;           /* plan_head: whose rates, such as "A100"; NULL: of a usual card */
  float expected_ignored;     /* in [0, 1]: share of the tokens, a hint: plan.h */
  int32_t budget_is_hint;     /* 1: memory_budget > 0 is doubled until a plan fits; default 0 */
} logitless_plan_request;
LOGITLESS_API void logitless_plan_request_init(logitless_plan_request* request, size_t struct_size);

/* A plan as numbers. `kernel` lives as long as the plan. */
typedef struct logitless_plan_info {
  size_t struct_size;
  const char* kernel;
  uint64_t workspace_bytes;
  uint64_t logits_bytes;  /* fp32 logits of the unfused loss: tokens * vocab * 4 */
  uint64_t memory_budget; /* of the request; 0: the default */
  int64_t tokens;         /* the most tokens of a call */
  int64_t dim;
  int64_t vocab;
  int64_t chunk_tokens; /* tokens per chunk, the step of the outer loop */
  int64_t block_vocab;  /* vocabulary entries of one vocabulary block */
  int64_t stored_vocab; /* vocabulary entries whose exponentials are saved per chunk */
  double passes;        /* GEMMs of tokens * vocab * dim multiply-adds */
  double predicted_seconds;
  logitless_plan_kind kind;
  logitless_dtype dtype;
  int32_t threads;
  int32_t reserved;
} logitless_plan_info;
LOGITLESS_API void logitless_plan_info_init(logitless_plan_info* info, size_t struct_size);

/* A plan that was considered. `reason` (why not, or "chosen") lives as long as the plan. */
typedef struct logitless_plan_candidate {
  size_t struct_size;
  const char* reason;
  uint64_t workspace_bytes; /* the least that it needs when it does not fit */
  double passes;
  double predicted_seconds;
  logitless_plan_kind kind;
  int32_t possible;
} logitless_plan_candidate;
LOGITLESS_API void logitless_plan_candidate_init(logitless_plan_candidate* candidate,
                                                 size_t struct_size);

LOGITLESS_API void logitless_plan_destroy(logitless_plan* plan);
/* Returns the exact workspace size in bytes; 0 for NULL. */
LOGITLESS_API size_t logitless_plan_workspace_bytes(const logitless_plan* plan);
LOGITLESS_API logitless_status logitless_plan_get_info(const logitless_plan* plan,
                                                       logitless_plan_info* info);
LOGITLESS_API size_t logitless_plan_candidate_count(const logitless_plan* plan);
LOGITLESS_API logitless_status logitless_plan_get_candidate(const logitless_plan* plan,
                                                            size_t index,
                                                            logitless_plan_candidate* candidate);
/* Explains the plan and the rejected ones. The text lives as long as the plan; "" for NULL. */
LOGITLESS_API const char* logitless_plan_explain(const logitless_plan* plan);

/* The features of a call that change its work, for plans made before there are tensors. */
typedef struct logitless_head_features {
  size_t struct_size;
  int64_t tokens; /* hidden [tokens, dim], weight [vocab, dim]; tokens is an upper bound */
  int64_t dim;
  int64_t vocab;
  logitless_dtype dtype;     /* of hidden and weight: f32, bf16 or f16; f32 if they differ */
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
  logitless_precision precision;
  logitless_dtype narrow_hidden; /* of a tensor of 16 bits beside f32, which is `dtype`; else 0 */
  logitless_dtype narrow_weight;
} logitless_head_features;
LOGITLESS_API void logitless_head_features_init(logitless_head_features* features,
                                                size_t struct_size);

/* request may be NULL in every planning call. Errors: impossible sizes, or a budget below every
 * plan, naming the least one (invalid argument); a kind that cannot serve (unsupported). */
LOGITLESS_API logitless_status logitless_plan_head(const logitless_context* context,
                                                   const logitless_head_features* features,
                                                   const logitless_plan_request* request,
                                                   logitless_plan** plan);

/* ---- Cross entropy ---- */

/* Options of the cross entropy; logitless/cross_entropy.h has the formula. */
typedef struct logitless_cross_entropy_options {
  size_t struct_size;
  int64_t ignore_index; /* default -100 */
  /* 0: reduction mean divides by it; 0: by the sum of the weights of the valid tokens */
  double normalizer;
  logitless_reduction reduction; /* default LOGITLESS_REDUCTION_MEAN */
  float label_smoothing;         /* in [0, 1] */
  float z_loss;                  /* >= 0 */
  float softcap;                 /* > 0; 0: none */
  float logit_scale;             /* default 1; finite, not 0 */
  /* hidden [B, T, D], targets [B, T] are the tokens: position t predicts t + 1 */
  int32_t next_token;
  int32_t nan_if_empty; /* mean over no token is NaN instead of 0 */
  int32_t accumulate;   /* gradients are added to what their tensors hold */
  logitless_precision precision;
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
  /* optional f32 [...]: upstream gradients of reduction none */
  const logitless_tensor* grad_losses;
  double grad_loss;                   /* default 1: upstream gradient */
  const logitless_vocab_order* order; /* the order of a far-field plan, which needs one */
  uint64_t sample_seed; /* seed of a far-field plan with sample_every: another one for each call */
  const struct logitless_sharding* sharding; /* vocabulary-parallel: c_sharding.h; NULL: none */
} logitless_cross_entropy_inputs;
LOGITLESS_API void logitless_cross_entropy_inputs_init(logitless_cross_entropy_inputs* inputs,
                                                       size_t struct_size);

/* Outputs that are not NULL are written; the rest is not computed. They must not overlap inputs or
 * each other. Certain overlap is refused (intersecting contiguous tensors, equal first elements),
 * that of interleaved views is not checked. Use f32 gradients for an f16 model whose gradients are
 * later multiplied by a loss scale: f16 lacks the range before that. */
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
  /* f32 [...], beside d_hidden: bound of the error of each row of a far-field plan's d_hidden */
  const logitless_tensor* d_hidden_bound;
} logitless_cross_entropy_outputs;
LOGITLESS_API void logitless_cross_entropy_outputs_init(logitless_cross_entropy_outputs* outputs,
                                                        size_t struct_size);

typedef struct logitless_loss_statistics {
  size_t struct_size;
  int64_t tokens;       /* rows of hidden */
  int64_t valid_tokens; /* not ignored */
  int64_t correct;      /* tokens whose argmax is the target; -1 unless argmax was requested */
  double normalizer;    /* the divisor of reduction mean */
  double mean_lse;      /* over valid tokens */
  double mean_log_prob; /* of the targets, unweighted */
  /* The far field (FarFieldStatistics of cross_entropy.h); `passes` is 0 with exact plans. */
  double selected;      /* fraction of pairs (tile, block of tokens) computed exactly */
  double sampled;       /* fraction of those pairs computed for d_weight and d_bias only */
  double passes;        /* GEMMs of tokens * vocab * dim for both */
  double bound;         /* bound of the relative error of d_hidden; -1: none */
  double audited_error; /* that error measured over audited_tokens; -1: not audited */
  int64_t audited_tokens;
  double audited_lse_error; /* root mean square, in nats */
  double audited_lse_error_max;
  int64_t dense_fallback; /* some chunk selected > 2/3 of its tiles: computed exactly */
  double imbalance; /* vocabulary-parallel: most selected pairs of a rank over the mean; else 1 */
  double sampled_lse_error; /* far_both: error of the lse from the sampled tiles, root mean square,
                               in nats */
  double sampled_most;      /* largest mass of a sampled tile, as a fraction of the token's total */
} logitless_loss_statistics;
LOGITLESS_API void logitless_loss_statistics_init(logitless_loss_statistics* statistics,
                                                  size_t struct_size);

/* options may be NULL: the defaults. Planning reads shapes, strides and dtypes, no data. */
LOGITLESS_API logitless_status logitless_plan_cross_entropy(
    const logitless_context* context, const logitless_cross_entropy_options* options,
    const logitless_cross_entropy_inputs* inputs, const logitless_cross_entropy_outputs* outputs,
    const logitless_plan_request* request, logitless_plan** plan);

/* Computes the loss, the statistics (may be NULL) and the requested gradients. A plan serves any
 * call with its features and at most its tokens. Deterministic; bits as in cross_entropy.h. */
LOGITLESS_API logitless_status logitless_cross_entropy(
    logitless_context* context, const logitless_plan* plan,
    const logitless_cross_entropy_options* options, const logitless_cross_entropy_inputs* inputs,
    const logitless_cross_entropy_outputs* outputs, void* workspace, size_t workspace_bytes,
    logitless_loss_statistics* statistics);

/* Waits for the stream and returns the statistics of the last logitless_cross_entropy that used the
 * workspace. On a GPU that call only enqueues and fills `tokens`. A bad target is reported here as
 * an error. */
LOGITLESS_API logitless_status logitless_device_statistics(const logitless_context* context,
                                                           const logitless_plan* plan,
                                                           void* workspace, size_t workspace_bytes,
                                                           logitless_loss_statistics* statistics);

/* ---- The loss of a token
 *
 * The formula of logitless_cross_entropy in double, from a token's log-sum-exp on. It serves
 * callers that compute logits where the library has no kernel. */

/* Additional terms of the loss, each with one coefficient. */
typedef struct logitless_loss_terms {
  size_t struct_size;
  double label_smoothing; /* in [0, 1]: the share of the loss spread over all classes */
  double z_loss;          /* >= 0: z_loss * lse^2 is added to each token's loss */
} logitless_loss_terms;
LOGITLESS_API void logitless_loss_terms_init(logitless_loss_terms* terms, size_t struct_size);

/* f64 tensors on the CPU, of any strides. */
typedef struct logitless_token_loss_inputs {
  size_t struct_size;
  const logitless_tensor* lse;          /* [N]: log sum_j exp z_ij; the loss of +inf is NaN */
  const logitless_tensor* target_logit; /* [N, K]: z of the targets */
  /* Optional [N, K]: class weight of the target times its target_weight; 0 for an ignored target;
   * NULL: 1 */
  const logitless_tensor* target_weight;
  const logitless_tensor* token_weight;       /* optional [N]; 0 for an ignored token; NULL: 1 */
  const logitless_tensor* weighted_logit_sum; /* [N]: sum_j c_j z_ij; only for label smoothing */
  double class_total;                         /* sum_j c_j; vocab without class weights */
  int64_t vocab;
} logitless_token_loss_inputs;
LOGITLESS_API void logitless_token_loss_inputs_init(logitless_token_loss_inputs* inputs,
                                                    size_t struct_size);

/* f64 tensors on the CPU; those that are not NULL are written. The derivatives are those of the
 * loss with respect to one input, with the others fixed. No overlap with inputs or each other. */
typedef struct logitless_token_loss_outputs {
  size_t struct_size;
  const logitless_tensor* loss;                 /* [N] */
  const logitless_tensor* d_lse;                /* [N] */
  const logitless_tensor* d_target_logit;       /* [N, K] */
  const logitless_tensor* d_weighted_logit_sum; /* [N]; 0 without label smoothing */
} logitless_token_loss_outputs;
LOGITLESS_API void logitless_token_loss_outputs_init(logitless_token_loss_outputs* outputs,
                                                     size_t struct_size);

/* Computes losses and derivatives of tokens, without extra memory. terms may be NULL, which means
 * none. Errors: a shape, dtype or term (invalid argument). */
LOGITLESS_API logitless_status logitless_token_losses(const logitless_loss_terms* terms,
                                                      const logitless_token_loss_inputs* inputs,
                                                      const logitless_token_loss_outputs* outputs);

/* ---- The head: differentiable outputs of each token ---- */

typedef struct logitless_head_options {
  size_t struct_size;
  int64_t ignore_index; /* default -100 */
  float softcap;        /* > 0; 0: none */
  float logit_scale;    /* default 1 */
  int32_t accumulate;   /* head_backward adds to the gradients' contents */
  logitless_precision precision;
} logitless_head_options;
LOGITLESS_API void logitless_head_options_init(logitless_head_options* options, size_t struct_size);

typedef struct logitless_head_inputs {
  size_t struct_size;
  const logitless_tensor* hidden;  /* [..., D] f32 | bf16 | f16 */
  const logitless_tensor* weight;  /* [V, D], the dtype of hidden */
  const logitless_tensor* targets; /* i32 | i64 [...] or [..., K] */
  const logitless_tensor* bias;    /* optional [V], f32 or the dtype of weight */
  /* optional f32 [V]: logit weights of weighted_logit_sum; NULL: 1 */
  const logitless_tensor* vocab_weight;
  const struct logitless_sharding* sharding; /* vocabulary-parallel: c_sharding.h; NULL: none */
} logitless_head_inputs;
LOGITLESS_API void logitless_head_inputs_init(logitless_head_inputs* inputs, size_t struct_size);

/* f32 tensors; those that are not NULL are written; 0 for rows whose targets are all ignored. */
typedef struct logitless_head_outputs {
  size_t struct_size;
  const logitless_tensor* lse;                /* [...]: log sum_j exp z_ij */
  const logitless_tensor* target_logit;       /* [...] or [..., K] */
  const logitless_tensor* log_prob;           /* [...] or [..., K]: target_logit - lse */
  const logitless_tensor* entropy;            /* [...] */
  const logitless_tensor* weighted_logit_sum; /* [...]: sum_j w_j z_ij with the logit weights w */
  const logitless_tensor* argmax;             /* i32 | i64 [...] */
} logitless_head_outputs;
LOGITLESS_API void logitless_head_outputs_init(logitless_head_outputs* outputs, size_t struct_size);

/* Gradients of a scalar with respect to each output: f32, in the shape of the output. NULL is 0. */
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

/* Planning and calls follow the rules of cross entropy. */
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

/* Multiplies the gradients by factor, an f32 scalar, in place. On a GPU one kernel reads the factor
 * there and writes nothing where it is 1. */
LOGITLESS_API logitless_status logitless_scale_gradients(logitless_context* context,
                                                         const logitless_tensor* factor,
                                                         const logitless_head_gradients* gradients);

/* ---- Tensor programs ---- */

/* Options of a compilation; logitless/compiler.h documents each. */
typedef struct logitless_program_options {
  size_t struct_size;
  const char* const* size_names; /* the program's sizes: size_count names */
  const int64_t* size_values;    /* size_count values; both NULL where size_count is 0 */
  size_t size_count;
  uint64_t memory_budget; /* bytes of values in the arena; 0: chunk, but recompute nothing */
  int64_t chunks;         /* chunks of every loop; 0: chosen */
  int32_t threads; /* threads of a run; 0: OMP_NUM_THREADS, or all cores that the process may use */
  int32_t chunk;   /* default 1; 0: no loops */
  int32_t head_engine; /* default 1; 0: heads become loops too */
  int32_t strict;      /* a missed budget, or a big value that could not be chunked, is an error */
  /* The device that runs it: default LOGITLESS_DEVICE_CPU. A GPU need not be present; its programs
   * are run by logitless_program_enqueue, and threads is 0. */
  logitless_device device;
  int32_t compute_capability; /* of the GPU, 10 * major + minor, 80 or more; 0 for the CPU */
  /* default 0; 1: accepts `extern` operations; a program with one is described, and the caller runs
   * it */
  int32_t externs;
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

/* Compiles the text form of docs/reference/ir.md for the CPU, or for the GPU of the options.
 * options may be NULL, which means the defaults. Invalid argument: an error at a line and column of
 * the text, an unbound size, a violation of strict, an unknown device or capability. Unsupported:
 * an operation and dtype without a kernel. A build without CUDA compiles for a GPU as well. */
LOGITLESS_API logitless_status logitless_program_compile(const char* text,
                                                         const logitless_program_options* options,
                                                         logitless_program** program);
LOGITLESS_API void logitless_program_destroy(logitless_program* program);
/* The program after the last pass, the report of the compiler's decisions, and the report as JSON.
 * They live as long as the program; "" for NULL. */
LOGITLESS_API const char* logitless_program_text(const logitless_program* program);
LOGITLESS_API const char* logitless_program_explain(const logitless_program* program);
LOGITLESS_API const char* logitless_program_report_json(const logitless_program* program);
/* Counts and descriptions of parameters and results, in the program's order; 0 for NULL. */
LOGITLESS_API size_t logitless_program_parameter_count(const logitless_program* program);
LOGITLESS_API size_t logitless_program_result_count(const logitless_program* program);
LOGITLESS_API logitless_status logitless_program_get_parameter(const logitless_program* program,
                                                               size_t index,
                                                               logitless_program_tensor* tensor);
LOGITLESS_API logitless_status logitless_program_get_result(const logitless_program* program,
                                                            size_t index,
                                                            logitless_program_tensor* tensor);
/* Exact bytes of everything except parameters and results, with loops and without; 0 for NULL. */
LOGITLESS_API size_t logitless_program_arena_bytes(const logitless_program* program);
LOGITLESS_API size_t logitless_program_unchunked_arena_bytes(const logitless_program* program);
/* Returns the number of threads of a run; 0 for a GPU's program and for NULL. */
LOGITLESS_API int32_t logitless_program_threads(const logitless_program* program);
/* Runs a CPU program on contiguous tensors, in the order of the program. Results overlap neither
 * each other nor parameters; their memory may hold other values until they are made. The arena has
 * logitless_program_arena_bytes(program) bytes, aligned to 64; no other call uses it meanwhile. */
LOGITLESS_API logitless_status logitless_program_run(const logitless_program* program,
                                                     const void* const* parameters,
                                                     size_t parameter_count, void* const* results,
                                                     size_t result_count, void* arena,
                                                     size_t arena_bytes);

/* Prepares a program for logitless_program_enqueue on the device of the context. On a GPU only this
 * call compiles and loads kernels and chooses GEMM algorithms. It takes device memory and files of
 * the cache (docs/use/gpu.md lists the libraries that it needs). `prepared` needs neither the
 * program nor the context afterwards, is immutable, and may be shared by threads. Not allowed while
 * the thread captures a stream. Errors: a context of another device or compute capability (invalid
 * argument); a missing library or a build without CUDA (unsupported); errors of the device. */
LOGITLESS_API logitless_status logitless_program_prepare(const logitless_program* program,
                                                         const logitless_context* context,
                                                         logitless_prepared_program** prepared);
/* Frees it, when all its work is done and no CUDA graph that captured it will be launched. */
LOGITLESS_API void logitless_prepared_program_destroy(logitless_prepared_program* prepared);
/* Enqueues the program. Pointers, their order and overlap rules are those of logitless_program_run.
 * On a GPU they are device memory: tensors aligned to 16 bytes, the arena to 256. The thread's
 * current device must be that of `prepared`. stream is a cudaStream_t; NULL is the default one.
 * Returns before the work is done. Neither waits nor allocates, but for the driver's graphs of runs
 * that repeat their addresses, at most four. A CUDA graph that captures the call keeps them. On the
 * CPU stream is NULL, and results are complete on return. Equal inputs give equal bits on the same
 * kind of device. Errors: wrong pointers or a small arena (invalid argument); device errors. */
LOGITLESS_API logitless_status logitless_program_enqueue(const logitless_prepared_program* prepared,
                                                         const void* const* parameters,
                                                         size_t parameter_count,
                                                         void* const* results, size_t result_count,
                                                         void* arena, size_t arena_bytes,
                                                         void* stream);

/* ---- Bytes ---- */

/* Parses "512MiB", "1.5GB" or "4096" into bytes; units in any case. */
LOGITLESS_API logitless_status logitless_parse_bytes(const char* text, uint64_t* bytes);
/* Returns the highest resident size of this process so far; 0 where unknown. */
LOGITLESS_API uint64_t logitless_process_peak_bytes(void);

#ifdef __cplusplus
}
#endif
