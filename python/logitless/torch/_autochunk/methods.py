"""Decorated methods: each instance has a chunked function of its own, whose plans live as long as the instance."""

from __future__ import annotations

import types
from typing import Any

import torch


@torch.compiler.disable
def bound(chunked: Any, instance: Any) -> Any:
    """Returns a chunked function with the options of ``chunked`` as a method of the instance, which keeps it."""
    if isinstance(instance, type):  # of a classmethod
        return types.MethodType(chunked, instance)
    method = types.MethodType(chunked._function, instance)
    name = f"_autochunk {chunked.__qualname__}"  # no name of a Python attribute
    try:
        space = vars(instance)
    except TypeError:
        kind = type(instance).__name__
        raise TypeError(f"autochunk: a method of {kind}, which has no __dict__; expected one, to keep plans in") from None
    made = space.get(name)
    if made is None or made.bound_from is not chunked or made._function.__self__ is not instance:  # of a shallow copy
        made = space[name] = type(chunked)(method, chunked.limits, chunked.gradients, chunked.unsupported)
        made.bound_from = chunked
    return made
