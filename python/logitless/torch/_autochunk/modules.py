"""The modules that a function uses, whose parameters and buffers become inputs of its plans."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch.nn.modules import module as of_all_modules

from logitless._autochunk.options import Unsupported
from logitless._autochunk.reads import Reads

_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
_EVERYWHERE = [getattr(of_all_modules, f"_global{name}") for name in _HOOKS]


class _Same:
    """A key that equals that of the same object alone, which it keeps alive."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self):
        return id(self.value)


def _hooks(tables) -> tuple[_Same, ...]:
    return tuple([_Same(hook) for table in tables for hook in table.values()])


def _called(module: torch.nn.Module) -> tuple:
    """Returns a key of what a call of a module runs, besides its children: whether it is in training, its forward and its
    hooks."""
    own = module.__dict__
    key = module.training, type(module).forward
    if "forward" in own:
        key = *key, _Same(own["forward"])
    if not (own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]):
        return key  # as of nearly all modules
    return *key, *_hooks([own[name] for name in _HOOKS])


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


def state_of(modules: dict[str, torch.nn.Module]) -> tuple[dict[str, torch.Tensor], tuple]:
    """Returns parameters, then buffers, by their names in a ``Shim`` of these modules, and a key of what calls of these
    modules run: hooks and functions may be replaced, and modules may change to training. As in PyTorch, modules and
    tensors that stand in several places have the name of the first. This takes a fraction of the time of making the Shim
    and asking it."""
    parameters: dict[int, tuple[str, torch.Tensor]] = {}
    buffers: dict[int, tuple[str, torch.Tensor]] = {}
    called, seen = [_hooks(_EVERYWHERE)] if modules else [], set()
    work = [*modules.items()][::-1]  # the next one last
    while work:
        prefix, module = work.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        called.append(_called(module))
        for found, tensors in ((parameters, module._parameters), (buffers, module._buffers)):
            for name, t in tensors.items():
                if t is not None:
                    found.setdefault(id(t), (f"{prefix}.{name}", t))
        work += [(f"{prefix}.{name}", child) for name, child in [*module._modules.items()][::-1]]
    return dict((*parameters.values(), *buffers.values())), tuple(called)


class Shim(torch.nn.Module):
    """A module that wraps a function and holds the modules that it uses, so that their state can be replaced."""

    def __init__(self, function: Callable, modules: dict[str, torch.nn.Module]):
        super().__init__()
        self.function = (function,)  # the tuple hides a module from registration
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args, **kwargs):
        before = self._tensors()
        made = self.function[0](*args, **kwargs)
        now = self._tensors()
        assigned = [name for name in now if now[name] is not before.get(name) and now[name] is not None]
        if assigned:
            raise Unsupported(
                f"autochunk: the function assigns {', '.join(assigned)}, which is done once, when it is traced, and not in "
                "each call; expected the new tensor among the results, to be assigned by the caller"
            )
        return made

    def _tensors(self) -> dict[str, torch.Tensor | None]:
        """Returns parameters and buffers by name, as they stand in the modules."""
        found = {}
        for prefix, module in self.named_modules():
            for tensors in (module._parameters, module._buffers):
                found.update((f"{prefix}.{name}", t) for name, t in tensors.items())
        return found


def with_state(modules: dict[str, torch.nn.Module], replaced: dict[str, torch.Tensor], run: Callable):
    """Returns ``run()``, with these tensors in the place of the modules' parameters and buffers."""
    return torch.func.functional_call(Shim(run, modules), replaced, ()) if modules else run()


def keep_attributes(modules: dict[str, torch.nn.Module], reads: Reads) -> None:
    """Notes the attributes of all modules, in which a function may leave tensors of its trace."""
    for holder, root in modules.items():
        for name, module in root.named_modules(prefix=holder):
            reads.leaks.keep(module, name, free=_set_before_calls(module))
            reads.covered.add(id(module))  # by state_of


def _set_before_calls(module: torch.nn.Module) -> frozenset[str]:
    """Returns the attributes that PyTorch's own code sets before each call of a module, as the old weight_norm does."""
    hooks = [h for h in module._forward_pre_hooks.values() if type(h).__module__.startswith("torch.nn.utils.")]
    flat = ["_flat_weights"] if isinstance(module, torch.nn.RNNBase) else []
    return frozenset((*(getattr(h, "name", "") for h in hooks), *flat))
