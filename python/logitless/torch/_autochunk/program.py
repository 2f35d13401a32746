"""Converts a traced graph to the text of a tensor program."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.utils._pytree as pytree

from logitless._autochunk.checks import Checks
from logitless._autochunk.externs import Call
from logitless._autochunk.heads import HeadWriter
from logitless._autochunk.lower import Value, Writer
from logitless._autochunk.options import Unsupported
from logitless.torch._autochunk import (  # noqa: F401: they add to HANDLERS
    aten_conv,
    aten_functions,
    aten_index,
    aten_order,
    aten_windows,
    attention,
    ctc,
    running,
)
from logitless.torch._autochunk.aten import HANDLERS
from logitless.torch._autochunk.aten_random import DRAWING
from logitless.torch._autochunk.dtypes import DTYPES
from logitless.torch._autochunk.externs import run_as_it_is, why_not
from logitless.torch._autochunk.locations import location_of

# Operations that may alias their first argument, in addition to those whose schemas declare it.
_VIEWS = {
    *("alias", "detach", "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "expand", "permute", "transpose"),
    *("t", "slice", "select", "split", "split_with_sizes", "unbind", "getitem"),
}

_LONG = 256  # elements; shorter contractions take about as long as reading what they make


def kept_products(graph: torch.fx.GraphModule, outputs: int, upstream: Container[int]) -> list[torch.fx.Node]:
    """Returns the matrix products of the forward that the gradients read, those that take longer to compute than to read.
    outputs: the number of outputs before the gradients. upstream: the placeholders that are upstream gradients."""
    nodes = list(graph.graph.nodes)
    made = _outputs(graph)
    if any(_writes(n) for n in nodes):
        return []
    later = {n for i, n in enumerate(n for n in nodes if n.op == "placeholder") if i in upstream}
    for n in nodes:
        if not later.isdisjoint(n.all_input_nodes):
            later.add(n)
    live = _live(made[outputs:]) - later - set(made[:outputs])
    return [n for n in nodes if n in live and n.op == "call_function" and _contracted(n) >= _LONG]


def _contracted(node: torch.fx.Node) -> int:
    """Returns the length of the contracted dimension of a matrix product, 0 for other operations."""
    left = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}.get(_name(node))
    return 0 if left is None else node.args[left].meta["val"].shape[-1]


def _name(node: torch.fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[1]
    return getattr(node.target, "__name__", str(node.target))


def _is_view(node: torch.fx.Node) -> bool:
    """Returns whether the results may alias the first argument."""
    if isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable:
        if any(r.alias_info is not None for r in node.target._schema.returns):
            return True
    return _name(node) in _VIEWS


def _described(node: torch.fx.Node) -> str:
    """Describes a node, such as aten.sort.default(float32[4, 8], 1)."""

    def one(x):
        if isinstance(x, torch.fx.Node):
            val = x.meta.get("val")
            return f"{str(val.dtype)[6:]}{list(val.shape)}" if isinstance(val, torch.Tensor) else x.name
        return str(x)

    return f"{node.target}({', '.join(one(a) for a in node.args)})"


def _writes(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _check_write(w: Writer, node: torch.fx.Node, base: dict, order: dict) -> None:
    """Checks that a write in place can become a new value: no alias reads the memory afterwards."""
    target = node.args[0]
    root = base[target]
    if root.op == "placeholder":
        raise Unsupported(f"autochunk: {w.prefix}{_described(node)} writes into an input of the function")
    for other, its_root in base.items():
        if its_root is root and other is not target and order[other] < order[node]:
            late = [u for u in other.users if order[u] > order[node]]
            if late:
                raise Unsupported(
                    f"autochunk: {w.prefix}{_described(node)} writes into memory that {late[0].target} sees as another "
                    "tensor; expected a new tensor, as torch.where, index_put and diagonal_scatter make one"
                )


def drawing(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Returns the operations that draw random numbers, in order."""
    return [n for n in graph.graph.nodes if n.op == "call_function" and _name(n) in DRAWING]


