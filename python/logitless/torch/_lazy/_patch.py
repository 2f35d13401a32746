"""Changing a model's head for one whose logits are lazy, and back."""

from __future__ import annotations

import threading
import warnings

import torch
from torch import Tensor, nn

from .._distributed import _is_dtensor, local
from ..far_field import FarFieldHead
from . import _warnings
from ._call import HeadCall, compute_dtype, refusal
from ._gradient import Head
from ._parallel import local_states, put_aside, put_back
from ._tensor import shadow
from ._traced import traced_logits
from ._warnings import LazyHeadWarning


_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # since PyTorch 2.7


class _Thread(threading.local):
    shards = None  # the weight of the head being called, before FSDP2 gathered it


_thread = _Thread()


def lazy_linear(hidden: Tensor, weight: Tensor, bias=None, *, module=None, shards=None, far=None, same=False) -> Tensor:
    """``F.linear(hidden, weight, bias)``, as LazyLogits where they can be promised: floating tensors of a CPU or a GPU,
    plain, or with weights that are DTensors."""
    if torch.compiler.is_compiling():
        return _linear(hidden, weight, bias)
    why = refusal(hidden, weight, bias)
    if why is not None:
        made = _linear(hidden, weight, bias)
        if why:
            _warnings.warn_made(made, by=why)
        return made
    compute = compute_dtype(hidden)
    like = _like(hidden, weight, bias, compute)
    flat = like._base is not None  # of two dimensions, and what is returned a view
    rows = hidden.reshape(-1, hidden.shape[-1]) if flat else hidden
    logits = Head.apply(rows, weight, bias, HeadCall(rows, weight, bias, compute, module, shards, far, same))
    return logits.view(like.shape) if flat else logits


def _linear(hidden: Tensor, weight: Tensor, bias) -> Tensor:
    """Real logits. DTensor weights beside plain hidden states are gathered, and get the mean of the ranks' gradients."""
    if _is_dtensor(weight) and not _is_dtensor(hidden):
        hidden, weight, _, bias = local(hidden, weight, None, bias)
    return nn.functional.linear(hidden, weight, bias)


def _like(hidden: Tensor, weight: Tensor, bias, compute) -> Tensor:
    """What ``F.linear`` returns, as a meta tensor."""
    with shadow(), torch.inference_mode(False), torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
        metas = [
            None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=compute or t.dtype, device="meta")
            for t in (hidden, weight, bias)
        ]
        return nn.functional.linear(metas[0].requires_grad_(), *metas[1:])


class LazyLinear(nn.Linear):
    """A linear head whose logits are lazy. Made of an ``nn.Linear`` by changing its class, and back."""

    def __call__(self, *args, **kwargs):
        if type(self.weight) is nn.Parameter:
            return super().__call__(*args, **kwargs)
        before, _thread.shards = _thread.shards, self.weight if hasattr(self.weight, "full_tensor") else None
        try:
            return super().__call__(*args, **kwargs)
        finally:
            _thread.shards = before

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return nn.functional.linear(input, self.weight, self.bias)
        return self._lazily(input)

    @torch.jit.unused
    def _lazily(self, input: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        input, same = local_states(self, input)
        if _is_dtensor(weight) and not torch.is_autocast_enabled(input.device.type):
            # FSDP's MixedPrecisionPolicy casts what it gathers, which this is not.
            weight, bias = weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
        if torch.compiler.is_compiling():
            if torch.compiler.is_dynamo_compiling() and not _is_exporting() and not _is_dtensor(weight):
                return traced_logits(input, weight, bias, self._far())
            return _linear(input, weight, bias)
        self.__dict__["_lazy_called"] = True
        return lazy_linear(input, weight, bias, module=self, shards=_thread.shards, far=self._far(), same=same)

    def _far(self):
        return self.__dict__.get("far_field") if self.training else None


_made: dict[type, type] = {nn.Linear: LazyLinear}  # by a head's class the lazy one


def _lazy_class(of: type) -> type | None:
    """None for a class that computes its logits in its own way, such as from quantised weights."""
    if of not in _made and issubclass(of, nn.Linear) and of.forward is nn.Linear.forward:
        _made[of] = type(f"Lazy{of.__name__}", (LazyLinear, of), {"__module__": of.__module__})
    return _made.get(of)


def _is_lazy(module: nn.Module) -> bool:
    return isinstance(module, LazyLinear)


def _head_of(model: nn.Module) -> nn.Module:
    if isinstance(model, nn.Linear):
        return model
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if head is None:
        head = getattr(model, "lm_head", None)
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"model: expected a language model with get_output_embeddings() or lm_head, or its head, got {type(model).__name__}"
        )
    return head


