"""Records the variables that a function reads while it is traced, besides its arguments, and detects changes. Variables
are attributes of objects and modules, globals, closed-over variables, and items of dicts and lists."""

from __future__ import annotations

import os
import sys
import sysconfig
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from logitless._autochunk.calls import Calls, NumpyGenerator
from logitless._autochunk.codes import Names, names_of
from logitless._autochunk.leaks import Leaks
from logitless._autochunk.left import Kept
from logitless._autochunk.notices import warn
from logitless._autochunk.options import Unsupported

_PLAIN = (int, float, bool, str, bytes, complex, type(None), np.generic)
_MOST = 256  # elements of a container or numpy array that are compared one by one
_DEPTH = 5  # levels of attributes of attributes, and of containers in containers
_ITEMS = 1024  # containers and objects in containers that are looked at
_LISTS = (tuple, list, set, frozenset, deque)
_DICTS = (dict, types.MappingProxyType)
_ENVIRON = id(type(os.environ).__getitem__.__code__)
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_MAKERS = ("logitless", "torch", "jax", "numpy", "namedtuple_", "dataclasses")  # modules that generate code
_NO_NAMES: set = set()
_STATE = {"_modules", "_parameters", "_buffers"}  # of an nn.Module
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
    if isinstance(value, _LISTS) and len(value) <= _MOST:
        return type(value), tuple(v if type(v) is str else _element(v) for v in value)
    if isinstance(value, _DICTS) and len(pairs := items_of(value)) <= _MOST:
        return dict, tuple((k, _element(v)) for k, v in pairs)
    if isinstance(value, types.MethodType):  # each access makes a new object
        return types.MethodType, id(value.__self__), id(value.__func__)
    return id(value)


def items_of(value: Any) -> Any:
    """Returns the items that a dict holds. A subclass's own methods are not called: they may make entries."""
    if not isinstance(value, dict):
        return value.items()
    return (OrderedDict if isinstance(value, OrderedDict) else dict).items(value)


def _element(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), number(value)
    return tuple(map(_element, value)) if type(value) is tuple and len(value) <= _MOST else id(value)


def _of_dict(owner: dict, name: Any) -> Any:
    return owner.get(name, _missing)


def _of_object(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, _missing)
    except Exception:  # of the object's own code
        return _missing


def _of_item(owner: Any, key: Any) -> Any:
    if isinstance(owner, dict):
        return dict.get(owner, key, _missing)
    try:
        return owner[key]
    except Exception:  # of a subclass's own code
        return _missing


