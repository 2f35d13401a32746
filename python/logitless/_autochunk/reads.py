"""Records the variables that a function reads while it is traced, besides its arguments, and detects changes. Variables
are attributes of objects and modules, globals, closed-over variables, and items of dicts and lists."""

from __future__ import annotations

import dis
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_PLAIN = (int, float, bool, str, bytes, complex, type(None), np.generic)
_MOST = 256  # elements of a container or numpy array that are compared one by one
_DEPTH = 5  # levels of attributes of attributes
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_MAKERS = ("logitless", "torch", "jax", "numpy", "namedtuple_", "dataclasses")  # modules that generate code
_missing = object()


def number(value: Any) -> Any:
    """Returns a key of a constant that tells 0.0 from -0.0, and is the same for every NaN."""
    return value if not isinstance(value, (float, np.floating)) or (value == value and value != 0.0) else repr(value)


def _frozen(value: Any) -> Any:
    """Returns a key of a value: numbers and texts compare by value, everything else by identity."""
    if isinstance(value, _PLAIN):
        return type(value), number(value)
    if isinstance(value, np.ndarray) and value.size <= _MOST:
        return np.ndarray, str(value.dtype), value.shape, value.tobytes()
    if type(value) in (tuple, list, set, frozenset) and len(value) <= _MOST:
        return type(value), tuple(v if type(v) is str else _element(v) for v in value)
    if isinstance(value, dict) and len(value) <= _MOST:
        return dict, tuple((k, _element(v)) for k, v in value.items())
    if isinstance(value, types.MethodType):  # each access makes a new object
        return types.MethodType, id(value.__self__), id(value.__func__)
    return id(value)


def _element(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), number(value)
    return tuple(map(_element, value)) if type(value) is tuple and len(value) <= _MOST else id(value)


def _of_dict(owner: dict, name: Any) -> Any:
    return owner.get(name, _missing)


def _of_object(owner: Any, name: str) -> Any:
    return getattr(owner, name, _missing)


def _of_cell(owner: types.CellType, name: str) -> Any:
    try:
        return owner.cell_contents
    except ValueError:
        return _missing


@dataclass
class Read:
    """One variable that was read."""

    get: Callable[[Any, Any], Any]
    owner: Any  # or a weak reference to it
    weak: bool
    name: Any
    value: Any  # the key that _frozen made
    kept: Any  # references that keep compared identities alive, so that no other object gets their addresses
    title: str

    def holds(self) -> bool:
        owner = self.owner() if self.weak else self.owner
        if self.weak and owner is None:
            return True
        value = self.get(owner, self.name)
        return (value is self.kept[0] and isinstance(value, _PLAIN)) or _frozen(value) == self.value


