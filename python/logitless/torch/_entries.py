"""Lists of entries, each of one token and one row of weight: gathers, sums and dot products, with gradients.

Sums over equal indices have one order, so results are the same bits in every run. The backward of each function is made
of the others, so that derivatives of any order have one. torch.compile sees those that add at indices as operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from .autograd import Function

_GATHERED = 16 << 20  # bytes of gathered rows, and of their products, at a time


def add_at(total: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Adds values [M, ...] to rows of ``total``. Of PyTorch's two ways, each device has a deterministic one."""
    if total.device.type == "cpu":
        return total.index_add_(0, index, values)
    return total.index_put_((index,), values, accumulate=True)


def number_of(*tensors: Tensor) -> torch.dtype:
    """Returns the dtype of products and their sums."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


# --- The operations, without gradients.


def _gathered(x: Tensor, index: Tensor, dtype: Optional[torch.dtype]) -> Tensor:
    return x.index_select(0, index).to(dtype or x.dtype)


def _summed(values: Tensor, index: Tensor, count: int) -> Tensor:
    return add_at(values.new_zeros(count, *values.shape[1:]), index, values)


def _dots(x: Tensor, y: Tensor, at_x: Tensor, at_y: Tensor, valid: Tensor) -> Tensor:
    number = number_of(x, y)
    found = torch.zeros(at_x.shape, dtype=number, device=x.device)
    for at in _chunks(valid, x.shape[1] * number.itemsize):
        rows = _rows(x, at_x, valid, at, number) * _rows(y, at_y, None, at, number)
        found.index_copy_(0, at, rows.sum(-1))
    return found


def _spread(factors: Tensor, x: Tensor, source: Tensor, to: Tensor, valid: Tensor, count: int) -> Tensor:
    total = factors.new_zeros(count, x.shape[1])
    for at in _chunks(valid, x.shape[1] * factors.element_size()):
        products = factors.index_select(0, at)[:, None] * _rows(x, source, valid, at, factors.dtype)
        add_at(total, to.index_select(0, at), products)
    return total


def _chunks(valid: Tensor, row: int) -> tuple[Tensor, ...]:
    """Returns the indices of entries in chunks. row: bytes of a gathered row. A CPU drops entries that are not valid; a
    GPU would have to synchronise for it, so they are zeros there."""
    chosen = valid.nonzero()[:, 0] if valid.device.type == "cpu" else torch.arange(valid.shape[0], device=valid.device)
    return chosen.split(max(1, _GATHERED // max(1, 3 * row)))


def _rows(x: Tensor, index: Tensor, valid: Optional[Tensor], at: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the rows of x of the entries ``at``. valid: those of others are zeros."""
    found = x.index_select(0, index.index_select(0, at)).to(dtype)
    if valid is None or valid.device.type == "cpu":
        return found
    return torch.where(valid.index_select(0, at)[:, None], found, 0.0)


# --- Their gradients, by the same operations. ``of`` has those that are recorded, and ``needs`` is needs_input_grad.


class _Operations(NamedTuple):
    """The operations with gradients: functions of eager code, or operators of a traced graph."""

    gathered: Callable[..., Tensor]
    summed: Callable[..., Tensor]
    dots: Callable[..., Tensor]
    spread: Callable[..., Tensor]


def _of_gathered(of, needs, d, x, index, dtype):
    return of.summed(d, index, x.shape[0]).to(x.dtype), None, None


def _of_summed(of, needs, d, values, index, count):
    return of.gathered(d, index, None), None, None


def _of_dots(of, needs, d, x, y, at_x, at_y, valid):
    d_x = of.spread(d, y, at_y, at_x, valid, x.shape[0]).to(x.dtype) if needs[0] else None
    d_y = of.spread(d, x, at_x, at_y, valid, y.shape[0]).to(y.dtype) if needs[1] else None
    return d_x, d_y, None, None, None


