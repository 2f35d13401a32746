"""Converts a traced function to the text of a tensor program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jax.lax import Precision

from logitless._autochunk.externs import Call
from logitless._autochunk.lower import Value
from logitless._autochunk.options import Unsupported
from logitless.jax._autochunk import (  # noqa: F401: they add to HANDLERS
    lax_conv,
    lax_index,
    lax_order,
    lax_random,
    lax_windows,
)
from logitless.jax._autochunk.dtypes import UNSIGNED, held
from logitless.jax._autochunk.externs import run_as_it_is, why_not
from logitless.jax._autochunk.lax import HANDLERS, JaxWriter, NativeWriter, swapped_product
from logitless.jax._autochunk.trace import Constant, Equation, Program, Ref


@dataclass
class Text:
    text: str
    parameters: list[str]  # the parameters that it reads, in order
    precision: object  # of its matrix products, as jax.lax takes it
    locations: dict[str, str]  # the line of the user's code of each value
    calls: list[Call]  # JAX functions that it calls
    bound: dict[str, Callable]  # the functions behind names in the calls' texts


def to_text(
    program: Program,
    names: dict[Ref, str],
    results: Sequence[tuple[str, Ref | Constant]],
    ones: Sequence[Ref] = (),
    name: str = "main",
    native: bool = False,
    axes: frozenset[str] = frozenset(),
) -> Text:
    """Writes the text of a program. names: of inputs and captured arrays. results: the outputs that are wanted. ones:
    inputs that are the constant 1, such as the upstream gradient of a scalar loss. native: the library runs it. axes:
    the axes of a shard_map over which values vary."""
    w = NativeWriter() if native else JaxWriter()
    w.axes = axes
    w.taken.update(names.values())
    equations, live = program.live([ref for _, ref in results])
    equations = _without_transposes(equations, [ref for _, ref in results])
    values: dict[Ref, Value] = {}
    header = []
    w.location = ""
    for ref, own in names.items():
        w.op = f"argument {own}"
        if ref in ones:
            values[ref] = w.number(1, ref.dtype, ref.shape)
        elif ref in live:
            header.append((own, w.type(ref.dtype, ref.shape)))
            values[ref] = Value(own, ref.dtype, ref.shape)

    def value(x: Ref | Constant, primitive: str = "") -> Value:
        return values[x] if isinstance(x, Ref) else w.number(x.number, held(x.dtype, primitive), x.shape)

    for equation in equations:
        w.op, w.hint, w.location = str(equation), equation.primitive, equation.location
        refs = [Ref(ref.shape, held(ref.dtype, equation.primitive)) for ref in equation.outputs]
        try:
            made = _handled(w, replace(equation, outputs=refs), value)
        except _Final:
            raise
        except Unsupported as error:
            made = _as_it_is(w, equation, value, live, error)
        values.update(zip(equation.outputs, made))
        for ref, v in zip(refs, made):
            if v is not None and (v.shape != ref.shape or v.dtype != ref.dtype):
                raise AssertionError(
                    f"autochunk: {equation} became {v.dtype}{list(v.shape)}, expected {ref.dtype}{list(ref.shape)}"
                )
    returned = []
    for result, ref in results:
        w.op, w.hint, w.location = f"result {result}", result, ""
        w.type(ref.dtype, ref.shape)
        returned.append(f"{result}: %{w.written(value(ref)).name}")
    inputs = ", ".join(f"%{own}: {type_}" for own, type_ in header)
    body = "\n".join(w.lines)
    text = f"graph {name}({inputs}) {{\n{body}\n  return {', '.join(returned)}\n}}\n"
    return Text(text, [own for own, _ in header], _precision(w), w.locations, list(w.calls.values()), w.bound)


class _Final(Unsupported):
    """A refusal that JAX's own form of the primitive does not mend: the program holds its operands in other dtypes."""


def _handled(w: JaxWriter, e: Equation, value: Callable) -> tuple[Value, ...]:
    """Lowers an equation. value: returns the value of an input for a primitive."""
    handler = HANDLERS.get(e.primitive)
    if handler is None:
        raise Unsupported(f"autochunk: {w.prefix}{e} has no form in a tensor program")
    for ref in e.inputs:
        w.type(held(ref.dtype, e.primitive), ref.shape)
    for ref in e.outputs:  # in the dtypes that hold them
        w.type(ref.dtype, ref.shape)
    operands = [value(x, e.primitive) for x in e.inputs]
    made = handler(w, e, *operands)
    if e.inputs and e.inputs[0].dtype == UNSIGNED:
        if e.primitive == "add" and not w.known(made, 2**32):
            raise _Final(str(w.refuse("a sum of uint32, which may wrap, has no form in a tensor program")))
        if e.primitive in ("eq", "ne") and not any(w.known(v, 2**31) for v in operands):
            raise _Final(str(w.refuse("a comparison of uint32 whose values are not known has no form in a tensor program")))
    return made if isinstance(made, tuple) else (made,)


def _as_it_is(w: JaxWriter, e: Equation, value: Callable, live: set, error: Unsupported) -> tuple[Value | None, ...]:
    """Runs the equation as JAX does, or raises the error with the reason why that is impossible."""
    why = why_not(w, e)
    if why:
        raise Unsupported(str(error) if why in str(error) else f"{error}; {why}") from error
    return run_as_it_is(w, e, [value(x, e.primitive) for x in e.inputs], live)


def _without_transposes(equations: Sequence[Equation], results) -> list[Equation]:
    """Fuses a transpose into the matrix product that it alone reads."""
    uses: dict[Ref, int] = {}
    for v in [*(v for e in equations for v in e.inputs), *results]:
        if isinstance(v, Ref):
            uses[v] = uses.get(v, 0) + 1
    made: dict[Ref, Equation] = {}
    kept: list[Equation | None] = []
    places: dict[Ref, int] = {}
    for e in equations:
        source = made.get(e.inputs[0]) if e.primitive == "transpose" and uses.get(e.inputs[0]) == 1 else None
        cast = source if source is not None and source.primitive == "convert_element_type" else None
        if cast is not None:  # a cast between the two
            source = made.get(cast.inputs[0]) if uses.get(cast.inputs[0]) == 1 else None
        if source is not None and source.primitive == "dot_general":
            turned = e.outputs if cast is None else [Ref(e.out.shape, source.out.dtype)]
            swapped = swapped_product(source, replace(e, outputs=turned))
            if swapped is not None:
                kept[places[source.out]] = None
                e, last = swapped, e
                if cast is not None:
                    kept[places[cast.out]] = None
                    kept.append(swapped)
                    e = replace(cast, inputs=turned, outputs=last.outputs)
        for ref in e.outputs:
            made[ref], places[ref] = e, len(kept)
        kept.append(e)
    return [e for e in kept if e is not None]


def _precision(w: JaxWriter):
    """Returns one precision for all matrix products of a program, the highest asked for: statements have none."""
    asked = [p for p in w.precisions if p is not None]
    if not asked:
        return None

    def pair(precision) -> tuple:
        return precision if isinstance(precision, tuple) else (precision, precision)

    if all(isinstance(p, Precision) for precision in asked for p in pair(precision)):
        return max(asked, key=lambda precision: max(p.value for p in pair(precision)))
    if len(w.precisions) > 1:
        raise w.refuse(f"products by different algorithms, {asked}, have no form in a tensor program")
    return asked[0]
