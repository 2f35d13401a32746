"""The choice between the library's kernels and JAX's own operations."""

from __future__ import annotations

import functools
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import _library as c


class Backend(NamedTuple):
    """An implementation of the head, and the reason for it."""

    name: str  # "native": custom calls of the library; "portable": JAX's own operations
    reason: str


_NAMES = ("native", "portable")


def backend(dtype: Any = None) -> Backend:
    """Returns the implementation that serves calls traced now, and why.

    The library's kernels serve JAX's backends cpu and cuda where the library loads, on GPUs of compute capability 7.5
    or more (bfloat16: 8.0), and JAX's own operations all others. A program that is lowered for another platform has
    the latter there. LOGITLESS_BACKEND=portable takes them everywhere. LOGITLESS_BACKEND=native raises the library's
    error where it cannot serve. Programs that are compiled already keep theirs.

    dtype: of the hidden states; None: float32.
    """
    wanted = os.environ.get("LOGITLESS_BACKEND", "")
    if wanted not in ("", *_NAMES):
        raise ValueError(f"LOGITLESS_BACKEND: expected {' or '.join(_NAMES)}, got {wanted!r}")
    if wanted:
        return Backend(wanted, f"LOGITLESS_BACKEND={wanted}")
    platform = platform_of_jax()
    refusal = refusal_of(platform) or _refusal_of_dtype(platform, jnp.dtype(dtype or jnp.float32))
    return Backend("portable", refusal) if refusal else Backend("native", f"the library has kernels for {platform}")


@functools.cache
def gpu_capability() -> float:
    """Returns the least compute capability of the GPUs here; infinity for a program for GPUs that are elsewhere."""
    try:
        return min(float(gpu.compute_capability) for gpu in jax.local_devices(backend="gpu"))
    except RuntimeError:
        return math.inf


def _refusal_of_dtype(platform: str, dtype: Any) -> str:
    """Returns the reason why the GPUs here have no kernels of a dtype, "" if they have."""
    least = 8.0 if dtype == jnp.bfloat16 else 7.5
    if platform != "cuda" or gpu_capability() >= least:
        return ""
    return f"the library has kernels of {dtype.name} for compute capability {least} or more, a GPU has {gpu_capability()}"


def platform_of_jax() -> str:
    """Returns the platform of JAX's default backend: cpu, cuda, rocm, tpu, ..."""
    name = jax.default_backend()
    if name != "gpu":
        return name
    return "rocm" if any("rocm" in d.client.platform_version.lower() for d in jax.local_devices()[:1]) else "cuda"


@functools.cache
def refusal_of(platform: str) -> str:
    """Returns the reason why the library cannot serve a platform, "" if it can."""
    from ._ffi import handlers

    if platform not in ("cpu", "cuda"):
        return f"the library has kernels for cpu and cuda, JAX's backend is {platform}"
    try:
        handlers()
        c.context(c.DEVICE_CUDA if platform == "cuda" else c.DEVICE_CPU)
    except (ImportError, NotImplementedError, c.LogitlessError) as error:
        return str(error)
    return ""
