"""liblogitless over ctypes: the structs and functions of logitless/c_api.h, and its errors as exceptions."""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path

ABI_VERSION = 1
MAX_RANK = 4

F32, BF16, F16, I32, I64, I8, F64 = range(7)
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
PLAN_KINDS = {"any": -1, "forward": 0, "dense": 1, "recompute": 2, "stored": 3}
CPU, CUDA = 0, 1


class LogitlessError(RuntimeError):
    """The device or the library failed; the message is the library's own."""


class Tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("shape", c_int64 * MAX_RANK),
        ("strides", c_int64 * MAX_RANK),
    ]


_TENSOR = POINTER(Tensor)


class ContextOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("device", c_int32),
        ("threads", c_int32),
        ("kernel", c_char_p),
        ("trace", c_void_p),
        ("trace_user", c_void_p),
        ("stream", c_void_p),
        ("device_index", c_int32),
    ]


class PlanRequest(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("memory_budget", c_uint64),
        ("stored_fraction", c_double),
        ("kind", c_int32),
        ("reserved", c_int32),
    ]


class HeadFeatures(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("tokens", c_int64),
        ("dim", c_int64),
        ("vocab", c_int64),
        ("dtype", c_int32),
        ("targets_per_token", c_int32),
        ("logit_scale", c_float),
        ("softcap", c_float),
        ("bias", c_int32),
        ("label_smoothing", c_int32),
        ("vocab_weight", c_int32),
        ("entropy", c_int32),
        ("argmax", c_int32),
        ("d_hidden", c_int32),
        ("d_weight", c_int32),
        ("d_bias", c_int32),
        ("d_hidden_dtype", c_int32),
        ("d_weight_dtype", c_int32),
        ("entropy_gradient", c_int32),
        ("accumulate", c_int32),
    ]


class CrossEntropyOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("ignore_index", c_int64),
        ("normalizer", c_double),
        ("reduction", c_int32),
        ("label_smoothing", c_float),
        ("z_loss", c_float),
        ("softcap", c_float),
        ("logit_scale", c_float),
        ("next_token", c_int32),
        ("nan_if_empty", c_int32),
        ("accumulate", c_int32),
    ]


class CrossEntropyInputs(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("hidden", _TENSOR),
        ("weight", _TENSOR),
        ("targets", _TENSOR),
        ("bias", _TENSOR),
        ("class_weight", _TENSOR),
        ("token_weight", _TENSOR),
        ("target_weight", _TENSOR),
        ("grad_losses", _TENSOR),
        ("grad_loss", c_double),
    ]


class CrossEntropyOutputs(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("loss", _TENSOR),
        ("d_hidden", _TENSOR),
        ("d_weight", _TENSOR),
        ("d_bias", _TENSOR),
        ("lse", _TENSOR),
        ("target_logit", _TENSOR),
        ("log_prob", _TENSOR),
        ("entropy", _TENSOR),
        ("argmax", _TENSOR),
    ]


class LossStatistics(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("tokens", c_int64),
        ("valid_tokens", c_int64),
        ("correct", c_int64),
        ("normalizer", c_double),
        ("mean_lse", c_double),
        ("mean_log_prob", c_double),
    ]


class HeadOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("ignore_index", c_int64),
        ("softcap", c_float),
        ("logit_scale", c_float),
        ("accumulate", c_int32),
        ("reserved", c_int32),
    ]


class HeadInputs(Structure):
    _fields_ = [("struct_size", c_size_t)] + [
        (name, _TENSOR) for name in ("hidden", "weight", "targets", "bias", "vocab_weight")
    ]


class HeadOutputs(Structure):
    _fields_ = [("struct_size", c_size_t)] + [
        (name, _TENSOR)
        for name in ("lse", "target_logit", "log_prob", "entropy", "weighted_logit_sum", "argmax")
    ]


class HeadCotangents(Structure):
    _fields_ = [("struct_size", c_size_t)] + [
        (name, _TENSOR) for name in ("lse", "target_logit", "log_prob", "entropy", "weighted_logit_sum")
    ]


class HeadGradients(Structure):
    _fields_ = [("struct_size", c_size_t)] + [(name, _TENSOR) for name in ("d_hidden", "d_weight", "d_bias")]


_STRUCTS = {
    "logitless_tensor": Tensor,
    "logitless_context_options": ContextOptions,
    "logitless_plan_request": PlanRequest,
    "logitless_head_features": HeadFeatures,
    "logitless_cross_entropy_options": CrossEntropyOptions,
    "logitless_cross_entropy_inputs": CrossEntropyInputs,
    "logitless_cross_entropy_outputs": CrossEntropyOutputs,
    "logitless_loss_statistics": LossStatistics,
    "logitless_head_options": HeadOptions,
    "logitless_head_inputs": HeadInputs,
    "logitless_head_outputs": HeadOutputs,
    "logitless_head_cotangents": HeadCotangents,
    "logitless_head_gradients": HeadGradients,
}


def library_path() -> Path:
    """The liblogitless that is used: ``LOGITLESS_LIBRARY`` if set, else the one of this package."""
    named = os.environ.get("LOGITLESS_LIBRARY")
    return Path(named) if named else Path(__file__).parent / "lib" / "liblogitless.so"


