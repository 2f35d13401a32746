"""A function of arrays, and its gradients, as a list of primitives. Nothing runs: only shapes and dtypes are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from logitless._autochunk.function import tracing
from logitless._autochunk.options import Unsupported
from logitless.jax._autochunk.places import place_of, place_of_error

ARRAY = object()

# Primitives that are a function of their operands: parameter that holds it.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "composite": "jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}


@dataclass(eq=False)
class Ref:
    """A value that a primitive makes, an input, or an array that the function holds."""

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class Constant:
    """A number."""

    number: object
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(eq=False)
class Equation:
    primitive: str
    params: dict
    inputs: list[Ref | Constant]
    outputs: list[Ref]
    source: object = None  # where JAX says that it comes from
    called: str = ""  # the line of the call that it is part of, which JAX may have traced for another line

    @property
    def place(self) -> str:
        return self.called or place_of(self.source)

    @property
    def out(self) -> Ref:
        return self.outputs[0]

    def __str__(self) -> str:
        """sort(float32[4, 8])"""
        return f"{self.primitive}({', '.join(f'{x.dtype}{list(x.shape)}' for x in self.inputs)})"


@dataclass
class Program:
    """Primitives in order, without calls of functions."""

    inputs: list[Ref]
    equations: list[Equation]
    outputs: list[Ref | Constant]
    captured: dict[Ref, jax.Array]  # arrays that the function made, or closes over

    def live(self, wanted: Sequence[Ref | Constant]) -> tuple[list[Equation], set[Ref]]:
        """The equations that these need, in order, and all values that are read."""
        needed = {v for v in wanted if isinstance(v, Ref)}
        kept = []
        for equation in reversed(self.equations):
            if not needed.isdisjoint(equation.outputs):
                kept.append(equation)
                needed.update(v for v in equation.inputs if isinstance(v, Ref))
        return kept[::-1], needed


class _Flattener:
    def __init__(self):
        self.equations: list[Equation] = []
        self.captured: dict[Ref, jax.Array] = {}
        self.held: dict[int, Ref] = {}  # by id of the array

    def constant(self, value) -> Ref | Constant:
        if isinstance(value, jax.core.Tracer):
            raise ValueError(
                f"autochunk: the function closes over a traced array {value.dtype}{list(value.shape)}, whose gradient "
                "would be lost; pass it as an argument"
            )
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
            raise Unsupported(f"autochunk: an array of {value.dtype} has no form in a tensor program")
        if not isinstance(value, jax.Array) and np.ndim(value) == 0:
            found = np.asarray(value)
            return Constant(found.item(), (), found.dtype)
        if id(value) not in self.held:
            ref = Ref(tuple(value.shape), np.dtype(value.dtype))
            self.held[id(value)], self.captured[ref] = ref, value
        return self.held[id(value)]

    def run(self, jaxpr, consts, arguments, called: str = "") -> list[Ref | Constant]:
        values = dict(zip(jaxpr.constvars, [c if isinstance(c, (Ref, Constant)) else self.constant(c) for c in consts]))
        values.update(zip(jaxpr.invars, arguments))

        def read(atom):
            if not isinstance(atom, Literal):
                return values[atom]
            made = self.constant(atom.val)
            if isinstance(made, Ref):
                return made
            return Constant(made.number, tuple(atom.aval.shape), np.dtype(atom.aval.dtype))

        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            inner = _CALLS.get(eqn.primitive.name)
            if inner is not None and inner in eqn.params:
                function = eqn.params[inner]
                plain = getattr(function, "jaxpr", function)
                made = self.run(plain, getattr(function, "consts", ()), inputs, called or place_of(eqn.source_info))
            else:
                made = [Ref(tuple(v.aval.shape), _dtype(v.aval)) for v in eqn.outvars]
                self.equations.append(Equation(eqn.primitive.name, eqn.params, inputs, made, eqn.source_info, called))
            values.update(zip(eqn.outvars, made))
        return [read(v) for v in jaxpr.outvars]


def _dtype(aval):
    """Extended ones, as of random keys, are no dtypes of numpy; lowering refuses them by name."""
    try:
        return np.dtype(aval.dtype)
    except TypeError:
        return aval.dtype


def _flat(function: Callable, inputs: Sequence[jax.ShapeDtypeStruct]) -> Program:
    try:
        with tracing():
            closed = jax.make_jaxpr(function)(*inputs)
    except (jax.errors.ConcretizationTypeError, jax.errors.NonConcreteBooleanIndexError) as error:
        place = place_of_error(error)
        raise Unsupported(
            f"autochunk: {place}the function needs the values of an array (a shape or a branch depends on them); only shapes "
            f"are known when it is traced: {str(error).splitlines()[0]}"
        ) from error
    flattener = _Flattener()
    given = [Ref(tuple(t.shape), np.dtype(t.dtype)) for t in inputs]
    outputs = flattener.run(closed.jaxpr, closed.consts, given)
    return Program(given, flattener.equations, outputs, flattener.captured)


def floating(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


@dataclass
class Traced:
    """What a function computes of its arrays, for one set of shapes and dtypes."""

    program: Program  # inputs -> outputs that are arrays
    tree: object  # of all outputs
    constants: list  # outputs that are no arrays; ARRAY where one stands


def trace(function: Callable, inputs: Sequence[jax.ShapeDtypeStruct]) -> Traced:
    found = {}

    def arrays(*given):
        leaves, found["tree"] = jax.tree.flatten(function(*given))
        found["constants"] = [ARRAY if is_array(leaf) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if is_array(leaf)]

    program = _flat(arrays, inputs)
    if not program.outputs:
        raise ValueError("autochunk: the function returns no array")
    return Traced(program, found["tree"], found["constants"])


def is_array(leaf) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def trace_gradients(function: Callable, inputs: Sequence[jax.ShapeDtypeStruct], wanted: Sequence[bool]) -> Program:
    """Inputs and a tangent for each floating output -> outputs, and gradients by the inputs that are wanted."""
    with tracing():
        sample = jax.eval_shape(lambda *given: [o for o in jax.tree.leaves(function(*given)) if is_array(o)], *inputs)
    places = [i for i, o in enumerate(sample) if floating(o.dtype)]

    def joint(*given):
        arrays, tangents = given[: len(inputs)], given[len(inputs) :]

        def of(*varied):
            varied = iter(varied)
            full = [next(varied) if w else x for w, x in zip(wanted, arrays)]
            outputs = [o for o in jax.tree.leaves(function(*full)) if is_array(o)]
            return [jnp.asarray(outputs[i]) for i in places], outputs

        _, pull, outputs = jax.vjp(of, *(x for w, x in zip(wanted, arrays) if w), has_aux=True)
        return [*outputs, *pull(list(tangents))]

    tangents = [jax.ShapeDtypeStruct(sample[i].shape, sample[i].dtype) for i in places]
    return _flat(joint, [*inputs, *tangents])
