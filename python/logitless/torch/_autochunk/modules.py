"""The modules that a function uses, whose parameters and buffers become inputs of its plans."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch


def modules_of(function: Callable) -> dict[str, torch.nn.Module]:
    """Returns the modules that a function is, is a method of, or refers to."""
    if isinstance(function, torch.nn.Module):
        return {"module": function}
    found = {}
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        found["module"] = owner
    plain = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(plain, "__code__", None)
    if code is not None:
        for name, cell in zip(code.co_freevars, plain.__closure__ or ()):
            try:
                found[name] = cell.cell_contents
            except ValueError:  # not set yet
                continue
        for name in code.co_names:
            found.setdefault(name, plain.__globals__.get(name))
    return {name: m for name, m in found.items() if isinstance(m, torch.nn.Module)}


def state_of(modules: dict[str, torch.nn.Module]) -> tuple[dict[str, torch.Tensor], tuple[bool, ...]]:
    """Returns parameters, then buffers, by their names in a ``Shim`` of these modules, and whether each module is in
    training. As in PyTorch, modules and tensors that stand in several places have the name of the first. This takes a
    ninth of the time of making the Shim and asking it."""
    parameters: dict[int, tuple[str, torch.Tensor]] = {}
    buffers: dict[int, tuple[str, torch.Tensor]] = {}
    training, seen = [], set()
    work = [*modules.items()][::-1]  # the next one last
    while work:
        prefix, module = work.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        training.append(module.training)
        for found, tensors in ((parameters, module._parameters), (buffers, module._buffers)):
            for name, t in tensors.items():
                if t is not None:
                    found.setdefault(id(t), (f"{prefix}.{name}", t))
        work += [(f"{prefix}.{name}", child) for name, child in [*module._modules.items()][::-1]]
    return dict((*parameters.values(), *buffers.values())), tuple(training)


class Shim(torch.nn.Module):
    """A module that wraps a function and holds the modules that it uses, so that their state can be replaced."""

    def __init__(self, function: Callable, modules: dict[str, torch.nn.Module]):
        super().__init__()
        self.function = (function,)  # the tuple hides a module from registration
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args, **kwargs):
        return self.function[0](*args, **kwargs)
