"""The chunked function, for any framework: its options, when its gradients are computed, and its reports."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

from logitless._autochunk.notices import warn
from logitless._autochunk.options import EXECUTORS, Limits, Unsupported, checked_limits
from logitless._autochunk.plan import Compiled, format_bytes
from logitless._autochunk.price import NEAR, beside, weight
from logitless._autochunk.reads import Read, changed


P = ParamSpec("P")
R = TypeVar("R")

_KEPT = 256  # plans of a function, least recently used evicted
_VARIANTS = 64  # plans of one key, which differ only in the variables that were read
_MANY = 8  # plans of one key beyond which a warning names the variable that changes


class _Tracing(threading.local):
    depth = 0
    running = False  # a function inside of the traced one has unsupported="run"


_tracing = _Tracing()


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Marks that a chunked function is being traced: chunked functions that it calls are traced as part of it."""
    _tracing.depth += 1
    _tracing.running = _tracing.running and _tracing.depth > 1
    try:
        yield
    finally:
        _tracing.depth -= 1


def is_tracing() -> bool:
    return _tracing.depth > 0


class Kept:
    """A cache of plans, least recently used evicted. The key holds everything that a trace depends on, except variables
    that it read, which are compared at lookup. Users of a plan hold a reference: an evicted plan stays valid for
    backward passes that wait for it."""

    def __init__(self):
        self._made: OrderedDict[tuple, list[tuple[list[Read], Any]]] = OrderedDict()
        self._lock = threading.Lock()
        self._warned = False

    def __len__(self) -> int:
        return len(self._made)

    def get(self, key: tuple):
        with self._lock:
            plans = self._made.get(key, ())
            for index in reversed(range(len(plans))):
                reads, plan = plans[index]
                if changed(reads) is None:
                    plans.append(plans.pop(index))
                    self._made.move_to_end(key)
                    return plan
            return None

    def keep(self, key: tuple, plan, reads: list[Read]) -> None:
        """Stores a plan. reads: the variables that were read to make it."""
        with self._lock:
            plans = self._made.setdefault(key, [])
            different = changed(plans[-1][0]) if plans else None
            plans.append((reads, plan))
            del plans[:-_VARIANTS]
            self._made.move_to_end(key)
            while len(self._made) > _KEPT:
                self._made.popitem(last=False)
            often = len(plans) > _MANY and different is not None and not self._warned
            self._warned = self._warned or often
        if often:
            warn(
                f"autochunk: a function was compiled {len(plans)} times, since {different.title} changes between its calls; "
                "pass what changes as a tensor among the arguments"
            )


