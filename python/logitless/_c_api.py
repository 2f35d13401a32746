"""The C ABI as ctypes: the declarations of c_api.h, c_communicator.h, c_far_field.h, c_sample.h, c_saved_head.h and c_sharding.h.

tools/python_c_api.py writes this file from those headers, which describe the fields. A struct has in
`defaults` those that are not 0."""

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
    _fields_ = [
        ("data", c_void_p), ("dtype", c_int32), ("rank", c_int32), ("shape", c_int64 * MAX_RANK),
        ("strides", c_int64 * MAX_RANK),
    ]


class ContextOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("device", c_int32), ("threads", c_int32), ("kernel", c_char_p),
        ("trace", TraceFunction), ("trace_user", c_void_p), ("stream", c_void_p), ("device_index", c_int32),
    ]


class PlanRequest(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("memory_budget", c_uint64), ("stored_fraction", c_double), ("kind", c_int32),
        ("accuracy", c_int32), ("sample_every", c_int64), ("audit_rows", c_int64), ("tau", c_float),
        ("compute_capability", c_int32), ("card", c_char_p), ("expected_ignored", c_float), ("budget_is_hint", c_int32),
    ]
    defaults: ClassVar[dict[str, float]] = {"kind": -1}


class PlanInfo(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("kernel", c_char_p), ("workspace_bytes", c_uint64), ("logits_bytes", c_uint64),
        ("memory_budget", c_uint64), ("tokens", c_int64), ("dim", c_int64), ("vocab", c_int64),
        ("chunk_tokens", c_int64), ("block_vocab", c_int64), ("stored_vocab", c_int64), ("passes", c_double),
        ("predicted_seconds", c_double), ("kind", c_int32), ("dtype", c_int32), ("threads", c_int32),
        ("reserved", c_int32),
    ]


class PlanCandidate(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("reason", c_char_p), ("workspace_bytes", c_uint64), ("passes", c_double),
        ("predicted_seconds", c_double), ("kind", c_int32), ("possible", c_int32),
    ]


class HeadFeatures(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("tokens", c_int64), ("dim", c_int64), ("vocab", c_int64), ("dtype", c_int32),
        ("targets_per_token", c_int32), ("logit_scale", c_float), ("softcap", c_float), ("bias", c_int32),
        ("label_smoothing", c_int32), ("vocab_weight", c_int32), ("entropy", c_int32), ("argmax", c_int32),
        ("d_hidden", c_int32), ("d_weight", c_int32), ("d_bias", c_int32), ("d_hidden_dtype", c_int32),
        ("d_weight_dtype", c_int32), ("entropy_gradient", c_int32), ("accumulate", c_int32), ("precision", c_int32),
        ("narrow_hidden", c_int32), ("narrow_weight", c_int32),
    ]
    defaults: ClassVar[dict[str, float]] = {"targets_per_token": 1, "logit_scale": 1.0}


class CrossEntropyOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("ignore_index", c_int64), ("normalizer", c_double), ("reduction", c_int32),
        ("label_smoothing", c_float), ("z_loss", c_float), ("softcap", c_float), ("logit_scale", c_float),
        ("next_token", c_int32), ("nan_if_empty", c_int32), ("accumulate", c_int32), ("precision", c_int32),
    ]
    defaults: ClassVar[dict[str, float]] = {"ignore_index": -100, "reduction": 1, "logit_scale": 1.0}


class Sharding(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("vocab_group", c_void_p), ("vocab", c_int64), ("vocab_begin", c_int64),
        ("vocab_ids", POINTER(Tensor)), ("tokens", c_int32), ("exchange", c_int32), ("replicas", c_void_p),
        ("weight", c_int32), ("columns", c_int64), ("interleaved", c_int32),
    ]


