"""Lowers ATen functions of one element that are composed of a program's functions, or approximated by them."""

from __future__ import annotations

from functools import partial

import torch

from logitless._autochunk.composed import COMPOSED, atan2, hypot, inverse_erf
from logitless.torch._autochunk.aten import HANDLERS, handles, value_of
from logitless.torch._autochunk.dtypes import DTYPES


def _composed(function, w, out, *operands):
    wide = DTYPES.wide(out.dtype)
    return w.cast(function(w, *(value_of(w, x, wide) for x in operands)), out.dtype)


for _name, _function in COMPOSED.items():
    HANDLERS[_name] = partial(_composed, _function)
HANDLERS["atan2"] = partial(_composed, atan2)
HANDLERS["hypot"] = partial(_composed, hypot)


@handles("polygamma")
def _polygamma(w, out, order, x):
    if order not in (0, 1):
        raise w.refuse(f"polygamma of order {order} has no form in a tensor program; expected 0 or 1")
    return w.map("trigamma" if order else "digamma", [w.cast(x, out.dtype)], out.dtype)


@handles("isinf")
def _isinf(w, out, x):
    if not x.dtype.is_floating_point:
        return w.number(0, torch.bool, x.shape)
    return w.map("eq", [w.map("abs", [x], x.dtype), w.number(float("inf"), x.dtype)], torch.bool)


@handles("_efficientzerotensor")
def _zero_tensor(w, out, sizes, **ignored):
    return w.number(0, out.dtype, out.shape)


@handles("hardshrink_backward", "softshrink_backward")
def _shrink_backward(w, out, cotangent, x, lambd):
    """Gradients are 0 where |x| <= lambd."""
    inside = w.map("le", [w.map("abs", [x], x.dtype), w.number(float(lambd), x.dtype)], torch.bool)
    return w.map("select", [inside, w.number(0, out.dtype), w.cast(cotangent, out.dtype)], out.dtype)

@handles("erfinv")
def _erfinv(w, out, x):
    x = w.cast(x, out.dtype)
    return w.cast(inverse_erf(w, w.cast(x, DTYPES.wide(x.dtype))), out.dtype)
