"""Operations that the framework runs as they are: `extern` of docs/ir.md, whose calls the generated source has."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from logitless._autochunk.parse import Graph, Node

WHOLE, SUM = "whole", "sum"  # of an operand that every chunk reads, of a result that chunks add to

# For an operand each, and then the result, the dimension along which parts come from parts.
Row = Sequence[int | str]


@dataclass(frozen=True)
class Call:
    """A function of arrays and of nothing else; equal ones are one."""

    name: str  # "aten.cumprod.default": what reports call it
    key: str  # all that it depends on but its operands
    emit: Callable[[Sequence[str], Sequence[int]], str]  # of operands' texts, and of the results that are read
    count: int | None = None  # of results where they come as a tuple
    helper: str = ""  # that stands beside the function

    def targets(self, names: dict[int, str]) -> str:
        """What the results are assigned to: names of those that are read."""
        if self.count is None:
            return names[0]
        return ", ".join(names.get(k, "_") for k in range(self.count)) + ("," if self.count == 1 else "")


def spread_rows(shapes: Sequence[Sequence[int]], result: Sequence[int], dims: Sequence[int]) -> list[Row]:
    """Along each of these dimensions of the result: operands that are spread to it have the same one, or are whole."""
    rows = []
    for d in dims:
        places = [d - (len(result) - len(shape)) for shape in shapes]
        row = [at if at >= 0 and shape[at] == result[d] else WHOLE for at, shape in zip(places, shapes)]
        if result[d] > 1 and any(at != WHOLE for at in row):
            rows.append([*row, d])
    return rows


def merged(graph: Graph) -> Graph:
    """The graph with one node for all results of a call, where the first of them stands. What is computed once more, to
    be kept no longer than it is read, is another call."""
    _merge(graph.nodes)
    return graph


def _merge(nodes: list[Node]) -> None:
    last: dict[tuple, Node] = {}
    for node in nodes:
        if node.loop is not None:
            _merge(node.loop.body)
        if node.op != "extern":
            continue
        node.types = [node.type]
        key = node.attributes["call"], *node.operands
        one = last.get(key)
        if one is None or set(node.numbers("result")) & set(one.numbers("result")):
            last[key] = node
            continue
        one.results += node.results
        one.types += node.types
        one.attributes["result"] += f", {node.attributes['result']}"
        node.op = ""
    nodes[:] = [node for node in nodes if node.op]


_EXTERN = re.compile(r"( *)%([\w.]+) = extern .*?call\((\d+)\) .*: \w+\[([^\]]*)\]")


def described(text: str, calls: Sequence[Call], places: dict[str, str], framework: str) -> list[str]:
    """A line for each call of a compiled program: where it is whole, and where it runs along a loop's dimension."""
    lines: list[str] = []
    for indent, name, call, sizes in map(re.Match.groups, filter(None, map(_EXTERN.match, text.splitlines()))):
        how = "whole"
        if len(indent) > 2:
            cut = [d for d, size in enumerate(sizes.split(",")) if re.search("[A-Za-z]", size)]
            how = f"chunk by chunk, along dimension {cut[0]}" if cut else "chunk by chunk, a sum of parts"
        place = f"{places[name]}: " if name in places else ""
        line = f"{place}{calls[int(call)].name} runs as {framework} has it, {how}"
        if line not in lines:
            lines.append(line)
    return lines
