"""The options of autochunk and its error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from logitless._library import parse_bytes

GRADIENTS = ("auto", "forward", "backward")
EXECUTORS = ("python", "native")
AUTO = "auto"  # executor: the faster of both on the device, among those that support the function within the budget


class Unsupported(NotImplementedError):
    """An operation or a dtype that tensor programs cannot express; the message names it."""


class Keywords(TypedDict, total=False):
    """The options of ``autochunk`` by name."""

    memory_budget: int | str | None
    chunks: int | None
    gradients: str
    strict: bool
    unsupported: str
    executor: str


@dataclass(frozen=True)
class Limits:
    """The caller's requirements of a program."""

    budget: int = 0  # bytes beyond inputs and results; 0: no limit
    chunks: int = 0
    strict: bool = False
    native: bool = False  # the library runs it, without generated code
    auto: bool = False  # the executor is chosen for each plan, whose own limits name it
    # Without a budget, the plan of least memory is chosen among those that recompute nothing. Its predicted time may
    # exceed the fastest plan's by this fraction. 0 leaves the choice to the compiler.
    slack: float = 0.0
    ready: bool = False  # of a ready loss, whose errors name its arguments
    keep: bool = True  # without a budget, products may be kept from forward to backward


def checked_limits(
    memory_budget, chunks, gradients, strict, unsupported, executor, executors: Sequence[str] = EXECUTORS
) -> Limits:
    """Returns the checked options. executors: those of the framework. Raises ValueError for an invalid option."""
    budget = parse_bytes(memory_budget)
    chunks = 0 if chunks is None else chunks
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 0:
        raise ValueError(f"chunks: expected a whole number, 0 or more, got {chunks!r}")
    if budget > 0 and chunks > 0:
        raise ValueError(f"chunks: expected 0 beside memory_budget, got {chunks}")
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients: expected one of {', '.join(GRADIENTS)}, got {gradients!r}")
    if not isinstance(strict, bool):
        raise ValueError(f"strict: expected True or False, got {strict!r}")
    if unsupported not in ("error", "run"):
        raise ValueError(f"unsupported: expected 'error' or 'run', got {unsupported!r}")
    if executor not in executors:
        raise ValueError(f"executor: expected one of {', '.join(executors)}, got {executor!r}")
    return Limits(budget, chunks, strict, executor == "native", executor == AUTO)
