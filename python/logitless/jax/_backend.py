"""The choice between the library's kernels and JAX's own operations."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import jax

from .. import _library as c


class Backend(NamedTuple):
    """An implementation of the head, and the reason for it."""

    name: str  # "native": custom calls of the library; "portable": JAX's own operations
    reason: str


_NAMES = ("native", "portable")


def backend() -> Backend:
    """Returns the implementation that serves calls traced now, and why.

    The library's kernels serve JAX's backends cpu and cuda where the library loads, and JAX's own operations all
    others. LOGITLESS_BACKEND=portable takes the latter everywhere, as for a program that is exported to another
    platform. LOGITLESS_BACKEND=native raises the library's error where it cannot serve. Programs that are compiled
    already keep theirs.
    """
    wanted = os.environ.get("LOGITLESS_BACKEND", "")
    if wanted not in ("", *_NAMES):
        raise ValueError(f"LOGITLESS_BACKEND: expected {' or '.join(_NAMES)}, got {wanted!r}")
    if wanted:
        return Backend(wanted, f"LOGITLESS_BACKEND={wanted}")
    platform = platform_of_jax()
    refusal = refusal_of(platform)
    return Backend("portable", refusal) if refusal else Backend("native", f"the library has kernels for {platform}")


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
