"""Programs that the library runs instead of generated code: the compilation key and the cache."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

from logitless import _library as c
from logitless._autochunk.checks import Checks
from logitless._compiler import PreparedProgram, Program

_KEPT = 256  # programs, least recently used evicted


@dataclass(frozen=True)
class Machine:
    """The machine that a program is compiled for."""

    device: int = c.DEVICE_CPU
    compute_capability: int = 0  # of a GPU, as 10 major + minor; 0 for the CPU
    threads: int = 1  # CPU threads, which affect only the kernels' scratch; 0 for a GPU
    head_engine: bool = False


@dataclass(frozen=True)
class Request:
    """Everything that a compiled program depends on; the key of the cache."""

    text: str
    machine: Machine = Machine()
    budget: int = 0  # bytes of values; 0 chunks wherever nothing is recomputed
    chunks: int = 0
    chunk: bool = True
    externs: bool = False  # the framework runs it, without any code of the library
    checks: Checks | None = None  # checks of its indices, made before it runs

    def on(self, **machine) -> Request:
        """Returns the same program for another machine."""
        return replace(self, machine=replace(self.machine, **machine))

    def of_checks(self) -> Request | None:
        """Returns the program of the checks, if there are any. It takes as much memory as this one may: an index may be
        computed from large values."""
        return None if self.checks is None else Request(self.checks.text, self.machine, self.budget)


@functools.lru_cache(_KEPT)
def program(request: Request) -> Program:
    """Returns the compiled program, cached by request. Raises the compiler's errors."""
    machine = request.machine
    return Program(
        request.text,
        memory_budget=request.budget or None,
        chunks=request.chunks,
        chunk=request.chunk,
        externs=request.externs,
        threads=machine.threads,
        head_engine=machine.head_engine,
        device=machine.device,
        compute_capability=machine.compute_capability,
    )


_VALUE = re.compile(r"%(\w+) = .* : (\w+)\[")
_PARAMETER = re.compile(r"%(\w+): (\w+)\[")
_PRODUCT = re.compile(r"= dot %(\w+), %(\w+)")


def multiplies_fp32(text: str) -> bool:
    """Returns whether a program as written multiplies matrices of fp32."""
    dtypes = dict(_PARAMETER.findall(text.partition("{")[0]))
    for line in text.splitlines():
        product = _PRODUCT.search(line)
        if product is not None and "f32" in (dtypes.get(product[1]), dtypes.get(product[2])):
            return True
        dtypes.update(_VALUE.findall(line))
    return False


# A program with a matrix product and a loop, so with all that a GPU needs.
_PROBE = """graph probe(%a: f32[8, 8], %b: f32[8, 8]) {
  %c = dot %a, %b contract(1; 0) : f32[8, 8]
  %d = exp %c : f32[8, 8]
  return d: %d
}"""


@functools.cache
def missing(machine: Machine, index: int = 0) -> str:
    """Returns what a GPU, by its index, lacks to run programs: a library, a compute capability, a build with CUDA.
    Returns "" if it lacks nothing."""
    try:
        PreparedProgram(program(Request(_PROBE, machine, chunk=False)), c.context(machine.device, index))
    except (NotImplementedError, ValueError, c.LogitlessError) as error:
        return str(error)
    return ""
