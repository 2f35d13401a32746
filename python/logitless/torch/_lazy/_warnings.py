"""Warnings of logits that are computed after all: the operation that reads them, and the caller's line that asks for it."""

from __future__ import annotations

import sys
import warnings
from types import CodeType, FrameType
from typing import Callable, Optional

from torch import Tensor

WARN_BYTES = 16 << 20  # logits of fewer bytes, such as a generated token's, are no surprise
_OWN = frozenset(("torch", "logitless"))
_LIBRARIES = frozenset(("transformers",))  # named beside the caller's line
# By a library that computes tokens' scores in its own way: what puts logitless there.
_INTEGRATIONS = {
    "trl": "logitless.torch.integrations.trl.patch()",
    "verl": "logitless.torch.integrations.verl.patch()",
}

_operations: set[CodeType] = set()


class LazyHeadWarning(UserWarning):
    """Logits that were to be avoided have been made, or a head that was to avoid them was not called."""


def names_operation(function: Callable) -> Callable:
    """Marks a function whose argument ``func`` is what reads logits."""
    _operations.add(function.__code__)
    return function


def _library(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


def integration(library: str) -> str:
    """Advice for where a library is at work, or nothing."""
    found = _INTEGRATIONS.get(library)
    return "" if found is None else f"; call {found} once, which puts logitless into {library}"


def _name(func) -> str:
    schema = getattr(func, "_schema", None)
    name = getattr(func, "__name__", str(func)) if schema is None else schema.name.partition("::")[2]
    return name.strip("_") or name


def warn(what: str, by: Optional[str] = None) -> None:
    """Warns of ``what`` at the caller's line, the first outside of torch, logitless and transformers. ``by``: the reason,
    or the operation that reads it, on the way to that line."""
    frame: Optional[FrameType] = sys._getframe(1)
    level, reads = 2, None
    while frame is not None and _library(frame) in _OWN:
        if frame.f_code in _operations:
            reads = frame.f_locals["func"]
        frame, level = frame.f_back, level + 1
    first = frame
    while frame is not None and _library(frame) in _LIBRARIES | _OWN:
        frame, level = frame.f_back, level + 1
    if by is None:
        by = "read" if reads is None else f"read by {_name(reads)}"
    if first is not None:
        by += f" at {first.f_code.co_filename}:{first.f_lineno}"
    if frame is not None and frame is not first:
        by += f", called from {frame.f_code.co_filename}:{frame.f_lineno}"
    if first is not None:
        by += integration(_library(first))
    warnings.warn(f"logitless: {what}, {by}", LazyHeadWarning, stacklevel=level if frame is not None else 2)


def warn_made(made: Tensor, what: str = "logits", by: Optional[str] = None) -> None:
    """Warns of logits, or of a tensor of their size, that have been computed and are large."""
    size = made.numel() * made.element_size()
    if size >= WARN_BYTES:
        warn(f"{what} {list(made.shape)} ({size >> 20} MiB) are computed after all", by)
