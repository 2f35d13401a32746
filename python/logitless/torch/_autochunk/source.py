"""Emits compiled programs as readable PyTorch: plain torch operations, with a `for` loop for each loop."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import torch

from logitless._autochunk.attention import without_statistics
from logitless._autochunk.externs import Call, merged
from logitless._autochunk.options import Unsupported
from logitless._autochunk.parse import Graph, Loop, Node, Slot, Type
from logitless._autochunk.source import BaseEmitter, gathered
from logitless._autochunk.text import (
    MAPS,
    UNARY,
    Term,
    broadcast,
    number_of,
    operation,
    rename,
    sizes,
    tuple_of,
)
from logitless.torch._autochunk.fused import fused
from logitless.torch._autochunk.helpers import HELPERS
from logitless.torch._autochunk.in_place import InPlace
from logitless.torch._autochunk.products import Products
from logitless.torch._autochunk.source_calls import CallScope

_VIEWS = {"reshape", "transpose", "slice", "broadcast", "stop_gradient"}


class Scope(CallScope, InPlace, Products):
    """Tracks the last use of each value's memory, which is then overwritten or freed."""

    def __init__(self, emitter: Emitter, nodes: list[Node], ends: Sequence[str], outer: dict[str, Term], indent: str):
        super().__init__(emitter, nodes, outer, indent)
        self.root: dict[str, str] = {}  # the value whose memory each value may share
        self.last: dict[str, int] = {}  # the last use of each root
        self.uses: dict[str, int] = {}
        self.names: dict[str, list[str]] = {}  # the Python names of each root
        self.types: dict[str, Type] = {}
        self.now = 0  # the index of the node being written
        self.sums: dict[str, str] = {}  # accumulators of matrix products that add in place
        self.puts: dict[str, tuple[Node, Term, Term]] = {}  # puts that a sum writes into its other operand
        self.makers = {r: i for i, n in enumerate(nodes) for r in n.results}
        for i, node in enumerate(nodes):
            view = node.op in _VIEWS
            for r, type_ in zip(node.results, node.types or [node.type] * len(node.results)):
                self.root[r] = self.root.get(node.operands[0], node.operands[0]) if view else r
                if type_ is not None:
                    self.types[r] = type_
            for operand in node.operands:
                self._use(operand, i)
        for v in ends:
            self._use(v, len(nodes))

    def _use(self, value: str, at: int) -> None:
        self.uses[value] = self.uses.get(value, 0) + 1
        root = self.root.get(value, value)
        self.last[root] = max(self.last.get(root, -1), at)

    # --- terms
    @staticmethod
    def floating(dtype) -> bool:
        return dtype.is_floating_point

    def full(self, t: Term) -> str:
        if t.number:
            dtype = f"dtype={t.type.dtype}, device=device"
            return f"torch.full({tuple_of(t.type.shape)}, {t.text}, {dtype})"
        return t.text if all(t.present) else f"{t.text}.expand({sizes(t.type.shape)})"

    def dies(self, value: str) -> bool:
        return self.last.get(self.root.get(value, value)) == self.now and value in self.makers

    def bind(self, value: str, text: str, type_: Type, present=None) -> Term:
        name = self.e.names.fresh(value)
        self.line(f"{name} = {text}")
        return self.keep(value, Term(name, type_, tuple(present or [True] * len(type_.shape)), owned=True))

    def keep(self, value: str, term: Term) -> Term:
        self.terms[value] = term
        root = self.root.get(value, value)
        name = re.match(r"\w+", term.text)
        if name and not term.number and name.group() not in self.names.setdefault(root, []):
            self.names[root].append(name.group())
        return term

    # --- the body
    def run(self) -> None:
        for at, node in enumerate(self.nodes):
            self.now = at
            if node.op == "loop":
                self.e.loop(self, node)
            elif node.op in MAPS:
                self.map(node)
            else:
                method = getattr(self, f"op_{node.op}", None)
                if method is None:
                    raise Unsupported(f"autochunk: {node.op} of a compiled program has no form in Python")
                method(node, *(self.terms[v] for v in node.operands))
            self.release(at)

    def release(self, at: int) -> None:
        """Deletes large values after their last use."""
        dead = []
        for root, last in self.last.items():
            if last == at and root in self.makers and self.e.big(self.types.get(root)):
                dead += self.names.pop(root, [])
        if dead:
            self.line(f"del {', '.join(dead)}")

    def map(self, node: Node) -> None:
        if sum(v in self.puts for v in node.operands) == 1 and node.operands[0] != node.operands[1]:
            self.add_put(node)
            return
        [value] = node.results
        terms = [self.terms[v] for v in node.operands]
        type_ = node.type
        if all(t.number for t in terms):
            text = number_of(node.op, [t.text for t in terms])
            if text is not None:
                self.number(node, text)
                return
            scalar = replace(terms[-1], type=Type(terms[-1].type.dtype, ()))
            terms[-1] = replace(terms[-1], text=self.full(scalar), number=False)
        present = tuple(any(t.present[d] for t in terms) for d in range(len(type_.shape)))
        texts = [t.text for t in terms]
        for place, (operand, t) in enumerate(zip(node.operands, terms)):
            same = t.type.dtype == type_.dtype and t.present == present and t.owned
            root = self.root.get(operand, operand)
            shared = sum(self.root.get(o, o) == root for o in node.operands) > 1  # x - x.t() would read what it writes
            if not same or not self.dies(operand) or shared or not any(present):
                continue
            text = self.in_place(node.op, place, texts, terms)
            if text is None:
                continue
            self.line(text)
            self.becomes(value, operand, type_)
            return
        self.bind(value, self._map(node.op, terms, type_), type_, present)

    def _map(self, op: str, terms: list[Term], type_: Type) -> str:
        texts = [t.text for t in terms]
        if op in UNARY:
            if op == "trigamma":
                return f"{texts[0]}.polygamma(1)"
            return f"torch.{op}({texts[0]})" if op == "erf" else f"{texts[0]}.{op}()"
        if op == "pow" and texts[0].startswith("-"):
            texts[0] = f"({texts[0]})"
        if (text := operation(op, texts)) is not None:
            return text
        if op in ("random", "uniform"):
            return f"{self.e.helper(f'_{op}')}({', '.join(texts)})"
        if op in ("max", "min"):
            if terms[0].number or terms[1].number:
                x, number = (texts[1], texts[0]) if terms[0].number else texts
                return f"{x}.clamp({'min' if op == 'max' else 'max'}={number})"
            return f"torch.{op}imum({texts[0]}, {texts[1]})"
        if terms[1].number and terms[2].number:  # PyTorch converts Python numbers alone to its default dtype
            texts[1] = f"torch.full((), {texts[1]}, dtype={type_.dtype}, device=device)"
        return f"torch.where({', '.join(texts)})"

    # --- operations: views
    def op_constant(self, node: Node) -> None:
        self.constant(node, condition=node.type.dtype == torch.bool)

    def op_broadcast(self, node: Node, x: Term) -> None:
        self.keep(node.results[0], broadcast(x, node.numbers("dims"), node.type))

    def op_stop_gradient(self, node: Node, x: Term) -> None:
        self.keep(node.results[0], replace(x, owned=False))

    def op_reshape(self, node: Node, x: Term) -> None:
        if x.number:
            self.number(node, x.text)
            return
        self.view(node, f"{self.full(x)}.reshape({sizes(node.type.shape) or '()'})", x)

    def view(self, node: Node, text: str, x: Term) -> None:
        self.bind(node.results[0], text, node.type)
        self.terms[node.results[0]] = replace(self.terms[node.results[0]], owned=x.owned and all(x.present))

    def op_transpose(self, node: Node, x: Term) -> None:
        dims = node.numbers("dims")
        if x.number:
            self.number(node, x.text)
        elif len(dims) == 2:
            text = self.full(x)
            text = text.removesuffix(".t()") if text.endswith(".t()") else f"{text}.t()"
            self.keep(node.results[0], Term(text, node.type, (True, True)))
        else:
            self.view(node, f"{self.full(x)}.permute({', '.join(map(str, dims))})", x)

    def op_slice(self, node: Node, x: Term) -> None:
        if x.number:
            self.number(node, x.text)
        else:
            self.view(node, self.sliced(node, x), x)

    # --- operations: new memory
    def op_iota(self, node: Node) -> None:
        [axis] = node.numbers("axis")
        dtype = "" if node.type.dtype == torch.int64 else f", dtype={node.type.dtype}"
        arange = f"torch.arange({node.type.shape[axis]}{dtype}, device=device)"
        self.keep(node.results[0], self.counted(node, arange))

    def op_cast(self, node: Node, x: Term) -> None:
        if x.number:
            self.cast_number(node, x)
        else:
            self.bind(node.results[0], f"{x.text}.to({node.type.dtype})", node.type, x.present)

    def op_pad(self, node: Node, x: Term) -> None:
        low, high = node.attributes["low"].split(","), node.attributes["high"].split(",")
        pads = [p.strip() for pair in reversed(list(zip(low, high))) for p in pair]
        self.bind(node.results[0], f"torch.nn.functional.pad({self.full(x)}, ({', '.join(pads)}))", node.type)

    def op_concat(self, node: Node, *parts: Term) -> None:
        listed = ", ".join(self.full(p) for p in parts)
        self.bind(node.results[0], f"torch.cat(({listed}), dim={node.attributes['axis']})", node.type)

    def op_reduce_sum(self, node: Node, x: Term) -> None:
        text, dims = self.reduced(node, x)
        dtype = f", dtype={node.type.dtype}" if node.type.dtype != x.type.dtype else ""
        self.bind(node.results[0], f"{text}.sum({dims}{dtype})", node.type)

    def op_reduce_max(self, node: Node, x: Term) -> None:
        text, dims = self.reduced(node, x)
        wide = f".to({node.type.dtype})" if node.type.dtype != x.type.dtype else ""
        self.bind(node.results[0], f"{text}.amax({dims}){wide}", node.type)

    def op_argmax(self, node: Node, x: Term) -> None:
        text, dims = self.reduced(node, x)
        self.bind(node.results[0], f"{text}.argmax({dims})", node.type)


    # --- operations: order
    def op_flip(self, node: Node, x: Term) -> None:
        self.bind(node.results[0], f"{self.full(x)}.flip({node.attributes['axis']})", node.type)

    def op_cumsum(self, node: Node, x: Term) -> None:
        dtype = "" if self.floating(node.type.dtype) else f", dtype={node.type.dtype}"
        self.scanned(node, x, "cumsum({}" + dtype + ")")

    def op_cumlse(self, node: Node, x: Term) -> None:
        self.scanned(node, x, "logcumsumexp({})")

    def scanned(self, node: Node, x: Term, call: str) -> None:
        axis = node.attributes["axis"]
        turn = f".flip({axis})" if node.attributes["reverse"] == "1" else ""
        self.bind(node.results[0], f"{self.full(x)}{turn}.{call.format(axis)}{turn}", node.type)

    def op_sort(self, node: Node, x: Term) -> None:
        axis, count, down = (node.attributes[k] for k in ("axis", "count", "descending"))
        names = [self.e.names.fresh(r) for r in node.results]
        if count == x.type.shape[int(axis)]:
            call = f"sort(dim={axis}, descending={down == '1'}, stable=True)"
        else:
            call = f"topk({count}, {axis}, largest={down == '1'})"
        self.line(f"{', '.join(names)} = {self.full(x)}.{call}")
        for value, name, type_ in zip(node.results, names, node.types):
            self.keep(value, Term(name, type_, (True,) * len(type_.shape), owned=True))

    # --- operations: indices. Only an index along a chunked axis can be out of range.
    def _cut(self, size: str) -> bool:
        return not size.isdigit()

    def op_pick(self, node: Node, x: Term, index: Term) -> None:
        axis = node.numbers("axis")[0]
        if len(index.type.shape) == len(x.type.shape):
            if self._cut(x.type.shape[axis]):
                text = f"{self.e.helper('_pick_several')}({self.full(x)}, {self.full(index)}, {axis})"
            else:
                text = f"{self.full(x)}.gather({axis}, {self._long(index)})"
            self.bind(node.results[0], text, node.type)
            return
        if self._cut(x.type.shape[axis]):
            text = f"{self.e.helper('_pick')}({self.full(x)}, {self.full(index)}, {axis})"
        else:
            at = f"{self._long(index)}.unsqueeze({axis})"
            text = f"{self.full(x)}.gather({axis}, {at}).squeeze({axis})"
        self.bind(node.results[0], text, node.type)

    def _long(self, index: Term) -> str:
        return self.full(index) + (".long()" if index.type.dtype != torch.int64 else "")

    def op_put(self, node: Node, index: Term, updates: Term) -> None:
        [value] = node.results
        readers = [i for i, n in enumerate(self.nodes) if value in n.operands]
        added = readers and self.nodes[readers[0]].op == "add" and self.puts.keys().isdisjoint(self.nodes[readers[0]].operands)
        if self.uses[value] == 1 and added:
            self.puts[value] = node, index, updates
            for operand in node.operands:
                root = self.root.get(operand, operand)
                self.last[root] = max(self.last[root], readers[0])
            return
        zeros = f"torch.zeros({tuple_of(node.type.shape)}, dtype={node.type.dtype}, device=device)"
        self.bind(node.results[0], self.put(zeros, node, index, updates), node.type)

    def put(self, x: str, node: Node, index: Term, updates: Term) -> str:
        axis = node.numbers("axis")[0]
        if "row" in node.attributes:
            at, numbers = (f"{self.full(t)}.unsqueeze({axis})" for t in (index, updates))
            return f"{self.e.helper('_put_')}({x}, {at}, {numbers}, {axis})"
        if self._cut(node.type.shape[axis]):
            return f"{self.e.helper('_put_')}({x}, {self.full(index)}, {self.full(updates)}, {axis})"
        to = f".to({node.type.dtype})" if node.type.dtype != updates.type.dtype else ""
        return f"{x}.scatter_add_({axis}, {self._long(index)}, {self.full(updates)}{to})"

    def op_take(self, node: Node, table: Term, index: Term) -> None:
        if self._cut(table.type.shape[0]):
            text = f"{self.e.helper('_take')}({self.full(table)}, {self.full(index)})"
        else:
            text = f"{self.full(table)}.index_select(0, {self.full(index)}.reshape(-1))"
            if len(index.type.shape) != 1:
                text += f".reshape({sizes(node.type.shape) or '()'})"
        self.bind(node.results[0], text, node.type)

    def op_scatter_add(self, node: Node, index: Term, updates: Term) -> None:
        rows = node.attributes["rows"]
        if self._cut(rows):
            call = f"({rows}, {self.full(index)}, {self.full(updates)}, {node.type.dtype})"
            self.bind(node.results[0], self.e.helper("_scatter_add") + call, node.type)
            return
        rest = [s for s in updates.type.shape[len(index.type.shape) :]]
        zeros = f"torch.zeros({tuple_of(node.type.shape)}, dtype={node.type.dtype}, device=device)"
        to = f".to({node.type.dtype})" if node.type.dtype != updates.type.dtype else ""
        count = f"{self.full(index)}.numel()" if "0" in map(str, rest) else "-1"  # PyTorch takes no -1 beside a 0
        parts = f"{self.full(updates)}.reshape({sizes([count, *rest])}){to}"
        self.bind(node.results[0], f"{zeros}.index_add_(0, {self.full(index)}.reshape(-1), {parts})", node.type)



