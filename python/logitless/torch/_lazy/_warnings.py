"""Warnings about logits that are computed after all. They name the operation that reads them and the caller's line."""

from __future__ import annotations

import sys
import warnings
from types import CodeType, FrameType
from typing import Callable, Optional

from torch import Tensor

WARN_BYTES = 16 << 20  # logits of fewer bytes, such as those of a generated token, are expected
_OWN = frozenset(("torch", "logitless"))
_LIBRARIES = frozenset(("transformers",))  # libraries that are named besides the caller's line
# Libraries with their own scoring of tokens, and the integrations that replace it.
INTEGRATIONS = {name: f"logitless.torch.integrations.{name}" for name in ("trl", "unsloth", "verl")}

_operations: set[CodeType] = set()


class LazyHeadWarning(UserWarning):
    """A warning that logits were computed although a lazy head should avoid it, or that a lazy head was not called."""


def names_operation(function: Callable) -> Callable:
    """Marks a function whose argument ``func`` is the operation that reads logits."""
    _operations.add(function.__code__)
    return function


def _library(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


def integration(library: str) -> str:
    """Returns advice for a library with an integration, or ""."""
    found = INTEGRATIONS.get(library)
    return "" if found is None else f"; for what {library} computes of tokens call {found}.patch() once"


def is_at_work(library: str) -> bool:
    """Returns whether the integration of a library is installed."""
    module = sys.modules.get(INTEGRATIONS[library])
    return module is not None and module.patched()


def _name(func) -> str:
    schema = getattr(func, "_schema", None)
    name = getattr(func, "__name__", str(func)) if schema is None else schema.name.partition("::")[2]
    return name.strip("_") or name


def warn(what: str, by: str = "") -> None:
    """Warns with ``what`` at the caller's line, the first one outside of torch, logitless and transformers."""
    frame: Optional[FrameType] = sys._getframe(1)
    level = 2
    while frame is not None and _library(frame) in _LIBRARIES | _OWN:
        frame, level = frame.f_back, level + 1
    warnings.warn(f"logitless: {what}{by}", LazyHeadWarning, stacklevel=level if frame is not None else 2)


def _reader() -> str:
    """Describes the running operation, the first line outside of torch and logitless, and the caller's line."""
    frame: Optional[FrameType] = sys._getframe(1)
    reads = "something"
    while frame is not None and _library(frame) in _OWN:
        if frame.f_code in _operations:
            reads = _name(frame.f_locals["func"])
        frame = frame.f_back
    if frame is None:
        return reads
    found, advice = f"{reads} at {frame.f_code.co_filename}:{frame.f_lineno}", integration(_library(frame))
    outer: Optional[FrameType] = frame
    while outer is not None and _library(outer) in _LIBRARIES | _OWN:
        outer = outer.f_back
    if outer is not None and outer is not frame:
        found += f", called from {outer.f_code.co_filename}:{outer.f_lineno}"
    return found + advice


def warn_made(made: Tensor, what: str = "logits", why: str = "") -> None:
    """Warns if computed logits, or a tensor of their size, are large. ``why``: the reason, if no operation has read
    them."""
    size = made.numel() * made.element_size()
    if size >= WARN_BYTES:
        warn(f"{what} {list(made.shape)} ({size >> 20} MiB) are computed after all, {why or 'read by ' + _reader()}")
