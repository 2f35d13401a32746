"""Replaces a function and its gradients by compiled programs."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial

from logitless._autochunk.calls import Calls
from logitless._autochunk.function import (
    ChunkedFunction,
    P,
    R,
    choose_executor,
    describe,
    in_one_pass,
    is_tracing,
    most_over,
    put,
    tracing,
    warn_missed,
)
from logitless._autochunk.methods import binds
from logitless._autochunk.native import Machine, multiplies_fp32
from logitless._autochunk.names import leaf_names, unique
from logitless._autochunk.options import AUTO, EXECUTORS, Limits, Unsupported
from logitless._autochunk.plan import Compiled, compile_text
from logitless._autochunk.reads import Read, Reads, number
from logitless._autochunk.text import load
from logitless.jax import _arguments, _ffi
from logitless.jax._autochunk import native
from logitless.jax._autochunk.dtypes import DTYPES
from logitless.jax._autochunk.program import to_text
from logitless.jax._autochunk.source import to_source
from logitless.jax._autochunk.trace import ARRAY, Program, floating, is_array, key_words, trace, trace_gradients


def _precision_text(precision) -> str:
    if precision is None:
        return ""
    if isinstance(precision, tuple):
        return f"({', '.join(_precision_text(p) for p in precision)})"
    if isinstance(precision, str):
        return repr(precision)
    return f"lax.Precision.{precision.name}" if isinstance(precision, jax.lax.Precision) else repr(str(precision))


def temporary_bytes(function: Callable, inputs: Sequence[jax.ShapeDtypeStruct]) -> int | None:
    """Returns the bytes that XLA allocates beyond inputs and results, or None if the platform does not report them."""
    found = jax.jit(function).lower(*inputs).compile().memory_analysis()
    return None if found is None else int(found.temp_size_in_bytes)


def _once(function: Callable) -> Callable:
    """Returns the function without a derivative, so that a second derivative raises an error."""

    @jax.custom_jvp
    def run(*arrays):
        return function(*arrays)

    @run.defjvp
    def refuse(primals, _):
        raise NotImplementedError(
            "autochunk: second derivatives have no form in a chunked function; differentiate the function itself"
        )

    return run


@dataclass
class Run:
    """A compiled program, with the captured arrays that it reads beside its inputs."""

    compiled: Compiled
    captured: dict[str, jax.Array]
    function: Callable
    axes: frozenset[str]  # the axes of a shard_map over which arrays vary
    keys: dict[str, Callable]  # the 32-bit halves of random keys, as functions of the inputs

    def __call__(self, named: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        named = {**named, **{name: words(named) for name, words in self.keys.items()}}
        named = _ffi.varying({**self.captured, **named}, self.axes)
        made = self.function(*(named[p] for p in self.compiled.parameters))
        return tuple(_ffi.varying(dict(enumerate(made)), self.axes).values())


@dataclass(eq=False)
class Plan:
    """The programs for one set of shapes, dtypes and constants, and for one set of inputs to differentiate by."""

    call: Call
    limits: Limits
    forward: Run  # computes the outputs; if joint, also the gradients for an upstream gradient of 1
    backward: Run | None  # computes the gradients from inputs and upstream gradients
    joint: bool
    wanted: tuple[bool, ...]  # whether each input needs a gradient
    cotangents: dict[str, int]  # parameter name -> index of the output whose upstream gradient it is
    not_native: str = ""  # with executor "auto": the reason why the library does not run it

    @property
    def programs(self) -> list[Compiled]:
        return [run.compiled for run in (self.forward, self.backward) if run is not None]

    @property
    def over(self) -> int:
        """The bytes over the budget."""
        return most_over(self.limits, self.programs)

    def run(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], Partial]:
        """Returns the outputs, and the function from their upstream gradients to the gradients."""
        made = self.forward(dict(zip(self.call.names, arrays)))
        count = len(self.call.outputs)
        saved = made[count:] if self.joint else arrays if self.backward is not None else ()
        return list(made[:count]), Partial(self.gradients, *saved)

    def gradients(self, *saved_and_cotangents) -> list[jax.Array | None]:
        *saved, all_cotangents = saved_and_cotangents
        cotangents = {name: all_cotangents[i] for name, i in self.cotangents.items()}
        if all(isinstance(t, SymbolicZero) for t in cotangents.values()):
            return [None] * len(self.wanted)
        cotangents = {n: jnp.zeros(t.shape, t.dtype) if isinstance(t, SymbolicZero) else t for n, t in cotangents.items()}
        if self.joint:
            [cotangent] = cotangents.values()
            made = iter([(g * cotangent.reshape(())).astype(g.dtype) for g in saved])
        else:
            made = iter(self.backward({**dict(zip(self.call.names, saved)), **cotangents}))
        return [next(made) if want else None for want in self.wanted]

    def describe(self) -> str:
        backward = None if self.backward is None else self.backward.compiled
        alone = "nothing is differentiated"
        eager = self.call.itself(self.wanted)
        return describe(self.forward.compiled, backward, self.joint, alone, self.limits, eager, self.not_native)

    def source(self) -> str:
        return "\n\n".join(made.source for made in self.programs)


@dataclass(eq=False)
class Unchunked:
    """The function itself, for gradients or outputs without a form in a tensor program."""

    call: Call
    wanted: tuple[bool, ...]
    why: str

    def run(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], Partial]:
        def of(*varied):
            given = iter(varied)
            outputs = self.call.function(*(next(given) if w else x for w, x in zip(self.wanted, arrays)))
            return [o for o in outputs if floating(o.dtype)], outputs

        _, pull, outputs = jax.vjp(of, *(x for w, x in zip(self.wanted, arrays) if w), has_aux=True)
        return outputs, Partial(self.gradients, pull)

    def gradients(self, pull, cotangents) -> list[jax.Array | None]:
        given = [t for t, o in zip(cotangents, self.call.outputs) if floating(o.dtype)]
        made = iter(pull([jnp.zeros(t.shape, t.dtype) if isinstance(t, SymbolicZero) else t for t in given]))
        return [next(made) if want else None for want in self.wanted]


class Call:
    """A function of arrays alone, for one set of shapes, dtypes and constants."""

    def __init__(
        self,
        owner: AutoChunked,
        function: Callable,
        inputs: Sequence[jax.ShapeDtypeStruct],
        names: list[str],
        axes: frozenset[str],
    ):
        traced = trace(function, inputs)
        self.owner, self.limits = owner, owner.limits
        self.inputs, self.names, self.axes = inputs, names, axes
        self.tree, self.constants = traced.tree, traced.constants
        self.program = traced.program
        self.outputs = [jax.ShapeDtypeStruct(o.shape, o.dtype) for o in traced.program.outputs]
        self.plans: dict[tuple[bool, ...], Plan | Unchunked] = {}
        self.reads: list[Read] = []  # variables that the function reads besides its arguments
        self.of_outputs = self._results(traced.program)
        to_text(traced.program, self._names(traced.program), self.of_outputs, axes=axes)  # raises Unsupported
        self.function = lambda *arrays: [jnp.asarray(o) for o in jax.tree.leaves(function(*arrays)) if is_array(o)]

        @jax.custom_vjp
        def chunked(*arrays):
            return self.plan((False,) * len(inputs)).run(arrays)[0]

        def forward(*primals):
            wanted = tuple(p.perturbed and floating(p.value.dtype) for p in primals)
            return self.plan(wanted).run([p.value for p in primals])

        def backward(pull, cotangents):
            return tuple(pull(cotangents))

        chunked.defvjp(forward, backward, symbolic_zeros=True)
        # A shard_map that runs eagerly does not accept a custom_vjp itself.
        self.chunked = jax.jit(chunked) if axes else chunked

    def plan(self, wanted: tuple[bool, ...]) -> Plan | Unchunked:
        if wanted not in self.plans:
            try:
                plan = self.plans[wanted] = self._chosen(wanted)
                self.reads[:] = [read for read in self.reads if read.holds()]  # tracing it again may have changed them
                warn_missed(plan.limits, plan.programs)
            except Unsupported as error:
                self.plans[wanted] = Unchunked(self, wanted, self.owner.refused(error, stacklevel=2))
        plan = self.plans[wanted]
        self.owner.last = plan.why if isinstance(plan, Unchunked) else plan
        return plan

    @functools.lru_cache(8)
    def itself(self, wanted: tuple[bool, ...]) -> int | None:
        """Returns XLA's temporary bytes of the eager function with the wanted gradients, or None if unknown."""

        def run(*arrays):
            def of(*varied):
                given = iter(varied)
                outputs = self.function(*(next(given) if w else x for w, x in zip(wanted, arrays)))
                return [o for o in outputs if floating(o.dtype)], outputs

            if not any(wanted):
                return self.function(*arrays)
            made, pull, outputs = jax.vjp(of, *(x for w, x in zip(wanted, arrays) if w), has_aux=True)
            return outputs, pull([jnp.ones_like(o) for o in made])

        try:
            with tracing():
                return temporary_bytes(run, self.inputs)
        except Exception:  # any error here only drops a line of the report
            return None

    def _results(self, program: Program) -> list:
        return [(f"out{i}", ref) for i, ref in enumerate(program.outputs[: len(self.outputs)])]

    def _names(self, program: Program) -> dict:
        names = dict(zip(program.inputs, self.names))
        names.update((ref, f"cotangent{i}") for i, ref in enumerate(program.inputs[len(self.names) :]))
        names.update((ref, f"constant{i}") for i, ref in enumerate(program.captured))
        names.update((ref, f"random_key{i}") for i, ref in enumerate(program.keys))
        return names

    def _keys(self, program: Program, read: Sequence[str]) -> dict[str, Callable]:
        """Returns functions from a program's inputs to the halves of the random keys that it reads, by name."""
        inputs, names = dict(zip(program.inputs, self.names)), self._names(program)

        def words(key, named):
            return key_words(program, key, {ref: named[own] for ref, own in inputs.items()})

        found = {names[ref]: key for ref, key in program.keys.items()}
        return {own: functools.partial(words, key) for own, key in found.items() if own in read}

    def _chosen(self, wanted: tuple[bool, ...]) -> Plan:
        """Returns a plan as ``_make`` does, choosing the executor if the limits leave it open."""
        if not self.limits.auto:
            return self._make(wanted, self.limits)
        why = native.why_not(self.axes)
        return choose_executor(
            lambda by_library: self._make(wanted, replace(self.limits, native=by_library, auto=False)), why, _rounded
        )

    def _compiled(self, program: Program, limits: Limits, results: list, name: str, ones=()) -> Run:
        names = self._names(program)
        text = to_text(program, names, results, ones, name, limits.native, self.axes)
        of_name = {own: jax.ShapeDtypeStruct(ref.shape, ref.dtype) for ref, own in names.items()}
        inputs = [of_name[p] for p in text.parameters]
        captured = {names[ref]: array for ref, array in program.captured.items() if names[ref] in text.parameters}
        keys = self._keys(program, text.parameters)
        if limits.native:
            made = compile_text(
                text.text,
                name,
                text.parameters,
                lambda compiled: (compiled.text, native.buffer_bytes(compiled.arena_bytes)),
                limits,
                native.default_machine(),
                lambda request: functools.partial(native.run, request, self.axes),
                text.locations,
            )
            made.threads = max(_ffi.threads_of(made.request.machine.device), 1)
            return Run(made, captured, _once(jax.jit(made.function)), self.axes, keys)
        measured: dict[str, int | None] = {}

        def emit(compiled):
            precision = _precision_text(text.precision)
            source = to_source(compiled.text, name, precision, calls=text.calls)
            if source not in measured:
                measured[source] = temporary_bytes(load(source, name, space), inputs)
            taken = compiled.arena_bytes if measured[source] is None else measured[source]
            if self.axes:
                source = to_source(compiled.text, name, precision, sorted(self.axes), text.calls)
            return source, taken

        space = {"calls": text.bound}
        made = compile_text(
            text.text,
            name,
            text.parameters,
            emit,
            limits,
            native.framework_machine() if limits.budget > 0 else Machine(),
            locations=text.locations,
            calls=text.calls,
            framework="JAX",
            space=space,
        )
        return Run(made, captured, _once(jax.jit(made.function)), self.axes, keys)

    def _make(self, wanted: tuple[bool, ...], limits: Limits) -> Plan:
        joint, sources = None, []
        if any(wanted):
            joint = trace_gradients(self.function, self.inputs, wanted)
            found = joint.outputs[len(self.outputs) :]
            _, live = joint.live(found)
            places = [i for i, o in enumerate(self.outputs) if floating(o.dtype)]
            cotangents = list(zip(joint.inputs[len(self.names) :], places))
            sources = [(f"cotangent{k}", ref, i) for k, (ref, i) in enumerate(cotangents) if ref in live]
        if not sources:
            forward = self._compiled(self.program, limits, self.of_outputs, "forward")
            return Plan(self, limits, forward, None, False, wanted, {})
        of_gradients = [(f"d_{n}", ref) for n, ref in zip((n for n, w in zip(self.names, wanted) if w), found)]
        of_cotangents = {name: i for name, _, i in sources}
        half = any(ref.dtype == DTYPES.f16 for e in joint.equations for ref in (*e.inputs, *e.outputs))
        if in_one_pass(self.owner.gradients, [self.outputs[i].shape for _, _, i in sources], half):
            results = self._results(joint) + of_gradients
            forward = self._compiled(joint, limits, results, "forward_and_gradients", [sources[0][1]])
            return Plan(self, limits, forward, None, True, wanted, of_cotangents)
        forward = self._compiled(self.program, limits, self.of_outputs, "forward")
        backward = self._compiled(joint, limits, of_gradients, "backward")
        return Plan(self, limits, forward, backward, False, wanted, of_cotangents)


