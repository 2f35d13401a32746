"""Lists of entries, each of one token and one row of weight: gathers, sums and dot products, with gradients.

Sums over equal indices have one order, so results are the same bits in every run.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

_GATHERED = 16 << 20  # bytes of gathered rows, and of their products, at a time


def add_at(total: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Adds values [M, ...] to rows of ``total``. Of PyTorch's two ways, each device has a deterministic one."""
    if total.device.type == "cpu":
        return total.index_add_(0, index, values)
    return total.index_put_((index,), values, accumulate=True)


class Gathered(torch.autograd.Function):
    """Returns x[index] in a dtype; the gradient sums over equal indices in that dtype."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, dtype: Optional[torch.dtype] = None) -> Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.save_for_backward(index)
        return x.index_select(0, index).to(dtype or x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, cotangent: Tensor):
        (index,) = ctx.saved_tensors
        return add_at(cotangent.new_zeros(ctx.shape), index, cotangent).to(ctx.dtype), None, None


class Summed(torch.autograd.Function):
    """Returns the sums [count] of values with equal indices."""

    @staticmethod
    def forward(ctx, values: Tensor, index: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(index)
        return add_at(values.new_zeros(count), index, values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, cotangent: Tensor):
        (index,) = ctx.saved_tensors
        return cotangent.index_select(0, index), None, None


def largest(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Returns the largest value of each index, -inf without any."""
    return values.new_full((count,), -torch.inf).scatter_reduce(0, index, values, "amax")


class Dots(torch.autograd.Function):
    """Returns the dot products [M] of hidden[rows] and weight[ids] in float32, or float64; 0 where not valid."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor, valid: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, rows, ids, valid)
        number = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        found = torch.zeros(rows.shape, dtype=number, device=hidden.device)
        for at, x, w in _chunks(hidden, weight, rows, ids, valid, number):
            found.index_copy_(0, at, (x * w).sum(-1))
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, cotangent: Tensor):
        hidden, weight, rows, ids, valid = ctx.saved_tensors
        sums = [
            torch.zeros(t.shape, dtype=cotangent.dtype, device=t.device) if needed else None
            for t, needed in zip((hidden, weight), ctx.needs_input_grad)
        ]
        for at, x, w in _chunks(hidden, weight, rows, ids, valid, cotangent.dtype):
            d = cotangent.index_select(0, at)[:, None]
            for total, index, other in zip(sums, (rows, ids), (w, x)):
                if total is not None:
                    add_at(total, index.index_select(0, at), d * other)
        made = (None if total is None else total.to(t.dtype) for total, t in zip(sums, (hidden, weight)))
        return *made, None, None, None


def _chunks(hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor, valid: Tensor, number: torch.dtype):
    """Yields indices of entries, and their rows of hidden and weight. A CPU drops entries that are not valid; a GPU
    would have to synchronise for it, and a traced program to know their number, so their rows of hidden are zeros."""
    drops = hidden.device.type == "cpu" and not torch.compiler.is_compiling()
    chosen = valid.nonzero()[:, 0] if drops else torch.arange(rows.shape[0], device=rows.device)
    step = max(1, _GATHERED // max(1, 3 * hidden.shape[1] * number.itemsize))
    for at in chosen.split(step):
        x = hidden.index_select(0, rows.index_select(0, at)).to(number)
        if not drops:
            x = torch.where(valid.index_select(0, at)[:, None], x, 0.0)
        w = weight.index_select(0, ids.index_select(0, at))
        yield at, x, w.to(hidden.dtype).to(number)