def _linears_of(model: nn.Module) -> list[nn.Module]:
    """The head itself; or of an adapter around it the layers whose outputs are logits, the one wrapped and the last
    of each adapter; or, where the model calls an embedding its head, the layer that shares its weight or alone has
    its shape."""
    head = _head_of(model)
    if isinstance(head, nn.Linear):
        return [head]
    linears = [m for m in head.modules() if isinstance(m, nn.Linear)]
    if isinstance(head, nn.Embedding):
        alike = [m for m in model.modules() if isinstance(m, nn.Linear) and m.weight.shape == head.weight.shape]
        linears = [m for m in alike if m.weight is head.weight] or (alike if len(alike) == 1 else [])
    words = max((m.out_features for m in linears), default=0)
    return [m for m in linears if m.out_features == words]


class _Watch:
    """A hook that looks once whether a forward of the model has called its head."""

    def __call__(self, module, args, output):
        if torch.compiler.is_compiling():
            return
        _unwatch(module)
        try:
            linears = _linears_of(module)
        except ValueError:
            return
        if not any(m.__dict__.get("_lazy_called") for m in linears):
            warnings.warn(
                f"logitless: {type(module).__name__} did not call its head in this forward, so that lazy_head saves nothing "
                "where it computes logits in another way",
                LazyHeadWarning,
                stacklevel=4,
            )


def _unwatch(model: nn.Module) -> None:
    for key, hook in list(model._forward_hooks.items()):
        if isinstance(hook, _Watch):
            del model._forward_hooks[key]


def lazy_head(model: nn.Module, far_field: FarFieldHead | float | None = None) -> nn.Module:
    """Makes the model's loss run without logits; returns the model.

    The model's head (``get_output_embeddings()`` or ``lm_head``), an ``nn.Linear`` or an adapter around one, returns
    ``LazyLogits`` from now on: a tensor that behaves as real logits would, but computes them only when something
    other than a loss reads them. Weights, names, signatures and the state dict stay as they are; the model pickles,
    saves and generates. ``unpatch(model)`` restores it. Of a model that has its head elsewhere give the head itself, an
    ``nn.Linear``: ``lazy_head(model.output)``.

    far_field: an error, or a FarFieldHead: in training a cross entropy (mean or sum, of words) of the logits is a step of
    it, ``head.far_field`` of the head from then on. All else that reads the logits, evaluation and losses without
    gradients are exact. Its state is no part of the model's state dict; keep ``head.far_field.state_dict()`` beside it.

    Raises TypeError when the head has no ``nn.Linear`` that computes as ``nn.Linear`` does (quantised, say),
    ValueError when the model has no head. Warns with LazyHeadWarning when the first forward does not call the head.
    """
    linears = _linears_of(model)
    if not linears or any(not _is_lazy(m) and _lazy_class(type(m)) is None for m in linears):
        found = type(linears[0] if linears else _head_of(model)).__name__
        raise TypeError(f"model: expected a head of class torch.nn.Linear, got {found}")
    if isinstance(far_field, (int, float)) and not isinstance(far_field, bool):
        far_field = FarFieldHead(far_field)
    if far_field is not None and not isinstance(far_field, FarFieldHead):
        raise TypeError(f"far_field: expected an error in (0, 1), a FarFieldHead or None, got {far_field!r}")
    if far_field is not None:
        for m in linears:
            m.__dict__["far_field"] = far_field  # no submodule: the state dict stays as it is
    if all(_is_lazy(m) for m in linears):
        return model
    for m in linears:
        if not _is_lazy(m):
            m.__class__ = _lazy_class(type(m))
            put_aside(m)
    _unwatch(model)
    model.register_forward_hook(_Watch())
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Undoes ``lazy_head``; a model without a lazy head stays as it is. Returns the model."""
    for m in _linears_of(model):
        if _is_lazy(m):
            m.__class__ = next((plain for plain, lazy in _made.items() if lazy is type(m)), nn.Linear)
            m.__dict__.pop("_lazy_called", None)
            m.__dict__.pop("far_field", None)
            put_back(m)
    _unwatch(model)
    return model
