"""Tells whether a tensor that a traced function left outside of itself is one that its next call would read."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from logitless._autochunk.leaks import Left
from logitless._autochunk.options import Unsupported

_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CONST")
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")
_PLAIN = (int, float, complex, str, bytes, type(None))
_ASKS = {"get", "setdefault", "pop"}  # methods that take a key that may not be there


def set_before_read(codes: Iterable[types.CodeType], name: str) -> bool:
    """Returns whether each function that sets a variable sets it before it reads it, in the order of its code, and one
    does. name: of an attribute, global or closed-over variable, or a key that stands in the code."""
    orders = [order for code in codes if (order := _order(code, name)) and "set" in order]
    return bool(orders) and all(order[0] == "set" for order in orders)


def set_unasked(codes: Iterable[types.CodeType]) -> bool:
    """Returns whether no function that sets items asks whether a key is there, and one sets items."""
    sets = [c for c in codes if any(i.opname == "STORE_SUBSCR" for i in dis.get_instructions(c))]
    return bool(sets) and not any(_asks(code) for code in sets)


def _order(code: types.CodeType, name: str) -> list[str]:
    """Returns what a code does with a name, in order: "set" or "read"."""
    found, steps = [], list(dis.get_instructions(code))
    for step, after in zip(steps, [*steps[1:], None]):
        if step.argval != name:
            continue
        if step.opname in _STORES:
            found.append("set")
        elif step.opname == "LOAD_CONST" and after is not None and after.opname == "STORE_SUBSCR":
            found.append("set")
        elif step.opname.startswith(_LOADS):
            found.append("read")
    return found


def _asks(code: types.CodeType) -> bool:
    return not _ASKS.isdisjoint(code.co_names) or any(i.opname == "CONTAINS_OP" for i in dis.get_instructions(code))


def _only_stays(left: Left, codes: Sequence[types.CodeType]) -> bool:
    """Returns whether a tensor only stays behind: no later call would read it before it sets it again."""
    if left.name is None:  # a list, which grows
        return False
    if left.item and not isinstance(left.before, _PLAIN) and set_unasked(codes):  # `check` looks at a tensor of before
        return True
    return isinstance(left.name, str) and set_before_read(codes, left.name)


@dataclass
class Kept:
    """The tensors that a function left outside of itself without reading them in its next call. They are gone after a
    call, which is said once."""

    titles: dict[str, None] = field(default_factory=dict)
    replaced: dict[str, Any] = field(default_factory=dict)  # what was there, by title
    places: set[tuple[int, Any]] = field(default_factory=set)  # identities of owners, and names

    def add(self, found: Sequence[Left], codes: Sequence[types.CodeType]) -> None:
        """Raises for those that the next call would read. codes: of the functions that ran."""
        self._refuse([left.title for left in found if not _only_stays(left, codes)])
        self.titles.update((left.title, None) for left in found)
        self.places.update((left.owner, left.name) for left in found)
        self.replaced.update((left.title, left.before) for left in found)

    def check(self, captured: Iterable[Any]) -> None:
        """Raises where what was there before is read. captured: the tensors that the plan reads."""
        read = {id(t) for t in captured}
        self._refuse([title for title, before in self.replaced.items() if id(before) in read])

    def _refuse(self, titles: Sequence[str]) -> None:
        if not titles:
            return
        self.titles.clear()
        raise Unsupported(
            f"autochunk: the function keeps a tensor in {', '.join(dict.fromkeys(titles))}, which is done once, when it is "
            "traced, and not in each call; expected it among the results, to be kept by the caller, or, if it is a cache, "
            "one call of the function itself before, which fills it"
        )

    def warning(self) -> str:
        return (
            f"autochunk: what the function keeps in {', '.join(self.titles)} is not there after a call, since Python runs "
            "it only when it is traced; expected it among the results, if it is read elsewhere"
        )