@dataclass
class Reads:
    """Collects the variables that traced Python may read. For each function called, these are the variables, attributes
    and items named in its code.

    skips: whether a file's code is ignored. ignored: whether a value belongs to the tracer. runs: functions that a value
    runs once gradients are traced, when nothing is watched.
    """

    skips: Callable[[str], bool]
    ignored: Callable[[Any], bool] = lambda value: False
    runs: Callable[[Any], Sequence[Any]] = lambda value: ()
    found: dict[tuple, Read] = field(default_factory=dict)
    _codes: dict[types.CodeType, tuple[set, set] | None] = field(default_factory=dict)
    _seen: set = field(default_factory=set)
    _before: Any = None

    def __enter__(self) -> Reads:
        self._before = sys.getprofile()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error) -> None:
        sys.setprofile(self._before)

    def outside(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Calls a function that runs no code to be recorded. Watching it would take several times as long. From Python
        3.12 on, it is watched all the same, since each change of the profile function takes long there."""
        if self._before is not None or sys.version_info >= (3, 12):
            return function(*args, **kwargs)
        sys.setprofile(None)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(self._event)

    def _event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            names = self._known_names(frame.f_code, frame.f_globals)
            if names is not None:
                self._frame(frame, *names)
        if self._before is not None:
            self._before(frame, event, argument)

    def _skips(self, file: str) -> bool:
        library = file.startswith(_LIBRARY) and "site-packages" not in file
        return library or file.startswith(("<frozen", _OWN)) or self.skips(file)

    def _known_names(self, code: types.CodeType, space: dict) -> tuple[set, set] | None:
        names = self._codes.get(code, _missing)
        if names is _missing:
            names = self._codes[code] = self._names(code, space)
        return names

    def _names(self, code: types.CodeType, space: dict) -> tuple[set, set] | None:
        """Returns the names in a function's code, including string constants that may be names, and the names of its
        globals. Returns None for code that is skipped."""
        made = code.co_filename.startswith("<") and str(space.get("__name__")).startswith(_MAKERS)
        if made or self._skips(code.co_filename):
            return None
        names, variables, work = set(), set(), [code]
        while work:
            code = work.pop()
            names.update(code.co_names)
            variables.update(i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
            for constant in code.co_consts:
                if isinstance(constant, str):
                    names.add(constant)
                elif isinstance(constant, types.CodeType):  # a comprehension or a nested function
                    work.append(constant)
        return names, variables

    def _frame(self, frame: types.FrameType, names: set, variables: set) -> None:
        code = frame.f_code
        for name in variables:
            if name in frame.f_globals:
                self._read(_of_dict, frame.f_globals, name, name, names, 0)
        for name in code.co_freevars:
            self._object(frame.f_locals.get(name, _missing), name, names, 0)
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = frame.f_locals.get(name, _missing)
            if not isinstance(value, (dict, list, tuple, set)):
                self._object(value, name, names, 0)

    def function(self, function: Any) -> None:
        """Records the globals and closed-over variables that a function may read whenever it is called."""
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType):
            return
        found = self._known_names(function.__code__, function.__globals__)
        if found is None:
            return
        names, variables = found
        for name in variables:
            if name in function.__globals__:
                self._read(_of_dict, function.__globals__, name, name, names, 0)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self._object(_of_cell(cell, name), name, names, 0)
        self.closure(function)

    def closure(self, function: Any) -> None:
        """Records the closed-over variables of a function, and of functions that it closes over or wraps."""
        work, seen = [function], set()
        while work:
            function = work.pop()
            function = getattr(function, "__func__", function)
            if id(function) in seen:
                continue
            seen.add(id(function))
            work += [w for w in (getattr(function, "__wrapped__", None),) if w is not None]
            if not isinstance(function, types.FunctionType) or self._skips(function.__code__.co_filename):
                continue
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                value = _of_cell(cell, name)
                self._add(_of_cell, cell, name, value, name)
                if callable(value):
                    work.append(value)

    def _read(self, get: Callable, owner: Any, name: Any, title: str, names: set, depth: int) -> None:
        value = get(owner, name)
        if value is not _missing:
            self._add(get, owner, name, value, title)
            self._object(value, title, names, depth)

    def _add(self, get: Callable, owner: Any, name: Any, value: Any, title: str) -> None:
        key = (id(owner), get, name)
        if key in self.found or value is _missing or isinstance(value, types.ModuleType):
            return
        elements = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
        if self.ignored(value) or (len(elements) <= _MOST and any(map(self.ignored, elements))):
            return
        try:
            held, weak = weakref.ref(owner), True
        except TypeError:  # a dict or a cell
            held, weak = owner, False
        self.found[key] = Read(get, held, weak, name, _frozen(value), (value, list(elements)[:_MOST]), title)
        if isinstance(value, (types.FunctionType, types.MethodType)) or hasattr(type(value), "explain"):
            self.closure(value)
        for function in self.runs(value):
            self.function(function)

    def _object(self, value: Any, title: str, names: set, depth: int) -> None:
        """Records the attributes that the code may read of an object."""
        plain = value is _missing or isinstance(value, (*_PLAIN, type, types.FunctionType, types.BuiltinFunctionType))
        if plain or depth == _DEPTH or (id(value), id(names)) in self._seen or self.ignored(value):
            return
        self._seen.add((id(value), id(names)))
        if isinstance(value, types.ModuleType):
            file = getattr(value, "__file__", None) or _OWN
            if self._skips(file):
                return
        if isinstance(value, dict):
            for name in names:
                if name in value:
                    self._read(_of_dict, value, name, f"{title}[{name!r}]", names, depth + 1)
            return
        own = getattr(value, "__dict__", None)
        for name in self._attributes(value, own, names):
            self._read(_of_object, value, name, f"{title}.{name}", names, depth + 1)

    @staticmethod
    def _attributes(value: Any, own: Any, names: set) -> Iterator[str]:
        inside = [own] if isinstance(own, dict) else []
        inside += [own[key] for key in ("_modules",) if isinstance(own, dict) and isinstance(own.get(key), dict)]
        kind = type(value)
        for name in names:
            if any(name in d for d in inside):
                yield name
                continue
            found = next((k.__dict__[name] for k in kind.__mro__ if name in k.__dict__), _missing)
            if isinstance(found, (*_PLAIN, types.MemberDescriptorType)):  # an attribute of the class, or of __slots__
                yield name

    def all(self) -> list[Read]:
        """Returns the reads whose owners outlive the trace and that the function did not change itself."""
        return [read for read in self.found.values() if (not read.weak or read.owner() is not None) and read.holds()]


def changed(reads: Sequence[Read]) -> Read | None:
    """Returns the first read whose value changed, or None."""
    return next((read for read in reads if not read.holds()), None)
