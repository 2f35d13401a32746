"""Traces a function of arrays, and its gradients, to a list of primitives. Nothing runs: tracing reads shapes and
dtypes only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from logitless._autochunk.function import check_constants, tracing
from logitless._autochunk.options import Unsupported
from logitless.jax._autochunk.dtypes import UNSIGNED, counts
from logitless.jax._autochunk.locations import location_of, location_of_error

ARRAY = object()

# Primitives that call a function, and the parameter that holds it.
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


_EFFECTS = {"debug_callback", "debug_print", "io_callback"}
_OUTPUTS = "arrays in pytrees; jax.tree_util registers a class as one"
_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
)
_ROUNDS = 64  # the longest scan that is unrolled


@dataclass(eq=False)
class Ref:
    """A result of a primitive, an input, or a captured array."""

    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class Constant:
    """A constant."""

    number: object
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(eq=False)
class Equation:
    primitive: str
    params: dict
    inputs: list[Ref | Constant]
    outputs: list[Ref]
    source: object = None  # JAX's source_info
    called: str = ""  # the line of the enclosing call: JAX may have traced the function for another caller
    own: object = None  # JAX's primitive object
    effects: frozenset = frozenset()

    @property
    def location(self) -> str:
        return self.called or location_of(self.source)

    @property
    def out(self) -> Ref:
        return self.outputs[0]

    def __str__(self) -> str:
        """Formats the equation, such as sort(float32[4, 8])."""
        return f"{self.primitive}({', '.join(f'{x.dtype}{list(x.shape)}' for x in self.inputs)})"


@dataclass
class Program:
    """Primitives in order, with function calls inlined."""

    inputs: list[Ref]
    equations: list[Equation]
    outputs: list[Ref | Constant]
    captured: dict[Ref, jax.Array]  # arrays that the function makes or closes over
    keys: dict[Ref, Ref] = field(default_factory=dict)  # the halves [2] of each random key -> the key

    def live(self, wanted: Sequence[Ref | Constant]) -> tuple[list[Equation], set[Ref]]:
        """Returns the equations that these values need, in order, and the set of all values that are read."""
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
        if not isinstance(value, jax.Array) and np.ndim(value) == 0:
            found = np.asarray(value)
            return Constant(found.item(), (), found.dtype)
        if id(value) not in self.held:
            ref = Ref(tuple(value.shape), _dtype(value))
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
            control = {"scan": self._scan, "cond": self._cond}.get(eqn.primitive.name)
            made = None if control is None else control(eqn, inputs, called)
            if made is not None:
                values.update(zip(eqn.outvars, made))
                continue
            function = _called(eqn)
            if function is not None and not _searches(eqn, function):
                plain = getattr(function, "jaxpr", function)
                made = self.run(plain, getattr(function, "consts", ()), inputs, called or location_of(eqn.source_info))
            else:
                made = [Ref(tuple(v.aval.shape), _dtype(v.aval)) for v in eqn.outvars]
                name, own = eqn.primitive.name, eqn.primitive
                effects = frozenset(eqn.effects)
                found = Equation(name, eqn.params, inputs, made, eqn.source_info, called, own, effects)
                self.equations.append(found)
            values.update(zip(eqn.outvars, made))
        return [read(v) for v in jaxpr.outvars]

    def _add(self, location: str, primitive: str, inputs: list, result: Sequence[int], dtype, **params) -> Ref:
        made = Ref(tuple(result), dtype)
        self.equations.append(Equation(primitive, params, inputs, [made], called=location))
        return made

    def _scan(self, eqn, inputs: list, called: str) -> list | None:
        """Unrolls a short scan. Returns None for a long one, or one of another form."""
        p, location = eqn.params, called or location_of(eqn.source_info)
        # Some later versions of JAX do not say how many operands are constants and how many are carried.
        if p["length"] > _ROUNDS or "num_consts" not in p or "num_carry" not in p:
            return None
        consts, carry, rows = inputs[: p["num_consts"]], inputs[p["num_consts"] :], []
        carry, rows = carry[: p["num_carry"]], carry[p["num_carry"] :]
        made: list[list] = []
        for k in range(p["length"]):
            at = p["length"] - 1 - k if p["reverse"] else k
            given = [*consts, *carry, *(self._row(location, x, at) for x in rows)]
            outputs = self.run(p["jaxpr"].jaxpr, p["jaxpr"].consts, given, called)
            carry = outputs[: p["num_carry"]]
            made.append(outputs[p["num_carry"] :])
        made = made[::-1] if p["reverse"] else made
        return [*carry, *(self._stack(location, list(parts)) for parts in zip(*made))]

    def _row(self, location: str, x: Ref | Constant, at: int) -> Ref | Constant:
        if isinstance(x, Constant):
            return Constant(x.number, x.shape[1:], x.dtype)
        begin, end = (at,) + (0,) * (len(x.shape) - 1), (at + 1,) + x.shape[1:]
        params = {"start_indices": begin, "limit_indices": end, "strides": None}
        row = self._add(location, "slice", [x], (1, *x.shape[1:]), x.dtype, **params)
        return self._add(location, "squeeze", [row], x.shape[1:], x.dtype, dimensions=(0,))

    def _stack(self, location: str, parts: list) -> Ref:
        shape, dtype = parts[0].shape, parts[0].dtype
        dims = tuple(range(1, len(shape) + 1))
        one = (1, *shape)
        params = {"shape": one, "broadcast_dimensions": dims}
        rows = [self._add(location, "broadcast_in_dim", [x], one, dtype, **params) for x in parts]
        return self._add(location, "concatenate", rows, (len(rows), *shape), dtype, dimension=0)

    def _cond(self, eqn, inputs: list, called: str) -> list:
        """Runs every branch and selects among their results."""
        location = called or location_of(eqn.source_info)
        which, *operands = inputs
        branches = eqn.params["branches"]
        each = [self.run(b.jaxpr, b.consts, operands, called) for b in branches]
        if which.dtype != bool:
            ends = [Constant(n, (), which.dtype) for n in (0, len(branches) - 1)]
            which = self._add(location, "clamp", [ends[0], which, ends[1]], (), which.dtype)
        shapes = [(cases, cases[0].shape, cases[0].dtype) for cases in zip(*each)]
        return [self._add(location, "select_n", [which, *cases], shape, dtype) for cases, shape, dtype in shapes]


def _called(eqn):
    """Returns the function that a primitive calls, or None."""
    return eqn.params.get(_CALLS.get(eqn.primitive.name, ""))


def _searches(eqn, function) -> bool:
    """Returns whether a call computes integers by arithmetic on unsigned ones, as jnp.searchsorted does. It has no form
    inlined, and runs as it is."""
    given, made = ([_dtype(v.aval) for v in atoms] for atoms in (eqn.invars, eqn.outvars))
    if not all(isinstance(t, np.dtype) and t != UNSIGNED for t in (*given, *made)) or any(t.kind not in "iub" for t in made):
        return False
    body = getattr(function, "jaxpr", function)
    return any(_dtype(v.aval) == UNSIGNED and not counts(e.primitive.name) for e in body.eqns for v in e.outvars)


def _dtype(aval):
    """Returns numpy's dtype. Extended dtypes, such as random keys, are returned as they are; lowering rejects them by
    name."""
    try:
        return np.dtype(aval.dtype)
    except TypeError:
        return aval.dtype


def _without_keys(equations: list[Equation]) -> tuple[list[Equation], dict[Ref, Ref]]:
    """Replaces each random key by its halves, i32 [2], as an input: keys are computed outside the program."""
    words: dict[Ref, Ref] = {}  # the halves of each key
    made = []
    for e in equations:
        key = e.inputs[0] if e.primitive == "random_bits" else None
        if key is not None and str(key.dtype) == "key<fry>" and key.shape == ():
            own = words.setdefault(key, Ref((2,), np.dtype("int32")))
            e = replace(e, inputs=[own])
        made.append(e)
    return made, {own: key for key, own in words.items()}


def key_words(program: Program, key: Ref, given: dict[Ref, jax.Array]) -> jax.Array:
    """Computes the two 32-bit halves of a random key from the program's inputs."""
    values = {**program.captured, **given}

    def read(x):
        return values[x] if isinstance(x, Ref) else jnp.full(x.shape, x.number, x.dtype)

    equations, _ = program.live([key])
    for e in equations:
        found = e.own.bind(*(read(x) for x in e.inputs), **e.params)
        values.update(zip(e.outputs, found if e.own.multiple_results else [found]))
    return jax.lax.bitcast_convert_type(jax.random.key_data(values[key]), jnp.int32)


