"""Operations on lazy logits that give new lazy values: casts, clones, row picks, scales, softcaps, added biases,
log-softmax. A rule takes the lazy argument's form and the other arguments, and returns the result's form, or None."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from ._form import Form

aten = torch.ops.aten


def _cast(form: Form, x, func, args, kwargs) -> Optional[Form]:
    dtype, device = kwargs.get("dtype") or x.dtype, kwargs.get("device")
    if device is not None and (device.type != x.device.type or device.index not in (None, x.device.index)):
        return None
    # A narrower dtype would round the values that a loss reads.
    if not dtype.is_floating_point or torch.finfo(dtype).bits < torch.finfo(x.dtype).bits:
        return None
    return form.with_step(lambda z: z.to(dtype, copy=True))


def _clone(form: Form, x, func, args, kwargs) -> Optional[Form]:
    return form.with_step(lambda z: z.clone())


def _index(form: Form, x, func, args, kwargs) -> Optional[Form]:
    (indices,) = args
    used = 0
    for i in indices:
        used += i.dim() if i is not None and i.dtype in (torch.bool, torch.uint8) else 1
    if form.vocab != x.dim() - 1 or used > form.vocab:
        return None
    index = tuple(slice(None) if i is None else i.clone() for i in indices)
    lead = torch.empty(1, dtype=torch.bool, device=x.device).expand(x.shape[:-1])[index].dim()
    return form.with_rows(lambda h: h[index], lead)


def _index_select(form: Form, x, func, args, kwargs) -> Optional[Form]:
    dim, index = args
    if dim % x.dim() == form.vocab:
        return None
    index = index.clone()
    torch.empty(1, dtype=torch.bool, device=x.device).expand(x.shape[dim]).index_select(0, index)  # range check
    return form.with_rows(lambda h: h.index_select(dim, index), form.vocab)


def _number(value) -> Optional[float]:
    """Returns the value of a number or a scalar CPU tensor; a GPU's would need a synchronisation."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.dim() or value.is_complex() or value.dtype == torch.bool:
            return None
        value = value.item()
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _scaled(form: Form, factor: float, step: Callable) -> Optional[Form]:
    if not math.isfinite(factor) or factor == 0.0:
        return None
    if form.log:
        return form.with_step(step, factor=form.factor * factor)
    if form.after_tanh:  # factor * tanh(scale * u): a softcap
        return form.with_step(step, scale=form.scale * factor, softcap=factor, after_tanh=False) if factor > 0 else None
    if form.softcap is not None or form.shift is not None:
        return None
    return form.with_step(step, scale=form.scale * factor)


def _frozen(value):
    """Returns a copy of a tensor's current values, since it may be edited later."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _mul(form: Form, x, func, args, kwargs) -> Optional[Form]:
    factor = _number(args[0])
    other = _frozen(args[0])
    return None if factor is None or kwargs else _scaled(form, factor, lambda z: z * other)


def _div(form: Form, x, func, args, kwargs) -> Optional[Form]:
    divisor = _number(args[0])
    if divisor is None or divisor == 0.0 or kwargs or form.after_tanh:
        return None
    other = _frozen(args[0])
    return _scaled(form, 1.0 / divisor, lambda z: z / other)


def _neg(form: Form, x, func, args, kwargs) -> Optional[Form]:
    return _scaled(form, -1.0, lambda z: -z)


def _tanh(form: Form, x, func, args, kwargs) -> Optional[Form]:
    if form.after_tanh or form.softcap is not None or form.shift is not None or form.log:
        return None
    return form.with_step(lambda z: z.tanh(), after_tanh=True)


def _plain(form: Form) -> bool:
    return not (form.log or form.after_tanh) and form.softcap is None and form.shift is None


def _log_softmax(form: Form, x, func, args, kwargs) -> Optional[Form]:
    dim, half_to_float = args
    if dim % x.dim() != form.vocab or form.log or form.after_tanh:
        return None
    return form.with_step(lambda z: func(z, -1, half_to_float), log=True)


def _add(form: Form, x, func, args, kwargs) -> Optional[Form]:
    other = args[0]
    if kwargs or not isinstance(other, Tensor) or not _plain(form):
        return None
    their = getattr(other, "_form", None)
    if their is None:
        return _add_bias(form, x, other) if type(other) in (Tensor, torch.nn.Parameter) else None
    same = _plain(their) and their.vocab == form.vocab and other.shape == x.shape and other.dtype == x.dtype
    if not same or form.vocab_range is not None or their.vocab_range is not None or set(form.calls) & set(their.calls):
        return None
    parts = []
    for f in (form, their):
        if len(f.parts) > 1 and f.steps:
            return None
        parts += [replace(p, steps=(*p.steps, *f.steps), coefficient=p.coefficient * f.scale) for p in f.parts]
    return Form(tuple(parts), form.vocab, detached=form.detached or their.detached)


def _add_bias(form: Form, x, bias: Tensor) -> Optional[Form]:
    """Adds a bias [V], or [1, ..., V] with at most x's rank."""
    if form.vocab != x.dim() - 1 or bias.dim() > x.dim() or bias.numel() != x.shape[-1] or form.scale != 1.0:
        return None
    if bias.dim() == 0 or bias.shape[-1] != x.shape[-1] or not bias.dtype.is_floating_point or form.vocab_range is not None:
        return None
    if bias.device != x.device:
        return None
    shift = _frozen(bias).reshape(-1)
    return form.with_step(lambda z: z + shift, shift=shift)


def positions(args: list) -> list:
    """Returns the arguments of a pick with masks converted to indices."""
    if not isinstance(args[0], (list, tuple)):
        return args
    found: list[Optional[Tensor]] = []
    for i in args[0]:
        found += i.nonzero(as_tuple=True) if i is not None and i.dtype in (torch.bool, torch.uint8) else [i]
    return [found, *args[1:]]


RULES: dict[Any, Callable] = {
    aten._to_copy.default: _cast,
    aten.clone.default: _clone,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.neg.default: _neg,
    aten.tanh.default: _tanh,
    aten._log_softmax.default: _log_softmax,
    aten.add.Tensor: _add,
}
COMMUTE = (aten.add.Tensor, aten.mul.Tensor)
PICKS = (aten.index.Tensor, aten.index_select.default)
