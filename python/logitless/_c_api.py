"""The C ABI as ctypes: the declarations of c_api.h, c_communicator.h, c_far_field.h, c_sample.h, c_saved_head.h and c_sharding.h.

tools/python_c_api.py writes this file from those headers."""

from __future__ import annotations

from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t
from ctypes import c_uint64, c_void_p
from typing import Any, ClassVar, NamedTuple, TypedDict

ABI_VERSION = 1
MAX_RANK = 4
NCCL_ID_BYTES = 128

OK = 0
INVALID_ARGUMENT = 1
UNSUPPORTED = 2
DEVICE_ERROR = 3
INTERNAL_ERROR = 4
STATUSES = {"ok": 0, "invalid_argument": 1, "unsupported": 2, "device_error": 3, "internal_error": 4}

F32 = 0
BF16 = 1
F16 = 2
I32 = 3
I64 = 4
I8 = 5
F64 = 6
DTYPES = {"f32": 0, "bf16": 1, "f16": 2, "i32": 3, "i64": 4, "i8": 5, "f64": 6}

REDUCTION_NONE = 0
REDUCTION_MEAN = 1
REDUCTION_SUM = 2
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}

PRECISION_IEEE = 0
PRECISION_TF32 = 1
PRECISION_BF16X3 = 2
PRECISIONS = {"ieee": 0, "tf32": 1, "bf16x3": 2}

PLAN_ANY = -1
PLAN_FORWARD = 0
PLAN_DENSE = 1
PLAN_RECOMPUTE = 2
PLAN_STORED = 3
PLAN_FAR_BACKWARD = 4
PLAN_FAR_BOTH = 5
PLAN_KINDS = {"any": -1, "forward": 0, "dense": 1, "recompute": 2, "stored": 3, "far_backward": 4, "far_both": 5}

DEVICE_CPU = 0
DEVICE_CUDA = 1
DEVICES = {"cpu": 0, "cuda": 1}

ACCURACY_EXACT = 0
ACCURACY_FAR_BACKWARD = 1
ACCURACY_FAR_BOTH = 2
ACCURACIES = {"exact": 0, "far_backward": 1, "far_both": 2}

EXCHANGE_PLANNED = 0
EXCHANGE_TOKENS = 1
EXCHANGE_WEIGHTS = 2
EXCHANGE_MODES = {"planned": 0, "tokens": 1, "weights": 2}

WEIGHT_ROWS = 0
WEIGHT_COLUMNS = 1
WEIGHT_SHARDINGS = {"rows": 0, "columns": 1}

TraceFunction = CFUNCTYPE(None, c_char_p, c_void_p)

ExchangeFunction = CFUNCTYPE(c_int32, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p)

WaitFunction = CFUNCTYPE(c_int32, c_void_p, c_int64, c_void_p)

AbortFunction = CFUNCTYPE(None, c_char_p, c_void_p)


class Term(NamedTuple):
    default: float
    least: float  # the range, ends included
    most: float
    text: str


class Tensor(Structure):
    """A strided view of the caller's memory. Strides count elements and may be zero or negative for inputs. The structs
    below hold pointers to tensors: NULL is no tensor. Inputs are only read. `[...]` in their comments stands for the
    leading sizes of hidden, at most two: [N] or [B, T]."""

    data: Any
    dtype: int
    rank: int  # 0 to LOGITLESS_MAX_RANK; 0 is a scalar
    shape: Any
    strides: Any
    _fields_ = [
        ("data", c_void_p), ("dtype", c_int32), ("rank", c_int32), ("shape", c_int64 * MAX_RANK),
        ("strides", c_int64 * MAX_RANK),
    ]


class ContextOptions(Structure):
    struct_size: int
    device: int  # default LOGITLESS_DEVICE_CPU
    threads: int  # 0: OMP_NUM_THREADS, or all cores that the process may use
    kernel: Any  # the only one; NULL or "": of the environment, or the best
    trace: Any  # text of each decision, on the calling thread; NULL: none
    trace_user: Any  # handed to trace
    stream: Any  # cudaStream_t that work is enqueued on; must be NULL on the CPU
    device_index: int  # index of the GPU; must be the thread's current one
    _fields_ = [
        ("struct_size", c_size_t), ("device", c_int32), ("threads", c_int32), ("kernel", c_char_p),
        ("trace", TraceFunction), ("trace_user", c_void_p), ("stream", c_void_p), ("device_index", c_int32),
    ]


class PlanRequest(Structure):
    struct_size: int
    memory_budget: int  # bytes of workspace at most, as in plan.h; 0: its default
    stored_fraction: float  # LOGITLESS_PLAN_STORED: in (0, 1), or 0: all that fits
    kind: int  # default LOGITLESS_PLAN_ANY
    accuracy: int  # logitless_accuracy of c_far_field.h; 0: exact
    sample_every: int  # these three are of the far field: plan.h; 0: off
    audit_rows: int  # 0: none
    tau: float  # in (0, 1); 0: 0.003
    compute_capability: int  # plan_head: of an absent GPU, 10 major + minor; 0: none
    card: Any  # plan_head: whose rates, such as "A100"; NULL: of a usual card
    expected_ignored: float  # in [0, 1]: share of the tokens, a hint: plan.h
    budget_is_hint: int  # 1: memory_budget > 0 is doubled until a plan fits; default 0
    _fields_ = [
        ("struct_size", c_size_t), ("memory_budget", c_uint64), ("stored_fraction", c_double), ("kind", c_int32),
        ("accuracy", c_int32), ("sample_every", c_int64), ("audit_rows", c_int64), ("tau", c_float),
        ("compute_capability", c_int32), ("card", c_char_p), ("expected_ignored", c_float), ("budget_is_hint", c_int32),
    ]
    # Defaults that are not 0.
    defaults: ClassVar[dict[str, float]] = {"kind": -1}


class PlanInfo(Structure):
    """A plan as numbers. `kernel` lives as long as the plan."""

    struct_size: int
    kernel: Any
    workspace_bytes: int
    logits_bytes: int  # fp32 logits of the unfused loss: tokens * vocab * 4
    memory_budget: int  # of the request; 0: the default
    tokens: int  # the most tokens of a call
    dim: int
    vocab: int
    chunk_tokens: int  # tokens per chunk, the step of the outer loop
    block_vocab: int  # vocabulary entries of one vocabulary block
    stored_vocab: int  # vocabulary entries whose exponentials are saved per chunk
    passes: float  # GEMMs of tokens * vocab * dim multiply-adds
    predicted_seconds: float
    kind: int
    dtype: int
    threads: int
    reserved: int
    _fields_ = [
        ("struct_size", c_size_t), ("kernel", c_char_p), ("workspace_bytes", c_uint64), ("logits_bytes", c_uint64),
        ("memory_budget", c_uint64), ("tokens", c_int64), ("dim", c_int64), ("vocab", c_int64),
        ("chunk_tokens", c_int64), ("block_vocab", c_int64), ("stored_vocab", c_int64), ("passes", c_double),
        ("predicted_seconds", c_double), ("kind", c_int32), ("dtype", c_int32), ("threads", c_int32),
        ("reserved", c_int32),
    ]


