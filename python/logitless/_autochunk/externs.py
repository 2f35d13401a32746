"""Operations that the framework itself runs: `extern` of docs/reference/ir.md. The generated source calls them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from logitless._autochunk.parse import Graph, Node

WHOLE, SUM = "whole", "sum"  # an operand that every chunk reads in full; a result that chunks accumulate

# The chunked dimension of each operand, and then of the result.
Row = Sequence[int | str]


@dataclass(frozen=True)
class Call:
    """A function that depends on its array operands alone. Calls with equal keys are the same call."""

    name: str  # the name in reports, e.g. "aten.cumprod.default"
    key: str  # everything that it depends on except its operands
    emit: Callable[[Sequence[str], Sequence[int]], str]  # (operands' texts, indices of results that are read)
    count: int | None = None  # number of results, if they come as a tuple
    helper: str = ""  # source of a helper that is emitted beside the function

    def targets(self, names: dict[int, str]) -> str:
        """Returns the left-hand side of the assignment: names of the results that are read, "_" for the others."""
        if self.count is None:
            return names[0]
        return ", ".join(names.get(k, "_") for k in range(self.count)) + ("," if self.count == 1 else "")


def spread_rows(shapes: Sequence[Sequence[int]], result: Sequence[int], dims: Sequence[int]) -> list[Row]:
    """Returns a row for each of these dimensions of a broadcast result. An operand has the same dimension, or is read
    in full."""
    rows = []
    for d in dims:
        places = [d - (len(result) - len(shape)) for shape in shapes]
        row = [at if at >= 0 and shape[at] == result[d] else WHOLE for at, shape in zip(places, shapes)]
        if result[d] > 1 and any(at != WHOLE for at in row):
            rows.append([*row, d])
    return rows


def merged(graph: Graph) -> Graph:
    """Returns the graph with one node for all results of a call, at the position of the first. A call that is
    recomputed, to free its result earlier, stays a separate call."""
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


def described(text: str, calls: Sequence[Call], locations: dict[str, str], framework: str) -> list[str]:
    """Describes each call of a compiled program: whether it runs at once or chunk by chunk, and along which dimension.
    """
    lines: list[str] = []
    for indent, name, call, sizes in map(re.Match.groups, filter(None, map(_EXTERN.match, text.splitlines()))):
        how = "whole"
        if len(indent) > 2:
            cut = [d for d, size in enumerate(sizes.split(",")) if re.search("[A-Za-z]", size)]
            how = f"chunk by chunk, along dimension {cut[0]}" if cut else "chunk by chunk, a sum of parts"
        location = f"{locations[name]}: " if name in locations else ""
        line = f"{location}{calls[int(call)].name} runs as {framework} has it, {how}"
        if line not in lines:
            lines.append(line)
    return lines
