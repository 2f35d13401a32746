"""Names of a program's inputs, derived from a function's signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable

_RESERVED = ("cotangent", "constant", "out")  # names of a program's other parameters and results


def leaf_names(function: Callable, args: tuple, kwargs: dict, endings: Callable[[object], list[str]]) -> list[str]:
    """Returns a name for each leaf of the arguments, in order; keywords in the caller's order. endings: returns the
    name suffixes of an argument's leaves, "" for an argument that is a leaf itself."""
    try:
        known = [p.name for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_POSITIONAL]
    except (TypeError, ValueError):
        known = []
    names = []
    for i, value in enumerate(args):
        name = known[i] if i < len(known) else f"argument{i}"
        names += [name + ending for ending in endings(value)]
    for name, value in kwargs.items():
        names += [name + ending for ending in endings(value)]
    return names


def numbered(count: int) -> list[str]:
    return [""] if count == 1 else [f"_{i}" for i in range(count)]


def unique(names: list[str]) -> list[str]:
    taken: set[str] = set()
    for i, name in enumerate(names):
        k = 1
        while names[i] in taken or names[i].startswith(_RESERVED):
            names[i], k = f"{name}_{k}" if k > 1 or name in taken else f"in_{name}", k + 1
        taken.add(names[i])
    return names
