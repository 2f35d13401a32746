"""Parses the text of a compiled program: exactly the form that the compiler prints, one statement a line."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from logitless._autochunk.dtypes import Dtypes


@dataclass(frozen=True)
class Type:
    dtype: Any  # the framework's
    shape: tuple[str, ...]  # numbers, or in a loop expressions of its symbol: "2 * c0"


@dataclass
class Loop:
    symbol: str  # the size of a chunk, in the body's types
    extent: int
    chunk: int
    first: str  # the index of the chunk's first element
    inputs: list[Slot]
    outputs: list[Slot]
    body: list[Node]


@dataclass(frozen=True)
class Slot:
    """A value that enters or leaves a loop. kind: whole, slice, stack, sum, max or lse."""

    name: str  # name in the body
    kind: str
    outer: str = ""  # name outside
    axis: int = 0
    factor: int = 1


@dataclass
class Node:
    results: list[str]
    op: str
    operands: list[str]
    attributes: dict[str, str]
    type: Type | None = None
    loop: Loop | None = None
    types: list[Type | None] = field(default_factory=list)  # types of several results, if inferred
    location: str = ""  # "loss.py:12", if the traced program has it

    def numbers(self, attribute: str) -> list[int]:
        text = self.attributes.get(attribute, "")
        return [int(x) for x in text.split(",") if x.strip()]

    def pair(self, attribute: str) -> tuple[list[int], list[int]]:
        """Parses a pair of lists, such as dims(0, 1; 2)."""
        a, b = self.attributes.get(attribute, ";").split(";")
        return [int(x) for x in a.split(",") if x.strip()], [int(x) for x in b.split(",") if x.strip()]


@dataclass
class Graph:
    parameters: list[tuple[str, Type]]
    nodes: list[Node]
    results: list[tuple[str, str]] = field(default_factory=list)  # name, value


def parse_type(text: str, dtypes: Dtypes) -> Type:
    dtype, shape = re.fullmatch(r"(\w+)\[(.*)\]", text.strip()).groups()
    return Type(getattr(dtypes, dtype), tuple(s.strip() for s in shape.split(",") if s.strip()))


_STATEMENT = re.compile(r"(%[\w.]+(?:, %[\w.]+)*) = (\w+)(.*)")
_LOOP = re.compile(r"\s*(\w+) extent\((\d+)\) chunk\((\d+)\) \((.*)\) \{")
_INPUT = re.compile(r"%([\w.]+) = (\w+) %([\w.]+)(?: axis\((\d+)\) factor\((\d+)\))?")
_LOCATION = re.compile(r' @ "([^"]*)"$')
_OUTPUT = re.compile(r"\w+: (\w+) %([\w.]+)(?: axis\((\d+)\) factor\((\d+)\))?")


def parse(text: str, dtypes: Dtypes) -> Graph:
    lines = (line.strip() for line in text.splitlines())
    lines = iter(line for line in lines if line and not line.startswith("#"))  # comments mark loops that share a body
    head = next(lines)
    listed = head[head.index("(") + 1 : head.rindex(")")]
    parameters = [(n, parse_type(t, dtypes)) for n, t in re.findall(r"%([\w.]+): (\w+\[[^\]]*\])", listed)]
    nodes, last = _statements(lines, dtypes, dict(parameters))
    return Graph(parameters, nodes, re.findall(r"([\w.]+): %([\w.]+)", last))


def _of_sort(node: Node, operand: Type, dtypes: Dtypes) -> list[Type]:
    """Returns the types of a sort's results: values and indices."""
    [axis] = node.numbers("axis")
    shape = tuple(node.attributes["count"] if d == axis else s for d, s in enumerate(operand.shape))
    return [Type(operand.dtype, shape), Type(dtypes.i64, shape)]


def entering(slot: Slot, symbol: str, known: dict[str, Type]) -> Type | None:
    """Returns the type of a loop's input in the body."""
    type_ = known.get(slot.outer)
    if slot.kind == "whole" or type_ is None:
        return type_
    size = symbol if slot.factor == 1 else f"{slot.factor} * {symbol}"
    return Type(type_.dtype, tuple(size if d == slot.axis else s for d, s in enumerate(type_.shape)))


def _leaving(slot: Slot, loop: Loop, known: dict[str, Type]) -> Type | None:
    type_ = known.get(slot.name)
    if slot.kind != "stack" or type_ is None:
        return type_
    size = str(loop.extent * slot.factor)
    return Type(type_.dtype, tuple(size if d == slot.axis else s for d, s in enumerate(type_.shape)))


def _statements(lines, dtypes: Dtypes, known: dict[str, Type | None]) -> tuple[list[Node], str]:
    """Parses statements up to the return. known: types of values, extended by those of the statements."""
    nodes = []
    for line in lines:
        if line.startswith("return "):
            next(lines)  # the closing brace
            return nodes, line.removeprefix("return ")
        location = _LOCATION.search(line)
        results, op, rest = _STATEMENT.fullmatch(line[: location.start()] if location else line).groups()
        node = Node(re.findall(r"%([\w.]+)", results), op, [], {}, location=location.group(1) if location else "")
        if op == "loop":
            symbol, extent, chunk, inputs = _LOOP.fullmatch(rest).groups()
            first = re.match(r"%([\w.]+)", inputs).group(1)
            slots = [Slot(n, k, o, int(a or 0), int(f or 1)) for n, k, o, a, f in _INPUT.findall(inputs)]
            inner = {slot.name: entering(slot, symbol, known) for slot in slots}
            inner[first] = Type(dtypes.i64, ())
            body, last = _statements(lines, dtypes, inner)
            leaving = [
                Slot(v, k, outer, int(a or 0), int(f or 1))
                for (k, v, a, f), outer in zip(_OUTPUT.findall(last), node.results)
            ]
            node.loop = Loop(symbol, int(extent), int(chunk), first, slots, leaving, body)
            node.operands = [slot.outer for slot in slots]
            node.types = [_leaving(slot, node.loop, inner) for slot in leaving]
        else:
            if " : " in rest:
                rest, type_ = rest.rsplit(" : ", 1)
                node.type = parse_type(type_, dtypes)
            node.attributes = dict(re.findall(r"(\w+)\(([^)]*)\)", rest))
            node.operands = re.findall(r"%([\w.]+)", rest)
            if node.op == "sort":
                node.types = _of_sort(node, known[node.operands[0]], dtypes)
            elif node.op == "attention":
                node.types = [known[node.operands[0]], None]
            elif node.op == "attention_grad":
                node.types = [known[v] for v in node.operands[:3]]
        known.update(zip(node.results, node.types or [node.type]))
        nodes.append(node)
    raise ValueError("the program has no return")
