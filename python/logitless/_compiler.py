"""Tensor programs over ctypes: the text form of docs/reference/ir.md, compiled by liblogitless. A program runs on numpy arrays,
or is enqueued on addresses of device memory."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from ctypes import c_char_p, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np

from logitless import _c_api
from logitless._library import Context, check, lib, new, parse_bytes

ALIGNMENT = 64  # alignment of an arena on the CPU

DTYPES = {value: name for name, value in _c_api.DTYPES.items()}
# numpy has no bfloat16: results are uint16 bits, parameters uint16 bits or an array of ml_dtypes.bfloat16.
_NUMPY = {
    "f32": np.float32,
    "bf16": np.uint16,
    "f16": np.float16,
    "i32": np.int32,
    "i64": np.int64,
    "i8": np.int8,
    "f64": np.float64,
}


@dataclass(frozen=True)
class ProgramTensor:
    """A parameter or a result of a program."""

    name: str
    dtype: str  # the name of docs/reference/ir.md: "f32", "bf16", ...
    shape: tuple[int, ...]


class Program:
    """A compiled tensor program. It is immutable, and threads may share it.

    text: the program in the form of docs/reference/ir.md. sizes: a value for each of its symbols. memory_budget: bytes, or text
    such as "512MiB", that values may take in the arena; None chunks wherever nothing is recomputed. chunks: the number
    of chunks of every loop; 0 lets the compiler choose. threads: CPU threads that run it; 0: all cores. chunk=False: no
    loops. head_engine=False: heads become loops like other regions. strict: a budget that is not met, or a large value
    that cannot be chunked, is an error. externs: the caller runs the text, so that `extern` operations are accepted; a
    program with one can be described but not run. device: DEVICE_CUDA for a GPU of this compute capability (10 * major
    + minor), which need not be present.

    Raises ValueError for an invalid text (with line and column), a size without a value, and violations of strict.
    Raises NotImplementedError for an operation and dtype without a kernel.
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
        externs: bool = False,
        device: int = _c_api.DEVICE_CPU,
        compute_capability: int = 0,
    ):
        sizes = dict(sizes or {})
        options = new(_c_api.ProgramOptions)
        options.size_names = (c_char_p * len(sizes))(*(name.encode() for name in sizes))
        options.size_values = (c_int64 * len(sizes))(*sizes.values())
        options.size_count = len(sizes)
        options.memory_budget = parse_bytes(memory_budget)
        options.chunks, options.threads = chunks, threads
        options.chunk, options.head_engine, options.strict = bool(chunk), bool(head_engine), bool(strict)
        options.device, options.compute_capability = device, compute_capability
        options.externs = bool(externs)
        self._handle = c_void_p()
        check(lib.logitless_program_compile(text.encode(), ctypes.byref(options), ctypes.byref(self._handle)))
        self.parameters = self._tensors("parameter")
        self.results = self._tensors("result")

    def __del__(self, lib=lib):  # this module is empty at interpreter exit
        if getattr(self, "_handle", None):
            lib.logitless_program_destroy(self._handle)

    def _tensors(self, what: str) -> tuple[ProgramTensor, ...]:
        count = getattr(lib, f"logitless_program_{what}_count")(self._handle)
        found = []
        for index in range(count):
            t = new(_c_api.ProgramTensor)
            check(getattr(lib, f"logitless_program_get_{what}")(self._handle, index, ctypes.byref(t)))
            found.append(ProgramTensor(t.name.decode(), DTYPES[t.dtype], tuple(t.shape[d] for d in range(t.rank))))
        return tuple(found)

    @property
    def text(self) -> str:
        """The program's text after the last pass."""
        return lib.logitless_program_text(self._handle).decode()

    @property
    def report(self) -> dict:
        """A dict of the compiler's decisions, and of memory over time before and after."""
        return json.loads(lib.logitless_program_report_json(self._handle))

    @property
    def arena_bytes(self) -> int:
        """The exact bytes of all values except parameters and results."""
        return lib.logitless_program_arena_bytes(self._handle)

    @property
    def unchunked_arena_bytes(self) -> int:
        """The arena's bytes without loops."""
        return lib.logitless_program_unchunked_arena_bytes(self._handle)

    @property
    def threads(self) -> int:
        return lib.logitless_program_threads(self._handle)

    def explain(self) -> str:
        """Returns a report: values that were chunked, along which dimension and into how many chunks; values that were
        not and why; memory before and after."""
        return lib.logitless_program_explain(self._handle).decode()

    def run(self, *parameters: np.ndarray) -> list[np.ndarray]:
        """Runs the program on the CPU. Parameters are in the order of ``parameters``; they are made contiguous but
        never cast. Returns results in the order of ``results``. bf16 parameters are bits (uint16) or
        ml_dtypes.bfloat16; results are bits."""
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


class PreparedProgram:
    """A program that is ready to be enqueued in a context. On a GPU its kernels are compiled and loaded. It is
    immutable, and threads may share it. On a GPU it must outlive all work that it enqueues.

    Raises ValueError for a context of another device type or compute capability than the program's. Raises
    NotImplementedError for a missing library (docs/use/gpu.md) or a build without CUDA, and LogitlessError for device
    errors.
    """

    def __init__(self, program: Program, context: Context):
        self._handle = c_void_p()
        check(lib.logitless_program_prepare(program._handle, context.handle, ctypes.byref(self._handle)))

    def __del__(self, lib=lib):
        if getattr(self, "_handle", None):
            lib.logitless_prepared_program_destroy(self._handle)

    def enqueue(
        self, parameters: Sequence[int], results: Sequence[int], arena: int, arena_bytes: int, stream: int = 0
    ) -> None:
        """Enqueues the program on addresses of contiguous memory, as logitless_program_enqueue (c_api.h) specifies."""
        given = (c_void_p * len(parameters))(*parameters)
        made = (c_void_p * len(results))(*results)
        status = lib.logitless_program_enqueue(
            self._handle, given, len(parameters), made, len(results), arena, arena_bytes, stream or None
        )
        if status:
            check(status)


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
