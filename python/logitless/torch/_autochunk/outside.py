"""Calls of PyTorch that a chunked function must not make, since they act outside of it."""

from __future__ import annotations

import contextlib
import importlib
import os
import types
from collections.abc import Callable, Iterator

import torch
from torch._C._functorch import is_functorch_wrapped_tensor as _is_wrapped
from torch._subclasses.fake_tensor import FakeTensor

from logitless._autochunk.calls import Calls, Refused, by_code

_TORCH = os.path.dirname(torch.__file__) + os.sep

_GRADIENTS = (
    "puts gradients into tensors outside of the function, once, when it is traced; expected torch.autograd.grad, whose "
    "gradients are returned, or backward() of what the function returns"
)
_STEP = "changes parameters outside of the function, once, when it is traced; expected it after the call"
_SEED = (
    "sets the random generator of the caller, once, when the function is traced; expected it before the call, as "
    "numbers are drawn in each call from the state that the generator has then"
)
_BRANCH = "has no form in a tensor program; expected torch.where of both results"
_LOOP = "has no form in a tensor program; expected a Python loop of a fixed number of rounds"
_ITEM = "needs the values of a tensor; only shapes are known when a function is traced"


def _has_format(frame: types.FrameType) -> bool:
    """Returns whether the number of a tensor of a trace is formatted: without a format it is shown as a tensor."""
    of_trace = isinstance(tensor := frame.f_locals.get("self"), FakeTensor) or _is_wrapped(tensor)
    return of_trace and bool(frame.f_locals.get("format_spec"))


_SEEDING = {
    "torch.manual_seed": torch.manual_seed,
    "torch.seed": torch.seed,
    "torch.set_rng_state": torch.set_rng_state,
    "torch.random.fork_rng": torch.random.fork_rng,
    "torch.cuda.manual_seed": torch.cuda.manual_seed,
    "torch.cuda.manual_seed_all": torch.cuda.manual_seed_all,
    "torch.cuda.set_rng_state": torch.cuda.set_rng_state,
}
_LOOPS = {"while_loop": _LOOP, "scan": _LOOP, "associative_scan": _LOOP, "map": _LOOP, "cond": _BRANCH}


def _loops() -> Iterator[tuple[Callable, Refused]]:
    """Yields the control flow that this version of PyTorch has."""
    for name, why in _LOOPS.items():
        with contextlib.suppress(ImportError, AttributeError):
            module = importlib.import_module(f"torch._higher_order_ops.{name}")
            yield getattr(module, name), Refused(f"torch.{name}" if hasattr(torch, name) else name, why)


_REFUSED = {
    torch.Tensor.backward: Refused("Tensor.backward", _GRADIENTS),
    torch.autograd.backward: Refused("torch.autograd.backward", _GRADIENTS),
    torch.optim.Optimizer.zero_grad: Refused("Optimizer.zero_grad", _STEP),
    torch.Tensor.__format__: Refused("the text of a number", _ITEM, _has_format),
    **{function: Refused(name, _SEED) for name, function in _SEEDING.items()},
    **dict(_loops()),
}
# One function wraps the step of every optimizer.
_WRAPPERS = [c for c in torch.optim.Optimizer.profile_hook_step.__code__.co_consts if isinstance(c, types.CodeType)]
_STEPS = {id(code): Refused("Optimizer.step", _STEP) for code in _WRAPPERS}
_GENERATOR = Refused("torch.default_generator", _SEED), frozenset(("manual_seed", "seed", "set_state", "set_offset"))

CALLS = Calls(
    {**by_code(_REFUSED), **_STEPS},
    {id(torch.default_generator): _GENERATOR},
    (_TORCH,),
    (os.path.join(_TORCH, "_compile.py"), os.path.join(_TORCH, "_dynamo")),
)
