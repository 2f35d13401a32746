"""Emits compiled programs as readable JAX: plain jnp code, with a ``lax.fori_loop`` for each loop.

The results of a loop are its carry: chunks are written into it in place, sums are added to it. If the last chunk is
shorter, the same function is called once more for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from logitless._autochunk.externs import Call, merged
from logitless._autochunk.options import Unsupported
from logitless._autochunk.parse import Graph, Loop, Node, Slot, Type, parse
from logitless._autochunk.source import BaseEmitter, BaseScope, gathered
from logitless._autochunk.text import MAPS, Term, broadcast, number_of, operation, rename, sizes, tuple_of
from logitless.jax._autochunk.dtypes import run_dtypes
from logitless.jax._autochunk.helpers import HELPERS

_UNARY = {name: f"jnp.{name}" for name in ("abs", "exp", "log", "log1p", "expm1", "sqrt", "tanh", "sin", "cos", "sign")}
_UNARY |= {"floor": "jnp.floor", "rsqrt": "lax.rsqrt", "erf": "lax.erf", "sigmoid": "lax.logistic"}
_UNARY |= {"atan": "lax.atan", "erfc": "lax.erfc", "lgamma": "lax.lgamma", "digamma": "lax.digamma"}
_RESERVED = {"jax", "jnp", "lax", "range", "float", "int", "state", "i", "calls", "_", *HELPERS}
_INDENT = "    "


def _floating(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


class Scope(BaseScope):
    floating = staticmethod(_floating)

    # --- terms
    def full(self, t: Term) -> str:
        if t.number:
            return f"jnp.full({tuple_of(t.type.shape)}, {t.text}, {self.dtype(t.type)})"
        return t.text if all(t.present) else f"jnp.broadcast_to({t.text}, {tuple_of(t.type.shape)})"

    @staticmethod
    def dtype(type_: Type) -> str:
        return "bool" if type_.dtype == bool else f"jnp.{type_.dtype.name}"

    def bind(self, value: str, text: str, type_: Type, present=None) -> Term:
        name = self.e.names.fresh(self.e.results.get(value, value))
        self.line(f"{name} = {text}")
        self.terms[value] = Term(name, type_, tuple(present or [True] * len(type_.shape)))
        return self.terms[value]

    # --- the body
    def run(self) -> None:
        for node in self.nodes:
            if node.op == "loop":
                self.e.loop(self, node)
                continue
            terms = [self.terms[v] for v in node.operands]
            if node.op in MAPS:
                self.map(node, terms)
                continue
            method = getattr(self, f"op_{node.op}", None)
            if method is None:
                raise Unsupported(f"autochunk: {node.op} of a compiled program has no form in JAX")
            method(node, *terms)

    def map(self, node: Node, terms: list[Term]) -> None:
        if all(t.number for t in terms):
            whole = node.op == "div" and not _floating(node.type.dtype)
            text = None if whole else number_of(node.op, [t.text for t in terms])
            if text is not None:
                self.number(node, text)
                return
            terms = [self._scalar(t) for t in terms]
        present = tuple(any(t.present[d] for t in terms) for d in range(len(node.type.shape)))
        self.bind(node.results[0], self._map(node.op, terms, node.type), node.type, present)

    def _scalar(self, t: Term) -> Term:
        return replace(t, text=f"jnp.full((), {t.text}, {self.dtype(t.type)})", number=False)

    def _map(self, op: str, terms: list[Term], type_: Type) -> str:
        texts = [t.text for t in terms]
        if op in _UNARY:
            return f"{_UNARY[op]}({texts[0]})"
        if op == "trigamma":
            return f"lax.polygamma(jnp.ones_like({texts[0]}), {texts[0]})"
        if op in ("random", "uniform"):
            return f"{self.e.helper(f'_{op}')}({', '.join(texts)})"
        if op == "div" and not _floating(type_.dtype):
            return f"lax.div({', '.join(self.full(t) for t in terms)})"
        if op == "pow":
            return f"jnp.power({texts[0]}, {texts[1]})"
        if (text := operation(op, texts)) is not None:
            return text
        if op in ("max", "min"):
            return f"jnp.{op}imum({texts[0]}, {texts[1]})"
        if terms[1].number and terms[2].number:  # JAX converts Python numbers alone to its default dtype
            texts[1] = self._scalar(terms[1]).text
        return f"jnp.where({', '.join(texts)})"

    # --- operations: views and copies
    def op_constant(self, node: Node) -> None:
        self.constant(node, condition=node.type.dtype == bool)

    def op_broadcast(self, node: Node, x: Term) -> None:
        self.terms[node.results[0]] = broadcast(x, node.numbers("dims"), node.type)

    def op_stop_gradient(self, node: Node, x: Term) -> None:
        self.terms[node.results[0]] = x

    def op_cast(self, node: Node, x: Term) -> None:
        [value] = node.results
        if x.number:
            self.cast_number(node, x)
        elif node.type.dtype == x.type.dtype and x.text not in self.e.starts:
            self.terms[value] = replace(x, type=node.type)
        elif x.text in self.e.starts:  # a Python number in the last chunk
            self.bind(value, f"jnp.asarray({x.text}, {self.dtype(node.type)})", node.type)
        else:
            self.bind(value, f"{x.text}.astype({self.dtype(node.type)})", node.type, x.present)

    def op_reshape(self, node: Node, x: Term) -> None:
        if x.number:
            self.number(node, x.text)
        else:
            self.bind(node.results[0], f"{self.full(x)}.reshape({sizes(node.type.shape) or '()'})", node.type)

    def op_transpose(self, node: Node, x: Term) -> None:
        dims = node.numbers("dims")
        if x.number:
            self.number(node, x.text)
        elif dims == [1, 0]:
            self.bind(node.results[0], f"{self.full(x)}.T", node.type)
        else:
            self.bind(node.results[0], f"{self.full(x)}.transpose({', '.join(map(str, dims))})", node.type)

    def op_slice(self, node: Node, x: Term) -> None:
        if x.number:
            self.number(node, x.text)
        else:
            self.bind(node.results[0], self.sliced(node, x), node.type)

    def op_pad(self, node: Node, x: Term) -> None:
        low, high = (node.attributes[k].split(",") for k in ("low", "high"))
        pads = tuple_of([f"({a.strip()}, {b.strip()})" for a, b in zip(low, high)])
        self.bind(node.results[0], f"jnp.pad({self.full(x)}, {pads})", node.type)

    def op_concat(self, node: Node, *parts: Term) -> None:
        listed = ", ".join(self.full(p) for p in parts)
        self.bind(node.results[0], f"jnp.concatenate(({listed}), {node.attributes['axis']})", node.type)

    def op_iota(self, node: Node) -> None:
        [axis] = node.numbers("axis")
        arange = f"jnp.arange({node.type.shape[axis]}, dtype={self.dtype(node.type)})"
        self.terms[node.results[0]] = self.counted(node, arange)

    # --- operations: reductions and matrix products
    def op_reduce_sum(self, node: Node, x: Term) -> None:
        text, dims = self.reduced(node, x)
        self.bind(node.results[0], f"{text}.sum({dims}, dtype={self.dtype(node.type)})", node.type)

    def op_reduce_max(self, node: Node, x: Term) -> None:
        text, dims = self.reduced(node, x)
        self.bind(node.results[0], f"{text}.max({dims}){self._to(node, x)}", node.type)

    def op_reduce_lse(self, node: Node, x: Term) -> None:
        text, dims = self.reduced(node, x)
        if x.type.dtype == jnp.float32 and node.type.dtype == jnp.float64:
            # Its differences to logits are wide, and not its exponentials.
            self.bind(node.results[0], f"{self.e.helper('_wide_lse')}({text}, {dims})", node.type)
            return
        self.bind(node.results[0], f"jax.nn.logsumexp({text}{self._to(node, x)}, {dims})", node.type)

    def op_argmax(self, node: Node, x: Term) -> None:
        text, dims = self.reduced(node, x)
        self.bind(node.results[0], f"{text}.argmax({dims}).astype({self.dtype(node.type)})", node.type)

    def _to(self, node: Node, x: Term) -> str:
        return f".astype({self.dtype(node.type)})" if node.type.dtype != x.type.dtype else ""

    def op_dot(self, node: Node, a: Term, b: Term) -> None:
        groups = tuple(tuple(pair) for pair in (node.pair("contract"), node.pair("batch")))
        dims = ", ".join(f"({', '.join(tuple_of([str(d) for d in dims]) for dims in pair)})" for pair in groups)
        more = f", precision={self.e.precision}" if self.e.precision else ""
        wide = f", preferred_element_type={self.dtype(node.type)}"
        text = f"lax.dot_general({self.full(a)}, {self.full(b)}, ({dims}){more}{wide})"
        self.bind(node.results[0], text, node.type)

    # --- operations that JAX itself runs
    def op_extern(self, node: Node, *operands: Term) -> None:
        call, read = self.e.calls[int(node.attributes["call"])], node.numbers("result")
        names = {k: self.e.names.fresh(self.e.results.get(r, r)) for k, r in zip(read, node.results)}
        self.line(f"{call.targets(names)} = {call.emit([self.full(t) for t in operands], read)}")
        for value, k, type_ in zip(node.results, read, node.types):
            self.terms[value] = Term(names[k], type_, (True,) * len(type_.shape))

    # --- operations: order
    def op_flip(self, node: Node, x: Term) -> None:
        self.bind(node.results[0], f"jnp.flip({self.full(x)}, {node.attributes['axis']})", node.type)

    def op_cumsum(self, node: Node, x: Term) -> None:
        self.scanned("lax.cumsum", node, x)

    def op_cumlse(self, node: Node, x: Term) -> None:
        self.scanned("lax.cumlogsumexp", node, x)

    def scanned(self, function: str, node: Node, x: Term) -> None:
        reverse = node.attributes["reverse"] == "1"
        self.bind(node.results[0], f"{function}({self.full(x)}, {node.attributes['axis']}, {reverse})", node.type)

    def op_sort(self, node: Node, x: Term) -> None:
        axis, count, down = (node.attributes[k] for k in ("axis", "count", "descending"))
        names = [self.e.names.fresh(self.e.results.get(r, r)) for r in node.results]
        call = f"{self.e.helper('_sort')}({self.full(x)}, {axis}, {count}, {down == '1'}, {self.dtype(node.types[1])})"
        self.line(f"{', '.join(names)} = {call}")
        for value, name, type_ in zip(node.results, names, node.types):
            self.terms[value] = Term(name, type_, (True,) * len(type_.shape))

    # --- operations: indices
    def op_pick(self, node: Node, x: Term, index: Term) -> None:
        call = f"({self.full(x)}, {self.full(index)}, {node.numbers('axis')[0]})"
        helper = "_pick_several" if len(index.type.shape) == len(x.type.shape) else "_pick"
        self.bind(node.results[0], self.e.helper(helper) + call, node.type)

    def op_put(self, node: Node, index: Term, updates: Term) -> None:
        axis, size = node.numbers("axis")[0], node.attributes["size"]
        call = f"({self.full(index)}, {self.full(updates)}, {size}, {axis}, {self.dtype(node.type)})"
        self.bind(node.results[0], self.e.helper("_put") + call, node.type)

    def op_take(self, node: Node, table: Term, index: Term) -> None:
        self.bind(node.results[0], f"{self.e.helper('_take')}({self.full(table)}, {self.full(index)})", node.type)

    def op_scatter_add(self, node: Node, index: Term, updates: Term) -> None:
        call = f"({node.attributes['rows']}, {self.full(index)}, {self.full(updates)}, {self.dtype(node.type)})"
        self.bind(node.results[0], self.e.helper("_scatter_add") + call, node.type)


class Emitter(BaseEmitter):
    def __init__(self, graph: Graph, name: str, precision: str, axes: Sequence[str], calls: Sequence[Call]):
        super().__init__(graph, name, _RESERVED)
        self.calls = calls  # JAX functions, by number
        self.precision = precision  # of matrix products, as Python source
        self.axes = axes  # the axes of a shard_map over which values vary
        self.results: dict[str, str] = {}  # the names of values that the function returns
        self.starts: set[str] = set()  # names of the index of a chunk's first element

    def run(self) -> str:
        outer, arguments = {}, []
        for name, type_ in self.graph.parameters:
            python = self.names.fresh(name)
            arguments.append(python)
            outer[name] = Term(python, type_, (True,) * len(type_.shape))
            self.lines.append(f"{_INDENT}# {python}: {type_.dtype.name} [{sizes(type_.shape)}]")
        scope = Scope(self, self.graph.nodes, outer, _INDENT)
        self.results = {value: name for name, value in self.graph.results}
        scope.run()
        returned = [scope.full(scope.terms[value]) for _, value in self.graph.results]
        self.lines.append(f"{_INDENT}return {', '.join(returned)}{',' if len(returned) == 1 else ''}")
        body = "\n".join(self.lines)
        parts = [HELPERS[h].strip("\n") for h in self.helpers]
        parts.append(f"def {self.name}({', '.join(arguments)}):\n{body}")
        return "import jax\nimport jax.numpy as jnp\nfrom jax import lax\n\n\n" + "\n\n\n".join(parts) + "\n"

    # --- loops
    def loop(self, scope: Scope, node: Node) -> None:
        loop = node.loop
        inner = Scope(self, loop.body, scope.terms, scope.indent + _INDENT)
        function, first, size = (self.names.fresh(n) for n in ("chunk", "start", "rows"))
        self.starts.add(first)
        types = {}
        for body_node in loop.body:
            known = body_node.types or [body_node.type] * len(body_node.results)
            types.update((r, t) for r, t in zip(body_node.results, known) if t is not None)
        for slot in loop.inputs:
            types[slot.name] = scope.terms[slot.outer].type
        names, starts = [], []
        for slot in loop.outputs:
            type_ = gathered(types[slot.name], slot, loop)
            names.append(self.names.fresh(self.results.get(slot.outer, slot.outer)))
            starts.append(self._empty(scope, slot, type_))
            scope.terms[slot.outer] = Term(names[-1], type_, (True,) * len(type_.shape))
        full, rest = divmod(loop.extent, loop.chunk)
        scope.line(f"# {loop.extent} in {full + (rest > 0)} chunks of {loop.chunk}")
        scope.line(f"def {function}({first}, {size}, state):")
        inner.line(f"{sizes(names)}{',' if len(names) == 1 else ''} = state")
        inner.terms[loop.first] = Term(first, Type(jnp.dtype("int32"), ()), ())
        for slot in loop.inputs:
            inner.terms[slot.name] = self.entering(scope, inner, slot, first, size)
        for body_node in loop.body:
            rename(body_node, loop.symbol, size)
        outer_results, self.results = self.results, {}
        inner.run()
        self.results = outer_results
        merged = [self._leaving(inner, slot, name, first) for slot, name in zip(loop.outputs, names)]
        inner.line(f"return {tuple_of(merged)}" if len(merged) < 2 else "return (")
        for text in merged if len(merged) > 1 else ():
            inner.line(f"{_INDENT}{text},")
        if len(merged) > 1:
            inner.line(")")
        self._rounds(scope, loop, function, names, starts)

    def _rounds(self, scope: Scope, loop: Loop, function: str, names: list[str], starts: list[str]) -> None:
        full, rest = divmod(loop.extent, loop.chunk)
        scope.line("state = (")
        for text in starts:
            scope.line(f"{_INDENT}{text},")
        scope.line(")")
        if self.axes:
            axes = tuple_of([repr(axis) for axis in self.axes])
            newer = hasattr(jax.lax, "pcast")
            cast = f"lax.pcast(state, {axes}, to='varying')" if newer else f"lax.pvary(state, {axes})"
            scope.line(f"state = {cast}")
        if full > 1:
            call = f"{function}({loop.chunk} * i, {loop.chunk}, state)"
            scope.line(f"state = lax.fori_loop(0, {full}, lambda i, state: {call}, state)")
        elif full == 1:
            scope.line(f"state = {function}(0, {loop.chunk}, state)")
        if rest > 0:
            scope.line(f"state = {function}({full * loop.chunk}, {rest}, state)")
        scope.line(f"{sizes(names)}{',' if len(names) == 1 else ''} = state")

    @staticmethod
    def _empty(scope: Scope, slot: Slot, type_: Type) -> str:
        if slot.kind in ("stack", "sum"):
            return f"jnp.zeros({tuple_of(type_.shape)}, {scope.dtype(type_)})"
        least = 'float("-inf")' if _floating(type_.dtype) else f"jnp.iinfo({scope.dtype(type_)}).min"
        return f"jnp.full({tuple_of(type_.shape)}, {least}, {scope.dtype(type_)})"

    def part(self, text: str, axis: int, factor: int, first: str, size: str) -> str:
        begin, size = (n if factor == 1 else f"{factor} * {n}" for n in (first, size))
        return f"lax.dynamic_slice_in_dim({text}, {begin}, {size}, {axis})"

    @staticmethod
    def _leaving(inner: Scope, slot: Slot, name: str, first: str) -> str:
        term = inner.terms[slot.name]
        if slot.kind == "stack":
            begin = first if slot.factor == 1 else f"{slot.factor} * {first}"
            return f"lax.dynamic_update_slice_in_dim({name}, {inner.full(term)}, {begin}, {slot.axis})"
        if slot.kind == "sum":
            return f"{name} + {term.text if term.number else inner.full(term)}"
        return f"jnp.{'maximum' if slot.kind == 'max' else 'logaddexp'}({name}, {inner.full(term)})"


def to_source(
    text: str, name: str, precision: str = "", axes: Sequence[str] = (), calls: Sequence[Call] = ()
) -> str:
    """Returns a module with a function that maps a compiled program's parameters to a tuple of its results. precision:
    of matrix products, as Python source; "" is JAX's default. axes: the axes of a shard_map over which the parameters
    vary. calls: JAX functions that the program calls."""
    return Emitter(merged(parse(text, run_dtypes())), name, precision, axes, calls).run()
