"""Regions of a captured graph around values that are far larger than their results: logits and losses, attention
scores."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree
from torch.fx import Graph, GraphModule, Node

from logitless.torch._autochunk.locations import location_of
from logitless.torch._compile.effects import mutates, name_of, opaque, written

_PRODUCTS = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "__matmul__", "__rmatmul__"}
# Small operations that join a region after its large values: the arithmetic of losses.
_TAIL = {
    *("add", "sub", "mul", "truediv", "div", "neg", "pow", "square", "sqrt", "exp", "log", "log1p", "abs", "sigmoid"),
    *("logsigmoid", "log_sigmoid", "softplus", "relu", "mean", "sum", "logsumexp", "where", "masked_fill", "clamp"),
    *("clamp_min", "clamp_max", "minimum", "maximum", "eq", "ne", "lt", "le", "gt", "ge", "float", "double", "to", "view"),
    *("reshape", "flatten", "squeeze", "unsqueeze", "type_as", "rsub", "radd", "rmul"),
}
_TURNS = {"t", "T", "mT", "transpose", "permute", "swapaxes", "contiguous"}
_TINY = 8  # elements per row
_MOST_PRODUCTS = 8  # matrix products of a region; with more, a region is most of the graph
_CONVERSIONS = {"float", "half", "bfloat16", "double", "to", "type_as", "view", "reshape", "flatten", *_TURNS}
_OUTSIDE = ("placeholder", "get_attr", "output")


RETURNED = (
    "the graph returns a value of its size, which has to be whole; compile a function that returns the loss alone, as "
    'torch.compile(lambda **batch: model(**batch).loss, backend="logitless")'
)


class Refused(Exception):
    """The reason why there is no region around a value."""


@dataclass
class Region:
    seed: Node
    nodes: list[Node]  # in order
    inputs: list[Node]
    outputs: list[Node]


def leaves(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("example_value", node.meta.get("val"))
    return [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def _hint(size) -> int | None:
    return getattr(size.node, "hint", None) if isinstance(size, torch.SymInt) else int(size)


def shape_of(tensor: torch.Tensor) -> list[int]:
    """Returns sizes. Symbolic ones are those of the trace; sizes that depend on values count as 0."""
    return [_hint(s) or 0 for s in tensor.shape]


def numel(node: Node) -> int:
    return max((math.prod(shape_of(t)) for t in leaves(node)), default=0)


def described(node: Node) -> str:
    """Describes a node, such as "model.py:12: logits = self.head(x): linear float32[4096, 50304]"."""
    location = location_of(node.stack_trace)
    [tensor, *_] = leaves(node)
    kind = f"{name_of(node)} {str(tensor.dtype).removeprefix('torch.')}{shape_of(tensor)}"
    return f"{location}: {kind}" if location else kind


def _is_product(node: Node) -> bool:
    return node.op in ("call_function", "call_method") and name_of(node) in _PRODUCTS and len(leaves(node)) == 1


def _is_given(node: Node) -> bool:
    """Returns whether a value is an input of the graph, such as a weight, up to casts and views."""
    while node.op not in ("placeholder", "get_attr"):
        if name_of(node) not in _CONVERSIONS and node.target is not getattr or not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
    return True


def seeds(graph: Graph, min_bytes: int, ratio: float) -> list[Node]:
    """Returns matrix products, largest first, whose result has at least min_bytes. It must also be ratio times as large
    as the computed operands."""
    found = {}
    for node in graph.nodes:
        if _is_product(node):
            size = numel(node) * leaves(node)[0].element_size()
            made = max((numel(a) for a in node.all_input_nodes if not _is_given(a)), default=0)
            if size >= min_bytes and numel(node) >= ratio * made:
                found[node] = size
    return sorted(found, key=found.get, reverse=True)


def _reached(start: Iterable[Node], step) -> set[Node]:
    seen, work = set(), list(start)
    while work:
        for other in step(work.pop()):
            if other not in seen:
                seen.add(other)
                work.append(other)
    return seen


class _Grower:
    def __init__(self, seed: Node):
        self.seed = seed
        self.size = numel(seed)
        shape = shape_of(leaves(seed)[0])
        self.tiny = _TINY * max(self.size // max(shape[-1] if shape else 1, 1), 1)
        self.inside: set[Node] = set()
        self.order = {node: i for i, node in enumerate(seed.graph.nodes)}

    def big(self, node: Node) -> bool:
        return 2 * numel(node) >= self.size

    def join(self, node: Node) -> None:
        """Adds a node, all readers of its large values, and the makers of those that it reads."""
        work = [node]
        while work:
            node = work.pop()
            if node in self.inside:
                continue
            if node.op == "output":
                raise Refused(RETURNED)
            if node.op == "get_attr" or opaque(node) or mutates(node):
                raise Refused(f"{name_of(node)} reads it, or a value of its size, or makes one")
            self.inside.add(node)
            if sum(_is_product(n) for n in self.inside) > _MOST_PRODUCTS:
                raise Refused(f"values of its size come from more than {_MOST_PRODUCTS} products")
            if self.big(node):
                work += [user for user in node.users if user not in self.inside]
            elif not isinstance(node.meta.get("example_value"), torch.Tensor):
                work += [user for user in node.users if user.target is operator.getitem]
            work += [a for a in node.all_input_nodes if a.op not in _OUTSIDE and self.big(a)]

    def close(self) -> None:
        """Adds all nodes on paths between nodes of the region."""
        while True:
            after = _reached(self.inside, lambda n: n.users)
            before = _reached(self.inside, lambda n: n.all_input_nodes)
            between = (after & before) - self.inside
            if not between:
                return
            for node in between:
                self.join(node)

    def follow(self) -> None:
        """Adds the small arithmetic after it, up to the loss."""
        for node in self.seed.graph.nodes:
            if node in self.inside or node.op in _OUTSIDE or name_of(node) not in _TAIL or not leaves(node):
                continue
            if any(a in self.inside for a in node.all_input_nodes) and numel(node) <= self.tiny and not mutates(node):
                self.inside.add(node)

    def turn(self) -> None:
        """Adds transposes that only the region reads; outside they would be copies."""
        work = list(self.inside)
        while work:
            for a in work.pop().all_input_nodes:
                name = a.args[1] if a.target is getattr and len(a.args) > 1 else name_of(a)
                if a.op in _OUTSIDE or a in self.inside or name not in _TURNS or mutates(a):
                    continue
                if all(user in self.inside for user in a.users):
                    self.inside.add(a)
                    work.append(a)

    def region(self) -> Region:
        nodes = sorted(self.inside, key=self.order.get)
        first, last = self.order[nodes[0]], self.order[nodes[-1]]
        after = _reached(nodes, lambda n: n.users)
        for node, at in self.order.items():
            between = first < at < last and (opaque(node) or mutates(node))
            if between or (mutates(node) and any(w in after or w in self.inside for w in written(node))):
                raise Refused(f"{name_of(node)} writes into memory, or changes how values are computed, beside it")
        inputs = dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in self.inside)
        outputs = [node for node in nodes if any(user not in self.inside for user in node.users)]
        return Region(self.seed, nodes, list(inputs), outputs)


def grow(seed: Node, ratio: float) -> Region:
    """Returns the region around a matrix product. ratio: how much larger the product must be than the region's outputs.
    A scalar output is exempt, since gradients are computed with it. Raises Refused."""
    grower = _Grower(seed)
    grower.join(seed)
    grower.close()
    grower.follow()
    grower.close()
    grower.turn()
    region = grower.region()
    if any(len(leaves(o)) != 1 or not isinstance(o.meta.get("example_value"), torch.Tensor) for o in region.outputs):
        raise Refused("something besides tensors leaves the region")
    if not region.outputs:
        raise Refused("nothing reads it")
    kept = sum(numel(o) for o in region.outputs)
    differentiable = [o for o in region.outputs if leaves(o)[0].requires_grad]
    scalar = len(differentiable) <= 1 and all(numel(o) == 1 for o in differentiable)
    if kept * ratio > grower.size and not (scalar and 2 * kept <= grower.size):
        raise Refused(
            f"what is kept of it has {kept} numbers, it {grower.size}: less than ratio={ratio:g} times as many, and its "
            "gradients would compute it again"
        )
    return region


def extracted(owner: GraphModule, region: Region) -> GraphModule:
    """Returns a graph that maps the region's inputs to a tuple of its outputs."""
    graph, made = Graph(), {}
    for node in region.inputs:
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    for node in region.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[o] for o in region.outputs))
    return GraphModule(owner, graph)


