"""liblogitless over ctypes: the functions of _c_api.py, with errors as exceptions."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
from collections.abc import Iterator
from ctypes import Structure, c_char_p, c_int32, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from ._cache import ThreadCache
from ._c_api import *  # noqa: F403  (re-exports the header's names)
from ._c_api import (
    ABI_VERSION, DEVICE_CPU, DTYPES, FUNCTIONS, INVALID_ARGUMENT, OK, STRUCTS, UNSUPPORTED, ContextOptions,
    HeadFeatures, PlanInfo, PlanRequest,
)


class LogitlessError(RuntimeError):
    """A failure of the device or the library, with the library's message."""


def library_path() -> Path:
    """Returns the path of the liblogitless in use: ``LOGITLESS_LIBRARY`` if set, else the one of this package."""
    named = os.environ.get("LOGITLESS_LIBRARY")
    return Path(named) if named else Path(__file__).parent / "lib" / "liblogitless.so"


@functools.cache
def _load() -> ctypes.CDLL:
    path = library_path()
    try:
        # RTLD_LOCAL keeps its symbols apart from those of a framework.
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        if not os.environ.get("LOGITLESS_LIBRARY") and not path.exists():
            raise ImportError(
                f"logitless: this package is pure Python, without the native library ({path}). Install the wheel of this "
                "platform (pip install . builds it), or name a built library in LOGITLESS_LIBRARY"
            ) from None
        raise ImportError(f"logitless: cannot load {path}: {error}") from error
    lib.logitless_abi_version.restype = c_int32
    found = lib.logitless_abi_version()
    if found != ABI_VERSION:
        raise ImportError(f"logitless: {path} has ABI version {found}, this package needs {ABI_VERSION}")
    lib.logitless_struct_size.restype = c_size_t
    lib.logitless_struct_size.argtypes = [c_char_p]
    for name, struct in STRUCTS.items():
        size = lib.logitless_struct_size(name.encode())
        if size != ctypes.sizeof(struct):
            raise ImportError(f"logitless: {path}: {name} has {size} bytes, this package has {ctypes.sizeof(struct)}")
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


class _Library:
    """The library's functions by name. The first use of one loads the library, and raises ImportError if that fails."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        require(name)
        loaded = _load()
        for known in FUNCTIONS:  # all of them, since this module is empty at interpreter exit
            setattr(self, known, getattr(loaded, known))
        function = getattr(loaded, name)
        setattr(self, name, function)
        return function


lib = _Library()


@functools.cache
def why_missing() -> str:
    """Returns the reason why the library cannot be loaded; empty if it can."""
    try:
        _load()
    except ImportError as error:
        return str(error)
    return ""


def require(call: str) -> None:
    """Raises ImportError that names a call which needs the library, if the library cannot be loaded."""
    if missing := why_missing():
        raise ImportError(f"{call}: needs the native library. {missing}")


def check(status: int) -> None:
    """Raises the exception for a status of the C ABI, with the library's message."""
    if status == OK:
        return
    message = lib.logitless_last_error().decode()
    if status == INVALID_ARGUMENT:
        raise ValueError(message)
    if status == UNSUPPORTED:
        raise NotImplementedError(message)
    raise LogitlessError(message)


def new(struct: type[Structure]):
    """Returns a struct with its struct_size set and defaults in the other fields."""
    return struct(struct_size=ctypes.sizeof(struct), **getattr(struct, "defaults", {}))


class Context:
    """A context of the library, for one thread at a time."""

    def __init__(self, device: int = DEVICE_CPU, device_index: int = 0, stream: int = 0, threads: int = 0):
        options = new(ContextOptions)
        options.device, options.device_index, options.stream, options.threads = device, device_index, stream, threads
        self.handle = c_void_p()
        check(lib.logitless_context_create(ctypes.byref(options), ctypes.byref(self.handle)))

    def __del__(self, lib=lib):  # this module is empty at interpreter exit
        if getattr(self, "handle", None):
            lib.logitless_context_destroy(self.handle)


_contexts = ThreadCache(64)  # planned calls hold theirs, whatever this cache drops


def context(device: int = DEVICE_CPU, device_index: int = 0, stream: int = 0, threads: int = 0) -> Context:
    """Returns this thread's cached context for a device, stream and number of threads (0: all cores)."""
    key = (device, device_index, stream, threads)
    return _contexts.remembered(key, lambda: Context(*key))


def version() -> str:
    """Returns the library's version, such as "0.1.0"."""
    return lib.logitless_version().decode()


def kernels(runnable: bool = True) -> list[str]:
    """Returns the names of the CPU kernels, best first. With ``runnable``, only those that this machine supports."""
    flag = int(runnable)
    return [lib.logitless_kernel_name(flag, i).decode() for i in range(lib.logitless_kernel_count(flag))]


