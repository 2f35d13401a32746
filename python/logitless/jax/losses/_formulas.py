"""Formulas of whole logits, by name, budget and executor: autochunk chunks them where the library's kernels serve, and
``_chunks.py`` elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax

from ..._cache import Cache
from ..._library import parse_bytes
from ..._losses.options import SLACK
from .. import _chunks
from .._autochunk import autochunk
from .._backend import backend
from .._chunks import FORMULAS

_made = Cache(64)
_explained = Cache(64)  # of portable calls


def _make(what: str, memory_budget: int | str | None, executor: str) -> Any:
    """Returns the formula chunked by autochunk; a budget that cannot be met is an error."""
    made = autochunk(
        FORMULAS[what], memory_budget=memory_budget, executor=executor, strict=memory_budget is not None
    )
    made.limits = replace(made.limits, slack=SLACK, ready=True)
    return made


class chunked(NamedTuple):
    """A formula that is computed chunk by chunk."""

    what: str
    memory_budget: int | str | None
    executor: str

    def __call__(self, given: dict[str, jax.Array], *form: Any):
        chosen = backend(given["hidden" if "hidden" in given else "teacher_hidden"].dtype)
        if chosen.name != "portable":
            _explained.forget(self)
            return _made.remembered(self, lambda: _make(*self))(given, *form)
        budget = parse_bytes(self.memory_budget)
        _explained.remember(self, _chunks.explain(self.what, budget, chosen.reason, given, *form))
        return _chunks.run(self.what, budget, given, *form)

    def explain(self) -> str:
        """Describes the plan of the last call."""
        return _explained.find(self) or _made.remembered(self, lambda: _make(*self)).explain()