def _of_environment(owner: Any, name: str) -> Any:
    return owner.get(name, _missing)


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
    calls: Calls = field(default_factory=Calls)
    found: dict[tuple, Read] = field(default_factory=dict)
    _codes: dict[types.CodeType, Names | None] = field(default_factory=dict)
    _seen: set = field(default_factory=set)
    _sets: list[set] = field(default_factory=list)  # sets of names, whose identities _seen has
    _outer: set = field(default_factory=set)  # keys of found variables that are outside of the function
    covered: set[int] = field(default_factory=set)  # identities of modules whose state and children are known otherwise
    _items: int = 0
    _before: Any = None
    _refusal: Unsupported | None = None
    _imports: dict[str, set] = field(default_factory=dict)  # modules that functions import, and names of their code

    def __post_init__(self):
        self.leaks, self.kept = Leaks(self.ignored), Kept()
        self.calls = replace(self.calls, library=_LIBRARY)

    def __enter__(self) -> Reads:
        self._refusal = None
        self._numpy = NumpyGenerator()
        self._before = sys.getprofile()
        sys.setprofile(self._event)
        return self

    def __exit__(self, kind, error, trace) -> None:
        sys.setprofile(self._before)
        left = self.leaks.put_back()
        names = set().union(*(found.all for found in self._codes.values() if found is not None))
        drawn = self._numpy.check(names)
        if self._refusal is not None and error is not self._refusal:  # the function caught it
            raise self._refusal
        if drawn is not None:
            raise Unsupported(drawn)
        if error is None:
            self.kept.add(left, [code for code, found in self._codes.items() if found is not None])

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
        try:
            if event == "call":
                self.calls.check(frame)
            elif event == "c_call":
                self.calls.check_native(frame, argument)
        except Unsupported as error:
            self._refusal = error
            raise
        if event == "call":
            names = self._known_names(frame.f_code, frame.f_globals)
            if names is not None:
                self._frame(frame, names)
            elif id(frame.f_code) == _ENVIRON and frame.f_locals.get("self") is os.environ:
                key = frame.f_locals["key"]
                self._add(_of_environment, os.environ, key, _of_environment(os.environ, key), f"os.environ[{key!r}]", True)
        if self._before is not None:
            self._before(frame, event, argument)

    def _skips(self, file: str) -> bool:
        library = file.startswith(_LIBRARY) and "site-packages" not in file
        return library or file.startswith(("<frozen", _OWN)) or self.skips(file)

    def _known_names(self, code: types.CodeType, space: dict) -> Names | None:
        names = self._codes.get(code, _missing)
        if names is _missing:
            names = self._codes[code] = self._names(code, space)
        return names

    def _names(self, code: types.CodeType, space: dict) -> Names | None:
        """Returns the names in a function's code. Returns None for code that is skipped."""
        made = code.co_filename.startswith("<") and str(space.get("__name__")).startswith(_MAKERS)
        return None if made or self._skips(code.co_filename) else names_of(code)

    def _frame(self, frame: types.FrameType, names: Names) -> None:
        code = frame.f_code
        self._globals(frame.f_globals, names)
        for name in code.co_freevars:
            self._object(frame.f_locals.get(name, _missing), name, names.all, 0)
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = frame.f_locals.get(name, _missing)
            if not isinstance(value, (dict, list, tuple, set)):
                self._object(value, name, names.all, 0)
        if code.co_argcount > 0:
            method = getattr(type(frame.f_locals.get(code.co_varnames[0])), code.co_name, None)
            if isinstance(method, types.FunctionType) and method.__code__ is code:
                self._defaults(method, names.all)

    def _globals(self, space: dict, names: Names) -> None:
        for name in names.variables:
            if name in space:
                self._read(_of_dict, space, name, name, names.all, 0, True)
        if names.stored:
            self.leaks.keep(space, str(space.get("__name__")), only=names.stored)
        for level, module in names.imports:
            package = str(space.get("__package__") or "").rsplit(".", max(level - 1, 0))[0] if level else ""
            self._imports.setdefault(".".join(filter(None, (package, module))), set()).update(names.all)

    def _defaults(self, function: types.FunctionType, names: set, outside: bool = True) -> None:
        """Records the defaults of a function's arguments, and what those hold that may change."""
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                self._read(_of_object, function, name, f"{function.__name__}.{name}", names, 0, outside)

    def function(self, function: Any, outside: bool = False) -> None:
        """Records the globals and closed-over variables that a function may read whenever it is called. outside: whether
        it outlives the traced function."""
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType):
            return
        found = self._known_names(function.__code__, function.__globals__)
        if found is None:
            return
        self._globals(function.__globals__, found)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self._object(_of_cell(cell, name), name, found.all, 0, outside)
        self.closure(function, outside)

    def closure(self, function: Any, outside: bool = True) -> None:
        """Records the closed-over variables and defaults of a function, and of functions that it closes over, wraps or
        is a partial call of. outside: whether they outlive the traced function."""
        work, seen = [function], set()
        while work:
            function = work.pop()
            function = getattr(function, "__func__", function)
            if id(function) in seen:
                continue
            seen.add(id(function))
            work += [w for w in (getattr(function, "__wrapped__", None),) if w is not None]
            if isinstance(function, partial):
                self._partial(function, outside)
                work.append(function.func)
            if not isinstance(function, types.FunctionType) or self._skips(function.__code__.co_filename):
                continue
            names = self._known_names(function.__code__, function.__globals__)
            self._defaults(function, names.all if names else _NO_NAMES, outside)
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                value = _of_cell(cell, name)
                self._add(_of_cell, cell, name, value, name, outside=outside)
                if outside:
                    self.leaks.keep(cell, name)
                self._object(value, name, names.all if names else _NO_NAMES, 0, outside)
                if callable(value):
                    work.append(value)

    def _partial(self, function: partial, outside: bool) -> None:
        inner = function.func
        while isinstance(inner, partial):
            inner = inner.func
        inner = getattr(inner, "__func__", inner)
        found = self._known_names(inner.__code__, inner.__globals__) if isinstance(inner, types.FunctionType) else None
        names = {*function.keywords, *(found.all if found else ())}
        self._sets.append(names)
        for name in ("args", "keywords"):
            self._read(_of_object, function, name, f"partial.{name}", names, 0, outside)

    def _read(
        self, get: Callable, owner: Any, name: Any, title: str, names: set, depth: int, outside: bool = False
    ) -> None:
        value = get(owner, name)
        if value is not _missing:
            self._add(get, owner, name, value, title, outside=outside)
            self._object(value, title, names, depth, outside)

    def _add(
        self, get: Callable, owner: Any, name: Any, value: Any, title: str, absent: bool = False, outside: bool = False
    ) -> None:
        """Records one variable. absent: one that does not exist yet, too. outside: whether it outlives the function."""
        key = (id(owner), get, name)
        if key in self.found and (not outside or key in self._outer):
            return
        if (value is _missing and not absent) or isinstance(value, types.ModuleType):
            return
        elements = [v for _, v in items_of(value)] if isinstance(value, _DICTS) else value if isinstance(value, _LISTS) else ()
        if self.ignored(value) or (len(elements) <= _MOST and any(map(self.ignored, elements))):
            return
        try:
            held, weak = weakref.ref(owner), True
        except TypeError:  # a dict or a cell
            held, weak = owner, False
        if outside:
            self._outer.add(key)
        if key not in self.found:
            self.found[key] = Read(get, held, weak, name, _frozen(value), (value, list(elements)[:_MOST]), title)
        if isinstance(value, (types.FunctionType, types.MethodType, partial)) or hasattr(type(value), "explain"):
            self.closure(value, outside)
        for function in self.runs(value):
            self.function(function, outside)

    def _object(self, value: Any, title: str, names: set, depth: int, outside: bool = False) -> None:
        """Records what the code may read of an object: attributes of these names, and items. outside: whether the object
        outlives the function."""
        plain = value is _missing or isinstance(value, (*_PLAIN, type, types.FunctionType, types.BuiltinFunctionType))
        if plain or depth == _DEPTH or self.ignored(value):
            return
        outside = outside or value in self.leaks
        if outside:
            self.leaks.keep(value, title)
        if (id(value), id(names), outside) in self._seen:
            return
        self._seen.add((id(value), id(names), outside))
        if isinstance(value, types.ModuleType):
            file = getattr(value, "__file__", None) or _OWN
            if self._skips(file):
                return
        if isinstance(value, (*_DICTS, *_LISTS)):
            self._contents(value, title, names, depth, outside)
        own = getattr(value, "__dict__", None)
        for name in self._attributes(value, own, names):
            self._read(_of_object, value, name, f"{title}.{name}", names, depth + 1, outside)

    def _contents(self, value: Any, title: str, names: set, depth: int, outside: bool) -> None:
        """Records the items of a container that the code names, and all where it names none. Numbers and texts are seen
        by who records the container."""
        if not isinstance(value, _DICTS) and len(value) > _MOST:
            return
        items = list(items_of(value)) if isinstance(value, _DICTS) else list(enumerate(value))
        if isinstance(value, _DICTS):
            named = [(k, v) for k, v in items if isinstance(k, str) and k in names]
            items = named or (items if len(items) <= _MOST else [])
        for key, item in items:
            if isinstance(item, (*_PLAIN, type)) or isinstance(value, (set, frozenset)):
                if isinstance(value, _DICTS) and key in names:
                    self._add(_of_item, value, key, item, f"{title}[{key!r}]")
                continue
            self._items += (id(value), _of_item, key) not in self.found
            if self._items > _ITEMS:
                return
            self._read(_of_item, value, key, f"{title}[{key!r}]", names, depth + 1, outside)

    def _attributes(self, value: Any, own: Any, names: set) -> Iterator[str]:
        names = names - _STATE if id(value) in self.covered else names
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

    def all(self, planned: bool) -> list[Read]:
        """Returns the reads whose owners outlive the trace and that the function did not change itself. planned: whether
        the function has a plan, and its warnings are of use."""
        for module, names in self._imports.items():
            self._object(sys.modules.get(module, _missing), module, names, 0)
        places = self.kept.places  # the function sets them before it reads them
        reads = [read for (owner, _, name), read in self.found.items() if (owner, name) not in places]
        if planned and self.kept.titles:
            warn(self.kept.warning())
        if planned and self._items > _ITEMS:
            warn(f"autochunk: changes of what the function reads are looked at in {_ITEMS} items of containers, and it "
                 "reads more; what may change belongs into tensors among the arguments")
        self.leaks.clear()  # nothing is held; a later trace, for a report, looks again
        self.found, self._seen, self._outer, self.covered, self._items = {}, set(), set(), set(), 0
        return [read for read in reads if (not read.weak or read.owner() is not None) and read.holds()]


def changed(reads: Sequence[Read]) -> Read | None:
    """Returns the first read whose value changed, or None."""
    return next((read for read in reads if not read.holds()), None)
