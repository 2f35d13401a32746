"""The options of autochunk, and what it raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from logitless._library import parse_bytes

GRADIENTS = ("auto", "forward", "backward")
EXECUTORS = ("python", "native")
AUTO = "auto"  # executor: the one that is faster on the device, of those that take the function within the budget


class Unsupported(NotImplementedError):
    """An operation or a dtype that tensor programs cannot express; the message names it."""


@dataclass(frozen=True)
class Limits:
    """What the caller asks of a program."""

    budget: int = 0  # bytes beyond inputs and results; 0: none
    chunks: int = 0
    strict: bool = False
    native: bool = False  # the library runs it, and no generated code
    auto: bool = False  # which of them is chosen for each plan, whose own limits say so
    # Without a budget: the least memory of all plans that compute nothing twice and are predicted to take at most this part
    # more time than the fastest; 0: what the compiler chooses.
    slack: float = 0.0


def checked_limits(
    memory_budget, chunks, gradients, strict, unsupported, executor, executors: Sequence[str] = EXECUTORS
) -> Limits:
    """The options as the caller gave them. executors: that the framework has. Raises ValueError for an option that is none."""
    budget = parse_bytes(memory_budget)
    chunks = 0 if chunks is None else chunks
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 0:
        raise ValueError(f"chunks: expected a whole number, 0 or more, got {chunks!r}")
    if budget > 0 and chunks > 0:
        raise ValueError(f"chunks: expected 0 beside memory_budget, got {chunks}")
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients: expected one of {', '.join(GRADIENTS)}, got {gradients!r}")
    if unsupported not in ("error", "run"):
        raise ValueError(f"unsupported: expected 'error' or 'run', got {unsupported!r}")
    if executor not in executors:
        raise ValueError(f"executor: expected one of {', '.join(executors)}, got {executor!r}")
    return Limits(budget, chunks, bool(strict), executor == "native", executor == AUTO)