class PlanCandidate(Structure):
    """A plan that was considered. `reason` (why not, or "chosen") lives as long as the plan."""

    struct_size: int
    reason: Any
    workspace_bytes: int  # the least that it needs when it does not fit
    passes: float
    predicted_seconds: float
    kind: int
    possible: int
    _fields_ = [
        ("struct_size", c_size_t), ("reason", c_char_p), ("workspace_bytes", c_uint64), ("passes", c_double),
        ("predicted_seconds", c_double), ("kind", c_int32), ("possible", c_int32),
    ]


class HeadFeatures(Structure):
    """The features of a call that change its work, for plans made before there are tensors."""

    struct_size: int
    tokens: int  # hidden [tokens, dim], weight [vocab, dim]; tokens is an upper bound
    dim: int
    vocab: int
    dtype: int  # of hidden and weight: f32, bf16 or f16; f32 if they differ
    targets_per_token: int  # default 1
    logit_scale: float  # default 1
    softcap: float  # 0: none
    bias: int
    label_smoothing: int
    vocab_weight: int  # class weights beside label smoothing, or vocab_weight of the head
    entropy: int
    argmax: int
    d_hidden: int  # the gradients asked for
    d_weight: int
    d_bias: int
    d_hidden_dtype: int  # set where the gradient is asked for, else 0
    d_weight_dtype: int
    entropy_gradient: int  # a cotangent of the entropy
    accumulate: int
    precision: int
    narrow_hidden: int  # of a tensor of 16 bits beside f32, which is `dtype`; else 0
    narrow_weight: int
    _fields_ = [
        ("struct_size", c_size_t), ("tokens", c_int64), ("dim", c_int64), ("vocab", c_int64), ("dtype", c_int32),
        ("targets_per_token", c_int32), ("logit_scale", c_float), ("softcap", c_float), ("bias", c_int32),
        ("label_smoothing", c_int32), ("vocab_weight", c_int32), ("entropy", c_int32), ("argmax", c_int32),
        ("d_hidden", c_int32), ("d_weight", c_int32), ("d_bias", c_int32), ("d_hidden_dtype", c_int32),
        ("d_weight_dtype", c_int32), ("entropy_gradient", c_int32), ("accumulate", c_int32), ("precision", c_int32),
        ("narrow_hidden", c_int32), ("narrow_weight", c_int32),
    ]
    # Defaults that are not 0.
    defaults: ClassVar[dict[str, float]] = {"targets_per_token": 1, "logit_scale": 1.0}


class CrossEntropyOptions(Structure):
    """Options of the cross entropy; logitless/cross_entropy.h has the formula."""

    struct_size: int
    ignore_index: int  # default -100
    normalizer: float  # 0: reduction mean divides by it; 0: by the sum of the weights of the valid tokens
    reduction: int  # default LOGITLESS_REDUCTION_MEAN
    label_smoothing: float  # in [0, 1]
    z_loss: float  # >= 0
    softcap: float  # > 0; 0: none
    logit_scale: float  # default 1; finite, not 0
    next_token: int  # hidden [B, T, D], targets [B, T] are the tokens: position t predicts t + 1
    nan_if_empty: int  # mean over no token is NaN instead of 0
    accumulate: int  # gradients are added to what their tensors hold
    precision: int
    _fields_ = [
        ("struct_size", c_size_t), ("ignore_index", c_int64), ("normalizer", c_double), ("reduction", c_int32),
        ("label_smoothing", c_float), ("z_loss", c_float), ("softcap", c_float), ("logit_scale", c_float),
        ("next_token", c_int32), ("nan_if_empty", c_int32), ("accumulate", c_int32), ("precision", c_int32),
    ]
    # Defaults that are not 0.
    defaults: ClassVar[dict[str, float]] = {"ignore_index": -100, "reduction": 1, "logit_scale": 1.0}


class Sharding(Structure):
    """A rank's part of the head. Local to this rank's vocabulary shard are weight [rows, D], bias [rows], d_weight and
    d_bias; rows may differ between ranks and be 0. Global are targets, weights of the vocabulary [vocab], label
    smoothing, argmax and all sums over the vocabulary."""

    struct_size: int
    vocab_group: Any  # the ranks of the vocabulary shards; required
    vocab: int  # global vocabulary
    vocab_begin: int  # the shard is vocabulary entries [vocab_begin, vocab_begin + rows)
    vocab_ids: Any  # or i32 [rows] ascending: the shard's vocabulary entries
    # Sequence-parallel: hidden, targets and all per-token tensors are this rank's own tokens, of any number. Otherwise
    # they are the same on all ranks. A mean or sum is global on each rank.
    tokens: int
    exchange: int  # the same on all ranks; 0 without tokens
    replicas: Any  # Further groups like this one whose tokens count in the divisor of a mean; NULL: none.
    weight: int
    columns: int  # local columns of a weight sharded by columns; those of all ranks make up D
    # Not 0: ranges of a vocabulary interleaved by logitless_interleave_vocab, so that the far field selects about as
    # many tiles on each rank. Without vocab_ids. The same on all ranks.
    interleaved: int
    _fields_ = [
        ("struct_size", c_size_t), ("vocab_group", c_void_p), ("vocab", c_int64), ("vocab_begin", c_int64),
        ("vocab_ids", POINTER(Tensor)), ("tokens", c_int32), ("exchange", c_int32), ("replicas", c_void_p),
        ("weight", c_int32), ("columns", c_int64), ("interleaved", c_int32),
    ]


class CrossEntropyInputs(Structure):
    struct_size: int
    hidden: Any  # [..., D] f32 | bf16 | f16
    weight: Any  # [V, D], the dtype of hidden
    targets: Any  # i32 | i64 [...], or [..., K] with target_weight
    bias: Any  # optional [V], f32 or the dtype of weight
    class_weight: Any  # optional f32 [V]
    token_weight: Any  # optional f32 [...]
    target_weight: Any  # optional f32 [..., K]
    grad_losses: Any  # optional f32 [...]: upstream gradients of reduction none
    grad_loss: float  # default 1: upstream gradient
    order: Any  # the order of a far-field plan, which needs one
    sample_seed: int  # seed of a far-field plan with sample_every: another one for each call
    sharding: Any  # vocabulary-parallel: c_sharding.h; NULL: none
    _fields_ = [
        ("struct_size", c_size_t), ("hidden", POINTER(Tensor)), ("weight", POINTER(Tensor)),
        ("targets", POINTER(Tensor)), ("bias", POINTER(Tensor)), ("class_weight", POINTER(Tensor)),
        ("token_weight", POINTER(Tensor)), ("target_weight", POINTER(Tensor)), ("grad_losses", POINTER(Tensor)),
        ("grad_loss", c_double), ("order", c_void_p), ("sample_seed", c_uint64), ("sharding", POINTER(Sharding)),
    ]
    # Defaults that are not 0.
    defaults: ClassVar[dict[str, float]] = {"grad_loss": 1.0}