def _device(made) -> str:
    """Returns the device type of a node's results."""
    return next((t.device.type for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)), "cpu")


def _outputs(graph: torch.fx.GraphModule) -> list:
    [output] = [n for n in graph.graph.nodes if n.op == "output"]
    made = output.args[0]
    return list(made) if isinstance(made, (list, tuple)) else [made]


@dataclass
class Text:
    text: str
    parameters: list[str]  # the parameters that it reads, in order
    locations: dict[str, str]  # the line of the user's code of each value
    calls: list[Call]  # PyTorch functions that it calls
    checks: Checks | None  # the checks of its indices


def to_text(
    graph: torch.fx.GraphModule,
    parameters: Sequence[str],
    results: Sequence[str | None],
    ones: Sequence[int] = (),
    name: str = "main",
    native: bool = False,
    seed: str = "",
    kept: Mapping[torch.fx.Node, str] = {},
    given: bool = False,
) -> Text:
    """Writes the text of a program. parameters: a name for each placeholder, in order. results: a name for each output,
    or None to omit it. ones: placeholders that are the constant 1, such as the upstream gradient of a scalar loss.
    native: the library runs it. seed: the parameter with the random seed. kept: names of values that another program
    keeps for this one: its last results, or parameters of this one if `given`."""
    w = HeadWriter(DTYPES)
    w.native = native
    widened = _widened(graph, kept) if native else set()
    values: dict[torch.fx.Node, object] = {}
    header: list[tuple[str, str]] = []
    nodes = [n for n in graph.graph.nodes if n.op != "output"]
    order = {n: i for i, n in enumerate(graph.graph.nodes)}
    wanted = [(node, result) for node, result in zip(_outputs(graph), results) if result is not None]
    if not given:
        wanted += kept.items()
    live = _live([node for node, _ in wanted], kept if given else ())
    base = {}
    w.taken.update([*parameters, *kept.values()])
    draws = {n: i for i, n in enumerate(drawing(graph))}
    if seed:
        w.taken.add(seed)
        w.seed = Value(seed, DTYPES.i64, (2,))
    position = 0
    for node in nodes:
        base[node] = base[node.args[0]] if node.args and _is_view(node) else node
        out = node.meta.get("val")
        if node.op == "placeholder":
            w.op = f"parameter {parameters[position]}"
            if position in ones:
                values[node] = w.number(1, out.dtype, out.shape)
            elif node in live:
                header.append((parameters[position], w.type(out.dtype, out.shape)))
                values[node] = Value(parameters[position], out.dtype, tuple(out.shape))
            position += 1
            continue
        if given and node in kept:
            if node in live:
                header.append((kept[node], w.type(out.dtype, out.shape)))
                values[node] = Value(kept[node], out.dtype, tuple(out.shape))
            continue
        w.location = location_of(node.stack_trace)
        writes = _writes(node)
        if writes:
            _check_write(w, node, base, order)
            base[node] = base[node.args[0]]
        if node not in live and not (writes and node.args[0] in live):
            continue
        w.op, w.hint, w.device, w.drawn = str(node.target), node.name, _device(out), draws.get(node, 0)
        w.asked = str(node.meta.get("original_aten") or node.target)
        if node in draws and node.kwargs.get("generator") is not None:
            raise w.refuse("a generator of its own has no form in a tensor program; expected the default one")
        if native:
            w.wide = node in widened
        if node in widened:
            out = torch.empty(out.shape, dtype=torch.float32, device="meta")
        arguments = torch.fx.node.map_arg(node.args, lambda n: values[n])
        if _name(node) == "getitem":
            values[node] = arguments[0][arguments[1]]
            continue
        options = torch.fx.node.map_arg(node.kwargs, lambda n: values[n])
        try:
            made = _handled(w, node, out, arguments, options)
        except Unsupported as error:
            made = _as_it_is(w, node, out, arguments, options, live, error)
        values[node] = _checked(w, made, out)
        if writes:
            values[node.args[0]] = values[node]
    w.op, w.location = "results", ""
    returned = []
    for node, result in wanted:
        returned.append(f"{result}: %{_result(w, values[node], result).name}")
    if w.keys:
        header.append((seed, w.type(w.seed.dtype, w.seed.shape)))
    inputs = ", ".join(f"%{parameter}: {type_}" for parameter, type_ in header)
    body = "\n".join(w.lines)
    text = f"graph {name}({inputs}) {{\n{body}\n  return {', '.join(returned)}\n}}\n"
    return Text(text, [p for p, _ in header], w.locations, list(w.calls.values()), w.all_checks(header))


