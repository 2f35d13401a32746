"""Replaces patterns of compiled programs by single PyTorch operations: a softmax with its log-sum-exp, and a scatter at
one index per row. Unfused, each takes several passes over a large value, and temporaries of its size."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from logitless._autochunk.parse import Graph, Node, Type, entering


def fused(graph: Graph) -> Graph:
    """Returns the graph with these PyTorch operations in addition to those of tensor programs:

    softmax x axis(d): the softmax along a dimension and, if it is read, the log-sum-exp
    log_softmax x axis(d)
    put index, updates axis(d) row(1): a put whose operands lack the dimension, like a pick's; indices out of range are
    dropped
    """
    graph.nodes = _Fusion(graph.nodes, dict(graph.parameters), [v for _, v in graph.results]).run()
    return graph


class _Fusion:
    """Fuses the statements of the function, or of a loop's body."""

    def __init__(self, nodes: list[Node], types: dict[str, Type], ends: Iterable[str], first: str = ""):
        self.nodes = nodes
        self.first = first  # the index of the chunk's first element
        self.makers = {r: n for n in nodes for r in n.results}
        self.types = {**types, **{r: t for n in nodes for r, t in zip(n.results, n.types or [n.type]) if t is not None}}
        self.readers: dict[str, list[Node]] = {}
        self.ends = set(ends)
        for node in nodes:
            for operand in node.operands:
                self.readers.setdefault(operand, []).append(node)

    def run(self) -> list[Node]:
        for node in list(self.nodes):
            if node.loop is not None:
                loop = node.loop
                known = {slot.name: entering(slot, loop.symbol, self.types) for slot in loop.inputs}
                ends = [slot.name for slot in loop.outputs]
                loop.body = _Fusion(loop.body, known, ends, loop.first).run()
            elif node.op == "reduce_lse":
                self.softmax(node)
            elif node.op == "select":
                self.put(node)
        for node in [n for n in self.nodes if n.op == "reduce_lse"]:
            self.late(node)
        return self.read()

    def read(self) -> list[Node]:
        """Returns the statements whose results are read."""
        wanted, kept = set(self.ends), []
        for node in reversed(self.nodes):
            if wanted.intersection(node.results):
                wanted.update(node.operands)
                kept.append(node)
        return kept[::-1]

    # --- readers of values
    def only(self, value: str) -> list[Node]:
        """Returns the readers of a value that is not a result of the graph; else none."""
        return [] if value in self.ends else self.readers.get(value, [])

    def made(self, value: str, *ops: str) -> Node | None:
        node = self.makers.get(value)
        return node if node is not None and node.op in ops else None

    def replace(self, gone: list[Node], new: list[Node], at: int) -> None:
        """Inserts new statements before index at, and removes others."""
        before, after = self.nodes[:at], self.nodes[at:]
        self.nodes = [n for n in before if n not in gone] + new + [n for n in after if n not in gone]
        for node in gone:
            for operand in node.operands:
                self.readers[operand] = [r for r in self.readers[operand] if r is not node]
        for node in new:
            self.makers.update((r, node) for r in node.results)
            for operand in node.operands:
                self.readers.setdefault(operand, []).append(node)

    # --- exp(x - lse(x)), or x - lse(x) alone
    def softmax(self, lse: Node) -> None:
        [x], [value], dims = lse.operands, lse.results, lse.numbers("dims")
        type_ = self.types.get(x)
        # Differences of rows may read a wider one, and those of x what that is in its dtype.
        narrow = [r for r in self.readers.get(value, []) if r.op == "cast" and type_ is not None and r.type.dtype == type_.dtype]
        wide = len(narrow) == 1 and lse.type.dtype == torch.float64
        if len(dims) != 1 or type_ is None or (type_.dtype != lse.type.dtype and not wide) or type_.dtype.itemsize < 4:
            return
        if type_.shape[dims[0]] == "0":
            return
        [axis] = dims
        narrow = narrow if wide else []
        narrowed = narrow[0].results[0] if narrow else value
        guard = self.guard(narrowed)
        given = guard[-1].results[0] if guard else narrowed  # what a softmax subtracts
        less = [(b, s) for b in self.readers.get(given, []) for s in self.less(x, b, axis)]
        if len(less) != 1:
            return
        [(spread, difference)] = less
        powers = self.only(difference.results[0])
        alone = len(powers) == 1 and powers[0].op == "exp"
        shown = {value, *(r for n in [*narrow, *guard] for r in n.results)}
        known = [spread, *narrow, *guard]
        others = [r for v in shown for r in self.readers.get(v, []) if not any(r is n for n in known)]
        kept = not self.ends.isdisjoint(shown) or others or self.only(spread.results[0]) != [difference]
        attributes = {"axis": str(axis)}
        if not kept:
            last = powers[0] if alone else difference
            op = "softmax" if alone else "log_softmax"
            new = Node(last.results, op, [x], attributes, last.type, location=last.location)
            self.replace([lse, *narrow, *guard, spread, difference, *powers[:alone]], [new], self.nodes.index(last))
        elif alone:
            # Both are computed at once if the softmax can replace its operand.
            again = [r for r in self.readers[spread.results[0]] if r is not difference]
            at = min(self.nodes.index(n) for n in [*others, powers[0], *again, *([spread] if again else [])])
            if all(r in (lse, difference) or self.nodes.index(r) < at for r in self.readers[x]) and x not in self.ends:
                types = [powers[0].type, lse.type]
                new = Node([*powers[0].results, value], "softmax", [x], attributes, types=types, location=lse.location)
                self.replace([lse, *narrow, *guard, difference, powers[0]], [new, *narrow, *guard], at)

    def guard(self, lse: str) -> list[Node]:
        """Returns the statements that make NaN of an infinite log-sum-exp (settled() in _autochunk/softmax.py), the last one's
        result instead of which a softmax has it; none where there are no such."""
        for size in self.readers.get(lse, []):
            for finite in self.readers.get(size.results[0], []) if size.op == "abs" else []:
                far = self.made(finite.operands[-1], "constant")
                for select in self.readers.get(finite.results[0], []):
                    chosen = select.op == "select" and select.operands[:2] == [finite.results[0], lse]
                    if finite.op == "lt" and chosen and far is not None and float(far.attributes["value"]) == float("inf"):
                        return [size, finite, select]
        return []

    def less(self, x: str, spread: Node, axis: int) -> list[Node]:
        """Returns the differences of x and a log-sum-exp along a dimension."""
        if spread.op != "broadcast" or axis in spread.numbers("dims") or spread.type.shape != self.types[x].shape:
            return []
        mine = [spread.results[0]]
        return [r for r in self.readers.get(mine[0], []) if r.op == "sub" and r.operands == [x, *mine]]

    # --- moves a log-sum-exp after the other readers of its operand, so that it can overwrite the operand
    def late(self, lse: Node) -> None:
        at = self.nodes.index(lse)
        waiting, moved = set(lse.results), [lse]  # it, and its readers
        for node in self.nodes[at + 1 :]:
            if waiting.intersection(node.operands):
                waiting.update(node.results)
                moved.append(node)
        others = [n for n in self.readers[lse.operands[0]] if not any(n is m for m in moved)]
        last = max((self.nodes.index(n) for n in others), default=-1)
        if last < at or lse.operands[0] in self.ends or any(n.loop is not None for n in self.nodes[at : last + 1]):
            return
        late = [n for n in self.nodes[at : last + 1] if any(n is m for m in moved)]
        soon = [n for n in self.nodes[at : last + 1] if not any(n is m for m in moved)]
        self.nodes[at : last + 1] = soon + late

    # --- values where a counter equals an index, and 0 elsewhere
    def put(self, select: Node) -> None:
        hit, part = self.made(select.operands[0], "eq"), self.made(select.operands[1], "broadcast")
        zero = self.made(select.operands[2], "constant")
        if hit is None or part is None or zero is None or float(zero.attributes["value"]) != 0:
            return
        if self.only(hit.results[0]) != [select]:
            return
        for counter, index in (hit.operands, hit.operands[::-1]):
            axis, first = self.counted(counter)
            rows = self.made(index, "broadcast")
            others = [d for d in range(len(select.type.shape)) if d != axis]
            if axis is None or rows is None or rows.numbers("dims") != others or part.numbers("dims") != others:
                continue
            new, where = [], rows.operands[0]
            if first:
                type_ = self.types[where]
                new.append(Node([f"{select.results[0]}.first"], "broadcast", [first], {"dims": ""}, type_))
                new.append(Node([f"{select.results[0]}.index"], "sub", [where, *new[0].results], {}, type_))
                where = new[1].results[0]
            attributes = {"axis": str(axis), "row": "1"}
            put = Node(select.results, "put", [where, part.operands[0]], attributes, select.type)
            put.location = select.location
            self.replace([hit, select], [*new, put], self.nodes.index(select))
            return

    def counted(self, value: str) -> tuple[int | None, str]:
        """Returns the dimension along which a value counts, and the value that is added to the count, if any."""
        node = self.made(value, "iota", "add", "broadcast")
        if node is None or node.op != "broadcast":
            return self.counter(node)
        dims, (axis, first) = node.numbers("dims"), self.counter(self.made(node.operands[0], "iota", "add"))
        return (None, "") if axis is None or len(dims) != 1 else (dims[0], first)

    def counter(self, node: Node | None) -> tuple[int | None, str]:
        """Returns the same for a value that is not broadcast: a count from 0 or from the chunk's first index."""
        if node is None or node.op == "iota":
            return (None, "") if node is None else (node.numbers("axis")[0], "")
        for numbers, offset in (node.operands, node.operands[::-1]):
            spread, made = self.made(offset, "broadcast"), self.made(numbers, "iota")
            if made is not None and spread is not None and self.first and self.first in spread.operands:
                return made.numbers("axis")[0], self.first
        return None, ""
