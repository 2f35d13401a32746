"""Tensor programs over ctypes: the text of docs/ir.md compiled by liblogitless, described, and run on numpy arrays."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass

import numpy as np

from logitless._library import BF16, F16, F32, F64, I8, I32, I64, check, lib, new, parse_bytes

ALIGNMENT = 64  # of an arena

DTYPES = {F32: "f32", BF16: "bf16", F16: "f16", I32: "i32", I64: "i64", I8: "i8", F64: "f64"}
# numpy has no bfloat16: results are its bits, parameters bits or an array of ml_dtypes.bfloat16.
_NUMPY = {
    "f32": np.float32,
    "bf16": np.uint16,
    "f16": np.float16,
    "i32": np.int32,
    "i64": np.int64,
    "i8": np.int8,
    "f64": np.float64,
}


class _Options(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("size_names", POINTER(c_char_p)),
        ("size_values", POINTER(c_int64)),
        ("size_count", c_size_t),
        ("memory_budget", c_uint64),
        ("chunks", c_int64),
        ("threads", c_int32),
        ("chunk", c_int32),
        ("head_engine", c_int32),
        ("strict", c_int32),
    ]


class _Tensor(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("shape", POINTER(c_int64)),
        ("bytes", c_uint64),
        ("dtype", c_int32),
        ("rank", c_int32),
    ]


def _declare() -> None:
    for name, struct in (("logitless_program_options", _Options), ("logitless_program_tensor", _Tensor)):
        size = lib.logitless_struct_size(name.encode())
        if size != ctypes.sizeof(struct):
            raise ImportError(f"logitless: {name} has {size} bytes, this package has {ctypes.sizeof(struct)}")
    lib.logitless_program_destroy.restype = None
    lib.logitless_program_destroy.argtypes = [c_void_p]
    for name in ("text", "explain", "report_json"):
        function = getattr(lib, f"logitless_program_{name}")
        function.restype, function.argtypes = c_char_p, [c_void_p]
    for name in ("parameter_count", "result_count", "arena_bytes", "unchunked_arena_bytes"):
        function = getattr(lib, f"logitless_program_{name}")
        function.restype, function.argtypes = c_size_t, [c_void_p]
    lib.logitless_program_threads.restype = c_int32
    lib.logitless_program_threads.argtypes = [c_void_p]
    for name in ("get_parameter", "get_result"):
        getattr(lib, f"logitless_program_{name}").argtypes = [c_void_p, c_size_t, POINTER(_Tensor)]
    lib.logitless_program_compile.argtypes = [c_char_p, POINTER(_Options), POINTER(c_void_p)]
    pointers = POINTER(c_void_p)
    lib.logitless_program_run.argtypes = [c_void_p, pointers, c_size_t, pointers, c_size_t, c_void_p, c_size_t]


_declare()


@dataclass(frozen=True)
class ProgramTensor:
    """A parameter or a result of a program."""

    name: str
    dtype: str  # of docs/ir.md: "f32", "bf16", ...
    shape: tuple[int, ...]


class Program:
    """A compiled tensor program. It never changes, and may be shared by threads.

    text: the program in the form of docs/ir.md. sizes: a value for each of its symbols. memory_budget: bytes, or text
    such as "512MiB", that values may take in the arena; None chunks wherever that computes nothing twice. chunks: of
    every loop, 0 for as many as pay. threads: that run it, 0 for all cores. chunk=False: no loops. head_engine=False:
    heads are loops like the rest. strict: a budget not met, or a big value that could not be cut, is an error.

    ValueError: the text (with line and column), a size without a value, what strict forbids. NotImplementedError: an
    operation and dtype without a kernel.
    """

    def __init__(
        self,
        text: str,
        *,
        sizes: Mapping[str, int] | None = None,
        memory_budget: int | str | None = None,
        chunks: int = 0,
        threads: int = 0,
        chunk: bool = True,
        head_engine: bool = True,
        strict: bool = False,
    ):
        sizes = dict(sizes or {})
        options = new(_Options)
        options.size_names = (c_char_p * len(sizes))(*(name.encode() for name in sizes))
        options.size_values = (c_int64 * len(sizes))(*sizes.values())
        options.size_count = len(sizes)
        options.memory_budget = parse_bytes(memory_budget)
        options.chunks, options.threads = chunks, threads
        options.chunk, options.head_engine, options.strict = bool(chunk), bool(head_engine), bool(strict)
        self._handle = c_void_p()
        check(lib.logitless_program_compile(text.encode(), ctypes.byref(options), ctypes.byref(self._handle)))
        self.parameters = self._tensors("parameter")
        self.results = self._tensors("result")

    def __del__(self):
        if getattr(self, "_handle", None):
            lib.logitless_program_destroy(self._handle)

    def _tensors(self, what: str) -> tuple[ProgramTensor, ...]:
        count = getattr(lib, f"logitless_program_{what}_count")(self._handle)
        found = []
        for index in range(count):
            t = new(_Tensor)
            check(getattr(lib, f"logitless_program_get_{what}")(self._handle, index, ctypes.byref(t)))
            found.append(ProgramTensor(t.name.decode(), DTYPES[t.dtype], tuple(t.shape[d] for d in range(t.rank))))
        return tuple(found)

    @property
    def text(self) -> str:
        """The program after the last pass."""
        return lib.logitless_program_text(self._handle).decode()

    @property
    def report(self) -> dict:
        """What was done, and the memory over time before and after."""
        return json.loads(lib.logitless_program_report_json(self._handle))

    @property
    def arena_bytes(self) -> int:
        """Bytes of everything but parameters and results: exact."""
        return lib.logitless_program_arena_bytes(self._handle)

    @property
    def unchunked_arena_bytes(self) -> int:
        """The same without loops."""
        return lib.logitless_program_unchunked_arena_bytes(self._handle)

    @property
    def threads(self) -> int:
        return lib.logitless_program_threads(self._handle)

    def explain(self) -> str:
        """What was chunked, along what, into how many chunks, what was not and why, memory before and after."""
        return lib.logitless_program_explain(self._handle).decode()

    def run(self, *parameters: np.ndarray) -> list[np.ndarray]:
        """Results in the order of ``results``, from parameters in the order of ``parameters``, which are made
        contiguous but never cast. bf16 is given as bits (uint16) or as ml_dtypes.bfloat16, and returned as bits."""
        if len(parameters) != len(self.parameters):
            names = ", ".join(p.name for p in self.parameters)
            raise ValueError(f"run: expected {len(self.parameters)} parameters ({names}), got {len(parameters)}")
        given = [_checked(p, array) for p, array in zip(self.parameters, parameters)]
        results = [np.empty(r.shape, _NUMPY[r.dtype]) for r in self.results]
        block = np.empty(self.arena_bytes + ALIGNMENT, np.uint8)
        arena = (block.ctypes.data + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        check(
            lib.logitless_program_run(
                self._handle, _pointers(given), len(given), _pointers(results), len(results), arena, self.arena_bytes
            )
        )
        return results


def _checked(parameter: ProgramTensor, array: np.ndarray) -> np.ndarray:
    array = np.asarray(array)
    wanted = np.dtype(_NUMPY[parameter.dtype])
    same = array.dtype == wanted or (
        (parameter.dtype == "bf16" and array.dtype.name == "bfloat16")
        or (parameter.dtype == "i8" and array.dtype == np.bool_)
    )
    if not same or array.shape != parameter.shape:
        raise ValueError(
            f"parameter {parameter.name}: expected {wanted.name} {list(parameter.shape)} ({parameter.dtype}), got "
            f"{array.dtype.name} {list(array.shape)}"
        )
    return np.require(array, requirements="CA")


def _pointers(arrays: Sequence[np.ndarray]):
    return (c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