def _handled(w: Writer, node: torch.fx.Node, out, arguments: Sequence, options: dict):
    """Lowers an operation."""
    name = _name(node)
    handler = HANDLERS.get(name) or (HANDLERS.get(name[:-1]) if _writes(node) else None)
    if handler is None or not _known(node):
        raise Unsupported(f"autochunk: {w.prefix}{_described(node)} has no form in a tensor program")
    try:
        return handler(w, out, *arguments, **options)
    except TypeError as error:  # an argument that the handler does not accept
        raise Unsupported(f"autochunk: {w.prefix}{_described(node)}: {error}") from error


def _as_it_is(w: Writer, node, out, arguments, options, live: set, error: Unsupported):
    """Makes the operation a call of PyTorch, or raises the error with the reason why that is impossible."""
    why = why_not(w, node.target, arguments, options, out)
    if why:
        raise Unsupported(str(error) if why in str(error) else f"{error}; {why}") from error
    read = {user.args[1] for user in node.users if user in live and _name(user) == "getitem"}
    return run_as_it_is(w, node.target, out, arguments, options, sorted(read))


def _widened(graph: torch.fx.GraphModule, kept: Container[torch.fx.Node]) -> set[torch.fx.Node]:
    """Returns the matrix products of 16-bit operands that are read in f32 alone, and the views between. They are
    accumulated in f32 anyway. Those that are kept have the dtype that PyTorch gives them."""
    found = set()
    for node in graph.graph.nodes:
        if node.op != "call_function" or _name(node) not in ("mm", "bmm") or node in kept:
            continue
        path = [node]
        while path[-1].meta["val"].dtype in DTYPES.narrow and len(path[-1].users) == 1:
            [user] = path[-1].users
            if user.op != "call_function" or _name(user) not in (*_VIEWS, "_to_copy"):
                break
            made = user.meta["val"]
            if not isinstance(made, torch.Tensor):  # parts of a split
                break
            if made.dtype == torch.float32:
                found.update(path)
                break
            path.append(user)
    return found


def _live(roots: Sequence[torch.fx.Node], given: Container[torch.fx.Node] = ()) -> set[torch.fx.Node]:
    """Returns the nodes that make the roots. given: nodes that nothing makes."""
    live, work = set(), list(roots)
    while work:
        node = work.pop()
        if node in live:
            continue
        live.add(node)
        work += () if node in given else node.all_input_nodes
        # A write into a live value is live.
        for user in node.users:
            if _writes(user) and user.args[0] is node:
                work.append(user)
    return live


def _known(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "logitless")


def _checked(w: Writer, made, out):
    """Checks that a handler's result has the shape and dtype that PyTorch infers."""
    if isinstance(out, (list, tuple)):
        return tuple(_checked(w, m, o) for m, o in zip(made, out))
    if made is None:  # nothing reads it
        return None
    if made.shape != tuple(out.shape) or made.dtype != out.dtype:
        raise AssertionError(
            f"autochunk: {w.op} became {made.dtype}{list(made.shape)}, expected {out.dtype}{list(out.shape)}"
        )
    return made


def _result(w: Writer, v: Value, name: str) -> Value:
    w.hint = name
    return w.written(v)
