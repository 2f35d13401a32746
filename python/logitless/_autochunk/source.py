"""Emits compiled programs as Python: the parts shared by all frameworks, such as names, numbers and indices. Each
framework's own module emits its operations and loops."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace

from logitless._autochunk.parse import Graph, Loop, Node, Slot, Type
from logitless._autochunk.text import Names, Term, literal, tuple_of


class BaseScope:
    """Emits the statements of the function or of a loop's body."""

    def __init__(self, emitter: BaseEmitter, nodes: list[Node], outer: dict[str, Term], indent: str):
        self.e = emitter
        self.nodes = nodes
        self.terms = dict(outer)
        self.indent = indent

    # --- implemented by the framework
    @staticmethod
    def floating(dtype) -> bool:
        raise NotImplementedError

    def full(self, t: Term) -> str:
        """Returns the text of the array with every dimension present."""
        raise NotImplementedError

    # --- shared
    def line(self, text: str) -> None:
        self.e.lines.append(self.indent + text)

    def number(self, node: Node, text: str) -> None:
        """Sets the result to a Python number, the same for every element."""
        self.terms[node.results[0]] = Term(text, node.type, (False,) * len(node.type.shape), number=True)

    def constant(self, node: Node, condition: bool) -> None:
        number = float(node.attributes["value"])
        if not self.floating(node.type.dtype):
            text = str(bool(number) if condition else int(number))
        else:
            text = repr(number) if math.isfinite(number) else f'float("{number}")'
        for factor in node.attributes.get("size", "").split(","):
            text = f"({text} * ({factor.strip()}))" if factor.strip() else text
        self.number(node, text)

    def cast_number(self, node: Node, x: Term) -> None:
        floating = self.floating(node.type.dtype)
        text = x.text
        if floating != self.floating(x.type.dtype) or not literal(text):
            text = f"float({text})" if floating else f"int({text})"
        if re.fullmatch(r"float\(-?[\d.]+\)", text):
            text = repr(float(x.text))
        self.number(node, text)

    def sliced(self, node: Node, x: Term) -> str:
        begin, end = (node.attributes[k].split(",") for k in ("begin", "end"))
        index = [
            ":" if b.strip() == "0" and e.strip() == s else f"{b.strip()}:{e.strip()}"
            for b, e, s in zip(begin, end, x.type.shape)
        ]
        return f"{self.full(x)}[{', '.join(index)}]"

    def reduced(self, node: Node, x: Term) -> tuple[str, str]:
        """Returns the texts of a reduction's operand and dimensions."""
        dims = node.numbers("dims")
        return self.full(x), str(dims[0]) if len(dims) == 1 else tuple_of([str(d) for d in dims])

    def counted(self, node: Node, arange: str) -> Term:
        """Returns the term of an iota. arange: the text that makes its numbers."""
        axis, rank = node.numbers("axis")[0], len(node.type.shape)
        name = self.e.names.fresh(node.results[0])
        self.line(f"{name} = {arange}")
        after = rank - 1 - axis
        text = f"{name}[:{', None' * after}]" if after else name
        return Term(text, node.type, tuple(d == axis for d in range(rank)))


class BaseEmitter:
    """Emits one function."""

    def __init__(self, graph: Graph, name: str, reserved: Iterable[str]):
        self.graph = graph
        self.name = name
        self.names = Names({*reserved, name})
        self.lines: list[str] = []
        self.helpers: list[str] = []

    def helper(self, name: str) -> str:
        if name not in self.helpers:
            self.helpers.append(name)
        return name

    def part(self, text: str, axis: int, factor: int, first: str, size: str) -> str:
        """Returns the text of a chunk of an array: its elements along the axis."""
        raise NotImplementedError

    def entering(self, scope: BaseScope, inner: BaseScope, slot: Slot, first: str, size: str) -> Term:
        """Returns the term of a loop's input in the body."""
        t = replace(scope.terms[slot.outer], owned=False)
        if slot.kind == "whole":
            return t
        shape = list(t.type.shape)
        shape[slot.axis] = size if slot.factor == 1 else f"{slot.factor} * {size}"
        t = replace(t, type=Type(t.type.dtype, tuple(shape)))
        if t.number or not t.present[slot.axis]:
            return t
        axis = slot.axis - (len(t.present) - t.rank)
        name = self.names.fresh(re.match(r"\w+", t.text).group() + "_part")
        inner.line(f"{name} = {self.part(t.text, axis, slot.factor, first, size)}")
        return replace(t, text=name)


def gathered(type_: Type, slot: Slot, loop: Loop) -> Type:
    """Returns the type of a loop's result after all chunks."""
    shape = list(type_.shape)
    if slot.kind == "stack":
        shape[slot.axis] = str(loop.extent * slot.factor)
    return Type(type_.dtype, tuple(shape))