class CrossEntropyInputs(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("hidden", POINTER(Tensor)), ("weight", POINTER(Tensor)),
        ("targets", POINTER(Tensor)), ("bias", POINTER(Tensor)), ("class_weight", POINTER(Tensor)),
        ("token_weight", POINTER(Tensor)), ("target_weight", POINTER(Tensor)), ("grad_losses", POINTER(Tensor)),
        ("grad_loss", c_double), ("order", c_void_p), ("sample_seed", c_uint64), ("sharding", POINTER(Sharding)),
    ]
    defaults: ClassVar[dict[str, float]] = {"grad_loss": 1.0}


class CrossEntropyOutputs(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("loss", POINTER(Tensor)), ("d_hidden", POINTER(Tensor)),
        ("d_weight", POINTER(Tensor)), ("d_bias", POINTER(Tensor)), ("lse", POINTER(Tensor)),
        ("target_logit", POINTER(Tensor)), ("log_prob", POINTER(Tensor)), ("entropy", POINTER(Tensor)),
        ("argmax", POINTER(Tensor)), ("d_hidden_bound", POINTER(Tensor)),
    ]


class LossStatistics(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("tokens", c_int64), ("valid_tokens", c_int64), ("correct", c_int64),
        ("normalizer", c_double), ("mean_lse", c_double), ("mean_log_prob", c_double), ("selected", c_double),
        ("sampled", c_double), ("passes", c_double), ("bound", c_double), ("audited_error", c_double),
        ("audited_tokens", c_int64), ("audited_lse_error", c_double), ("audited_lse_error_max", c_double),
        ("dense_fallback", c_int64), ("imbalance", c_double), ("sampled_lse_error", c_double),
        ("sampled_most", c_double),
    ]


class LossTerms(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("label_smoothing", c_double), ("z_loss", c_double),
    ]


class TokenLossInputs(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("lse", POINTER(Tensor)), ("target_logit", POINTER(Tensor)),
        ("target_weight", POINTER(Tensor)), ("token_weight", POINTER(Tensor)), ("weighted_logit_sum", POINTER(Tensor)),
        ("class_total", c_double), ("vocab", c_int64),
    ]


class TokenLossOutputs(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("loss", POINTER(Tensor)), ("d_lse", POINTER(Tensor)),
        ("d_target_logit", POINTER(Tensor)), ("d_weighted_logit_sum", POINTER(Tensor)),
    ]


class HeadOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("ignore_index", c_int64), ("softcap", c_float), ("logit_scale", c_float),
        ("accumulate", c_int32), ("precision", c_int32),
    ]
    defaults: ClassVar[dict[str, float]] = {"ignore_index": -100, "logit_scale": 1.0}


class HeadInputs(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("hidden", POINTER(Tensor)), ("weight", POINTER(Tensor)),
        ("targets", POINTER(Tensor)), ("bias", POINTER(Tensor)), ("vocab_weight", POINTER(Tensor)),
        ("sharding", POINTER(Sharding)),
    ]


class HeadOutputs(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("lse", POINTER(Tensor)), ("target_logit", POINTER(Tensor)),
        ("log_prob", POINTER(Tensor)), ("entropy", POINTER(Tensor)), ("weighted_logit_sum", POINTER(Tensor)),
        ("argmax", POINTER(Tensor)),
    ]


class HeadCotangents(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("lse", POINTER(Tensor)), ("target_logit", POINTER(Tensor)),
        ("log_prob", POINTER(Tensor)), ("entropy", POINTER(Tensor)), ("weighted_logit_sum", POINTER(Tensor)),
    ]


class HeadGradients(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("d_hidden", POINTER(Tensor)), ("d_weight", POINTER(Tensor)),
        ("d_bias", POINTER(Tensor)),
    ]


class ProgramOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("size_names", POINTER(c_char_p)), ("size_values", POINTER(c_int64)),
        ("size_count", c_size_t), ("memory_budget", c_uint64), ("chunks", c_int64), ("threads", c_int32),
        ("chunk", c_int32), ("head_engine", c_int32), ("strict", c_int32), ("device", c_int32),
        ("compute_capability", c_int32), ("externs", c_int32),
    ]
    defaults: ClassVar[dict[str, float]] = {"chunk": 1, "head_engine": 1}


