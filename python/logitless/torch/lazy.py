"""Models that compute their loss without logits, unchanged: the head returns a promise of logits.

``lazy_head(model)`` changes the class of one module, the head. Its forward then returns a ``LazyLogits``, which remembers
hidden states and weight. Cross entropy recognises it, through casts, slices of positions, views and a softcap; anything
else turns it into real logits, with one warning.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .loss import linear_cross_entropy

_WARN_BYTES = 16 << 20  # logits of fewer bytes, such as a generated token's, are no surprise


class LazyHeadWarning(UserWarning):
    """Logits that were to be avoided have been made."""


class LazyLogits(Tensor):
    """``softcap(scale * (hidden @ weight.T + bias))`` [..., V], not computed yet."""

    _hidden: Tensor
    _weight: Tensor
    _bias: Optional[Tensor]
    _scale: float
    _softcap: Optional[float]
    _after_tanh: bool  # between the tanh of a softcap and the factor that completes it
    _real: Optional[Tensor]

    @staticmethod
    def __new__(cls, hidden, weight, bias=None, *, scale=1.0, softcap=None, after_tanh=False, dtype=None):
        self = Tensor._make_wrapper_subclass(
            cls, (*hidden.shape[:-1], weight.shape[0]), dtype=dtype or hidden.dtype, device=hidden.device
        )
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._scale, self._softcap, self._after_tanh = scale, softcap, after_tanh
        self._real = None
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None:
            result = rule(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func in _OF_THE_PROMISE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args = _map(args)
        kwargs = _map(kwargs)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"LazyLogits: {func} reached the dispatcher; call materialize() first")

    def __repr__(self, **_: Any) -> str:
        return f"LazyLogits({list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol):
        return self.materialize().__reduce_ex__(protocol)

    def materialize(self) -> Tensor:
        """The logits, computed at the first call."""
        if self._real is None:
            z = F.linear(self._hidden, self._weight, self._bias)
            if z.dtype != self.dtype:
                z = z.to(self.dtype)
            if self._scale != 1.0:
                z = z * self._scale
            if self._after_tanh:
                z = torch.tanh(z)
            elif self._softcap is not None:
                z = torch.tanh(z / self._softcap) * self._softcap
            self._real = z
        return self._real

    def _like(self, hidden=None, **changes) -> LazyLogits:
        state = dict(scale=self._scale, softcap=self._softcap, after_tanh=self._after_tanh, dtype=self.dtype)
        state.update(changes)
        return LazyLogits(self._hidden if hidden is None else hidden, self._weight, self._bias, **state)


def _map(value):
    if isinstance(value, LazyLogits):
        size = value.numel() * value.element_size()
        if value._real is None and size >= _WARN_BYTES:
            warnings.warn(
                f"logitless: logits {list(value.shape)} ({size >> 20} MiB) are computed after all: something other than a "
                "cross entropy reads them",
                LazyHeadWarning,
                stacklevel=4,
            )
        return value.materialize()
    if isinstance(value, (list, tuple)):
        mapped = [_map(v) for v in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if isinstance(value, dict):
        return {k: _map(v) for k, v in value.items()}
    return value


# --- What keeps the promise. Each rule returns NotImplemented where it does not apply.


def _to(x, *args, **kwargs):
    dtype, copy = kwargs.pop("dtype", None), kwargs.pop("copy", False)
    device = kwargs.pop("device", None)
    if kwargs.pop("non_blocking", False) or kwargs.pop("memory_format", None) or kwargs or copy:
        return NotImplemented
    for a in args:
        if isinstance(a, torch.dtype):
            dtype = a
        elif isinstance(a, (str, torch.device)):
            device = a
        elif isinstance(a, Tensor) and not isinstance(a, LazyLogits):
            dtype, device = a.dtype, a.device
        else:
            return NotImplemented
    if device is not None:
        device = torch.device(device)
        if device.type != x.device.type or (device.index is not None and device.index != x.device.index):
            return NotImplemented
    if dtype is None or dtype == x.dtype:
        return x
    # A narrower number would round what a loss reads.
    if not (dtype.is_floating_point and torch.finfo(dtype).bits >= torch.finfo(x.dtype).bits):
        return NotImplemented
    return x._like(dtype=dtype)


def _float(x):
    return _to(x, torch.float32)


def _same(x, *args, **kwargs):
    return NotImplemented if args or kwargs else x


def _detach(x):
    return LazyLogits(
        x._hidden.detach(),
        x._weight.detach(),
        None if x._bias is None else x._bias.detach(),
        scale=x._scale,
        softcap=x._softcap,
        after_tanh=x._after_tanh,
        dtype=x.dtype,
    )


def _view(x, *shape, **kwargs):
    if kwargs or any(isinstance(s, torch.dtype) for s in shape):
        return NotImplemented
    if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)):
        shape = tuple(shape[0])
    if not shape or shape[-1] not in (x.shape[-1], -1):
        return NotImplemented
    rows = x.shape[:-1].numel()
    lead = list(shape[:-1])
    if shape[-1] == -1 and math.prod(lead) != rows:
        return NotImplemented
    if -1 in lead:
        rest = math.prod(s for s in lead if s != -1)
        if rest == 0 or rows % rest:
            return NotImplemented
    elif math.prod(lead) != rows:
        return NotImplemented
    return x._like(x._hidden.reshape(*lead, x._hidden.shape[-1]))


def _getitem(x, index):
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(p, Tensor) and p.dtype == torch.bool for p in parts):
        used = sum(p.dim() if isinstance(p, Tensor) and p.dtype == torch.bool else 1 for p in parts)
    else:
        used = sum(1 for p in parts if p is not None and p is not Ellipsis)
    if Ellipsis in [p for p in parts if not isinstance(p, Tensor)]:
        # What stands after the dots may reach the vocabulary.
        last = parts[-1]
        if last is not Ellipsis:
            if not (isinstance(last, slice) and last == slice(None)):
                return NotImplemented
    elif used >= x.dim():
        last = parts[-1]
        if used > x.dim() or not (isinstance(last, slice) and last == slice(None)):
            return NotImplemented
    return x._like(x._hidden[index])


def _number(value) -> Optional[float]:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _mul(x, other, **kwargs):
    if not isinstance(x, LazyLogits):
        x, other = other, x
    factor = _number(other)
    if kwargs or factor is None or factor == 0.0 or not math.isfinite(factor):
        return NotImplemented
    if x._after_tanh:  # factor * tanh(scale * u): a softcap
        if factor < 0.0:
            return NotImplemented
        return x._like(scale=x._scale * factor, softcap=factor, after_tanh=False)
    return x._like(scale=x._scale * factor) if x._softcap is None else NotImplemented


def _div(x, other, **kwargs):
    divisor = _number(other)
    if not isinstance(x, LazyLogits) or kwargs or divisor is None or divisor == 0.0 or x._after_tanh:
        return NotImplemented
    return _mul(x, 1.0 / divisor)


def _tanh(x, **kwargs):
    if kwargs or x._after_tanh or x._softcap is not None:
        return NotImplemented
    return x._like(after_tanh=True)


def _cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0
):
    x = input
    if (
        not isinstance(x, LazyLogits)
        or isinstance(target, LazyLogits)
        or x._after_tanh
        or x._real is not None
        or x.dim() > 2
        or size_average is not None
        or reduce is not None
        or (target.dtype.is_floating_point and (target.requires_grad or x.shape[-1] > 65536 or ignore_index >= 0))
        or target.dtype not in (torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
    ):
        return NotImplemented
    valid = None
    if not target.dtype.is_floating_point and reduction == "mean":
        valid = target != ignore_index
    loss = linear_cross_entropy(
        x._hidden,
        x._weight,
        target,
        x._bias,
        class_weight=weight,
        ignore_index=None if target.dtype.is_floating_point else ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=x._softcap,
        logit_scale=x._scale,
    )
    if valid is not None:  # PyTorch's mean of no token
        loss = torch.where(valid.any(), loss, torch.full_like(loss, math.nan))
    return loss if loss.dtype == x.dtype else loss.to(x.dtype)


_RULES = {
    Tensor.to: _to,
    Tensor.float: _float,
    Tensor.contiguous: _same,
    Tensor.detach: _detach,
    Tensor.view: _view,
    Tensor.reshape: _view,
    torch.reshape: _view,
    Tensor.__getitem__: _getitem,
    Tensor.mul: _mul,
    Tensor.__mul__: _mul,
    Tensor.__rmul__: _mul,
    torch.mul: _mul,
    Tensor.div: _div,
    Tensor.__truediv__: _div,
    torch.div: _div,
    Tensor.tanh: _tanh,
    torch.tanh: _tanh,
    F.cross_entropy: _cross_entropy,
    Tensor.requires_grad.__get__: lambda x: (  # type: ignore[attr-defined]
        x._hidden.requires_grad or x._weight.requires_grad
    ),
}
# What may be asked without computing anything.
_OF_THE_PROMISE = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,  # type: ignore[attr-defined]
    Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.get_device,
    Tensor.__len__,
}


class LazyLinear(nn.Linear):
    """A linear head whose logits are lazy. Made of an ``nn.Linear`` by changing its class, and back."""

    def forward(self, input: Tensor) -> Tensor:
        hidden, weight, bias = input, self.weight, self.bias
        kind = hidden.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        if hidden.dtype != weight.dtype:
            raise TypeError(f"LazyLinear: expected hidden in {weight.dtype}, the dtype of weight, got {hidden.dtype}")
        return LazyLogits(hidden, weight, bias)


def _head_of(model: nn.Module) -> nn.Module:
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else getattr(model, "lm_head", None)
    if head is None:
        raise ValueError(
            f"model: expected a language model with get_output_embeddings() or lm_head, got {type(model).__name__}"
        )
    return head


def lazy_head(model: nn.Module) -> nn.Module:
    """Makes the model's loss run without logits; returns the model.

    The model's head (``get_output_embeddings()`` or ``lm_head``), an ``nn.Linear``, returns ``LazyLogits`` from now on.
    Weights, names, signatures and the state dict stay as they are; the model pickles, saves and generates.
    ``unpatch(model)`` restores it.

    Raises TypeError when the head is no plain ``nn.Linear`` (quantised, or with an adapter).
    """
    head = _head_of(model)
    if type(head) is LazyLinear:
        return model
    if type(head) is not nn.Linear:
        raise TypeError(f"model: expected a head of class torch.nn.Linear, got {type(head).__name__}")
    if head._forward_hooks:
        raise ValueError("model: its head has forward hooks, which would see the logits; remove them first")
    head.__class__ = LazyLinear
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Undoes ``lazy_head``; a model without a lazy head stays as it is. Returns the model."""
    head = _head_of(model)
    if type(head) is LazyLinear:
        head.__class__ = nn.Linear
    return model