def replace(graph: Graph, region: Region, function) -> None:
    """Replaces the region's nodes by one call of the function, which returns a tuple. Other nodes between them move
    before it, or after it if they depend on it."""
    inside, after = set(region.nodes), _reached(region.nodes, lambda n: n.users)
    nodes = list(graph.nodes)
    first, last = nodes.index(region.nodes[0]), nodes.index(region.nodes[-1])
    behind = [n for n in nodes[first : last + 1] if n not in inside and n in after]
    with graph.inserting_after(region.nodes[-1]):
        call = graph.call_function(function, tuple(region.inputs))
    call.meta["example_value"] = tuple(o.meta["example_value"] for o in region.outputs)
    at = call
    for i, output in enumerate(region.outputs):
        with graph.inserting_after(at):
            at = graph.call_function(operator.getitem, (call, i))
        at.meta = {"example_value": output.meta["example_value"]}
        output.replace_all_uses_with(at, delete_user_cb=lambda user: user not in inside)
    for node in behind:
        at.append(node)
        at = node
    for node in reversed(region.nodes):
        graph.erase_node(node)


def find(graph: Graph, min_bytes: int, ratio: float, take) -> Sequence[tuple[str, str]]:
    """Passes regions to ``take``, which replaces them, until there is none. Returns the matrix products without a
    region, each with the reason."""
    refused: dict[Node, str] = {}
    while True:
        rest = [s for s in seeds(graph, min_bytes, ratio) if s not in refused]
        if not rest:
            return [(described(node), why) for node, why in refused.items()]
        try:
            take(grow(rest[0], ratio))
        except Refused as why:
            refused[rest[0]] = str(why)
