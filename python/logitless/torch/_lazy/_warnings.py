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
INTEGRATIONS = {"trl": "logitless.torch.integrations.trl", "verl": "logitless.torch.integrations.verl"}

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
    found = INTEGRATIONS.get(library)
    return "" if found is None else f"; for what {library} computes of tokens call {found}.patch() once"


def is_at_work(library: str) -> bool:
    """Returns whether the integration of a library has been put there."""
    module = sys.modules.get(INTEGRATIONS[library])
    return module is not None and module.patched()


def _name(func) -> str:
    schema = getattr(func, "_schema", None)
    name = getattr(func, "__name__", str(func)) if schema is None else schema.name.partition("::")[2]
    return name.strip("_") or name


def warn(what: str, by: str = "") -> None:
    """Warns of ``what`` at the caller's line, the first outside of torch, logitless and transformers."""
    frame: Optional[FrameType] = sys._getframe(1)
    level = 2
    while frame is not None and _library(frame) in _LIBRARIES | _OWN:
        frame, level = frame.f_back, level + 1
    warnings.warn(f"logitless: {what}{by}", LazyHeadWarning, stacklevel=level if frame is not None else 2)


def _reader() -> str:
    """The operation that is running, the first line outside of torch and logitless, and the caller's."""
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
    """Warns of logits, or of a tensor of their size, that have been computed and are large. ``why``: the reason where no
    operation has read them."""
    size = made.numel() * made.element_size()
    if size >= WARN_BYTES:
        warn(f"{what} {list(made.shape)} ({size >> 20} MiB) are computed after all, {why or 'read by ' + _reader()}")
