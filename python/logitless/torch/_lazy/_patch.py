"""Changing a model's head for one whose logits are lazy, and back; and following it where it is replaced later."""

from __future__ import annotations

import sys
import weakref
from typing import Optional

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..far_field import FarFieldHead
from . import _warnings
from ._linear import LazyLinear, head_of, is_lazy, lazy_class, lazy_linear, linears_in, linears_of, make_lazy, make_plain

__all__ = ["LazyLinear", "lazy_head", "lazy_linear", "unpatch"]


def _convertible(linears: list[nn.Module]) -> bool:
    return bool(linears) and all(is_lazy(m) or lazy_class(type(m)) is not None for m in linears)


def _called(model: nn.Module) -> bool:
    """Returns whether its head has been called, or is gone."""
    try:
        return any(m.__dict__.get("_lazy_called") for m in linears_of(model))
    except ValueError:
        return True


# --- A head that the model does not call.


def _warn_uncalled(model: nn.Module, when: str) -> None:
    advice = [_warnings.integration(library) for library in _warnings.INTEGRATIONS if library in sys.modules]
    if not any(_warnings.is_at_work(library) for library in _warnings.INTEGRATIONS):
        _warnings.warn(
            f"{type(model).__name__} did not call its head {when}, so that lazy_head saves nothing where it computes logits "
            "in another way", "".join(advice)
        )


class _Watch:
    """A hook that looks once whether a forward of the model has called its head."""

    def __call__(self, module, args, output):
        if torch.compiler.is_compiling():
            return
        _remove_hooks(module, _Watch)
        _uncalled.discard(module)
        if not _called(module):
            _warn_uncalled(module, "in this forward")


_uncalled: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose heads have not been called yet


def _after_step(optimizer, args, kwargs) -> None:
    """What wraps a model may run its forward without the hooks."""
    if not _uncalled:
        return
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in list(_uncalled):
        called = _called(model)
        if called or any(id(p) in stepped for p in model.parameters()):
            _uncalled.discard(model)
            if not called:
                _warn_uncalled(model, "before this step of its optimizer")


register_optimizer_step_post_hook(_after_step)


# --- A head that is replaced.


_TOLD = "_lazy_told"  # of a module that has replaced a lazy head: a warning has named it


def _follow(model: nn.Module, name: str, new: nn.Module, far_field: Optional[FarFieldHead]) -> None:
    """Makes what has replaced a lazy head lazy, or warns."""
    linears = linears_in(new)
    if _convertible(linears):
        for m in linears:
            make_lazy(m, far_field)
        return
    if _TOLD in new.__dict__:
        return
    new.__dict__[_TOLD] = True
    _warnings.warn(
        f"the lazy head {name} of {type(model).__name__} was replaced by {type(new).__name__}, which computes its logits in "
        "its own way, so that lazy_head saves nothing any more"
    )


def _registered(parent: nn.Module, name: str, new) -> None:
    """Of every module that becomes another's."""
    old = parent._modules.get(name)
    if isinstance(old, LazyLinear) and isinstance(new, nn.Module) and new is not old:
        _follow(parent, name, new, old.__dict__.get("far_field"))


register_module_module_registration_hook(_registered)


class _Follow:
    """A hook that looks before each forward whether the model's head is lazy still: some replace it unseen, by the
    dictionary of a model's modules."""

    def __init__(self, far_field: Optional[FarFieldHead]):
        self.far_field = far_field

    def __call__(self, module, args):
        if torch.compiler.is_compiling():
            return
        try:
            head = head_of(module)
        except ValueError:
            _remove_hooks(module, _Follow)
            _warnings.warn(f"{type(module).__name__} has no head any more, so that lazy_head saves nothing")
            return
        linears = [] if is_lazy(head) else linears_of(module)
        if not is_lazy(head) and not (linears and all(is_lazy(m) for m in linears)):
            _follow(module, "head", head, self.far_field)


def _remove_hooks(model: nn.Module, *kinds: type) -> None:
    for hooks in (model._forward_hooks, model._forward_pre_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, kinds):
                del hooks[key]


def lazy_head(model: nn.Module, far_field: FarFieldHead | float | None = None) -> nn.Module:
    """Makes the model's loss run without logits; returns the model.

    The model's head (``get_output_embeddings()`` or ``lm_head``), an ``nn.Linear`` or an adapter around one, returns
    ``LazyLogits`` from now on: a tensor that behaves as real logits would, but computes them only when something
    other than a loss reads them. Weights, names, signatures and the state dict stay as they are; the model pickles,
    saves and generates. ``unpatch(model)`` restores it. Of a model that has its head elsewhere give the head itself, an
    ``nn.Linear``: ``lazy_head(model.output)``. What replaces the head later (``resize_token_embeddings``, an adapter)
    becomes lazy as well, and a LazyHeadWarning says what cannot.

    far_field: an error, or a FarFieldHead: in training a cross entropy (mean or sum, of words) of the logits is a step of
    it, ``head.far_field`` of the head from then on. All else that reads the logits, evaluation and losses without
    gradients are exact. Its state is no part of the model's state dict; keep ``head.far_field.state_dict()`` beside it.

    Raises TypeError when the head has no ``nn.Linear`` that computes as ``nn.Linear`` does (quantised, say),
    ValueError when the model has no head. Warns with LazyHeadWarning when the first forward, or the first step of an
    optimizer of its parameters, comes without a call of the head.
    """
    linears = linears_of(model)
    if not _convertible(linears):
        found = type(linears[0] if linears else head_of(model)).__name__
        raise TypeError(f"model: expected a head of class torch.nn.Linear, got {found}")
    if isinstance(far_field, (int, float)) and not isinstance(far_field, bool):
        far_field = FarFieldHead(far_field)
    if far_field is not None and not isinstance(far_field, FarFieldHead):
        raise TypeError(f"far_field: expected an error in (0, 1), a FarFieldHead or None, got {far_field!r}")
    known = all(is_lazy(m) for m in linears)
    for m in linears:
        make_lazy(m, far_field)
    if model is not head_of(model) and (not known or far_field is not None):
        _remove_hooks(model, _Follow)
        model.register_forward_pre_hook(_Follow(linears[0].__dict__.get("far_field")))
    if not known:
        _remove_hooks(model, _Watch)
        model.register_forward_hook(_Watch())
        _uncalled.add(model)
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Undoes ``lazy_head``; a model without a lazy head stays as it is. Returns the model."""
    for m in linears_of(model):
        make_plain(m)
    _remove_hooks(model, _Follow, _Watch)
    _uncalled.discard(model)
    return model
