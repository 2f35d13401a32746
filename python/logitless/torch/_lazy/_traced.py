"""Lazy heads under torch.compile: traced logits that remember the head's arguments while the graph is recorded.

The graph contains the head's matrix product, and a cross entropy that does not read it; the compiler removes values
that nothing reads. So a compiled function that returns only the loss computes no logits. One that returns them too,
like a whole model, computes them once, in the model's dtype. After an operation that is unknown here, the loss reads
the logits.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from .._precision import autocast_dtype
from ..loss import linear_cross_entropy
from ._call import are_mixed, linear


class Source:
    """The arguments of one head call, and whether its logits may have been modified."""

    def __init__(self, weight, bias, grad: bool, autocast: bool, far, expected_ignored: float):
        self.weight, self.bias, self.grad, self.autocast, self.far = weight, bias, grad, autocast, far
        self.expected_ignored = expected_ignored
        self.clean = True


class TracedLogits(Tensor):
    """Real logits of a graph that is being recorded; outside of it an ordinary tensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        x = args[0] if args else None
        if torch.compiler.is_compiling() and type(x) is TracedLogits and hasattr(x, "_rows"):
            if func is F.cross_entropy:
                loss = _cross_entropy(*args, **kwargs)
                if loss is not None:
                    return loss
            elif func in _ASKED:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            elif func in _KEPT and not kwargs:
                rows = _KEPT[func](x, *args[1:])
                if rows is not None:
                    return _kept(func, x, args, rows)
            x._source.clean = False  # it may write, or return an alias that is written
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __reduce_ex__(self, protocol):
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def traced_logits(hidden, weight, bias, far=None, expected_ignored: float = 0.0) -> Tensor:
    logits = linear(hidden, weight, bias)
    kind = hidden.device.type
    autocast = autocast_dtype(kind) is not None
    if not autocast and hidden.dtype != weight.dtype and not are_mixed(hidden, weight):
        return logits
    if hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16) or kind == "meta":
        return logits
    source = Source(weight, bias, torch.is_grad_enabled(), autocast, far, expected_ignored)
    return _marked(logits, hidden, source, 1.0, None, False)


def _marked(logits, rows, source, scale, softcap, after_tanh):
    x = logits.as_subclass(TracedLogits)
    x._rows, x._source = rows, source
    x._scale, x._softcap, x._after_tanh = scale, softcap, after_tanh
    return x


def _kept(func, x, args, rows):
    with torch._C.DisableTorchFunctionSubclass():
        logits = func(*args)
    scale, softcap, after_tanh = x._scale, x._softcap, x._after_tanh
    if func in _PRODUCTS:
        factor = float(args[1])
        if after_tanh:
            scale, softcap, after_tanh = scale * factor, factor, False
        else:
            scale = scale * factor
    elif func in _QUOTIENTS:
        scale = scale / float(args[1])
    elif func in (torch.tanh, Tensor.tanh):
        after_tanh = True
    return _marked(logits, rows, x._source, scale, softcap, after_tanh)


# Each rule returns the hidden states of the result, or None.


def _view(x, *size):
    size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    if len(size) < 1 or size[-1] != x.shape[-1]:
        return None
    return x._rows.reshape(*size[:-1], x._rows.shape[-1])


def _getitem(x, index):
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        if part is not Ellipsis and not isinstance(part, slice):
            return None
    whole = slice(None)
    if any(p is Ellipsis for p in parts):
        if parts[-1] is not Ellipsis and parts[-1] != whole:
            return None
    elif len(parts) >= x.dim() and parts[-1] != whole:
        return None
    return x._rows[index]


def _cast(x, dtype):
    if not isinstance(dtype, torch.dtype) or dtype not in (x.dtype, torch.float32):
        return None
    return x._rows


def _scaled(x, factor):
    number = isinstance(factor, (int, float)) and not isinstance(factor, bool) and factor > 0 and math.isfinite(factor)
    return x._rows if number and x._softcap is None else None


def _divided(x, divisor):
    return None if x._after_tanh else _scaled(x, divisor)


def _tanh(x):
    return None if x._after_tanh or x._softcap is not None else x._rows


def _rows(x):
    return x._rows


_PRODUCTS = (Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul)
_QUOTIENTS = (Tensor.div, Tensor.__truediv__, torch.div)
_KEPT = {
    Tensor.view: _view,
    Tensor.reshape: _view,
    torch.reshape: _view,
    Tensor.float: _rows,
    Tensor.contiguous: _rows,
    Tensor.to: _cast,
    Tensor.__getitem__: _getitem,
    Tensor.tanh: _tanh,
    torch.tanh: _tanh,
    **dict.fromkeys(_PRODUCTS, _scaled),
    **dict.fromkeys(_QUOTIENTS, _divided),
}
_ASKED = (
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_contiguous, Tensor.is_floating_point,
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
)


def loss_of_targets(
    loss_of: Callable, hidden, matrix, target, bias, weight, ignore_index: Optional[int], reduction: str, **options: Any
) -> Tensor:
    """Returns PyTorch's loss of logits ``hidden @ matrix.T + bias`` with ``weight`` [V] or None for the classes.
    ignore_index: None for class probabilities."""
    loss = loss_of(hidden, matrix, target, bias, class_weight=weight, ignore_index=ignore_index, reduction=reduction, **options)
    if reduction != "mean" or ignore_index is None:
        return loss
    valid = target != ignore_index  # PyTorch's mean of no token is NaN
    some = valid.any() if weight is None else (weight[torch.where(valid, target, 0)] * valid).sum() != 0
    return torch.where(some, loss, torch.full_like(loss, math.nan))


def _cross_entropy(
    x, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    source = x._source
    if not source.clean or x._after_tanh or x.dim() != 2 or size_average is not None or reduce is not None:
        return None
    if target.dtype != torch.int64 or target.dim() != 1 or type(target) is TracedLogits:
        return None
    if weight is not None and (weight.dtype != x.dtype or weight.requires_grad):
        return None
    if source.grad != torch.is_grad_enabled() or source.autocast != torch.is_autocast_enabled(target.device.type):
        return None
    exact = source.far is None or reduction == "none"
    loss = loss_of_targets(
        partial(linear_cross_entropy, expected_ignored=source.expected_ignored) if exact else source.far, x._rows, source.weight, target, source.bias, weight, ignore_index, reduction,
        label_smoothing=label_smoothing, softcap=x._softcap, logit_scale=x._scale,
    )
    return loss if source.autocast else loss.to(x.dtype)