class CrossEntropyOutputs(Structure):
    """Outputs that are not NULL are written; the rest is not computed. They must not overlap inputs or each other.
    Certain overlap is refused (intersecting contiguous tensors, equal first elements), that of interleaved views is not
    checked. Use f32 gradients for an f16 model whose gradients are later multiplied by a loss scale: f16 lacks the
    range before that."""

    struct_size: int
    loss: Any  # f32 [] for mean and sum, f32 [...] for none
    d_hidden: Any  # [..., D], the dtype of hidden or f32
    d_weight: Any  # [V, D], the dtype of weight or f32
    d_bias: Any  # [V], f32 or the dtype of bias
    lse: Any  # f32 [...]; 0 for ignored tokens, as in all below
    target_logit: Any  # f32 [...]
    log_prob: Any  # f32 [...]
    entropy: Any  # f32 [...]
    argmax: Any  # i32 | i64 [...]; -1 for ignored tokens
    d_hidden_bound: Any  # f32 [...], beside d_hidden: bound of the error of each row of a far-field plan's d_hidden
    _fields_ = [
        ("struct_size", c_size_t), ("loss", POINTER(Tensor)), ("d_hidden", POINTER(Tensor)),
        ("d_weight", POINTER(Tensor)), ("d_bias", POINTER(Tensor)), ("lse", POINTER(Tensor)),
        ("target_logit", POINTER(Tensor)), ("log_prob", POINTER(Tensor)), ("entropy", POINTER(Tensor)),
        ("argmax", POINTER(Tensor)), ("d_hidden_bound", POINTER(Tensor)),
    ]


class LossStatistics(Structure):
    struct_size: int
    tokens: int  # rows of hidden
    valid_tokens: int  # not ignored
    correct: int  # tokens whose argmax is the target; -1 unless argmax was requested
    normalizer: float  # the divisor of reduction mean
    mean_lse: float  # over valid tokens
    mean_log_prob: float  # of the targets, unweighted
    # The far field (FarFieldStatistics of cross_entropy.h); `passes` is 0 with exact plans. fraction of pairs (tile,
    # block of tokens) computed exactly
    selected: float
    sampled: float  # fraction of those pairs computed for d_weight and d_bias only
    passes: float  # GEMMs of tokens * vocab * dim for both
    bound: float  # bound of the relative error of d_hidden; -1: none
    audited_error: float  # that error measured over audited_tokens; -1: not audited
    audited_tokens: int
    audited_lse_error: float  # root mean square, in nats
    audited_lse_error_max: float
    dense_fallback: int  # some chunk selected > 2/3 of its tiles: computed exactly
    imbalance: float  # vocabulary-parallel: most selected pairs of a rank over the mean; else 1
    sampled_lse_error: float  # far_both: error of the lse from the sampled tiles, root mean square, in nats
    sampled_most: float  # largest mass of a sampled tile, as a fraction of the token's total
    _fields_ = [
        ("struct_size", c_size_t), ("tokens", c_int64), ("valid_tokens", c_int64), ("correct", c_int64),
        ("normalizer", c_double), ("mean_lse", c_double), ("mean_log_prob", c_double), ("selected", c_double),
        ("sampled", c_double), ("passes", c_double), ("bound", c_double), ("audited_error", c_double),
        ("audited_tokens", c_int64), ("audited_lse_error", c_double), ("audited_lse_error_max", c_double),
        ("dense_fallback", c_int64), ("imbalance", c_double), ("sampled_lse_error", c_double),
        ("sampled_most", c_double),
    ]


class LossTerms(Structure):
    """Additional terms of the loss, each with one coefficient."""

    struct_size: int
    label_smoothing: float  # in [0, 1]: the share of the loss spread over all classes
    z_loss: float  # >= 0: z_loss * lse^2 is added to each token's loss
    _fields_ = [
        ("struct_size", c_size_t), ("label_smoothing", c_double), ("z_loss", c_double),
    ]


class TokenLossInputs(Structure):
    """f64 tensors on the CPU, of any strides."""

    struct_size: int
    lse: Any  # [N]: log sum_j exp z_ij; the loss of +inf is NaN
    target_logit: Any  # [N, K]: z of the targets
    # Optional [N, K]: class weight of the target times its target_weight; 0 for an ignored target; NULL: 1
    target_weight: Any
    token_weight: Any  # optional [N]; 0 for an ignored token; NULL: 1
    weighted_logit_sum: Any  # [N]: sum_j c_j z_ij; only for label smoothing
    class_total: float  # sum_j c_j; vocab without class weights
    vocab: int
    _fields_ = [
        ("struct_size", c_size_t), ("lse", POINTER(Tensor)), ("target_logit", POINTER(Tensor)),
        ("target_weight", POINTER(Tensor)), ("token_weight", POINTER(Tensor)), ("weighted_logit_sum", POINTER(Tensor)),
        ("class_total", c_double), ("vocab", c_int64),
    ]


class TokenLossOutputs(Structure):
    """f64 tensors on the CPU; those that are not NULL are written. The derivatives are those of the loss with respect
    to one input, with the others fixed. No overlap with inputs or each other."""

    struct_size: int
    loss: Any  # [N]
    d_lse: Any  # [N]
    d_target_logit: Any  # [N, K]
    d_weighted_logit_sum: Any  # [N]; 0 without label smoothing
    _fields_ = [
        ("struct_size", c_size_t), ("loss", POINTER(Tensor)), ("d_lse", POINTER(Tensor)),
        ("d_target_logit", POINTER(Tensor)), ("d_weighted_logit_sum", POINTER(Tensor)),
    ]


class HeadOptions(Structure):
    struct_size: int
    ignore_index: int  # default -100
    softcap: float  # > 0; 0: none
    logit_scale: float  # default 1
    accumulate: int  # head_backward adds to the gradients' contents
    precision: int
    _fields_ = [
        ("struct_size", c_size_t), ("ignore_index", c_int64), ("softcap", c_float), ("logit_scale", c_float),
        ("accumulate", c_int32), ("precision", c_int32),
    ]
    # Defaults that are not 0.
    defaults: ClassVar[dict[str, float]] = {"ignore_index": -100, "logit_scale": 1.0}


