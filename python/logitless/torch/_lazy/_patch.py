"""Makes a model's head lazy, and back; and follows it if it is replaced later."""

from __future__ import annotations

import sys
import weakref
from typing import Any, Optional

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import quantized
from ..._options import share
from ..far_field import FarFieldHead
from . import _warnings
from ._linear import (
    LazyLinear, head_of, is_lazy, lazy_class, lazy_linear, linears_in, linears_of, make_lazy, make_plain, options_of,
)

__all__ = ["LazyLinear", "lazy_head", "lazy_linear", "unpatch"]


def _convertible(linears: list[nn.Module]) -> bool:
    return bool(linears) and all(is_lazy(m) or lazy_class(type(m)) is not None for m in linears)


def _called(model: nn.Module) -> bool:
    """Returns whether the model's head has been called, or no longer exists."""
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
    """A hook that checks, after one forward of the model, whether it called the head."""

    def __call__(self, module, args, output):
        if torch.compiler.is_compiling():
            return
        _remove_hooks(module, _Watch)
        _uncalled.discard(module)
        if not _called(module):
            _warn_uncalled(module, "in this forward")


_uncalled: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose heads have not been called yet


def _after_step(optimizer, args, kwargs) -> None:
    """Checks heads after an optimizer step, since a wrapper may run a model's forward without its hooks."""
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


_WARNED = "_lazy_warned"  # marks a module that replaced a lazy head, once a warning has named it


def _follow(model: nn.Module, name: str, new: nn.Module, options: dict[str, Any]) -> None:
    """Makes a replaced lazy head's successor lazy, or warns. options: of the lazy head."""
    linears = linears_in(new)
    if _convertible(linears):
        for m in linears:
            make_lazy(m, **options)
        return
    if _WARNED in new.__dict__:
        return
    new.__dict__[_WARNED] = True
    _warnings.warn(
        f"the lazy head {name} of {type(model).__name__} was replaced by {type(new).__name__}, which computes its logits in "
        "its own way, so that lazy_head saves nothing any more"
    )


def _registered(parent: nn.Module, name: str, new) -> None:
    """Handles the registration of every submodule."""
    old = parent._modules.get(name)
    if isinstance(old, LazyLinear) and isinstance(new, nn.Module) and new is not old:
        _follow(parent, name, new, options_of(old))


register_module_module_registration_hook(_registered)


class _Follow:
    """A hook that checks before each forward whether the model's head is still lazy. Some code replaces it unnoticed,
    through the dict of modules."""

    def __init__(self, options: dict[str, Any]):
        self.options = options  # of the lazy head

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
            _follow(module, "head", head, self.options)


def _remove_hooks(model: nn.Module, *kinds: type) -> None:
    for hooks in (model._forward_hooks, model._forward_pre_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, kinds):
                del hooks[key]


def lazy_head(
    model: nn.Module, far_field: FarFieldHead | float | None = None, *, expected_ignored: Optional[float] = None
) -> nn.Module:
    """Makes the model's loss run without logits; returns the model.

    The model's head (``get_output_embeddings()`` or ``lm_head``) is an ``nn.Linear``, or an adapter around one. From
    now on it returns ``LazyLogits``: a tensor that behaves like real logits, but computes them only if something other
    than a loss reads them. Weights, names, signatures and the state dict do not change; the model pickles, saves and
    generates. ``unpatch(model)`` restores it. For a model with its head elsewhere, pass the head itself, an
    ``nn.Linear``: ``lazy_head(model.output)``. A later replacement of the head (``resize_token_embeddings``, an
    adapter) becomes lazy as well, or a LazyHeadWarning names it.

    far_field: an error, or a FarFieldHead. In training, a cross entropy of the logits (mean or sum, with token ids) is
        then one step of it. The head's attribute ``head.far_field`` holds it. Other readers of the logits are exact, as
        are evaluation and losses without gradients. Its state is not in the model's state dict: save
        ``head.far_field.state_dict()`` too.

    expected_ignored: the share of the tokens that a cross entropy of the logits is expected to ignore, in [0, 1]: a hint
        for GPUs, as in ``linear_cross_entropy``. None: as before, at first 0. The head's attribute
        ``head.expected_ignored`` holds it. It must be 0 beside a far_field and for a head whose vocabulary is sharded.

    A frozen quantised head (torchao's weights in an ``nn.Linear``, the layers of bitsandbytes) is dequantised a block of
    the vocabulary at a time. Its hidden states are not quantised.

    Raises TypeError if the head has no ``nn.Linear`` with its standard forward, nor a layer of bitsandbytes. Raises
    ValueError if the model has no head. Warns with LazyHeadWarning if the first forward, or the first optimizer step of
    its parameters, happens without a call of the head.
    """
    linears = linears_of(model)
    if not _convertible(linears):
        found = type(linears[0] if linears else head_of(model)).__name__
        raise TypeError(f"model: expected a head of class torch.nn.Linear, got {found}")
    if isinstance(far_field, (int, float)) and not isinstance(far_field, bool):
        far_field = FarFieldHead(far_field)
    if far_field is not None and not isinstance(far_field, FarFieldHead):
        raise TypeError(f"far_field: expected an error in (0, 1), a FarFieldHead or None, got {far_field!r}")
    options = {} if far_field is None else {"far_field": far_field}
    if expected_ignored is not None:
        options["expected_ignored"] = share("expected_ignored", expected_ignored)
    both = [{**options_of(m), **options} for m in linears]
    for given in both:
        if given.get("far_field") is not None and given.get("expected_ignored"):
            raise ValueError(f"expected_ignored: expected 0 beside a far_field, got {given['expected_ignored']}")
    if far_field is not None and any(quantized.of(m.weight, torch.float32, m) is not None for m in linears):
        raise NotImplementedError("far_field: a quantised head has none; expected None")
    known = all(is_lazy(m) for m in linears)
    for m in linears:
        make_lazy(m, **options)
    if model is not head_of(model) and (not known or options):
        _remove_hooks(model, _Follow)
        model.register_forward_pre_hook(_Follow(options_of(linears[0])))
    if not known:
        _remove_hooks(model, _Watch)
        model.register_forward_hook(_Watch())
        _uncalled.add(model)
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Undoes ``lazy_head``; a model without a lazy head is not changed. Returns the model."""
    for m in linears_of(model):
        make_plain(m)
    _remove_hooks(model, _Follow, _Watch)
    _uncalled.discard(model)
    return model
