"""Finds tensors of a trace that a function keeps outside of itself: in attributes, globals, closed-over variables, lists
and dicts. They have no values, and a plan would not keep them again."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

_LARGEST = 4096  # entries of a container that is looked at
_DEPTH = 2  # containers within containers that may hold tensors
nothing = object()


class Left(NamedTuple):
    """A tensor of the trace that the function left outside of itself."""

    title: str
    owner: int  # the identity of the object that holds it
    name: Any  # of the attribute or variable, or the key of the item; None: an entry of a list, deque or set
    before: Any  # what was there, or `nothing`
    item: bool  # of a dict


@dataclass
class _State:
    """Holds what an object outside of the function had before it ran."""

    owner: Any
    title: str
    before: dict  # the entries by name, key or position
    only: frozenset[str] | None  # the names that are looked at; None: all
    free: frozenset[str]  # names that are put back without an error

    def shown(self, key: Any) -> str:
        if isinstance(self.owner, types.CellType) or self.only is not None:
            return self.title if self.only is None else str(key)
        if isinstance(self.owner, (dict, list, deque, set)):
            return self.title
        return f"{self.title}.{key}"

    def left(self, key: Any) -> Left:
        before = self.before.get(key, nothing)
        if isinstance(self.owner, types.CellType):
            return Left(self.shown(key), id(self.owner), self.title, before, False)
        if isinstance(self.owner, (list, deque, set)):
            return Left(self.shown(key), id(self.owner), None, before, False)
        item = isinstance(self.owner, dict) and self.only is None
        return Left(self.shown(key), id(self.owner), key, before, item)


def _entries(owner: Any) -> dict | None:
    """Returns the entries of an object, or None where it has none that can be put back."""
    if isinstance(owner, types.CellType):
        try:
            return {"": owner.cell_contents}
        except ValueError:
            return {}
    if isinstance(owner, dict):
        return dict(dict.items(owner))  # a subclass's own methods may make entries
    if isinstance(owner, (list, deque)):
        return dict(enumerate(owner))
    if isinstance(owner, set):
        return {id(v): v for v in owner}
    own = getattr(owner, "__dict__", None)
    return own if isinstance(own, dict) and not isinstance(owner, (type, types.ModuleType)) else None


def _put_back(owner: Any, key: Any, state: _State) -> None:
    before = state.before
    if isinstance(owner, types.CellType):
        if key in before:
            owner.cell_contents = before[key]
        else:
            del owner.cell_contents
    elif isinstance(owner, (list, deque, set)):
        values = list(before.values())
        owner.clear()
        owner.update(values) if isinstance(owner, set) else owner.extend(values)
    else:
        entries = owner if isinstance(owner, dict) else owner.__dict__
        if key in before:
            entries[key] = before[key]
        else:
            entries.pop(key, None)


class Leaks:
    """The objects outside of a function, and what they held before it ran. traced: whether a value is a tensor of the
    trace."""

    def __init__(self, traced: Callable[[Any], bool]):
        self._traced = traced
        self._states: dict[Any, _State] = {}

    def __contains__(self, owner: Any) -> bool:
        return id(owner) in self._states

    def keep(self, owner: Any, title: str, only: frozenset[str] | None = None, free: frozenset[str] = frozenset()) -> None:
        """Notes what an object holds, where it is not known yet."""
        key = id(owner) if only is None else (id(owner), only)
        if key in self._states:
            return
        entries = _entries(owner)
        if entries is None or (only is None and len(entries) > _LARGEST):
            return
        before = dict(entries) if only is None else {k: entries[k] for k in only if k in entries}
        self._states[key] = _State(owner, title, before, only, free)

    def clear(self) -> None:
        self._states.clear()

    def put_back(self) -> list[Left]:
        """Puts back what held tensors of the trace, and returns what they were."""
        found = []
        for state in self._states.values():
            for key in self._changed(state):
                if key not in state.free:
                    found.append(state.left(key))
                _put_back(state.owner, key, state)
        return found

    def _changed(self, state: _State) -> list:
        entries, before = _entries(state.owner) or {}, state.before
        keys = list(entries) if state.only is None else [k for k in state.only if k in entries]
        return [k for k in keys if entries[k] is not before.get(k, nothing) and self._holds(entries[k], _DEPTH)]

    def _holds(self, value: Any, depth: int) -> bool:
        if self._traced(value):
            return True
        if depth == 0 or not isinstance(value, (dict, list, tuple, set, deque)) or len(value) > _LARGEST:
            return False
        return any(self._holds(v, depth - 1) for v in (dict.values(value) if isinstance(value, dict) else value))
