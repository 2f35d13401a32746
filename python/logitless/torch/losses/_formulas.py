"""Formulas of whole logits that autochunk chunks, by name, budget and executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..._library import require
from ..._losses.options import CHUNKED_CALLS, SLACK

FORMULAS: dict[str, Callable[..., Any]] = {}
_MADE: dict[str, Any] = {}


# torch.compile treats a string as a constant, and finds the function through a global.
@torch.compiler.assume_constant_result
def _key(what: str, memory_budget: int | str | None, executor: str) -> str:
    """Returns the key of the formula in _MADE. A budget that cannot be met raises at the call."""
    from .._autochunk import autochunk  # it imports PyTorch's compiler

    require(CHUNKED_CALLS[what])
    key = f"{what} {memory_budget!r} {executor}"
    if key not in _MADE:
        strict = memory_budget is not None
        made = autochunk(FORMULAS[what], memory_budget=memory_budget, executor=executor, strict=strict)
        made.limits = replace(made.limits, slack=SLACK)
        _MADE.setdefault(key, made)
    return key


def chunked(what: str, memory_budget: int | str | None, executor: str):
    return _MADE[_key(what, memory_budget, executor)]
