"""Attention in tensor programs: the `attention` operation, or its decomposition where no kernel supports it."""

from __future__ import annotations

from dataclasses import dataclass

from logitless._autochunk.lower import Value, Writer
from logitless._autochunk.parse import Graph, Node

LARGEST_DIM = 256  # the largest head dimension that the kernels of every device support
LARGEST_FAST_DIM = 128  # of the GPU kernels that use tensor cores, in 16 bits


@dataclass(frozen=True)
class Attention:
    """softmax(scale q k^T + bias) v, with q [B, H, T, D] and k, v [B, Hkv, S, D]. Under `causal`, query t sees the keys
    s <= t + S - T. bias: [1 or B, 1 or H, 1 or T, S] in q's dtype, without a gradient."""

    causal: bool
    scale: float
    bias: Value | None = None

    @property
    def text(self) -> str:
        return f" causal({int(self.causal)}) scale({self.scale!r})" + (" bias(1)" if self.bias else "")

    @property
    def operands(self) -> list[Value]:
        return [self.bias] if self.bias else []

    # --- the operation
    def attend(self, w: Writer, q: Value, k: Value, v: Value) -> tuple[Value, Value]:
        """Returns the result and the log-sum-exp of each row of scores [B, H, T]."""
        statistics = (w.dtypes.wide(q.dtype), q.shape[:3])
        return w.emit_all("attention", [q, k, v, *self.operands], [(q.dtype, q.shape), statistics], self.text)

    def gradients(self, w: Writer, q: Value, k: Value, v: Value, out: Value, lse: Value, d_out: Value):
        types = [(x.dtype, x.shape) for x in (q, k, v)]
        return w.emit_all("attention_grad", [q, k, v, out, lse, d_out, *self.operands], types, self.text)

    # --- its decomposition
    def _scores(self, w: Writer, q: Value, k: Value) -> Value:
        """Returns the scores [B, Hkv, H / Hkv, T, S] in the dtype of accumulation. q: grouped by key head."""
        wide = w.dtypes.wide(q.dtype)
        z = w.scaled(w.dot(q, k, ([4], [3]), ([0, 1], [0, 1]), wide), self.scale)
        if self.bias is not None:
            bias = w.cast(self.bias, wide)
            heads = [z.shape[1], z.shape[2]] if bias.shape[1] > 1 else [1, 1]
            z = w.add(z, w.reshape(bias, [bias.shape[0], *heads, *bias.shape[2:]]))
        if self.causal:
            queries, keys = z.shape[3:]
            limits = w.map("add", [w.iota([queries, 1], 0), w.number(keys - queries, w.dtypes.i64)], w.dtypes.i64)
            seen = w.map("le", [w.iota([1, keys], 1), limits], w.dtypes.i8)
            z = w.map("select", [seen, z, w.number(float("-inf"), wide)], wide)
        return z

    def _probabilities(self, w: Writer, z: Value, lse: Value) -> Value:
        """Returns the softmax. lse: of size 1 along the keys. A row whose scores are all -inf gets zeros."""
        if self.bias is not None:
            seen = w.map("ne", [lse, w.number(float("-inf"), lse.dtype)], w.dtypes.i8)
            lse = w.map("select", [seen, lse, w.number(0, lse.dtype)], lse.dtype)
        return w.map("exp", [w.sub(z, lse)], z.dtype)

    @staticmethod
    def _grouped(w: Writer, x: Value, k: Value) -> Value:
        """Groups the query heads by the key head that they share: [B, H, ...] -> [B, Hkv, H / Hkv, ...]."""
        batch, heads, *rest = x.shape
        return w.reshape(x, [batch, k.shape[1], heads // k.shape[1], *rest])

    def attend_plainly(self, w: Writer, q: Value, k: Value, v: Value) -> tuple[Value, Value]:
        z = self._scores(w, self._grouped(w, q, k), k)
        lse = w.reduce("reduce_lse", z, [4], keep=True)
        p = w.cast(self._probabilities(w, z, lse), q.dtype)
        out = w.dot(p, v, ([4], [2]), ([0, 1], [0, 1]))
        return w.reshape(out, q.shape), w.reshape(lse, q.shape[:3])

    def gradients_plainly(self, w: Writer, q: Value, k: Value, v: Value, out: Value, lse: Value, d_out: Value):
        grouped, d_grouped = self._grouped(w, q, k), self._grouped(w, d_out, k)
        z = self._scores(w, grouped, k)
        p = self._probabilities(w, z, w.reshape(lse, [*z.shape[:4], 1]))
        d_p = w.dot(d_grouped, v, ([4], [3]), ([0, 1], [0, 1]), z.dtype)
        products = w.mul(w.cast(d_grouped, z.dtype), w.cast(self._grouped(w, out, k), z.dtype))
        delta = w.reduce("reduce_sum", products, [4], keep=True)
        d_z = w.cast(w.scaled(w.mul(p, w.sub(d_p, delta)), self.scale), q.dtype)
        d_q = w.reshape(w.dot(d_z, k, ([4], [2]), ([0, 1], [0, 1])), q.shape)
        d_k = w.dot(d_z, grouped, ([2, 3], [2, 3]), ([0, 1], [0, 1]))
        d_v = w.dot(w.cast(p, q.dtype), d_grouped, ([2, 3], [2, 3]), ([0, 1], [0, 1]))
        return d_q, d_k, d_v


# --- compiled programs, for frameworks whose attention does not return the log-sum-exp


def without_statistics(graph: Graph) -> Graph:
    """Returns the graph with fewer log-sum-exps of attention. A log-sum-exp stays only where its reader is an adjacent
    gradient of the same operands. That attention is marked `paired`: its second result stands for everything that the
    gradient reads. Other gradients recompute what they need."""
    _unpaired(graph.nodes, set())
    return graph


def _unpaired(nodes: list[Node], gone: set[str]) -> set[str]:
    """Removes log-sum-exps that no paired gradient reads. gone: those removed in enclosing graphs. Returns all that are
    removed."""
    makers = {node.results[1]: node for node in nodes if node.op == "attention"}
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for operand in node.operands:
            readers.setdefault(operand, []).append(node)
    for value, maker in makers.items():
        mine = readers.get(value, [])
        beside = [r.op == "attention_grad" and [*r.operands[:3], *r.operands[6:]] == maker.operands for r in mine]
        if mine and all(beside):
            maker.attributes["paired"] = "1"
        else:
            maker.results.pop()
            maker.types.pop()
            gone.add(value)
    for node in nodes:
        if node.op == "attention_grad" and node.operands[4] in gone:
            del node.operands[4]
        if node.loop is None:
            continue
        loop = node.loop
        inside = {slot.name for slot in loop.inputs if slot.outer in gone}
        loop.inputs = [slot for slot in loop.inputs if slot.name not in inside]
        inside = _unpaired(loop.body, inside)
        gone.update(slot.outer for slot in loop.outputs if slot.name in inside)
        loop.outputs = [slot for slot in loop.outputs if slot.name not in inside]
        kept = [(r, t) for r, t in zip(node.results, node.types) if r not in gone]
        node.results, node.types = [r for r, _ in kept], [t for _, t in kept]
        node.operands = [slot.outer for slot in loop.inputs]
    return gone