class ProgramTensor(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("name", c_char_p), ("shape", POINTER(c_int64)), ("bytes", c_uint64),
        ("dtype", c_int32), ("rank", c_int32),
    ]


class CommunicatorCallbacksOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("rank", c_int32), ("size", c_int32), ("device", c_int32), ("capturable", c_int32),
        ("all_gather", ExchangeFunction), ("all_to_all", ExchangeFunction), ("all_gather_host", ExchangeFunction),
        ("wait", WaitFunction), ("abort", AbortFunction), ("user", c_void_p),
    ]
    defaults: ClassVar[dict[str, float]] = {"size": 1}


class CommunicatorNcclOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("id", c_void_p), ("nccl_comm", c_void_p), ("rank", c_int32), ("size", c_int32),
        ("max_ctas", c_int32), ("watch", c_int32), ("limit_ms", c_int64), ("copy_engines", c_int32),
        ("reserved", c_int32),
    ]
    defaults: ClassVar[dict[str, float]] = {"limit_ms": 60000, "copy_engines": 1}


class OrderOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("strata", c_int64), ("seed", c_uint64),
    ]
    defaults: ClassVar[dict[str, float]] = {"strata": 16}


class FarFieldOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("error", c_double), ("memory_budget", c_uint64), ("sample_every", c_int64),
        ("audit_rows", c_int64), ("audit_every", c_int64), ("refresh_every", c_int64), ("refresh_delay", c_int64),
        ("sample_rows", c_int64), ("accuracy", c_int32), ("reserved", c_int32), ("replicas", c_void_p),
    ]
    defaults: ClassVar[dict[str, float]] = {"error": 0.01, "sample_every": 16, "audit_rows": 128, "audit_every": 25, "refresh_every": 100, "refresh_delay": 4, "sample_rows": 1024, "accuracy": 1}


class FarFieldReport(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("steps", c_int64), ("dense_steps", c_int64), ("repeated_steps", c_int64),
        ("audits", c_int64), ("refreshes", c_int64), ("last_error", c_double), ("worst_accepted_error", c_double),
        ("tau", c_double), ("mean_selected", c_double), ("vocab", c_int64), ("far", c_int64),
    ]


class SampleOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("top_k", c_int64), ("seed", c_uint64), ("temperature", c_float), ("top_p", c_float),
        ("min_p", c_float), ("softcap", c_float), ("logit_scale", c_float), ("reserved", c_int32),
    ]
    defaults: ClassVar[dict[str, float]] = {"temperature": 1.0, "top_p": 1.0, "logit_scale": 1.0}


class SampleInputs(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("hidden", POINTER(Tensor)), ("weight", POINTER(Tensor)), ("bias", POINTER(Tensor)),
        ("logit_bias", POINTER(Tensor)), ("temperature", POINTER(Tensor)), ("top_p", POINTER(Tensor)),
        ("min_p", POINTER(Tensor)), ("counter", POINTER(Tensor)), ("key", POINTER(Tensor)),
    ]


class SampleOutputs(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("tokens", POINTER(Tensor)), ("log_prob", POINTER(Tensor)),
    ]


class TopLogprobsOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("k", c_int64), ("softcap", c_float), ("logit_scale", c_float),
    ]
    defaults: ClassVar[dict[str, float]] = {"k": 1, "logit_scale": 1.0}


class TopLogprobsInputs(Structure):
    _fields_ = [
        ("struct_size", c_size_t), ("hidden", POINTER(Tensor)), ("weight", POINTER(Tensor)), ("bias", POINTER(Tensor)),
        ("targets", POINTER(Tensor)),
    ]


class TopLogprobsOutputs(Structure):
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