class HeadInputs(Structure):
    struct_size: int
    hidden: Any  # [..., D] f32 | bf16 | f16
    weight: Any  # [V, D], the dtype of hidden
    targets: Any  # i32 | i64 [...] or [..., K]
    bias: Any  # optional [V], f32 or the dtype of weight
    vocab_weight: Any  # optional f32 [V]: logit weights of weighted_logit_sum; NULL: 1
    sharding: Any  # vocabulary-parallel: c_sharding.h; NULL: none
    _fields_ = [
        ("struct_size", c_size_t), ("hidden", POINTER(Tensor)), ("weight", POINTER(Tensor)),
        ("targets", POINTER(Tensor)), ("bias", POINTER(Tensor)), ("vocab_weight", POINTER(Tensor)),
        ("sharding", POINTER(Sharding)),
    ]


class HeadOutputs(Structure):
    """f32 tensors; those that are not NULL are written; 0 for rows whose targets are all ignored."""

    struct_size: int
    lse: Any  # [...]: log sum_j exp z_ij
    target_logit: Any  # [...] or [..., K]
    log_prob: Any  # [...] or [..., K]: target_logit - lse
    entropy: Any  # [...]
    weighted_logit_sum: Any  # [...]: sum_j w_j z_ij with the logit weights w
    argmax: Any  # i32 | i64 [...]
    _fields_ = [
        ("struct_size", c_size_t), ("lse", POINTER(Tensor)), ("target_logit", POINTER(Tensor)),
        ("log_prob", POINTER(Tensor)), ("entropy", POINTER(Tensor)), ("weighted_logit_sum", POINTER(Tensor)),
        ("argmax", POINTER(Tensor)),
    ]


class HeadCotangents(Structure):
    """Gradients of a scalar with respect to each output: f32, in the shape of the output. NULL is 0."""

    struct_size: int
    lse: Any
    target_logit: Any
    log_prob: Any
    entropy: Any
    weighted_logit_sum: Any
    _fields_ = [
        ("struct_size", c_size_t), ("lse", POINTER(Tensor)), ("target_logit", POINTER(Tensor)),
        ("log_prob", POINTER(Tensor)), ("entropy", POINTER(Tensor)), ("weighted_logit_sum", POINTER(Tensor)),
    ]


class HeadGradients(Structure):
    struct_size: int
    d_hidden: Any  # [..., D], the dtype of hidden or f32
    d_weight: Any  # [V, D]
    d_bias: Any  # [V]
    _fields_ = [
        ("struct_size", c_size_t), ("d_hidden", POINTER(Tensor)), ("d_weight", POINTER(Tensor)),
        ("d_bias", POINTER(Tensor)),
    ]


class ProgramOptions(Structure):
    """Options of a compilation; logitless/compiler.h documents each."""

    struct_size: int
    size_names: Any  # the program's sizes: size_count names
    size_values: Any  # size_count values; both NULL where size_count is 0
    size_count: int
    memory_budget: int  # bytes of values in the arena; 0: chunk, but recompute nothing
    chunks: int  # chunks of every loop; 0: chosen
    threads: int  # threads of a run; 0: OMP_NUM_THREADS, or all cores that the process may use
    chunk: int  # default 1; 0: no loops
    head_engine: int  # default 1; 0: heads become loops too
    strict: int  # a missed budget, or a big value that could not be chunked, is an error
    # The device that runs it: default LOGITLESS_DEVICE_CPU. A GPU need not be present; its programs are run by
    # logitless_program_enqueue, and threads is 0.
    device: int
    compute_capability: int  # of the GPU, 10 * major + minor, 80 or more; 0 for the CPU
    externs: int  # default 0; 1: accepts `extern` operations; a program with one is described, and the caller runs it
    _fields_ = [
        ("struct_size", c_size_t), ("size_names", POINTER(c_char_p)), ("size_values", POINTER(c_int64)),
        ("size_count", c_size_t), ("memory_budget", c_uint64), ("chunks", c_int64), ("threads", c_int32),
        ("chunk", c_int32), ("head_engine", c_int32), ("strict", c_int32), ("device", c_int32),
        ("compute_capability", c_int32), ("externs", c_int32),
    ]
    # Defaults that are not 0.
    defaults: ClassVar[dict[str, float]] = {"chunk": 1, "head_engine": 1}


class ProgramTensor(Structure):
    """A parameter or a result. `name` and `shape` live as long as the program."""

    struct_size: int
    name: Any
    shape: Any  # rank sizes
    bytes: int
    dtype: int
    rank: int
    _fields_ = [
        ("struct_size", c_size_t), ("name", c_char_p), ("shape", POINTER(c_int64)), ("bytes", c_uint64),
        ("dtype", c_int32), ("rank", c_int32),
    ]


class CommunicatorCallbacksOptions(Structure):
    """The caller's own collectives: MPI, Gloo."""

    struct_size: int
    rank: int
    size: int  # default 1
    device: int  # the memory that all_gather and all_to_all move
    capturable: int  # calls may be captured into a CUDA graph; only for a GPU
    all_gather: Any  # mine [bytes_each] to all [size, bytes_each]
    all_to_all: Any  # [size, bytes_each] both; slice r is for rank r
    all_gather_host: Any  # host memory, done on return, stream NULL; only for a GPU, and required there
    wait: Any  # waits for the stream; only for a GPU, and required there
    abort: Any  # NULL: the other ranks notice by their own limits
    user: Any  # passed to all of them
    _fields_ = [
        ("struct_size", c_size_t), ("rank", c_int32), ("size", c_int32), ("device", c_int32), ("capturable", c_int32),
        ("all_gather", ExchangeFunction), ("all_to_all", ExchangeFunction), ("all_gather_host", ExchangeFunction),
        ("wait", WaitFunction), ("abort", AbortFunction), ("user", c_void_p),
    ]
    # Defaults that are not 0.
    defaults: ClassVar[dict[str, float]] = {"size": 1}


class CommunicatorNcclOptions(Structure):
    struct_size: int
    id: Any  # the id from logitless_nccl_id of a new group; NULL: nccl_comm is given
    nccl_comm: Any  # an ncclComm_t whose ranks form a new group; NULL: id is given
    rank: int  # with id
    size: int  # with id
    max_ctas: int  # the most thread blocks of a call's kernel; 0: NCCL chooses
    watch: int  # 1: a thread aborts the group when a rank's process has ended
    limit_ms: int  # default 60000; of waits on the host
    copy_engines: int  # default 1; 0: no memory for exchanges by copy engines, see NcclOptions
    reserved: int  # 0
    _fields_ = [
        ("struct_size", c_size_t), ("id", c_void_p), ("nccl_comm", c_void_p), ("rank", c_int32), ("size", c_int32),
        ("max_ctas", c_int32), ("watch", c_int32), ("limit_ms", c_int64), ("copy_engines", c_int32),
        ("reserved", c_int32),
    ]
    # Defaults that are not 0.
    defaults: ClassVar[dict[str, float]] = {"limit_ms": 60000, "copy_engines": 1}