def _refuse_effects(equations: Sequence[Equation]) -> None:
    """Raises for what acts outside of the program: nothing reads its results, so it would be left out."""
    for e in equations:
        if e.primitive in _EFFECTS and e.effects:
            location = f"{e.location}: " if e.location else ""
            raise Unsupported(
                f"autochunk: {location}{e.primitive} has effects, {', '.join(map(str, e.effects))}, which no tensor program has; "
                "expected it outside of the function"
            )


def _flat(function: Callable, inputs: Sequence[jax.ShapeDtypeStruct]) -> Program:
    try:
        with tracing():
            closed = jax.make_jaxpr(function)(*inputs)
    except _VALUES as error:
        location = location_of_error(error)
        raise Unsupported(
            f"autochunk: {location}the function needs the values of an array (a shape or a branch depends on them); only shapes "
            f"are known when it is traced: {str(error).splitlines()[0]}"
        ) from error
    flattener = _Flattener()
    given = [Ref(tuple(t.shape), _dtype(t)) for t in inputs]
    outputs = flattener.run(closed.jaxpr, closed.consts, given)
    _refuse_effects(flattener.equations)
    equations, keys = _without_keys(flattener.equations)
    return Program(given, equations, outputs, flattener.captured, keys)


def floating(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


@dataclass
class Traced:
    """A traced function, for one set of shapes and dtypes."""

    program: Program  # maps inputs to the outputs that are arrays
    tree: object  # the tree of all outputs
    constants: list  # outputs that are not arrays; ARRAY in place of one that is


def trace(function: Callable, inputs: Sequence[jax.ShapeDtypeStruct]) -> Traced:
    found = {}

    def arrays(*given):
        leaves, found["tree"] = jax.tree.flatten(function(*given))
        constants = [leaf for leaf in leaves if not is_array(leaf)]
        check_constants(constants, jax.tree.leaves, lambda leaf: isinstance(leaf, jax.core.Tracer), _OUTPUTS)
        found["constants"] = [ARRAY if is_array(leaf) else leaf for leaf in leaves]
        return [leaf for leaf in leaves if is_array(leaf)]

    program = _flat(arrays, inputs)
    if not program.outputs:
        raise ValueError("autochunk: the function returns no array")
    return Traced(program, found["tree"], found["constants"])


def is_array(leaf) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def trace_gradients(function: Callable, inputs: Sequence[jax.ShapeDtypeStruct], wanted: Sequence[bool]) -> Program:
    """Traces inputs and an upstream gradient for each floating output -> outputs, and gradients by the wanted inputs.
    """
    with tracing():
        sample = jax.eval_shape(lambda *given: [o for o in jax.tree.leaves(function(*given)) if is_array(o)], *inputs)
    places = [i for i, o in enumerate(sample) if floating(o.dtype)]

    def joint(*given):
        arrays, cotangents = given[: len(inputs)], given[len(inputs) :]

        def of(*varied):
            varied = iter(varied)
            full = [next(varied) if w else x for w, x in zip(wanted, arrays)]
            outputs = [o for o in jax.tree.leaves(function(*full)) if is_array(o)]
            return [jnp.asarray(outputs[i]) for i in places], outputs

        _, pull, outputs = jax.vjp(of, *(x for w, x in zip(wanted, arrays) if w), has_aux=True)
        return [*outputs, *pull(list(cotangents))]

    cotangents = [jax.ShapeDtypeStruct(sample[i].shape, sample[i].dtype) for i in places]
    return _flat(joint, [*inputs, *cotangents])