# The settings of JAX that a trace depends on.
_SETTINGS = "enable_x64", "default_matmul_precision", "numpy_dtype_promotion", "default_prng_impl", "threefry_partitionable"


class AutoChunked(ChunkedFunction[P, R]):
    """The return type of ``autochunk``: callable like the function, with ``explain`` and ``source``."""

    executors = (AUTO, *EXECUTORS)
    register_dataclass = "jax.tree_util.register_dataclass"

    def __init__(self, function: Callable[P, R], limits: Limits, gradients: str, unsupported: str):
        super().__init__(function, limits, gradients, unsupported)
        functools.update_wrapper(self, function)

    def __get__(self, instance, owner=None):
        return self if instance is None or not binds(self._function) else Bound(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_tracing():
            return self._inside(args, kwargs)
        call, arrays = self._call(args, kwargs)
        if isinstance(call, str):
            self.last = call
            return self._function(*args, **kwargs)
        made = iter(call.chunked(*_ffi.varying(dict(enumerate(arrays)), call.axes).values()))
        flat = [next(made) if constant is ARRAY else constant for constant in call.constants]
        return jax.tree.unflatten(call.tree, flat)

    def _planned(self, args, kwargs) -> Plan | str:
        call, arrays = self._call(args, kwargs)
        if isinstance(call, str):
            return call
        plan = call.plan(tuple(floating(a.dtype) for a in arrays))
        return plan.why if isinstance(plan, Unchunked) else plan

    def _call(self, args, kwargs) -> tuple[Call | str, list[jax.Array]]:
        kwargs = dict(sorted(kwargs.items()))  # fixes the order of the leaves
        leaves, tree = jax.tree.flatten((args, kwargs))
        names = leaf_names(self._function, args, kwargs, _endings)
        places = [i for i, leaf in enumerate(leaves) if is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)]
        if not places:
            advice = self._advice(tuple(map(type, leaves)))
            raise ValueError(f"autochunk: expected an array among the arguments, got none{advice}")
        arrays = [_array(names[i], leaves[i]) for i in places]
        constants = [None if i in places else leaf for i, leaf in enumerate(leaves)]
        types = tuple((a.shape, jnp.dtype(a.dtype) if floating(a.dtype) else a.dtype, _weak(a)) for a in arrays)
        config = jax.config
        settings = tuple(getattr(config, f"jax_{name}") for name in _SETTINGS)
        axes = _ffi.axes_of(*(a for a in arrays if isinstance(a, jax.Array)))
        key = (tree, types, axes, tuple(places), tuple((type(c), number(c)) for c in constants), settings)
        call = self._known(key, "arrays")
        if call is not None:
            return call, arrays

        reads = Reads(_skips, lambda value: isinstance(value, jax.core.Tracer), _runs, Calls(frameworks=_FOLDERS))

        def flat(*given):
            inner_args, inner_kwargs = jax.tree.unflatten(tree, put(constants, places, given))
            reads.closure(self._function)
            with reads:
                return self._function(*inner_args, **inner_kwargs)

        inputs = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in types]
        try:
            call = Call(self, flat, inputs, unique([names[i] for i in places]), axes)
            reads.kept.check(call.program.captured.values())
        except Unsupported as error:
            call = self.refused(error, stacklevel=3)
        found = reads.all(isinstance(call, Call))
        if isinstance(call, Call):
            call.reads = found
        self._made.keep(key, call, found)
        return call, arrays


