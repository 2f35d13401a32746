"""Programs that the library runs as custom calls of an XLA program. Their arena is one of XLA's temporaries."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from logitless import _library as c
from logitless._autochunk.native import Machine, Request, missing, program
from logitless.jax import _ffi
from logitless.jax._backend import platform_of_jax
from logitless.jax._autochunk.dtypes import DTYPES


@functools.cache
def _compute_capability() -> int:
    major, minor = str(jax.devices("gpu")[0].compute_capability).split(".")
    return 10 * int(major) + int(minor)


def machine_of(device: int) -> Machine:
    """Returns the machine that programs are compiled for. On the CPU the number of threads does not affect the result
    (compiler.h)."""
    if device == c.DEVICE_CPU:
        return Machine(head_engine=True)
    return Machine(c.DEVICE_CUDA, _compute_capability(), threads=0, head_engine=True)


def default_machine() -> Machine:
    """Returns the machine of JAX's default backend, for which budgets are checked."""
    platform = platform_of_jax()
    if platform not in ("cpu", "cuda"):
        raise NotImplementedError(f"autochunk: executor='native' runs on cpu and cuda; JAX's backend is {platform}")
    return machine_of(c.DEVICE_CPU if platform == "cpu" else c.DEVICE_CUDA)


def framework_machine() -> Machine:
    """Returns the machine whose rates predict the time of generated code on JAX's default backend."""
    if platform_of_jax() != "cuda" or _compute_capability() < 80:
        return Machine()
    return replace(machine_of(c.DEVICE_CUDA), head_engine=False)


def why_not(axes: frozenset[str]) -> str:
    """Returns the reason why generated code runs instead of the library where the caller does not choose, or "". axes:
    the axes of a shard_map around the call."""
    platform = platform_of_jax()
    if platform != "cuda":
        return f"XLA's loops are chosen on a {platform}"
    if not axes and jax.local_device_count() > 1:
        return "XLA divides generated code among several GPUs, and gathers the inputs of a custom call"
    return missing(machine_of(c.DEVICE_CUDA), jax.local_devices()[0].local_hardware_id or 0)


def buffer_bytes(arena_bytes: int) -> int:
    """Returns the size of the buffer that holds an arena, with padding for a GPU's alignment."""
    return arena_bytes + _ffi.ALIGNMENT


def run(request: Request, axes: frozenset[str], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Runs the program on its parameters and returns its results, in order. axes: the axes of a shard_map over which
    all arrays vary."""

    def on(device: int, *operands):
        threads = _ffi.threads_of(device)
        machine = machine_of(device)
        made = program(
            request.on(device=device, compute_capability=machine.compute_capability, threads=threads)
        )
        results = [_ffi.result_type(r.shape, jnp.dtype(getattr(DTYPES, r.dtype)), axes) for r in made.results]
        arena = _ffi.result_type((buffer_bytes(made.arena_bytes),), jnp.dtype("int8"), axes)
        call = jax.ffi.ffi_call("logitless_program", [*results, arena], vmap_method="sequential")
        *found, _ = call(
            *operands,
            text=request.text,
            memory_budget=np.int64(request.budget),
            chunks=np.int64(request.chunks),
            chunk=np.int64(request.chunk),
            head_engine=np.int64(request.machine.head_engine),
            threads=np.int64(threads),
        )
        return tuple(found)

    def elsewhere(*_):
        raise NotImplementedError(
            "autochunk: executor='native' runs on cpu and cuda; this program is lowered for another platform: use "
            "executor='python', and LOGITLESS_BACKEND=portable for losses and samples"
        )

    return _ffi.on_platform(on, elsewhere, axes, *arrays)
