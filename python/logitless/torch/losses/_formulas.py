"""Formulas of whole logits, by name, budget and executor: autochunk chunks them where the library's kernels serve, and
``_chunks.py`` elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._library import parse_bytes
from ..._losses.options import SLACK
from .. import _chunks
from .._backend import why_portable
from .._chunks import FORMULAS

_MADE: dict[str, Any] = {}


# torch.compile treats a string as a constant, and finds the function through a global.
@torch.compiler.assume_constant_result
def _key(what: str, memory_budget: int | str | None, executor: str) -> str:
    """Returns the key of the formula in _MADE. A budget that cannot be met raises at the call."""
    from .._autochunk import autochunk  # it imports PyTorch's compiler

    key = f"{what} {memory_budget!r} {executor}"
    if key not in _MADE:
        strict = memory_budget is not None
        made = autochunk(FORMULAS[what], memory_budget=memory_budget, executor=executor, strict=strict)
        made.limits = replace(made.limits, slack=SLACK)
        _MADE.setdefault(key, made)
    return key


@torch.compiler.assume_constant_result
def _bytes(memory_budget: int | str | None) -> int:
    return parse_bytes(memory_budget)


class chunked(NamedTuple):
    """A formula that is computed chunk by chunk."""

    what: str
    memory_budget: int | str | None
    executor: str

    def _why_portable(self, given: dict[str, Tensor]) -> str:
        first = given["hidden" if "hidden" in given else "teacher_hidden"]
        dtype = torch.float32 if first.dtype == torch.float64 else first.dtype  # autochunk has float64
        return why_portable(first.device.type, first.device.index, dtype)

    def __call__(self, given: dict[str, Tensor], *form: Any):
        if self._why_portable(given):
            return _chunks.run(self.what, _bytes(self.memory_budget), given, *form)
        return _MADE[_key(*self)](given, *form)

    def explain(self, given: dict[str, Tensor], *form: Any) -> str:
        if reason := self._why_portable(given):
            return _chunks.explain(self.what, _bytes(self.memory_budget), reason, given, *form)
        return _MADE[_key(*self)].explain(given, *form)
