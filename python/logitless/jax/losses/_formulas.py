"""Formulas of whole logits that autochunk chunks, by name, budget and executor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..._library import require
from ..._losses.options import CHUNKED_CALLS, SLACK
from .._autochunk import autochunk
from .._backend import platform_of_jax, refusal_of

FORMULAS: dict[str, Callable[..., Any]] = {}


@functools.lru_cache(maxsize=64)
def chunked(what: str, memory_budget: int | str | None, executor: str):
    """Returns the chunked formula; a budget that cannot be met is an error. Generated code runs where the library has no
    kernels."""
    require(CHUNKED_CALLS[what])
    if refusal_of(platform_of_jax()):
        executor = "python"
    made = autochunk(
        FORMULAS[what], memory_budget=memory_budget, executor=executor, strict=memory_budget is not None
    )
    made.limits = replace(made.limits, slack=SLACK)
    return made