class Bound:
    """A decorated method of an instance, which is the first argument of the chunked function."""

    def __init__(self, chunked: AutoChunked, instance):
        functools.update_wrapper(self, chunked)
        self._given = chunked, instance

    def __call__(self, *args, **kwargs):
        chunked, instance = self._given
        return chunked(instance, *args, **kwargs)

    def __reduce__(self):
        return type(self), self._given

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """Reports as ``AutoChunked.explain`` does."""
        chunked, instance = self._given
        return chunked.explain(*((instance, *args) if args or kwargs else ()), **kwargs)

    def source(self, *args: Any, **kwargs: Any) -> str:
        """Returns what ``AutoChunked.source`` does."""
        chunked, instance = self._given
        return chunked.source(*((instance, *args) if args or kwargs else ()), **kwargs)


def _rounded(plan: Plan) -> str:
    """Returns the reason against the library where XLA rounds fp32 operands of products, or ""."""
    if not any(multiplies_fp32(made.request.text) for made in plan.programs):
        return ""
    return "XLA multiplies fp32 arrays in TF32 by default, the library in fp32"


_FOLDERS = tuple(os.path.dirname(module.__file__) + os.sep for module in (jax, jaxlib, np))


def _skips(file: str) -> bool:
    """Returns whether a file is JAX's own code."""
    return file.startswith(_FOLDERS)


def _runs(value) -> tuple:
    """Returns the functions of a custom_vjp or custom_jvp."""
    if not isinstance(value, (jax.custom_vjp, jax.custom_jvp)):
        return ()
    return tuple(getattr(value, name, None) for name in ("fun", "fwd", "bwd", "jvp"))


def _endings(value) -> list[str]:
    """Returns name suffixes of the leaves: "_weights_0" for ["weights"][0]."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(value)]
    return ["".join("_" + re.sub(r"\W+", "_", _key(key)) for key in path) for path in paths]


def _key(key) -> str:
    """Returns the text of an entry of a tree path."""
    found = next((getattr(key, name) for name in ("key", "name", "idx") if hasattr(key, name)), key)
    return str(found)


def _array(name: str, leaf) -> jax.Array | jax.ShapeDtypeStruct:
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else _arguments.array(name, leaf)


def _weak(array) -> bool:
    return bool(getattr(array, "weak_type", False))
