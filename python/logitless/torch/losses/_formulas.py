"""Formulas of whole logits, by name, budget and executor: autochunk chunks them where the library's kernels serve, and
``_chunks.py`` elsewhere."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._cache import Cache
from ..._library import parse_bytes
from ..._losses.options import SLACK
from .. import _chunks
from .._backend import why_portable
from .._chunks import FORMULAS

_MADE = Cache(64)


# torch.compile treats a string as a constant, and finds the function through a global.
@torch.compiler.assume_constant_result
def _key(what: str, memory_budget: int | str | None, executor: str) -> str:
    """Returns the key of the formula in _MADE. A budget that cannot be met raises at the call."""
    from .._autochunk import autochunk  # it imports PyTorch's compiler

    def make() -> Any:
        strict = memory_budget is not None
        made = autochunk(FORMULAS[what], memory_budget=memory_budget, executor=executor, strict=strict)
        made.limits = replace(made.limits, slack=SLACK, ready=True)
        return made

    key = f"{what} {memory_budget!r} {executor}"
    _MADE.remembered(key, make)
    return key


@torch.compiler.assume_constant_result
def _bytes(memory_budget: int | str | None) -> int:
    return parse_bytes(memory_budget)


def _text(value: Any) -> str:
    """Returns a number, a flag or None as Python's text. A flag that torch.compile traces becomes a constant."""
    if isinstance(value, bool):
        return "True" if value else "False"
    return str(value)


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
        traced = torch.compiler.is_compiling() and not any(t.requires_grad for t in given.values())
        if traced and self.executor == "auto":  # torch.compile does not trace generated code
            softcap, logit_scale, *rest = form  # numbers of the trace; the others are its constants
            texts = ",".join(given), ",".join([_text(value) for value in rest]), self.what, repr(self.memory_budget)
            made = torch.ops.logitless.chunked_formula(list(given.values()), softcap, logit_scale, *texts)
            return tuple(made) if len(made) > 1 else made[0]
        if self._why_portable(given):
            return _chunks.run(self.what, _bytes(self.memory_budget), given, *form)
        return _MADE[_key(*self)](given, *form)

    def explain(self, given: dict[str, Tensor], *form: Any) -> str:
        if reason := self._why_portable(given):
            return _chunks.explain(self.what, _bytes(self.memory_budget), reason, given, *form)
        return _MADE[_key(*self)].explain(given, *form)


def _outputs_of(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def _form_of(softcap: float, logit_scale: float, rest: str) -> tuple[Any, ...]:
    return (softcap, logit_scale, *ast.literal_eval(f"({rest},)"))


@torch.library.custom_op(
    "logitless::chunked_formula", mutates_args=(),
    schema="(Tensor[] tensors, float softcap, float logit_scale, str names, str rest, str what, str memory_budget) -> Tensor[]",
)
def _chunked_formula(tensors, softcap, logit_scale, names, rest, what, memory_budget):
    """A formula without gradients, by ``chunked``, as an operator of a graph of torch.compile."""
    given = dict(zip(names.split(","), tensors))
    made = chunked(what, ast.literal_eval(memory_budget), "auto")(given, *_form_of(softcap, logit_scale, rest))
    return [t.clone() if any(t is other for other in tensors) else t for t in _outputs_of(made)]


@_chunked_formula.register_fake
def _(tensors, softcap, logit_scale, names, rest, what, memory_budget):
    made = FORMULAS[what](dict(zip(names.split(","), tensors)), *_form_of(1.0, 1.0, rest))
    return [t.new_empty(t.shape) for t in _outputs_of(made)]
