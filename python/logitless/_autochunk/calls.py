"""Refuses calls of a traced function that a plan would not repeat, such as of a random generator outside of it. They are
refused before they run, so that nothing outside has changed."""

from __future__ import annotations

import inspect
import random
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from logitless._autochunk.locations import INSTALLED, chosen, shown
from logitless._autochunk.options import Unsupported

_ADVICE = "is drawn once, when the function is traced, and not in each call; expected the number among the arguments"
_SEED = (
    "sets the random generator of the caller, once, when the function is traced; expected it before the call, and numbers "
    "drawn there among the arguments"
)


@dataclass(frozen=True)
class Refused:
    """A call that is refused. when: whether the call of this frame is."""

    name: str
    why: str
    when: Callable[[types.FrameType], bool] = lambda frame: True


def by_code(functions: Mapping[Callable, Refused]) -> dict[int, Refused]:
    """Returns the refused calls of Python functions, by the identity of their code."""
    codes = ((getattr(inspect.unwrap(function), "__code__", None), refused) for function, refused in functions.items())
    return {id(code): refused for code, refused in codes if code is not None}


def _of_global_random(frame: types.FrameType) -> bool:
    return frame.f_locals.get("self") is random._inst


_SEEDING = ("seed", "setstate")
_RANDOM_CODES = {
    id(function.__code__): Refused(f"random.{name}", _SEED if name in _SEEDING else _ADVICE, _of_global_random)
    for name, function in vars(random.Random).items()
    if isinstance(function, types.FunctionType) and not name.startswith("__") and name != "getstate"  # which reads
}
_RANDOM_NATIVE = Refused("random", _ADVICE), frozenset(("random", "getrandbits"))

_GENERATED = (*INSTALLED, "<@")  # files of installed packages, and of code that they write


@dataclass
class Calls:
    """The refused calls of a framework.

    codes: Python functions. methods: the name of a native object, and why, by its identity, and the methods that are
    refused, where it is not all of them. frameworks: folders whose code may make such calls. wrappers: files and folders
    of functions that call others for the user's code.
    """

    codes: Mapping[int, Refused] = field(default_factory=dict)
    methods: Mapping[int, tuple[Refused, frozenset[str]]] = field(default_factory=dict)
    frameworks: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    library: str = ""  # the folder of Python's own modules

    def __post_init__(self):
        self.codes = {**_RANDOM_CODES, **self.codes}
        self.methods = {id(random._inst): _RANDOM_NATIVE, **self.methods}

    def check(self, frame: types.FrameType) -> None:
        """Raises for a refused call of a Python function. frame: its own."""
        found = self.codes.get(id(frame.f_code))
        if found is not None and found.when(frame):
            self._refuse(found, found.name, frame.f_back)

    def check_native(self, frame: types.FrameType, function: Any) -> None:
        """Raises for a refused call of a native function. frame: the caller's."""
        found = self.methods.get(id(getattr(function, "__self__", None)))
        if found is not None:
            refused, names = found
            if not names or function.__name__ in names:
                self._refuse(refused, f"{refused.name}.{function.__name__}", frame)

    def _refuse(self, refused: Refused, name: str, frame: types.FrameType | None) -> None:
        frames = list(_outwards(frame))
        caller = next((file for file, _ in frames if not (file.startswith(self.wrappers) or self._of_python(file))), "")
        if caller.startswith(self.frameworks):  # such as a checkpoint, which restores the state
            return
        if name == "random.getrandbits" and caller.startswith(_GENERATED):  # a type checker's choice of what it looks at
            return
        found = chosen(frames, self.frameworks)
        line = f"{shown(*found)}: " if found else ""
        raise Unsupported(f"autochunk: {line}{name} {refused.why}")

    def _of_python(self, file: str) -> bool:
        return file.startswith(self.library) and "site-packages" not in file


def _outwards(frame: types.FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


class NumpyGenerator:
    """Refuses a function that draws from numpy's global generator, and puts the generator back. Its calls are not seen,
    so its state is compared. Another thread may draw meanwhile: names of the traced code decide whose numbers they
    are: only code with the name "random" is taken to draw them."""

    def __init__(self):
        self._before = np.random.get_state(legacy=False)

    def check(self, names: set[str]) -> str | None:
        """Returns why the function is refused, or None. names: those in the code that was traced."""
        now = np.random.get_state(legacy=False)
        same = now.keys() == self._before.keys() and all(_same(now[k], self._before[k]) for k in now)
        if same or names.isdisjoint(_NUMPY_NAMES):
            return None
        np.random.set_state(self._before)
        return f"autochunk: a number of np.random {_ADVICE}"


_NUMPY_NAMES = {"random", "numpy.random"}  # the latter of an import within the function


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else a == b