def _load() -> ctypes.CDLL:
    path = library_path()
    try:
        # RTLD_LOCAL: no symbol of it meets those of a framework.
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"logitless: cannot load {path}: {error}. Install the wheel (pip install .), or name a built library in "
            "LOGITLESS_LIBRARY"
        ) from error
    lib.logitless_abi_version.restype = c_int32
    found = lib.logitless_abi_version()
    if found != ABI_VERSION:
        raise ImportError(f"logitless: {path} has ABI version {found}, this package needs {ABI_VERSION}")
    lib.logitless_struct_size.restype = c_size_t
    lib.logitless_struct_size.argtypes = [c_char_p]
    for name, struct in _STRUCTS.items():
        size = lib.logitless_struct_size(name.encode())
        if size != ctypes.sizeof(struct):
            raise ImportError(f"logitless: {path}: {name} has {size} bytes, this package has {ctypes.sizeof(struct)}")
    for name in ("logitless_version", "logitless_last_error", "logitless_kernel_name", "logitless_plan_explain"):
        getattr(lib, name).restype = c_char_p
    lib.logitless_kernel_count.restype = c_size_t
    lib.logitless_kernel_count.argtypes = [c_int32]
    lib.logitless_kernel_name.argtypes = [c_int32, c_size_t]
    lib.logitless_plan_explain.argtypes = [c_void_p]
    lib.logitless_plan_workspace_bytes.restype = c_size_t
    lib.logitless_plan_workspace_bytes.argtypes = [c_void_p]
    lib.logitless_context_destroy.argtypes = [c_void_p]
    lib.logitless_context_destroy.restype = None
    lib.logitless_plan_destroy.argtypes = [c_void_p]
    lib.logitless_plan_destroy.restype = None
    lib.logitless_cross_entropy.argtypes = [c_void_p] * 6 + [c_size_t, c_void_p]
    lib.logitless_head_forward.argtypes = [c_void_p] * 6 + [c_size_t]
    lib.logitless_scale_gradients.argtypes = [c_void_p] * 3
    lib.logitless_head_backward.argtypes = [c_void_p] * 7 + [c_size_t]
    return lib


lib = _load()


def check(status: int) -> None:
    """Raises what a status of the C ABI stands for, with the library's message."""
    if status == 0:
        return
    message = lib.logitless_last_error().decode()
    if status == 1:
        raise ValueError(message)
    if status == 2:
        raise NotImplementedError(message)
    raise LogitlessError(message)


def new(struct: type[Structure]):
    """A struct with its struct_size set and every other field 0."""
    value = struct()
    value.struct_size = ctypes.sizeof(struct)
    return value


class Context:
    """A context of the library; for one thread at a time."""

    def __init__(self, device: int = CPU, device_index: int = 0, stream: int = 0, threads: int = 0):
        options = new(ContextOptions)
        options.device, options.device_index, options.stream, options.threads = device, device_index, stream, threads
        self.handle = c_void_p()
        check(lib.logitless_context_create(ctypes.byref(options), ctypes.byref(self.handle)))

    def __del__(self):
        if getattr(self, "handle", None):
            lib.logitless_context_destroy(self.handle)


_contexts = threading.local()


def context(device: int = CPU, device_index: int = 0, stream: int = 0, threads: int = 0) -> Context:
    """This thread's context for a device, stream and number of threads (0: all cores)."""
    key = (device, device_index, stream, threads)
    cache = _contexts.__dict__
    found = cache.get(key)
    if found is None:
        found = cache[key] = Context(*key)
    return found


def version() -> str:
    """Version of the library, "0.1.0"."""
    return lib.logitless_version().decode()


def kernels(runnable: bool = True) -> list[str]:
    """Names of the CPU kernels, best first; with ``runnable``, those this machine can run."""
    flag = int(runnable)
    return [lib.logitless_kernel_name(flag, i).decode() for i in range(lib.logitless_kernel_count(flag))]


def parse_bytes(text: int | str | None) -> int:
    """Bytes of a memory budget: a number, or text such as "512MiB"; None is 0, the default."""
    if text is None:
        return 0
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise TypeError(f"memory_budget: expected bytes or text such as '512MiB', got {text!r}")
    if isinstance(text, int):
        if text <= 0:
            raise ValueError(f"memory_budget: expected more than 0 bytes, got {text}")
        return text
    value = c_uint64()
    check(lib.logitless_parse_bytes(text.encode(), ctypes.byref(value)))
    return value.value


def explain(
    tokens: int,
    dim: int,
    vocab: int,
    dtype: str = "bf16",
    *,
    memory_budget: int | str | None = None,
    gradients: bool = True,
    threads: int = 0,
) -> str:
    """The plan for a head of ``hidden [tokens, dim]`` and ``weight [vocab, dim]``: strategy, kernel, workspace, and why
    not the others. dtype: "f32", "bf16" or "f16". For the CPU."""
    dtypes = {"f32": F32, "bf16": BF16, "f16": F16}
    if dtype not in dtypes:
        raise ValueError(f"dtype: expected one of {', '.join(dtypes)}, got {dtype!r}")
    features = new(HeadFeatures)
    features.tokens, features.dim, features.vocab, features.dtype = tokens, dim, vocab, dtypes[dtype]
    features.targets_per_token, features.logit_scale = 1, 1.0
    if gradients:
        features.d_hidden = features.d_weight = 1
        features.d_hidden_dtype = features.d_weight_dtype = dtypes[dtype]
    request = new(PlanRequest)
    request.memory_budget, request.kind = parse_bytes(memory_budget), PLAN_KINDS["any"]
    plan = c_void_p()
    check(
        lib.logitless_plan_head(
            context(threads=threads).handle, ctypes.byref(features), ctypes.byref(request), ctypes.byref(plan)
        )
    )
    try:
        return lib.logitless_plan_explain(plan).decode()
    finally:
        lib.logitless_plan_destroy(plan)