def _of_spread(of, needs, d, factors, x, source, to, valid, count):
    d_factors = of.dots(x, d, source, to, valid).to(factors.dtype) if needs[0] else None
    d_x = of.spread(factors, d, to, source, valid, x.shape[0]).to(x.dtype) if needs[1] else None
    return d_factors, d_x, None, None, None, None


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*(a for a in inputs if isinstance(a, Tensor)))
    ctx.others = [None if isinstance(a, Tensor) else (a,) for a in inputs]


def _backward(of: _Operations, gradients: Callable[..., Any], ctx, cotangent: Tensor):
    tensors = iter(ctx.saved_tensors)
    inputs = [next(tensors) if other is None else other[0] for other in ctx.others]
    return gradients(of, ctx.needs_input_grad, cotangent, *inputs)


def _function(name: str, forward: Callable[..., Tensor], gradients: Callable[..., Any]) -> Callable[..., Tensor]:
    """Returns the operation for eager code, and under transforms of torch.func."""
    backward = lambda ctx, d: _backward(_FUNCTIONS, gradients, ctx, d)  # noqa: E731
    rules = dict(forward=forward, setup_context=_save, backward=backward)
    return type(name, (Function,), {rule: staticmethod(call) for rule, call in rules.items()}).apply


def _operator(
    name: str, schema: str, forward: Callable[..., Tensor], fake: Callable[..., Tensor], gradients: Callable[..., Any]
) -> Callable[..., Tensor]:
    """Returns the operation as an operator that tracers do not look into."""
    op = torch.library.custom_op(f"logitless::entries_{name}", forward, mutates_args=(), schema=f"({schema}) -> Tensor")
    op.register_fake(fake)
    op.register_autograd(lambda ctx, d: _backward(_OPERATORS, gradients, ctx, d), setup_context=_save)
    return op


_FUNCTIONS = _Operations(
    _function("Gathered", _gathered, _of_gathered), _function("Summed", _summed, _of_summed),
    _function("Dots", _dots, _of_dots), _function("Spread", _spread, _of_spread),
)  # fmt: skip
_OPERATORS = _Operations(
    _operator(
        "gathered", "Tensor x, Tensor index, ScalarType? dtype", _gathered,
        lambda x, index, dtype: x.new_empty(index.shape[0], *x.shape[1:], dtype=dtype or x.dtype), _of_gathered,
    ),
    _operator(
        "summed", "Tensor values, Tensor index, SymInt count", _summed,
        lambda values, index, count: values.new_empty(count, *values.shape[1:]), _of_summed,
    ),
    _operator(
        "dots", "Tensor x, Tensor y, Tensor at_x, Tensor at_y, Tensor valid", _dots,
        lambda x, y, at_x, *_: x.new_empty(at_x.shape, dtype=number_of(x, y)), _of_dots,
    ),
    _operator(
        "spread", "Tensor factors, Tensor x, Tensor source, Tensor to, Tensor valid, SymInt count", _spread,
        lambda factors, x, source, to, valid, count: factors.new_empty(count, x.shape[1]), _of_spread,
    ),
)  # fmt: skip


def _operations() -> _Operations:
    return _OPERATORS if torch.compiler.is_compiling() else _FUNCTIONS


# --- The calls.


def gathered(x: Tensor, index: Tensor, dtype: Optional[torch.dtype] = None) -> Tensor:
    """Returns x[index] in a dtype, in which a gradient is summed, and then rounded once. None: that of x."""
    return _operations().gathered(x, index, dtype)


def summed(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Returns the sums [count] of values with equal indices."""
    return _operations().summed(values, index, count)


def dots(hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor, valid: Tensor) -> Tensor:
    """Returns the dot products [M] of hidden[rows] and weight[ids] in float32, or float64; 0 where not valid."""
    return _operations().dots(hidden, weight, rows, ids, valid)


def largest(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Returns the largest value of each index, -inf without any."""
    return values.new_full((count,), -torch.inf).scatter_reduce(0, index, values, "amax")
