"""Programs that the library runs on torch tensors: on the current stream, in memory of PyTorch's allocator."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from logitless import _library as c
from logitless._autochunk.checks import unpacked
from logitless._autochunk.native import Machine, Request, missing, program
from logitless._compiler import PreparedProgram
from logitless.torch import _memory
from logitless.torch._autochunk.dtypes import DTYPES
from logitless.torch._engine import current_stream, on_device
from logitless.torch._precision import torch_has_tf32

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_ALIGNMENT = 16  # of tensors on a GPU
_KEPT = 256  # prepared programs, least recently used evicted
_captured: set[Runner] = set()  # runners whose kernels a CUDA graph may launch at any time


def check_device(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and torch.version.hip is not None):
        raise NotImplementedError(
            f"autochunk: executor='native' runs on cpu and cuda (NVIDIA), got {device}; use executor='python'"
        )


def why_not(device: torch.device) -> str:
    """Returns the reason why the library runs no program on a device, or "" if it does."""
    try:
        check_device(device)
    except NotImplementedError as error:
        return str(error)
    if device.type == "cpu":
        return ""
    if torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured, and preparing a program is invalid meanwhile"
    index = torch.cuda.current_device() if device.index is None else device.index
    return on_device(torch.device("cuda", index), missing, machine_of(device), index)


def machine_of(device: torch.device) -> Machine:
    """Returns the machine that programs for a device are compiled for. On the CPU the number of threads does not affect
    the result (compiler.h)."""
    if device.type == "cpu":
        return Machine(head_engine=True)
    major, minor = torch.cuda.get_device_capability(device)
    return Machine(c.DEVICE_CUDA, 10 * major + minor, threads=0, head_engine=True)


def framework_machine(device: torch.device) -> Machine:
    """Returns the machine whose rates predict the time of generated code on a device."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return Machine()
    return replace(machine_of(device), head_engine=False)


def has_tf32(device: torch.device) -> bool:
    """Returns whether PyTorch multiplies fp32 matrices on a device in TF32."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch_has_tf32(torch.cuda.current_device() if device.index is None else device.index)


def input_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Returns the bytes of the copies that a run makes of its inputs."""
    return sum(t.numel() * t.element_size() for t in tensors if not t.is_contiguous())


class Runner:
    """A program prepared for a device, and on the CPU for a number of threads."""

    def __init__(self, request: Request, device: torch.device, threads: int):
        self.device, self.is_cpu = device, device.type == "cpu"
        self.checks = None  # index checks, on a CPU
        made = program(request.on(threads=threads) if self.is_cpu else request)
        self.arena_bytes = made.arena_bytes
        # Size, stride and dtype: torch.empty_strided takes two thirds of the time of torch.empty.
        self.results = [
            (r.shape, torch.empty(r.shape, device="meta").stride(), getattr(DTYPES, r.dtype)) for r in made.results
        ]
        if self.is_cpu:
            self.prepared = PreparedProgram(made, c.context())
            self.checks = request.checks
            if self.checks is not None:
                self.check = runner(request.of_checks(), device)
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "autochunk: a CUDA graph is being captured, and this function has not run with such arguments yet; run "
                "it once before the capture"
            )
        self.prepared = on_device(device, lambda: PreparedProgram(made, c.context(c.DEVICE_CUDA, device.index)))

    def __del__(self, ending=sys.is_finalizing):  # this module is empty at interpreter exit
        # Kernels may still run, so their code is freed after a synchronisation. During a capture, synchronising is
        # invalid.
        if getattr(self, "prepared", None) is None or self.is_cpu or ending():
            return
        if torch.cuda.is_current_stream_capturing():
            _captured.add(self)
        else:
            torch.cuda.synchronize(self.device)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given = [self._readable(i, t) for i, t in enumerate(tensors)]
        if self.checks is not None:
            self.checks.raise_for([t.item() for t in self.check.run([given[place] for place in self.checks.reads])])
        made = [torch.empty_strided(size, stride, dtype=d, device=self.device) for size, stride, d in self.results]
        arena = torch.empty(max(self.arena_bytes, 1), dtype=torch.uint8, device=self.device)
        pointers = [t.data_ptr() for t in given], [t.data_ptr() for t in made], arena.data_ptr(), self.arena_bytes
        if self.is_cpu:
            self.prepared.enqueue(*pointers)
            return made
        if torch.cuda.is_current_stream_capturing():
            _captured.add(self)
        on_device(self.device, self.prepared.enqueue, *pointers, current_stream(self.device))
        return made

    def _readable(self, i: int, t: torch.Tensor) -> torch.Tensor:
        """Returns input i, contiguous on the program's device and aligned there. As in PyTorch, a CPU scalar may
        accompany GPU tensors. Raises for a tensor without memory."""
        simple = t.layout is torch.strided and t.device == self.device and t.is_contiguous() and not t.is_neg()
        if not simple or t.storage_offset() or not 0 < t.nbytes <= t.untyped_storage().nbytes():
            if t.dim() == 0 and t.device.type == "cpu":
                t = t.to(self.device)
            _memory.check(f"input {i} of a program", t, self.device, "the first")
            t = t.resolve_neg().contiguous()
        return t if self.is_cpu or t.data_ptr() % _ALIGNMENT == 0 else t.clone()


@functools.lru_cache(_KEPT)
def _runner(request: Request, device: torch.device, threads: int) -> Runner:
    return Runner(request, device, threads)


def runner(request: Request, device: torch.device) -> Runner:
    """Returns the prepared program for a device, cached by request."""
    return _runner(request, device, torch.get_num_threads() if device.type == "cpu" else 0)


_SCHEMA = "(Tensor[] inputs, str text, int budget, int chunks, bool chunk, bool head_engine, str checks='') -> Tensor[]"


def _request(inputs, text: str, budget: int, chunks: int, chunk: bool, head_engine: bool, checks: str) -> Request:
    made = Request(text.replace("\\n", "\n"), machine_of(inputs[0].device), budget, chunks, chunk, checks=unpacked(checks))
    return made.on(head_engine=head_engine)


# The operator's arguments determine the program, since a graph of torch.compile outlives the process's state and is
# stored.
@torch.library.custom_op("logitless::program", mutates_args=(), schema=_SCHEMA)
def program_op(inputs, text, budget, chunks, chunk, head_engine, checks=""):
    return runner(_request(inputs, text, budget, chunks, chunk, head_engine, checks), inputs[0].device).run(inputs)


@program_op.register_fake
def _(inputs, text, budget, chunks, chunk, head_engine, checks=""):
    made = program(_request(inputs, text, budget, chunks, chunk, head_engine, checks))
    return [inputs[0].new_empty(r.shape, dtype=getattr(DTYPES, r.dtype)) for r in made.results]


def is_traced(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether tensors are a tracer's, such as torch.compile's."""
    return any(type(t) not in PLAIN for t in tensors)


def run(request: Request, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Runs the program on its parameters and returns its results, in order."""
    if is_traced(inputs):
        machine = request.machine
        op = torch.ops.logitless.program
        checks = "" if request.checks is None else request.checks.packed()
        text = request.text.replace("\n", "\\n")  # Inductor writes arguments into comments of one line
        return tuple(op(inputs, text, request.budget, request.chunks, request.chunk, machine.head_engine, checks))
    return tuple(runner(request, inputs[0].device).run(inputs))
