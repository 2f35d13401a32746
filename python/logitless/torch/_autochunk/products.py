"""Matrix products of a compiled program, with or without batches, for any contracted dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from logitless._autochunk.parse import Node
from logitless._autochunk.source import BaseScope
from logitless._autochunk.text import Term, sizes


class Products(BaseScope):
    """The part of a scope that writes matrix products. A product that a loop accumulates adds to its accumulator
    directly."""

    def op_dot(self, node: Node, a: Term, b: Term) -> None:
        [value] = node.results
        into = self.sums.get(value)
        if into is None:
            self.bind(value, self.product(node, a, b), node.type)
            return
        wide = node.type.dtype != a.type.dtype
        to = f".to({node.type.dtype})" if wide else ""
        factors = self.matrices(node, a, b)
        if factors is None:
            x, y, groups = self.batches(node, a, b)
            self.line(f"{_grouped(into, groups)}.baddbmm_({x}{to}, {y}{to})")
            return
        (x, y), rows = factors, len(a.type.shape) - len(node.pair("contract")[0])
        into = _grouped(into, (rows, len(node.type.shape) - rows))
        if wide and self.e.wide_products and node.type.dtype == torch.float32:
            self.line(f"torch.addmm({into}, {x}, {y}, out_dtype={node.type.dtype}, out={into})")
        else:
            self.line(f"{into}.addmm_({x}{to}, {y}{to})")

    def product(self, node: Node, a: Term, b: Term) -> str:
        (ca, cb), (ba, _) = node.pair("contract"), node.pair("batch")
        wide = node.type.dtype != a.type.dtype
        to = f".to({node.type.dtype})" if wide else ""
        factors = self.matrices(node, a, b)
        if factors is None:
            x, y, groups = self.batches(node, a, b)
            shaped = "" if groups == (1, 1, 1) else f".view({sizes(node.type.shape) or '()'})"
            return f"torch.bmm({x}{to}, {y}{to}){shaped}"
        shaped = f".view({sizes(node.type.shape)})" if len(node.type.shape) != 2 else ""
        if wide and self.e.wide_products and node.type.dtype == torch.float32:
            return f"torch.mm({factors[0]}, {factors[1]}, out_dtype={node.type.dtype}){shaped}"
        if not ba and ca == [len(a.type.shape) - 1] and cb == [0] and len(b.type.shape) <= 2:
            return f"{self.full(a)}{to} @ {self.full(b)}{to}"
        product = f"{factors[0]}{to} @ {factors[1]}{to}"
        return f"({product}){shaped}" if shaped else product

    def matrices(self, node: Node, a: Term, b: Term) -> tuple[str, str] | None:
        """Returns the operands as matrices, or None if that needs a copy: adjacent dimensions are flattened."""
        (ca, cb), (ba, _) = node.pair("contract"), node.pair("batch")
        if ba:
            return None
        first, second = self._matrix(a, ca, False), self._matrix(b, cb, True)
        return None if first is None or second is None else (first, second)

    def _matrix(self, t: Term, contract: list[int], before: bool) -> str | None:
        """Returns the array as a matrix. Contracted dimensions become the rows if `before`, else the columns. Returns
        None if they are not adjacent."""
        rank, count = len(t.type.shape), len(contract)
        leading = contract == list(range(count))
        if not 0 < count < rank or not (leading or contract == list(range(rank - count, rank))):
            return None
        text, rows = self.full(t), count if leading else rank - count
        text = _grouped(text, (rows, rank - rows))
        if leading == before:
            return text
        return text.removesuffix(".t()") if text.endswith(".t()") else f"{text}.t()"

    def batches(self, node: Node, a: Term, b: Term) -> tuple[str, str, tuple[int, int, int]]:
        """Returns the operands as batches of matrices. Also returns the number of the result's dimensions in batch,
        rows and columns."""
        (ca, cb), (ba, bb) = node.pair("contract"), node.pair("batch")
        fa, fb = ([d for d in range(len(t.type.shape)) if d not in (*c, *p)] for t, c, p in ((a, ca, ba), (b, cb, bb)))
        groups = (len(ba), len(fa), len(fb))
        return self._batch(a, (ba, fa, ca)), self._batch(b, (bb, cb, fb)), groups

    def _batch(self, t: Term, groups: Sequence[list[int]]) -> str:
        """Returns the array as batches of matrices; each group of dimensions is flattened."""
        text, order = self.full(t), [d for group in groups for d in group]
        if order == [0, 2, 1]:
            text = f"{text}.mT"
        elif order != sorted(order):
            text = f"{text}.permute({', '.join(map(str, order))})"
        return _grouped(text, [len(g) for g in groups])


def _grouped(text: str, counts: Sequence[int]) -> str:
    """Flattens groups of neighbouring dimensions, counts[i] each. An empty group becomes a dimension of size 1."""
    first = sum(counts)
    for count in reversed(counts):
        first -= count
        if count == 0:
            text = f"{text}.unsqueeze({first})"
        elif count > 1:
            text = f"{text}.flatten({first}, {first + count - 1})"
    return text
