"""Spares PyTorch's own operations from being watched for the variables that a function reads."""

from __future__ import annotations

import types as python_types

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from logitless._autochunk.reads import Reads

_OPERATIONS = (
    python_types.BuiltinFunctionType,  # torch.add
    python_types.MethodDescriptorType,  # Tensor.add
    python_types.WrapperDescriptorType,  # Tensor.__add__
    python_types.MethodWrapperType,  # Tensor.shape.__get__
)
_FUNCTIONS = ("torch.nn.functional", "torch.functional")  # modules of operations in Python


def _is_operation(func) -> bool:
    """Returns whether a function is an operation of PyTorch, which calls no code but PyTorch's unless it is given some.
    The apply of an autograd.Function is none."""
    if isinstance(func, _OPERATIONS):
        return func.__name__ != "apply"
    return isinstance(func, python_types.FunctionType) and func.__module__ in _FUNCTIONS


def runs(value) -> tuple:
    """Returns the methods of an autograd.Function, given as the class or as its ``apply``."""
    value = getattr(value, "__self__", value)
    if not isinstance(value, type) or not issubclass(value, torch.autograd.Function):
        return ()
    return value.forward, value.setup_context, value.backward


class Watched(TorchFunctionMode):
    """A mode, entered after all others of a trace, in which ``reads`` does not watch PyTorch's operations. Tracing one
    runs hundreds of Python functions of PyTorch."""

    def __init__(self, reads: Reads):
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.__format__ and not isinstance(args[0], FakeTensor):  # its number is known
            with _disable_current_modes():
                return func(*args, **kwargs)
        given = [a for a in (*args, *kwargs.values()) if callable(a) and not isinstance(a, torch.Tensor)]
        for hook in given:
            self.reads.function(hook)
        if given or not _is_operation(func):
            return func(*args, **kwargs)
        return self.reads.outside(func, *args, **kwargs)