class OrderOptions(Structure):
    struct_size: int
    strata: int  # default 16; in [1, 4096]
    seed: int
    _fields_ = [
        ("struct_size", c_size_t), ("strata", c_int64), ("seed", c_uint64),
    ]
    # Defaults that are not 0.
    defaults: ClassVar[dict[str, float]] = {"strata": 16}


class FarFieldOptions(Structure):
    """FarFieldOptions of far_field.h, which documents each. Counts are at most 2^40."""

    struct_size: int
    error: float  # default 0.01; in (0, 1): wanted relative error of d_hidden
    memory_budget: int  # of each plan; 0: the default
    sample_every: int  # default 16; >= 0
    audit_rows: int  # default 128; >= 1
    audit_every: int  # default 25; >= 1: steps between audits
    refresh_every: int  # default 100; >= 1: steps between orders, at first
    refresh_delay: int  # default 4; >= 0: steps until an order is used
    sample_rows: int  # default 1024; >= 1: tokens that an order is made from
    accuracy: int  # default LOGITLESS_ACCURACY_FAR_BACKWARD
    reserved: int  # 0
    # Default NULL. Data-parallel ranks, each with the full vocabulary and its own tokens, that make the same decisions
    # (FarFieldOptions::replicas of far_field.h). Must live until the head is created.
    replicas: Any
    _fields_ = [
        ("struct_size", c_size_t), ("error", c_double), ("memory_budget", c_uint64), ("sample_every", c_int64),
        ("audit_rows", c_int64), ("audit_every", c_int64), ("refresh_every", c_int64), ("refresh_delay", c_int64),
        ("sample_rows", c_int64), ("accuracy", c_int32), ("reserved", c_int32), ("replicas", c_void_p),
    ]
    # Defaults that are not 0.
    defaults: ClassVar[dict[str, float]] = {"error": 0.01, "sample_every": 16, "audit_rows": 128, "audit_every": 25, "refresh_every": 100, "refresh_delay": 4, "sample_rows": 1024, "accuracy": 1}


class FarFieldReport(Structure):
    """Counts since the head was made, including those of a state that it was given."""

    struct_size: int
    steps: int
    dense_steps: int  # computed densely, including fallbacks and repeated steps
    repeated_steps: int  # of those, repeats of a far-field step whose audit missed the error
    audits: int
    refreshes: int  # new orders put to use
    last_error: float  # of the last audit; -1: none yet
    # Worst error of the audited far-field steps whose gradients were used, including misses that were accumulated;
    # infinity: one was not a number
    worst_accepted_error: float
    tau: float  # threshold of the next far-field step
    mean_selected: float  # mean fraction of selected tiles over the far-field steps
    vocab: int  # vocabulary entries of the current order; 0: none
    far: int  # the next step is a far-field one
    _fields_ = [
        ("struct_size", c_size_t), ("steps", c_int64), ("dense_steps", c_int64), ("repeated_steps", c_int64),
        ("audits", c_int64), ("refreshes", c_int64), ("last_error", c_double), ("worst_accepted_error", c_double),
        ("tau", c_double), ("mean_selected", c_double), ("vocab", c_int64), ("far", c_int64),
    ]


class SampleOptions(Structure):
    struct_size: int
    top_k: int  # default 0: all; else 1 to V
    seed: int
    temperature: float  # default 1; >= 0: 0 takes the largest entry, the first of equal ones
    top_p: float  # default 1: all; above 0 and at most 1
    min_p: float  # default 0: all; at most 1
    softcap: float  # > 0; 0: none
    logit_scale: float  # default 1
    reserved: int  # 0
    _fields_ = [
        ("struct_size", c_size_t), ("top_k", c_int64), ("seed", c_uint64), ("temperature", c_float), ("top_p", c_float),
        ("min_p", c_float), ("softcap", c_float), ("logit_scale", c_float), ("reserved", c_int32),
    ]
    # Defaults that are not 0.
    defaults: ClassVar[dict[str, float]] = {"temperature": 1.0, "top_p": 1.0, "logit_scale": 1.0}


class SampleInputs(Structure):
    """Contiguous tensors; on a GPU in its memory, aligned to 16 bytes."""

    struct_size: int
    hidden: Any  # [..., D] f32 | bf16 | f16
    weight: Any  # [V, D], the dtype of hidden
    bias: Any  # optional [V], f32, or on a CPU the dtype of weight
    logit_bias: Any  # optional f32 [V]; -inf forbids an entry
    temperature: Any  # optional f32 [...], instead of the option; as the two below
    top_p: Any
    min_p: Any
    counter: Any  # optional i32 | i64 [...]; NULL: the index of the token
    key: Any  # optional i64 [2]: the noise's key, instead of the seed's
    _fields_ = [
        ("struct_size", c_size_t), ("hidden", POINTER(Tensor)), ("weight", POINTER(Tensor)), ("bias", POINTER(Tensor)),
        ("logit_bias", POINTER(Tensor)), ("temperature", POINTER(Tensor)), ("top_p", POINTER(Tensor)),
        ("min_p", POINTER(Tensor)), ("counter", POINTER(Tensor)), ("key", POINTER(Tensor)),
    ]


class SampleOutputs(Structure):
    struct_size: int
    tokens: Any  # i32 | i64 [...]
    log_prob: Any  # optional f32 [...]: without temperature, filters and logit_bias
    _fields_ = [
        ("struct_size", c_size_t), ("tokens", POINTER(Tensor)), ("log_prob", POINTER(Tensor)),
    ]


class TopLogprobsOptions(Structure):
    struct_size: int
    k: int  # default 1; 1 to V
    softcap: float  # > 0; 0: none
    logit_scale: float  # default 1
    _fields_ = [
        ("struct_size", c_size_t), ("k", c_int64), ("softcap", c_float), ("logit_scale", c_float),
    ]
    # Defaults that are not 0.
    defaults: ClassVar[dict[str, float]] = {"k": 1, "logit_scale": 1.0}


