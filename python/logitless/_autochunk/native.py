"""Programs that the library runs itself, in place of generated code: what a compilation depends on, and those made."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from logitless import _library as c
from logitless._autochunk.checks import Checks
from logitless._compiler import Program

_KEPT = 256  # programs, the ones used last


@dataclass(frozen=True)
class Machine:
    """What a program is for."""

    device: int = c.DEVICE_CPU
    compute_capability: int = 0  # of a GPU
    threads: int = 1  # of the CPU, which decide nothing but the scratch of kernels; 0 of a GPU
    head_engine: bool = False


@dataclass(frozen=True)
class Request:
    """All that a compiled program depends on."""

    text: str
    machine: Machine = Machine()
    budget: int = 0  # bytes of values; 0: chunk wherever that computes nothing twice
    chunks: int = 0
    chunk: bool = True
    externs: bool = False  # the framework runs it, and the library nothing of it
    checks: Checks | None = None  # of its indices, before it runs

    def on(self, **machine) -> Request:
        """The same program for another machine."""
        return replace(self, machine=replace(self.machine, **machine))


@functools.lru_cache(_KEPT)
def program(request: Request) -> Program:
    """The compiled program, one for equal requests. Raises what compiling raises."""
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
