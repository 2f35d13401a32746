"""A fast path for calls seen before: a mean or sum of plain eager tensors goes from Python to C without repeated
checks.

The key contains everything that the checks of ``loss.py`` read, so a call that passed once passes again.
"""

from __future__ import annotations

import threading
from typing import Any, Optional

import torch
from torch import Tensor, nn

from . import _engine
from ._ops import _bits, refuse_second_derivatives, saved_dtype, scaled

_TENSORS = (Tensor, nn.Parameter)
_MOST = 64


class _Thread(threading.local):
    def __init__(self):
        self.calls: dict[Any, FastLoss] = {}


_thread = _Thread()


def key_of(args: tuple, kwargs: dict) -> Any:
    """Returns the cache key of a call, or None if it needs the general path."""
    if len(args) not in (3, 4) or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    parts: list[Any] = []
    for t in args:
        if t is None:
            parts.append(None)
            continue
        if type(t) not in _TENSORS or t.layout is not torch.strided or t.is_nested or t.is_neg():
            return None
        parts.append((t.shape, t.stride(), t.dtype, t.device, t.requires_grad))
    if args[0].device.type == "cuda":  # misaligned tensors are copied first
        parts.append((args[0].data_ptr() % 16, args[1].data_ptr() % 16))
    for name, value in kwargs.items():
        if value is not None and type(value) not in (bool, int, float, str):
            return None
        parts.append((name, type(value), value))  # the type distinguishes True from 1
    device = args[0].device.type
    if device == "cpu":
        place: Any = torch.get_num_threads()
    elif device == "cuda":
        place = _engine.current_stream(args[0].device)
    else:
        return None
    return (*parts, place, torch.is_grad_enabled(), torch.is_autocast_enabled(device))


def find(key: Any) -> Optional[FastLoss]:
    return _thread.calls.get(key)


def remember(key: Any, loss: FastLoss) -> None:
    if len(_thread.calls) >= _MOST:
        _thread.calls.clear()
    _thread.calls[key] = loss


class FastLoss:
    """A planned call of one kind."""

    def __init__(self, hidden, weight, target, bias, options, needs):
        self.needs = needs
        self.device = hidden.device
        inputs = dict(hidden=hidden, weight=weight, targets=target, bias=bias)
        self.places = _bits(needs)
        made = [t if needed else None for t, needed in zip((hidden, weight, bias), self.places)]
        gradients = [None if t is None else t.new_empty(t.shape, dtype=saved_dtype(t.dtype)) for t in made]
        self.loss_dtype = torch.float32
        outputs = dict(loss=torch.empty((), dtype=self.loss_dtype, device=self.device))
        outputs.update(zip(("d_hidden", "d_weight", "d_bias"), gradients))
        self.call = _engine.on_device(self.device, _engine.prepare_cross_entropy, options, inputs, outputs)
        # Shapes and dtypes of the gradients as computed, and their final dtypes.
        self.made = [(g.shape, g.dtype) for g in gradients if g is not None]
        self.dtypes = [t.dtype for t in made if t is not None]

    def __call__(self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None) -> Tensor:
        if self.needs:
            return _FastFunction.apply(hidden, weight, bias, (self, target))
        return self.run(hidden, weight, bias, target)[0]

    def run(self, hidden, weight, bias, target):
        """Returns [loss, gradients asked for]."""
        device = self.device
        outputs = [torch.empty((), dtype=self.loss_dtype, device=device)]
        outputs += [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.made]
        inputs = (hidden, weight, target) if bias is None else (hidden, weight, target, bias)
        _engine.on_device(device, self.call.run, (*inputs, *outputs), device)
        return outputs


class _FastFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, rest):
        ctx.loss, target = rest
        loss, *gradients = ctx.loss.run(hidden, weight, bias, target)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx, d_loss):
        refuse_second_derivatives()
        gradients = iter(scaled(ctx.saved_tensors, d_loss, ctx.loss.dtypes))
        return (*[next(gradients) if made else None for made in ctx.loss.places], None)
