"""Checks of index ranges before a program runs: the framework raises for an index that the program would read as 0."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logitless._autochunk.bounds import Bounds
    from logitless._autochunk.lower import Value, Writer


class IndexOutside(IndexError, RuntimeError):
    """An index outside of its range. PyTorch raises IndexError or RuntimeError, depending on the operation and the
    device."""


@dataclass(frozen=True)
class Check:
    index: Value
    low: int
    size: int
    dim: int
    asked: str  # the framework's operation
    location: str  # the line of the user's code


@dataclass(frozen=True)
class Checks:
    """A program with two results for each check: the row-major position of the first index that is out of range, if
    there is one, and the index at that position."""

    text: str
    reads: tuple[int, ...]  # its parameters, as positions among those of the checked program
    messages: tuple[tuple[int, int, tuple[int, ...], str], ...]  # low, size, the index's shape, the message

    def raise_for(self, found: Sequence[Any]) -> None:
        """Raises IndexOutside for the first failed check. found: the results, each as a number."""
        for (low, size, shape, text), position, index in zip(self.messages, found[::2], found[1::2]):
            if low <= index < size:
                continue
            at = []
            for s in reversed(shape):
                position, k = divmod(position, s)
                at += [k] if s != 1 else []
            raise IndexOutside(text.format(index=index, at=f" at {at[::-1]}" if at else ""))

    def packed(self) -> str:
        return json.dumps([self.text, self.reads, self.messages])


def unpacked(text: str) -> Checks | None:
    """Returns the checks that ``packed`` wrote, or None for an empty text."""
    if not text:
        return None
    program, reads, messages = json.loads(text)
    return Checks(program, tuple(reads), tuple((low, size, tuple(shape), t) for low, size, shape, t in messages))


def checked(function: Callable, checks: Checks, run: Callable) -> Callable:
    """Wraps a program's function so that ``run`` first makes the checks on its arguments."""

    def call(*given):
        run(*(given[position] for position in checks.reads))
        return function(*given)

    return call


def checks_of(w: Writer, checks: Sequence[Check], parameters: Sequence[tuple[str, str]]) -> Checks | None:
    """Builds the program of the checks, whose statements are appended to the writer's. parameters: name and type of
    each parameter of the checked program. Returns None if there are no checks."""
    results, messages = [], []
    w.hint = "check"
    for check in checks:
        index, count = check.index, math.prod(check.index.shape)
        outside = w.map("logical_not", [w.inside(index, check.size, check.low)], w.dtypes.i8)
        flat = w.reshape(w.cast(outside, w.dtypes.i32), [count])
        position = w.reduce("argmax", flat, [0], dtype=w.dtypes.i64)
        index = w.cast(w.take(w.reshape(index, [count]), position), w.dtypes.i64)
        results += [w.written(position).name, w.written(index).name]
        where = f"{check.location}: " if check.location else ""
        what = f"{where}{check.asked}".replace("{", "{{").replace("}", "}}")
        text = f"autochunk: {what}: index {{index}}{{at}} is out of bounds for dimension {check.dim} with size {check.size}"
        messages.append((check.low, check.size, check.index.shape, text))
    if not results:
        return None
    wanted, body = set(results), []
    for line in reversed(w.lines):
        made, _, rest = line.partition(" = ")
        if wanted.intersection(re.findall(r"%(\w+)", made)):
            wanted.update(re.findall(r"%(\w+)", rest.partition(' @ "')[0]))
            body.append(line)
    reads = [position for position, (name, _) in enumerate(parameters) if name in wanted]
    header = ", ".join(f"%{parameters[position][0]}: {parameters[position][1]}" for position in reads)
    returned = ", ".join(f"check{k}: %{name}" for k, name in enumerate(results))
    text = f"graph checks({header}) {{\n" + "\n".join(body[::-1]) + f"\n  return {returned}\n}}\n"
    return Checks(text, tuple(reads), tuple(messages))


class Indices:
    """The part of a writer that knows the bounds of indices, and the ranges that a framework requires."""

    def range_of(self, v: Value) -> Bounds | None:
        """Returns the smallest and the largest of an integer value, if they are known."""
        return (v.number, v.number) if v.number is not None else self.bounds.get(v.name)

    def known(self, index: Value, size: int, low: int = 0) -> bool:
        """Returns whether an index is within [low, size) for all inputs."""
        found = self.range_of(index)
        return 0 in index.shape or (found is not None and low <= found[0] and found[1] < size)

    def inside(self, index: Value, size: int, low: int = 0) -> Value:
        tests = [("ge", low), ("lt", size)]
        first, last = (self.map(test, [index, self.number(n, index.dtype)], self.dtypes.i8) for test, n in tests)
        return self.map("logical_and", [first, last], self.dtypes.i8)

    def check(self, index: Value, size: int, dim: int, low: int = 0) -> None:
        """Registers a check that an index is within [low, size). The framework raises otherwise, so a run on a CPU
        checks first."""
        if self.device == "cpu" and not self.known(index, size, low):
            self.checks.setdefault((index.name, low, size), Check(index, low, size, dim, self.asked, self.location))

    def filled(self, read: Value, index: Value, dims: Sequence[int], size: int, low: int = 0) -> Value:
        """Replaces what was read at an index out of range by NaN, on devices that do not raise. dims: the index's
        dimensions."""
        if self.device == "cpu" or not self.dtypes.floating(read.dtype) or self.known(index, size, low):
            return read
        inside = self.broadcast_dims(self.inside(index, size, low), read.shape, dims)
        return self.map("select", [inside, read, self.number(math.nan, read.dtype)], read.dtype)

    def _addressed(self, index: Value, size: int, updates: Value | None = None) -> tuple[Value, Value | None]:
        """Returns the index and its updates in a form that the framework's GPU operations accept. An index out of range
        would abort the process's CUDA context, so it becomes 0, with an update of 0."""
        if self.device == "cpu" or self.native or self.known(index, size):
            return index, updates
        inside = self.inside(index, size)
        if updates is not None:
            kept = self.broadcast_dims(inside, updates.shape, list(range(index.rank)))
            updates = self.map("select", [kept, updates, self.number(0, updates.dtype)], updates.dtype)
        return self.map("select", [inside, index, self.number(0, index.dtype)], index.dtype), updates

    def all_checks(self, parameters: Sequence[tuple[str, str]]) -> Checks | None:
        """Returns the program of all checks, or None if there are none. parameters: (name, type) of each."""
        return checks_of(self, list(self.checks.values()), parameters)