class Emitter(BaseEmitter):
    def __init__(self, graph: Graph, name: str, wide_products: bool, calls: Sequence[Call]):
        super().__init__(graph, name, {"torch", "device", "range", "float", "min", "_", *HELPERS})
        self.calls = calls  # PyTorch functions, by number
        # Matrix products of 16-bit operands with an f32 result; only GPUs have such kernels.
        self.wide_products = wide_products
        self.chunks: dict[str, int] = {}
        self.largest = max([self.bytes(t) for t in self._types(graph.nodes)], default=0)

    def _types(self, nodes: Sequence[Node]):
        for node in nodes:
            if node.loop is not None:
                self.chunks[node.loop.symbol] = node.loop.chunk
                yield from self._types(node.loop.body)
            elif node.type is not None:
                yield node.type

    def bytes(self, type_: Type) -> int:
        return self.elements(type_) * type_.dtype.itemsize

    def elements(self, type_: Type) -> int:
        return math.prod(eval(s, {"__builtins__": {}}, self.chunks) for s in type_.shape)  # the compiler's own text

    def big(self, type_: Type | None) -> bool:
        return type_ is None or self.bytes(type_) * 64 >= self.largest

    def run(self) -> str:
        outer, arguments = {}, []
        for name, type_ in self.graph.parameters:
            python = self.names.fresh(name)
            arguments.append((python, type_))
            outer[name] = Term(python, type_, (True,) * len(type_.shape))
        for python, type_ in arguments:
            self.lines.append(f"    # {python}: {str(type_.dtype).removeprefix('torch.')} [{sizes(type_.shape)}]")
        # Checks of constant indices read no tensor.
        self.lines.append(f"    device = {arguments[0][0]}.device" if arguments else '    device = torch.device("cpu")')
        scope = Scope(self, self.graph.nodes, [v for _, v in self.graph.results], outer, "    ")
        scope.run()
        returned = []
        for _, value in self.graph.results:
            term = scope.terms[value]
            text = scope.full(term)
            made = scope.root.get(value, value) in scope.makers  # inputs and views of them must be copied
            own = term.number or (made and term.text == text and text not in returned)
            returned.append(text if own else f"{text}.clone(memory_format=torch.contiguous_format)")
        self.lines.append(f"    return {', '.join(returned)}{',' if len(returned) == 1 else ''}")
        body = "\n".join(self.lines)
        head = f"def {self.name}({', '.join(python for python, _ in arguments)}):"
        parts = [HELPERS[h].strip("\n") for h in self.helpers] + [f"{head}\n{body}"]
        return "import torch\n\n\n" + "\n\n\n".join(parts) + "\n"

    # --- loops
    def loop(self, scope: Scope, node: Node) -> None:
        loop = node.loop
        inner = Scope(self, loop.body, [slot.name for slot in loop.outputs], {}, scope.indent + "    ")
        first, size = self.names.fresh("start"), self.names.fresh("rows")
        rounds = -(-loop.extent // loop.chunk)
        accumulated = [self._accumulator(scope, inner, loop, slot) for slot in loop.outputs]
        scope.line(f"# {loop.extent} in {rounds} chunks of {loop.chunk}")
        scope.line(f"for {first} in range(0, {loop.extent}, {loop.chunk}):")
        inner.line(f"{size} = min({loop.chunk}, {loop.extent} - {first})")
        self.size_name = size
        inner.terms[loop.first] = Term(first, Type(torch.int64, ()), (), number=True)
        for slot in loop.inputs:
            inner.terms[slot.name] = self.entering(scope, inner, slot, first, size)
        for body_node in loop.body:
            rename(body_node, loop.symbol, size)
        self.chunks[size] = loop.chunk
        inner.types = {}
        for body_node in loop.body:
            types = body_node.types or [body_node.type] * len(body_node.results)
            inner.types.update((r, t) for r, t in zip(body_node.results, types) if t is not None)
        inner.run()
        for slot, name in zip(loop.outputs, accumulated):
            self._leaving(inner, slot, name, first, size)
        inner.release(len(loop.body))

    def _accumulator(self, scope: Scope, inner: Scope, loop: Loop, slot: Slot) -> str:
        type_ = inner.types.get(slot.name) or scope.terms[[i for i in loop.inputs if i.name == slot.name][0].outer].type
        if slot.kind == "stack":
            type_ = gathered(type_, slot, loop)
            start = "torch.empty({})"
        elif slot.kind == "sum":
            start = "torch.zeros({})"
        elif type_.dtype.is_floating_point:
            start = 'torch.full({}, float("-inf"))'
        else:
            start = f"torch.full({{}}, torch.iinfo({type_.dtype}).min)"
        start = start.format(tuple_of(type_.shape))[:-1] + f", dtype={type_.dtype}, device=device)"
        scope.types[slot.outer] = type_
        made = scope.bind(slot.outer, start, type_).text
        maker = loop.body[inner.makers[slot.name]] if slot.name in inner.makers else None
        if slot.kind == "sum" and maker is not None and maker.op == "dot" and inner.uses[slot.name] == 1:
            inner.sums[slot.name] = made
        return made

    @staticmethod
    def _index(axis: int, factor: int, first: str, size: str) -> str:
        if factor == 1:
            return ":, " * axis + f"{first}:{first} + {size}"
        return ":, " * axis + f"{factor} * {first}:{factor} * ({first} + {size})"

    def part(self, text: str, axis: int, factor: int, first: str, size: str) -> str:
        return f"{text}[{self._index(axis, factor, first, size)}]"

    def _leaving(self, inner: Scope, slot: Slot, name: str, first: str, size: str) -> None:
        if slot.name in inner.sums:
            return
        term = inner.terms[slot.name]
        text = term.text if term.number else inner.full(term)
        if slot.kind == "stack":
            inner.line(f"{name}[{self._index(slot.axis, slot.factor, first, size)}] = {text}")
        elif slot.kind == "sum":
            inner.line(f"{name} += {text}")
        else:
            text = inner.full(term)
            function = "torch.maximum" if slot.kind == "max" else "torch.logaddexp"
            inner.line(f"{function}({name}, {text}, out={name})")


def to_source(graph: Graph, name: str, wide_products: bool, calls: Sequence[Call] = ()) -> str:
    """Returns a module with a function that maps the graph's parameters to a tuple of its results. The graph is
    consumed. calls: PyTorch functions that the program calls."""
    return Emitter(fused(without_statistics(merged(graph))), name, wide_products, calls).run()