class ChunkedFunction(Generic[P, R]):
    """The base class of each framework's ``AutoChunked``, with ``explain`` and ``source``."""

    executors: tuple[str, ...] = EXECUTORS  # the executors that the option accepts
    register_dataclass = ""  # the framework's function

    def __init__(self, function: Callable[P, R], limits: Limits, gradients: str, unsupported: str):
        self.limits = limits
        self.gradients = gradients
        self.unsupported = unsupported
        self.last = None  # the last plan that ran, or the reason why there is none
        self._function = function
        self._made = Kept()  # plans, or the reason why there is none

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        raise NotImplementedError

    def __reduce__(self):
        """Copies and pickles hold the function and the options, and recompile when they are called. An object that is
        found under its own qualified name in a module, such as a decorated function, is pickled as that name."""
        found = sys.modules.get(getattr(self, "__module__", ""))
        name = getattr(self, "__qualname__", "")
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self:
            return name
        return type(self), (self._function, self.limits, self.gradients, self.unsupported)

    def _inside(self, args: tuple, kwargs: dict) -> Any:
        """Calls the function as part of another that is being traced, whose options hold."""
        _tracing.running = _tracing.running or self.unsupported == "run"
        return self._function(*args, **kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Reports which values were chunked and along which dimension, which were not and why, and the memory before
        and after. With arguments, it compiles the call without running it. Without arguments, it reports on the last
        call."""
        plan = self._described("explain", args, kwargs)
        return plan if isinstance(plan, str) else plan.describe()

    def source(self, *args: Any, **kwargs: Any) -> str:
        """Returns the generated Python, or the program in the form of docs/reference/ir.md where the library runs it. Arguments
        as in ``explain``."""
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
        """Returns the plan of a call with these arguments, or the reason why there is none."""
        raise NotImplementedError

    def _known(self, key: tuple, expected: str):
        """Returns the cached plan of a key. expected: the arguments that need not be hashable, such as "arrays", for
        the error."""
        try:
            return self._made.get(key)
        except TypeError as error:
            raise TypeError(f"autochunk: arguments must be {expected} or hashable values; {error}{self._advice(key)}") from error

    def _advice(self, key: Any) -> str:
        """Returns advice where the key of arguments has a dataclass that the framework does not know."""
        work = [key]
        while work:
            value = work.pop()
            if isinstance(value, tuple):
                work += value
            elif isinstance(value, type) and dataclasses.is_dataclass(value):
                return f": {self.register_dataclass}({value.__name__}) makes its fields arguments"
        return ""

    def refused(self, error: Unsupported, stacklevel: int) -> str:
        """Applies the option ``unsupported``: raises the error, or warns and returns the reason. stacklevel: the
        caller's."""
        if self.unsupported == "error" and _tracing.running:
            raise Unsupported(f"{error} (the options of the outermost chunked function hold, unsupported='error')") from error
        if self.unsupported == "error":
            raise error
        warnings.warn(f"the function runs unchunked: {error}", stacklevel=stacklevel + 1)
        return f"runs unchunked: {error}"


def make(kind: type[ChunkedFunction], fn, memory_budget, chunks, gradients, strict, unsupported, executor):
    """Returns ``fn`` as a chunked function of the framework's kind, or a decorator if it is None."""
    limits = checked_limits(memory_budget, chunks, gradients, strict, unsupported, executor, kind.executors)

    def chunked(function: Callable) -> ChunkedFunction:
        if not callable(function):
            raise TypeError(f"fn: expected a callable, got {function!r}")
        return kind(function, limits, gradients, unsupported)

    return chunked if fn is None else chunked(fn)


def check_constants(
    outputs: Sequence, leaves: Callable[[Any], Sequence], traced: Callable[[Any], bool], expected: str
) -> None:
    """Checks that outputs that are no tensors hold no tensors of the trace. leaves: of a tree. traced: whether a leaf is
    such a tensor. expected: the outputs that are known, for the error."""
    for output in outputs:
        held = list(output) if isinstance(output, (set, frozenset)) else dict(getattr(output, "__dict__", {}))
        if isinstance(output, types.GeneratorType) or any(map(traced, leaves(held))):
            raise Unsupported(
                f"autochunk: the function returns a {type(output).__name__}, whose contents are no outputs; expected {expected}"
            )


def put(values: list, positions: Sequence[int], given: Sequence) -> list:
    """Returns a copy of the values with the given ones at these positions."""
    full = list(values)
    for position, value in zip(positions, given):
        full[position] = value
    return full


def choose_executor(plan: Callable[[bool], Any], why: str, declined: Callable[[Any], str] = lambda plan: ""):
    """Returns a plan by the executor that is chosen if the caller leaves it open: the library, else generated code.

    plan: makes the plan, by the library if True. why: the reason why the library cannot run on the device, or "".
    declined: the reason against a plan of the library, or "". Generated code is also chosen if the library does not
    support the function, or misses a budget that it meets. Where both miss the budget, memory and predicted time are
    balanced.
    """
    made = None
    if not why:
        try:
            made = plan(True)
        except (Unsupported, ValueError) as error:  # an error of the function itself is raised by the other plan too
            why = str(error)
    if made is not None and (why := declined(made)):
        made = None
    if made is not None and made.over == 0:
        return made
    other = plan(False)
    if made is not None and other.over > 0 and _weight(made.programs) <= _weight(other.programs):
        return made
    if made is not None:
        time = total_seconds(other.programs) / max(total_seconds(made.programs), 1e-9)
        faster = f", and is predicted to be {time:.1f} times as fast" if time > NEAR else ""
        why = f"that would take {format_bytes(made.over)} more than the budget{faster}"
        for mine, its in zip(other.programs, made.programs):
            mine.price = beside(mine.seconds, mine.price, its.seconds, its.price)
    other.not_native = why
    return other


def most_over(limits: Limits, parts: Sequence[Compiled]) -> int:
    """Returns the bytes over the budget of a plan's programs."""
    return max(made.over(limits.budget) for made in parts)


def total_seconds(parts: Sequence[Compiled]) -> float:
    """Returns the predicted time of a plan's programs."""
    return sum(made.seconds for made in parts)


def _weight(parts: Sequence[Compiled]) -> float:
    """Orders plans over a budget by memory and predicted time, the less the better."""
    return weight(max(made.after for made in parts), total_seconds(parts))


def in_one_pass(gradients: str, shapes: Sequence[Sequence[int]], half: bool) -> bool:
    """Returns whether gradients are computed together with the outputs. shapes: of the differentiable outputs. half:
    whether any value is fp16. Loss scaling keeps fp16 gradients from underflowing, so they need the upstream gradient
    while they are computed."""
    scalar = len(shapes) == 1 and math.prod(shapes[0]) == 1
    if gradients == "forward" and shapes and not scalar:
        listed = ", ".join(str(list(shape)) for shape in shapes)
        raise ValueError(
            "autochunk: gradients='forward' needs one differentiable output of one element, got "
            f"{listed}; use 'backward'"
        )
    return scalar and (gradients == "forward" or (gradients == "auto" and not half))


def warn_missed(limits: Limits, parts: Sequence[Compiled]) -> None:
    """Warns of a budget that is not met, with ``strict`` an error elsewhere, and of one that costs much time. parts: the
    programs of a new plan."""
    for made in parts:
        if made.over(limits.budget):
            warn(f"autochunk: {made.missed(limits.budget)}. It runs as it is; strict=True makes this an error")
            return
    for made in parts:
        if limits.budget > 0 and made.price.is_slow:
            warn(f"autochunk: {made.name} meets memory_budget {format_bytes(limits.budget)}, and is {made.slower()}")
            return


def describe(
    forward: Compiled,
    backward: Compiled | None,
    joint: bool,
    alone: str,
    limits: Limits,
    eager: int | None = None,
    not_native: str = "",
    kept: int = 0,
) -> str:
    """Describes a plan. alone: the reason why outputs have no gradients, if so. eager: bytes that the eager function
    takes beyond inputs and results, with its gradients, if known. not_native: the reason for generated code, if the
    executor was chosen. kept: bytes that live from forward to backward beside inputs and outputs."""
    if joint:
        how = "outputs and gradients in one pass; backward multiplies the gradients by the upstream gradient of the loss"
    elif backward is not None:
        how = "outputs now, gradients in backward, which computes what it needs of the forward again"
        if kept > 0:
            how += f", except for {format_bytes(kept)} of matrix products, which are kept"
    else:
        how = f"outputs alone: {alone}"
    if limits.native:
        how += "; run by the library"
    programs = [made for made in (forward, backward) if made is not None]
    if eager is not None:
        took = kept + max(made.after for made in programs)
        saved = f", {100 * (1 - took / eager):.1f} % less" if took < eager else ""
        how += f"\nthe function itself takes {format_bytes(eager)} beyond inputs and results, this {format_bytes(took)}{saved}"
    parts = [how] + [made.describe(limits.budget) for made in programs]
    if not_native:
        parts.append(f"  not by the library: {not_native}")
    return "\n".join(parts) + "\n"
