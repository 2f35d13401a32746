"""What a chunked function is in any framework: its options, where its gradients are computed, what it tells."""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

from logitless._autochunk.options import EXECUTORS, Limits, Unsupported, checked_limits
from logitless._autochunk.plan import Compiled


P = ParamSpec("P")
R = TypeVar("R")

_KEPT = 256  # plans of a function, the ones used last


class _Tracing(threading.local):
    depth = 0


_tracing = _Tracing()


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """While a chunked function is traced: chunked functions that it calls are traced with it."""
    _tracing.depth += 1
    try:
        yield
    finally:
        _tracing.depth -= 1


def is_tracing() -> bool:
    return _tracing.depth > 0


class Kept:
    """Plans by all that a trace depends on, the ones used last. What uses a plan holds it: one that is let go is made
    again for the next call, and backward passes that wait for it have it still."""

    def __init__(self):
        self._made: OrderedDict[tuple, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._made)

    def get(self, key: tuple):
        with self._lock:
            found = self._made.get(key)
            if found is not None:
                self._made.move_to_end(key)
            return found

    def keep(self, key: tuple, plan) -> None:
        with self._lock:
            self._made[key] = plan
            self._made.move_to_end(key)
            while len(self._made) > _KEPT:
                self._made.popitem(last=False)


class ChunkedFunction(Generic[P, R]):
    """What a framework's ``AutoChunked`` begins with: ``explain``, ``source`` and what they speak of."""

    executors: tuple[str, ...] = EXECUTORS  # that may be asked for

    def __init__(self, function: Callable[P, R], limits: Limits, gradients: str, unsupported: str):
        self.limits = limits
        self.gradients = gradients
        self.unsupported = unsupported
        self.last = None  # what ran: a plan, or why there is none
        self._function = function
        self._made = Kept()  # plans, or why there is none

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        raise NotImplementedError

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """What was chunked, along what, what was not and why, and the memory before and after: of a call with these
        arguments, which is compiled but not run, or without arguments of what ran last."""
        plan = self._described("explain", args, kwargs)
        return plan if isinstance(plan, str) else plan.describe()

    def source(self, *args: Any, **kwargs: Any) -> str:
        """The Python that runs, or the program as docs/ir.md has it where the library runs it, of the same."""
        plan = self._described("source", args, kwargs)
        if isinstance(plan, str):
            raise RuntimeError(f"source: there is none, since the function runs unchunked: {plan}")
        return plan.source()

    def _described(self, what: str, args, kwargs):
        found = self._planned(args, kwargs) if args or kwargs else self.last
        if found is None:
            raise RuntimeError(f"{what}: the function has not been called; call it first, or give arguments")
        return found

    def _planned(self, args: tuple, kwargs: dict):
        """The plan of a call with these arguments, or why there is none."""
        raise NotImplementedError

    def _known(self, key: tuple, expected: str):
        """What was made for the key. expected: the arguments that need not be hashable, as in "arrays"."""
        try:
            return self._made.get(key)
        except TypeError as error:
            raise TypeError(f"autochunk: arguments must be {expected} or hashable values; {error}") from error

    def refused(self, error: Unsupported, stacklevel: int) -> str:
        """What ``unsupported`` asks for: the error, or a warning and why there is no plan. stacklevel: the caller's."""
        if self.unsupported == "error":
            raise error
        warnings.warn(f"the function runs unchunked: {error}", stacklevel=stacklevel + 1)
        return f"runs unchunked: {error}"


def make(kind: type[ChunkedFunction], fn, memory_budget, chunks, gradients, strict, unsupported, executor):
    """``fn`` as a chunked function of the framework's kind, or a decorator where it is None."""
    limits = checked_limits(memory_budget, chunks, gradients, strict, unsupported, executor, kind.executors)

    def chunked(function: Callable) -> ChunkedFunction:
        if not callable(function):
            raise TypeError(f"fn: expected a callable, got {function!r}")
        return kind(function, limits, gradients, unsupported)

    return chunked if fn is None else chunked(fn)


def put(values: list, places: Sequence[int], given: Sequence) -> list:
    """The values with the given ones at their places."""
    full = list(values)
    for place, value in zip(places, given):
        full[place] = value
    return full


def in_one_pass(gradients: str, shapes: Sequence[Sequence[int]], half: bool) -> bool:
    """Whether gradients are computed with the outputs. shapes: of the differentiable outputs. half: whether anything is
    fp16: loss scaling keeps such gradients from vanishing, they need the tangent while they are computed."""
    scalar = len(shapes) == 1 and math.prod(shapes[0]) == 1
    if gradients == "forward" and shapes and not scalar:
        listed = ", ".join(str(list(shape)) for shape in shapes)
        raise ValueError(
            "autochunk: gradients='forward' needs one differentiable output of one element, got "
            f"{listed}; use 'backward'"
        )
    return scalar and (gradients == "forward" or (gradients == "auto" and not half))


def describe(forward: Compiled, backward: Compiled | None, joint: bool, alone: str, limits: Limits) -> str:
    """alone: why there are outputs and no gradients, where it is so."""
    if joint:
        how = "outputs and gradients in one pass; backward multiplies the gradients by the tangent of the loss"
    elif backward is not None:
        how = "outputs now, gradients in backward, which computes what it needs of the forward again"
    else:
        how = f"outputs alone: {alone}"
    if limits.native:
        how += "; run by the library"
    parts = [how] + [made.describe(limits.budget) for made in (forward, backward) if made is not None]
    return "\n".join(parts) + "\n"
