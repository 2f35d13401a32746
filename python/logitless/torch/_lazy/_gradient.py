"""``LazyGradient``: the gradient of lazy logits, which carries the known gradients of hidden and weight.

A loss without logits sends it back through the graph of its logits, so that hooks, DDP and FSDP see an ordinary
backward. The derivatives of views and of the operations in ``_copies.py`` pass it on. The head's call extracts the
gradients of hidden and weight. Any other operation reads its values, which are then computed.
"""

from __future__ import annotations

import contextlib
from typing import Callable, Optional

import torch
from torch import Tensor

from ..dtensor import mean_gradient, whole
from . import _tensor, _warnings
from ._call import HeadCall
from ._tensor import LazyLogits

aten = torch.ops.aten

# Autograd nodes that pass it on, and the operations of their derivatives.
_SHAPES = (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.clone.default, aten.alias.default,
           aten.detach.default)
_NODES: dict[str, tuple] = {
    "View": _SHAPES,
    "UnsafeView": _SHAPES,
    "ReshapeAlias": _SHAPES,
    "Alias": _SHAPES,
    "Clone": _SHAPES,
    "Slice": (aten.slice_backward.default,),
    "Select": (aten.select_backward.default,),
    "Permute": (aten.permute.default,),
    "Transpose": (aten.transpose.int,),
    "T": (aten.t.default,),
    "Unsqueeze": (aten.squeeze.dim,),
    "Squeeze": (aten.unsqueeze.default, *_SHAPES),
    "Expand": (aten.sum.dim_IntList, *_SHAPES),
    "Split": (aten.cat.default,),
    "SplitWithSizes": (aten.cat.default,),
    "Unbind": (aten.stack.default, aten.cat.default, aten.unsqueeze.default),
    "ToCopy": (aten._to_copy.default, aten.clone.default),
    "Index": (aten.new_zeros.default, aten.index_put.default, aten._index_put_impl.default),
    "IndexSelect": (aten.new_zeros.default, aten.index_add.default),
    "Add": (aten._to_copy.default,),  # to the logits' dtype, if the other addend is wider
    "Mul": (aten.mul.Tensor, aten.mul.Scalar),
    "Div": (aten.div.Tensor, aten.div.Scalar),
    "Neg": (aten.neg.default,),
    "Tanh": (aten.tanh_backward.default,),
    "LogSoftmax": (aten._log_softmax_backward_data.default,),
}


class LazyGradient(_tensor.Lazy):
    _known: dict[HeadCall, list]  # gradients (hidden, weight, bias) of each call, one for each use
    _make: Callable[[], Tensor]
    _made: Optional[Tensor]

    @staticmethod
    def __new__(cls, like: Tensor, device, known, make):
        with _tensor.shadow():
            like = torch.empty_like(like)  # dense
        self = Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device)
        self._known, self._make, self._made = known, make, None
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})

    def __repr__(self, **_):
        return f"LazyGradient({list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def _ordinary(self) -> Tensor:
        return self.materialize()

    def _any_nan(self) -> Tensor:
        """Returns whether a resulting gradient has a NaN: anomaly detection asks this of each gradient."""
        found = [g.isnan().any() for known in self._known.values() for gs in known for g in gs if g is not None]
        return torch.stack(found).any() if found else torch.zeros((), dtype=torch.bool, device=self.device)

    def materialize(self) -> Tensor:
        """Computes the values."""
        if self._made is None:
            with _autograd_again():
                made = self._make().detach()
                with _tensor.shadow():
                    like = torch.empty_strided(self.shape, self.stride(), device="meta")
                self._made = _tensor.laid_out(made, like)
                _warnings.warn_made(self._made, "gradients of logits")
        return self._made


@contextlib.contextmanager
def _autograd_again():
    """Enables recording of gradients, also below autograd, where operations on a LazyGradient run."""
    keys = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        keys = keys - torch._C.DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), keys), torch.enable_grad():
        yield


def _numbers(value):
    if isinstance(value, LazyGradient):
        return value.materialize()
    if isinstance(value, (list, tuple)):
        return type(value)(_numbers(v) for v in value)
    if isinstance(value, dict):
        return {k: _numbers(v) for k, v in value.items()}
    return value