def parse_bytes(given: int | str | None) -> int:
    """Returns the bytes of a memory budget: a positive number, or text such as "512MiB". None is 0, the default."""
    if given is None:
        return 0
    if isinstance(given, bool) or not isinstance(given, (int, str)):
        raise TypeError(f"memory_budget: expected bytes or text such as '512MiB', got {given!r}")
    found = given if isinstance(given, int) else _bytes_of(given)
    if found <= 0:
        raise ValueError(f"memory_budget: expected more than 0 bytes, got {given!r}")
    if found >= 1 << 62:
        raise ValueError(f"memory_budget: expected less than {1 << 62} bytes, got {given!r}")
    return found


_UNITS = {
    "": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "k": 1 << 10, "m": 1 << 20,
    "g": 1 << 30, "t": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}
_BYTES = re.compile(r"(-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?) *([A-Za-z]*)")


def _bytes_of(text: str) -> int:
    """Returns the bytes of a text, as src/core/bytes.cpp does."""
    found = _BYTES.fullmatch(text)
    unit = _UNITS.get(found[2].lower()) if found else None
    size = float(found[1]) * unit if found and unit else -1.0
    if not 0.0 <= size < 2.0**62:
        raise ValueError(
            f"memory_budget: '{text}' is not a number of bytes; expected one such as 512MiB, 2GiB, 1.5GB or 65536"
        )
    return int(size + 0.5) if size < 2.0**52 else int(size)


@contextlib.contextmanager
def _planned(
    tokens: int, dim: int, vocab: int, dtype: str = "bf16", *, memory_budget: int | str | None = None, gradients: bool = True,
    threads: int = 0, device: str = "cpu", compute_capability: int | None = None, card: str | None = None,
    expected_ignored: float = 0.0,
) -> Iterator[c_void_p]:
    """Yields the plan that ``explain`` describes."""
    require("explain")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {device!r}")
    if device == "cuda" and threads != 0:
        raise ValueError(f"threads: expected 0 beside device cuda, got {threads}")
    if device == "cpu" and card is not None:
        raise ValueError(f"card: expected none beside device cpu, got {card!r}")
    if compute_capability is None:
        compute_capability = 0 if card is not None else 90
    elif isinstance(compute_capability, bool) or not isinstance(compute_capability, int) or not 75 <= compute_capability < 1000:
        raise ValueError(f"compute_capability: expected 75 to 999, got {compute_capability!r}")
    dtypes = {name: DTYPES[name] for name in ("f32", "bf16", "f16")}
    if dtype not in dtypes:
        raise ValueError(f"dtype: expected one of {', '.join(dtypes)}, got {dtype!r}")
    features = new(HeadFeatures)
    features.tokens, features.dim, features.vocab, features.dtype = tokens, dim, vocab, dtypes[dtype]
    if gradients:
        features.d_hidden = features.d_weight = 1
        features.d_hidden_dtype = features.d_weight_dtype = dtypes["f32" if dtype == "f16" else dtype]
    request = new(PlanRequest)
    request.memory_budget, request.expected_ignored = parse_bytes(memory_budget), expected_ignored
    if device == "cuda":
        request.compute_capability = compute_capability
        request.card = None if card is None else card.encode()
    plan = c_void_p()
    check(
        lib.logitless_plan_head(
            context(threads=threads).handle, ctypes.byref(features), ctypes.byref(request), ctypes.byref(plan)
        )
    )
    try:
        yield plan
    finally:
        lib.logitless_plan_destroy(plan)


def head_kernel(*sizes: Any, **options: Any) -> str:
    """Returns the name of the kernel in the plan that ``explain`` of the same arguments describes."""
    with _planned(*sizes, **options) as plan:
        info = new(PlanInfo)
        check(lib.logitless_plan_get_info(plan, ctypes.byref(info)))
        return info.kernel.decode()


def explain(
    tokens: int,
    dim: int,
    vocab: int,
    dtype: str = "bf16",
    *,
    memory_budget: int | str | None = None,
    gradients: bool = True,
    threads: int = 0,
    device: str = "cpu",
    compute_capability: int | None = None,
    card: str | None = None,
    expected_ignored: float = 0.0,
) -> str:
    """Returns a description of the plan for a head of ``hidden [tokens, dim]`` and ``weight [vocab, dim]``: strategy,
    kernel, workspace in bytes, and the reasons against the others.

    dtype: "f32", "bf16" or "f16". memory_budget: bytes beyond inputs and outputs, or text such as "256MiB". gradients:
    those of a mean or sum, in dtype (fp32 for f16). device: "cpu" with ``threads`` (0: all cores), or "cuda", a GPU of
    ``compute_capability`` (10 * major + minor, 75 or more; default 90, an H100 or H200). The GPU need not be present:
    times are predicted at the nominal rates of ``card``, such as "A100" or "RTX 4090". Without one they are those of a
    usual card of the capability, an H200 for 90. expected_ignored: as in ``linear_cross_entropy``. Raises ValueError for another device or card, for invalid sizes, and
    for a budget below the least plan, which the message names.
    """
    with _planned(
        tokens, dim, vocab, dtype, memory_budget=memory_budget, gradients=gradients, threads=threads, device=device,
        compute_capability=compute_capability, card=card, expected_ignored=expected_ignored,
    ) as plan:
        return lib.logitless_plan_explain(plan).decode()