class TopLogprobsInputs(Structure):
    struct_size: int
    hidden: Any  # as in logitless_sample_inputs
    weight: Any  # [V, D]
    bias: Any  # optional [V]
    targets: Any  # optional i32 | i64 [...], for log_prob
    _fields_ = [
        ("struct_size", c_size_t), ("hidden", POINTER(Tensor)), ("weight", POINTER(Tensor)), ("bias", POINTER(Tensor)),
        ("targets", POINTER(Tensor)),
    ]


class TopLogprobsOutputs(Structure):
    struct_size: int
    top_log_probs: Any  # f32 [..., K], the largest first
    top_ids: Any  # i32 | i64 [..., K]
    log_prob: Any  # f32 [...], of the targets; NULL without them
    _fields_ = [
        ("struct_size", c_size_t), ("top_log_probs", POINTER(Tensor)), ("top_ids", POINTER(Tensor)),
        ("log_prob", POINTER(Tensor)),
    ]


class CrossEntropyValues(NamedTuple):
    """Fields of CrossEntropyOptions that Python sets, and of the request of the plan."""

    reduction: str = "mean"
    precision: str = "ieee"
    ignore_index: int = -100
    label_smoothing: float = 0.0  # in [0, 1]
    z_loss: float = 0.0  # >= 0
    softcap: float = 0.0  # > 0; 0: none
    logit_scale: float = 1.0  # finite, not 0
    normalizer: float = 0.0  # 0: reduction mean divides by it; 0: by the sum of the weights of the valid tokens
    # Bytes; 0: the library's default; below 0 a hint of so many, which the least plan may exceed.
    memory_budget: int = 0
    expected_ignored: float = 0.0  # in [0, 1]: share of the tokens


class HeadValues(NamedTuple):
    """Fields of HeadOptions that Python sets, and of the request of the plan."""

    precision: str = "ieee"
    ignore_index: int = -100
    softcap: float = 0.0  # > 0; 0: none
    logit_scale: float = 1.0
    # Bytes; 0: the library's default; below 0 a hint of so many, which the least plan may exceed.
    memory_budget: int = 0
    expected_ignored: float = 0.0  # in [0, 1]: share of the tokens


class LossTermArguments(TypedDict, total=False):
    """The terms of the loss as keyword arguments."""

    label_smoothing: float  # in [0, 1]: the share of the loss spread over all classes
    z_loss: float  # >= 0: z_loss * lse^2 is added to each token's loss


# Range, default and text of each term of the loss.
LOSS_TERMS = {
    "label_smoothing": Term(
        0.0, 0.0, 1.0,
        "in [0, 1]: the share of the loss spread over all classes",
    ),
    "z_loss": Term(
        0.0, 0.0, float("inf"),
        ">= 0: z_loss * lse^2 is added to each token's loss",
    ),
}


class LossWeights(NamedTuple):
    """The optional weights of the loss, or values of them. They have no gradients."""

    class_weight: Any = None  # [V]
    token_weight: Any = None  # [...]
    target_weight: Any = None  # [..., K]


# Shape of each weight of the loss: of vocabulary entries, tokens or targets.
LOSS_WEIGHTS = {
    "class_weight": "[V]",
    "token_weight": "[...]",
    "target_weight": "[..., K]",
}


# Structs by their C names.
STRUCTS = {
    "logitless_tensor": Tensor,
    "logitless_context_options": ContextOptions,
    "logitless_plan_request": PlanRequest,
    "logitless_plan_info": PlanInfo,
    "logitless_plan_candidate": PlanCandidate,
    "logitless_head_features": HeadFeatures,
    "logitless_cross_entropy_options": CrossEntropyOptions,
    "logitless_cross_entropy_inputs": CrossEntropyInputs,
    "logitless_cross_entropy_outputs": CrossEntropyOutputs,
    "logitless_loss_statistics": LossStatistics,
    "logitless_loss_terms": LossTerms,
    "logitless_token_loss_inputs": TokenLossInputs,
    "logitless_token_loss_outputs": TokenLossOutputs,
    "logitless_head_options": HeadOptions,
    "logitless_head_inputs": HeadInputs,
    "logitless_head_outputs": HeadOutputs,
    "logitless_head_cotangents": HeadCotangents,
    "logitless_head_gradients": HeadGradients,
    "logitless_program_options": ProgramOptions,
    "logitless_program_tensor": ProgramTensor,
    "logitless_communicator_callbacks_options": CommunicatorCallbacksOptions,
    "logitless_communicator_nccl_options": CommunicatorNcclOptions,
    "logitless_order_options": OrderOptions,
    "logitless_far_field_options": FarFieldOptions,
    "logitless_far_field_report": FarFieldReport,
    "logitless_sample_options": SampleOptions,
    "logitless_sample_inputs": SampleInputs,
    "logitless_sample_outputs": SampleOutputs,
    "logitless_top_logprobs_options": TopLogprobsOptions,
    "logitless_top_logprobs_inputs": TopLogprobsInputs,
    "logitless_top_logprobs_outputs": TopLogprobsOutputs,
    "logitless_sharding": Sharding,
}