@_warnings.names_operation
def _dispatch(func, args, kwargs):
    if func is aten.add.Tensor and not kwargs and len(args) == 2 and all(isinstance(a, LazyGradient) for a in args):
        handed = args[0].shape == args[1].shape and args[0].dtype == args[1].dtype  # two uses of one value
    else:
        node = torch._C._current_autograd_node()
        name = node.name().partition("Backward")[0] if node is not None else None
        handed = func in _NODES.get(name, ())
        if handed and func in (aten.mul.Tensor, aten.div.Tensor):
            handed = isinstance(args[0], LazyGradient) and (not isinstance(args[1], Tensor) or args[1].dim() == 0)
        if handed and func in (aten.cat.default, aten.stack.default):
            handed = all(isinstance(t, LazyGradient) or not t.any() for t in args[0])
    if not handed:
        if func is aten.isnan.default and torch.is_anomaly_check_nan_enabled():
            return args[0]._any_nan().expand(args[0].shape)
        return func(*_numbers(args), **_numbers(kwargs))
    return _handed(func, args, kwargs)


def _handed(func, args, kwargs) -> LazyGradient:
    found: list[LazyGradient] = []

    def meta(value):
        if isinstance(value, LazyGradient):
            found.append(value)
        if isinstance(value, (LazyGradient, LazyLogits)):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, Tensor):
            return value.to("meta") if value.dim() or value.device.type != "cpu" else value
        return type(value)(meta(v) for v in value) if isinstance(value, (list, tuple)) else value

    metas, options = meta(args), {k: v for k, v in kwargs.items()}
    if "device" in options:
        options["device"] = torch.device("meta")
    if func in (aten.index_put.default, aten._index_put_impl.default):
        like = metas[0]
    else:
        like = func(*metas, **options)
    known: dict[HeadCall, list] = {}
    if func is not aten.new_zeros.default:
        for gradient in found:
            for head, gradients in gradient._known.items():
                known.setdefault(head, []).extend(gradients)
    device = found[0].device

    def make():
        return func(*_numbers(args), **_numbers(kwargs))

    return LazyGradient(like, device, known, make)


def refuse_spread_derivatives(spread: bool) -> None:
    """Raises in a backward that is itself differentiated."""
    if spread and torch.is_grad_enabled():
        raise NotImplementedError("lazy_head: second derivatives of a head whose vocabulary is on several ranks")


class Head(torch.autograd.Function):
    """A call of the head as an autograd function: (hidden, weight, bias, call) -> lazy logits."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, head):
        ctx.head = head
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight)
        with _tensor.shadow():
            like = torch.empty(head.shape, dtype=head.dtype, device="meta")
        return _tensor.promise(_tensor.Form.of(head), like, hidden.device)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        if gradient is None:
            return None, None, None, None
        refuse_spread_derivatives(ctx.head.spread)
        need = ctx.needs_input_grad
        if isinstance(gradient, LazyGradient) and ctx.head in gradient._known:
            return (*_total(gradient._known[ctx.head]), None)
        if isinstance(gradient, LazyGradient):
            gradient = gradient.materialize()
        vocab = gradient.shape[-1]
        d_hidden = (gradient @ whole(weight).to(gradient.dtype)).to(hidden.dtype) if need[0] else None
        d_weight = d_bias = None
        rows = gradient.reshape(-1, vocab)
        if need[1]:
            d_weight = rows.t() @ hidden.reshape(-1, hidden.shape[-1]).to(gradient.dtype)
            d_weight = mean_gradient(d_weight.to(weight.dtype), weight)
        if need[2]:
            d_bias = mean_gradient(rows.sum(0).to(ctx.head.bias.dtype), ctx.head.bias)
        return d_hidden, d_weight, d_bias, None


def _total(gradients: list):
    """Sums several (hidden, weight, bias)."""
    first, *more = gradients
    if not more:
        return first
    return tuple(None if g is None else sum((m[k] for m in more), g) for k, g in enumerate(first))