# (type of the result, types of the arguments) by name.
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "logitless_version": (c_char_p, []),
    "logitless_abi_version": (c_int32, []),
    "logitless_struct_size": (c_size_t, [c_char_p]),
    "logitless_status_name": (c_char_p, [c_int32]),
    "logitless_last_error": (c_char_p, []),
    "logitless_tensor_init": (c_int32, [POINTER(Tensor), c_void_p, c_int32, c_int32, POINTER(c_int64)]),
    "logitless_context_options_init": (None, [POINTER(ContextOptions), c_size_t]),
    "logitless_context_create": (c_int32, [POINTER(ContextOptions), POINTER(c_void_p)]),
    "logitless_context_destroy": (None, [c_void_p]),
    "logitless_context_threads": (c_int32, [c_void_p]),
    "logitless_context_compute_capability": (c_int32, [c_void_p]),
    "logitless_kernel_count": (c_size_t, [c_int32]),
    "logitless_kernel_name": (c_char_p, [c_int32, c_size_t]),
    "logitless_plan_request_init": (None, [POINTER(PlanRequest), c_size_t]),
    "logitless_plan_info_init": (None, [POINTER(PlanInfo), c_size_t]),
    "logitless_plan_candidate_init": (None, [POINTER(PlanCandidate), c_size_t]),
    "logitless_plan_destroy": (None, [c_void_p]),
    "logitless_plan_workspace_bytes": (c_size_t, [c_void_p]),
    "logitless_plan_get_info": (c_int32, [c_void_p, POINTER(PlanInfo)]),
    "logitless_plan_candidate_count": (c_size_t, [c_void_p]),
    "logitless_plan_get_candidate": (c_int32, [c_void_p, c_size_t, POINTER(PlanCandidate)]),
    "logitless_plan_explain": (c_char_p, [c_void_p]),
    "logitless_head_features_init": (None, [POINTER(HeadFeatures), c_size_t]),
    "logitless_plan_head": (c_int32, [c_void_p, POINTER(HeadFeatures), POINTER(PlanRequest), POINTER(c_void_p)]),
    "logitless_cross_entropy_options_init": (None, [POINTER(CrossEntropyOptions), c_size_t]),
    "logitless_cross_entropy_inputs_init": (None, [POINTER(CrossEntropyInputs), c_size_t]),
    "logitless_cross_entropy_outputs_init": (None, [POINTER(CrossEntropyOutputs), c_size_t]),
    "logitless_loss_statistics_init": (None, [POINTER(LossStatistics), c_size_t]),
    "logitless_plan_cross_entropy": (c_int32, [c_void_p, POINTER(CrossEntropyOptions), POINTER(CrossEntropyInputs),
        POINTER(CrossEntropyOutputs), POINTER(PlanRequest), POINTER(c_void_p)]),
    "logitless_cross_entropy": (c_int32, [c_void_p, c_void_p, POINTER(CrossEntropyOptions), POINTER(CrossEntropyInputs),
        POINTER(CrossEntropyOutputs), c_void_p, c_size_t, POINTER(LossStatistics)]),
    "logitless_device_statistics": (c_int32, [c_void_p, c_void_p, c_void_p, c_size_t, POINTER(LossStatistics)]),
    "logitless_loss_terms_init": (None, [POINTER(LossTerms), c_size_t]),
    "logitless_token_loss_inputs_init": (None, [POINTER(TokenLossInputs), c_size_t]),
    "logitless_token_loss_outputs_init": (None, [POINTER(TokenLossOutputs), c_size_t]),
    "logitless_token_losses": (c_int32, [POINTER(LossTerms), POINTER(TokenLossInputs), POINTER(TokenLossOutputs)]),
    "logitless_head_options_init": (None, [POINTER(HeadOptions), c_size_t]),
    "logitless_head_inputs_init": (None, [POINTER(HeadInputs), c_size_t]),
    "logitless_head_outputs_init": (None, [POINTER(HeadOutputs), c_size_t]),
    "logitless_head_cotangents_init": (None, [POINTER(HeadCotangents), c_size_t]),
    "logitless_head_gradients_init": (None, [POINTER(HeadGradients), c_size_t]),
    "logitless_plan_head_forward": (c_int32, [c_void_p, POINTER(HeadOptions), POINTER(HeadInputs), POINTER(HeadOutputs),
        POINTER(PlanRequest), POINTER(c_void_p)]),
    "logitless_head_forward": (c_int32, [c_void_p, c_void_p, POINTER(HeadOptions), POINTER(HeadInputs),
        POINTER(HeadOutputs), c_void_p, c_size_t]),
    "logitless_plan_head_backward": (c_int32, [c_void_p, POINTER(HeadOptions), POINTER(HeadInputs),
        POINTER(HeadCotangents), POINTER(HeadGradients), POINTER(PlanRequest), POINTER(c_void_p)]),
    "logitless_head_backward": (c_int32, [c_void_p, c_void_p, POINTER(HeadOptions), POINTER(HeadInputs),
        POINTER(HeadCotangents), POINTER(HeadGradients), c_void_p, c_size_t]),
    "logitless_scale_gradients": (c_int32, [c_void_p, POINTER(Tensor), POINTER(HeadGradients)]),
    "logitless_program_options_init": (None, [POINTER(ProgramOptions), c_size_t]),
    "logitless_program_tensor_init": (None, [POINTER(ProgramTensor), c_size_t]),
    "logitless_program_compile": (c_int32, [c_char_p, POINTER(ProgramOptions), POINTER(c_void_p)]),
    "logitless_program_destroy": (None, [c_void_p]),
    "logitless_program_text": (c_char_p, [c_void_p]),
    "logitless_program_explain": (c_char_p, [c_void_p]),
    "logitless_program_report_json": (c_char_p, [c_void_p]),
    "logitless_program_parameter_count": (c_size_t, [c_void_p]),
    "logitless_program_result_count": (c_size_t, [c_void_p]),
    "logitless_program_get_parameter": (c_int32, [c_void_p, c_size_t, POINTER(ProgramTensor)]),
    "logitless_program_get_result": (c_int32, [c_void_p, c_size_t, POINTER(ProgramTensor)]),
    "logitless_program_arena_bytes": (c_size_t, [c_void_p]),
    "logitless_program_unchunked_arena_bytes": (c_size_t, [c_void_p]),
    "logitless_program_threads": (c_int32, [c_void_p]),
    "logitless_program_run": (c_int32, [c_void_p, POINTER(c_void_p), c_size_t, POINTER(c_void_p), c_size_t, c_void_p,
        c_size_t]),
    "logitless_program_prepare": (c_int32, [c_void_p, c_void_p, POINTER(c_void_p)]),
    "logitless_prepared_program_destroy": (None, [c_void_p]),
    "logitless_program_enqueue": (c_int32, [c_void_p, POINTER(c_void_p), c_size_t, POINTER(c_void_p), c_size_t,
        c_void_p, c_size_t, c_void_p]),
    "logitless_parse_bytes": (c_int32, [c_char_p, POINTER(c_uint64)]),
    "logitless_process_peak_bytes": (c_uint64, []),
    "logitless_communicator_threads": (c_int32, [c_int32, c_int64, POINTER(c_void_p)]),
    "logitless_communicator_tcp": (c_int32, [c_char_p, c_int32, c_int32, c_int32, c_int64, POINTER(c_void_p)]),
    "logitless_communicator_callbacks_options_init": (None, [POINTER(CommunicatorCallbacksOptions), c_size_t]),
    "logitless_communicator_callbacks": (c_int32, [POINTER(CommunicatorCallbacksOptions), POINTER(c_void_p)]),
    "logitless_nccl_missing": (c_char_p, []),
    "logitless_nccl_id": (c_int32, [c_void_p]),
    "logitless_communicator_nccl_options_init": (None, [POINTER(CommunicatorNcclOptions), c_size_t]),
    "logitless_communicator_nccl": (c_int32, [POINTER(CommunicatorNcclOptions), POINTER(c_void_p)]),
    "logitless_communicator_destroy": (None, [c_void_p]),
    "logitless_communicator_rank": (c_int32, [c_void_p]),
    "logitless_communicator_size": (c_int32, [c_void_p]),
    "logitless_communicator_all_gather": (c_int32, [c_void_p, c_void_p, c_void_p, c_size_t, c_void_p]),
    "logitless_communicator_all_to_all": (c_int32, [c_void_p, c_void_p, c_void_p, c_size_t, c_void_p]),
    "logitless_communicator_all_gather_host": (c_int32, [c_void_p, c_void_p, c_void_p, c_size_t]),
    "logitless_communicator_wait": (c_int32, [c_void_p, c_void_p, c_int64]),
    "logitless_communicator_check": (c_int32, [c_void_p]),
    "logitless_communicator_abort": (c_int32, [c_void_p, c_char_p]),
    "logitless_order_options_init": (None, [POINTER(OrderOptions), c_size_t]),
    "logitless_average_probability": (c_int32, [c_void_p, POINTER(Tensor), POINTER(Tensor), POINTER(Tensor), c_float,
        c_float, c_uint64, POINTER(c_float), c_int64]),
    "logitless_vocab_order_make": (c_int32, [c_void_p, POINTER(Tensor), POINTER(c_float), c_int64,
        POINTER(OrderOptions), POINTER(c_void_p)]),
    "logitless_vocab_order_create": (c_int32, [POINTER(c_int64), POINTER(c_float), c_int64, POINTER(c_void_p)]),
    "logitless_vocab_order_measure": (c_int32, [c_void_p, c_void_p, POINTER(Tensor), POINTER(Tensor), POINTER(Tensor),
        c_float, c_float, POINTER(c_void_p)]),
    "logitless_vocab_order_destroy": (None, [c_void_p]),
    "logitless_vocab_order_vocab": (c_int64, [c_void_p]),
    "logitless_vocab_order_dim": (c_int64, [c_void_p]),
    "logitless_vocab_order_ids": (POINTER(c_int64), [c_void_p]),
    "logitless_vocab_order_average": (POINTER(c_float), [c_void_p]),
    "logitless_vocab_order_save": (c_int32, [c_void_p, c_char_p]),
    "logitless_vocab_order_load": (c_int32, [c_char_p, POINTER(c_void_p)]),
    "logitless_far_field_options_init": (None, [POINTER(FarFieldOptions), c_size_t]),
    "logitless_far_field_report_init": (None, [POINTER(FarFieldReport), c_size_t]),
    "logitless_far_head_create": (c_int32, [c_void_p, POINTER(FarFieldOptions), POINTER(c_void_p)]),
    "logitless_far_head_destroy": (None, [c_void_p]),
    "logitless_far_head_step": (c_int32, [c_void_p, POINTER(CrossEntropyOptions), POINTER(CrossEntropyInputs),
        POINTER(CrossEntropyOutputs), POINTER(LossStatistics)]),
    "logitless_far_head_statistics": (c_int32, [c_void_p, POINTER(LossStatistics)]),
    "logitless_far_head_report": (c_int32, [c_void_p, POINTER(FarFieldReport)]),
    "logitless_far_head_explain": (c_char_p, [c_void_p]),
    "logitless_far_head_order": (c_int32, [c_void_p, POINTER(c_void_p)]),
    "logitless_far_head_save": (c_int32, [c_void_p, c_char_p]),
    "logitless_far_head_load": (c_int32, [c_void_p, c_char_p]),
    "logitless_far_head_state": (c_int32, [c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "logitless_far_head_set_state": (c_int32, [c_void_p, c_void_p, c_size_t]),
    "logitless_sample_plan_destroy": (None, [c_void_p]),
    "logitless_sample_plan_workspace_bytes": (c_size_t, [c_void_p]),
    "logitless_sample_plan_explain": (c_char_p, [c_void_p]),
    "logitless_sample_options_init": (None, [POINTER(SampleOptions), c_size_t]),
    "logitless_sample_inputs_init": (None, [POINTER(SampleInputs), c_size_t]),
    "logitless_sample_outputs_init": (None, [POINTER(SampleOutputs), c_size_t]),
    "logitless_plan_sample": (c_int32, [c_void_p, POINTER(SampleOptions), POINTER(SampleInputs), POINTER(SampleOutputs),
        c_uint64, POINTER(c_void_p)]),
    "logitless_sample": (c_int32, [c_void_p, c_void_p, POINTER(SampleOptions), POINTER(SampleInputs),
        POINTER(SampleOutputs), c_void_p, c_size_t]),
    "logitless_top_logprobs_options_init": (None, [POINTER(TopLogprobsOptions), c_size_t]),
    "logitless_top_logprobs_inputs_init": (None, [POINTER(TopLogprobsInputs), c_size_t]),
    "logitless_top_logprobs_outputs_init": (None, [POINTER(TopLogprobsOutputs), c_size_t]),
    "logitless_plan_top_logprobs": (c_int32, [c_void_p, POINTER(TopLogprobsOptions), POINTER(TopLogprobsInputs),
        POINTER(TopLogprobsOutputs), c_uint64, POINTER(c_void_p)]),
    "logitless_top_logprobs": (c_int32, [c_void_p, c_void_p, POINTER(TopLogprobsOptions), POINTER(TopLogprobsInputs),
        POINTER(TopLogprobsOutputs), c_void_p, c_size_t]),
    "logitless_plan_head_saved": (c_int32, [c_void_p, POINTER(HeadOptions), POINTER(HeadInputs), POINTER(HeadOutputs),
        POINTER(HeadGradients), POINTER(PlanRequest), POINTER(c_void_p)]),
    "logitless_head_forward_saved": (c_int32, [c_void_p, c_void_p, POINTER(HeadOptions), POINTER(HeadInputs),
        POINTER(HeadOutputs), POINTER(HeadGradients), c_void_p, c_size_t]),
    "logitless_head_backward_saved": (c_int32, [c_void_p, c_void_p, POINTER(HeadOptions), POINTER(HeadInputs),
        POINTER(HeadCotangents), POINTER(HeadGradients), c_void_p, c_size_t]),
    "logitless_sharding_init": (None, [POINTER(Sharding), c_size_t]),
    "logitless_supports_vocab_parallel": (c_int32, [c_int32, c_int32, c_int32, c_int64]),
    "logitless_interleave_vocab": (c_int32, [c_int64, c_int32, POINTER(c_float), c_uint64, POINTER(c_int32)]),
    "logitless_interleaved_begin": (c_int32, [c_int64, c_int32, c_int32, POINTER(c_int64)]),
    "logitless_sharded_average_probability": (c_int32, [c_void_p, POINTER(Sharding), POINTER(Tensor), POINTER(Tensor),
        POINTER(Tensor), c_float, c_float, c_uint64, POINTER(c_float), c_int64]),
    "logitless_sharded_vocab_order_measure": (c_int32, [c_void_p, POINTER(Sharding), c_void_p, POINTER(Tensor),
        POINTER(Tensor), POINTER(Tensor), c_float, c_float, POINTER(c_void_p)]),
    "logitless_vocab_order_share": (c_int32, [c_void_p, POINTER(Sharding), POINTER(c_void_p)]),
}
