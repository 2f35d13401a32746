"""Primitives without a form in a tensor program. They are bound again with their parameters, at once or chunk by chunk
along independent dimensions."""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from logitless._autochunk.externs import SUM, WHOLE, Call, Row, spread_rows
from logitless._autochunk.lower import Value, rules_of
from logitless.jax._autochunk.dtypes import UNSIGNED, held, run_dtypes
from logitless.jax._autochunk.lax import JaxWriter
from logitless.jax._autochunk.trace import Equation

# Collectives over the devices of a mesh. Their axis names are unknown where the program runs.
_COLLECTIVE = {"psum", "psum2", "psum_invariant", "pmax", "pmin", "pbroadcast", "pvary", "pcast", "all_gather"}
_COLLECTIVE |= {"all_gather_invariant", "all_to_all", "ppermute", "reduce_scatter", "axis_index", "ragged_all_to_all"}
_COLLECTIVE |= {"shard_map", "xla_pmap", "sharding_constraint"}
_RANDOM = {"random_bits", "threefry2x32", "random_gamma", "rng_bit_generator", "rng_uniform", "random_seed"}
_RANDOM |= {"random_wrap", "random_unwrap", "random_fold_in", "random_split"}


def why_not(w: JaxWriter, e: Equation) -> str:
    """Returns the reason why JAX cannot run a primitive inside the program; "" if it can."""
    if e.own is None:
        return "it is part of another"
    if e.primitive in _RANDOM:
        return "random bits that jax.random draws otherwise than f32 numbers by one threefry key"
    named = [p for p in _primitives(e) if p in _COLLECTIVE]
    if named:
        return f"{named[0]} is of devices" if named[0] != e.primitive else "it is of devices"
    if w.axes and any(_inner(v) for v in e.params.values()):
        return "within a shard_map it would have to be traced again, where its values vary over devices"
    if e.effects:
        return f"it has effects, {', '.join(str(effect) for effect in e.effects)}"
    dtypes = (held(ref.dtype, e.primitive) for ref in (*e.inputs, *e.outputs))
    unknown = next((dtype for dtype in dtypes if w.dtypes.name(dtype) is None), None)
    if unknown is not None:
        return f"dtype {unknown} has no form in a tensor program; expected one of {w.dtypes.listed()}"
    return "the library has no code for it; executor='python' takes it" if w.native else ""


def _inner(value) -> list:
    """Returns the functions in a parameter."""
    if isinstance(value, (tuple, list)):
        return [j for v in value for j in _inner(v)]
    return [value] if hasattr(value, "eqns") else []


def _primitives(e: Equation) -> list[str]:
    found, work = [e.primitive], [j for v in e.params.values() for j in _inner(v)]
    while work:
        jaxpr = work.pop()
        if isinstance(jaxpr, ClosedJaxpr):
            for const in jaxpr.consts:
                if isinstance(const, jax.core.Tracer):
                    raise ValueError(
                        f"autochunk: the function closes over a traced array {const.dtype}{list(const.shape)}, whose "
                        "gradient would be lost; pass it as an argument"
                    )
        for inner in jaxpr.eqns:
            found.append(inner.primitive.name)
            work += [j for v in inner.params.values() for j in _inner(v)]
    return found


def _written(value) -> str | None:
    """Returns a parameter as Python source, or None if it has no such form."""
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, lax.ConvDimensionNumbers):
        return f"lax.{value!r}"
    if isinstance(value, enum.Enum) and getattr(lax, type(value).__name__, None) is type(value):
        return f"lax.{type(value).__name__}.{value.name}"
    if isinstance(value, np.dtype):
        return f'jnp.dtype("{value.name}")'
    if type(value) is tuple:
        parts = [_written(v) for v in value]
        return None if None in parts else f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    return None


def _call(e: Equation, number: int) -> tuple[Call, Callable | None]:
    """Returns the call, and the function behind its name if the parameters have no form in Python source."""
    count = len(e.outputs) if e.own.multiple_results else None
    written = {name: _written(value) for name, value in e.params.items()}
    plain = UNSIGNED not in {ref.dtype for ref in (*e.inputs, *e.outputs)}
    if plain and None not in written.values() and getattr(lax, f"{e.primitive}_p", None) is e.own:
        options = "".join(f", {name}={text}" for name, text in written.items())
        bound, key = None, f"{e.primitive}{options}"

        def emit(texts, read):
            return f"lax.{e.primitive}_p.bind({', '.join(texts)}{options})"

    else:
        bound = functools.partial(e.own.bind, **e.params) if plain else _counted(e)
        dtypes = [str(ref.dtype) for ref in e.inputs]
        key = f"{e.primitive} {dtypes} {[(name, text or id(e.params[name])) for name, text in written.items()]}"
        name = f"{e.primitive}_{number}"

        def emit(texts, read):
            return f'calls["{name}"]({", ".join(texts)})'

    return Call(e.primitive, key, emit, count), bound


def _counted(e: Equation) -> Callable:
    """Returns a primitive on unsigned integers as a function of the signed ones that a program holds."""

    def run(*arrays):
        given = (x.astype(ref.dtype) for x, ref in zip(arrays, e.inputs))
        made = e.own.bind(*given, **e.params)
        held_dtypes = run_dtypes()
        parts = made if e.own.multiple_results else [made]
        parts = [x.astype(held_dtypes.i64) if x.dtype == UNSIGNED else x for x in parts]
        return parts if e.own.multiple_results else parts[0]

    return run


def run_as_it_is(w: JaxWriter, e: Equation, operands: Sequence[Value], live: set) -> tuple[Value | None, ...]:
    """Returns the results of a primitive that JAX runs. Results that nothing reads are None."""
    call, bound = _call(e, len(w.calls))
    if bound is not None and call.key not in w.calls:
        w.bound[f"{e.primitive}_{len(w.calls)}"] = bound
    made: list[Value | None] = []
    for k, ref in enumerate(e.outputs):
        along = _along(e, [v.shape for v in operands], ref.shape)
        dtype = held(ref.dtype, e.primitive)
        made.append(w.extern(call, operands, dtype, ref.shape, k, along) if ref in live else None)
    return tuple(made)


# --- independent dimensions of primitives: rows for one result

_ALONG: dict[str, Callable] = {}
_rules = rules_of(_ALONG)

_POINTWISE = {"lgamma", "digamma", "polygamma", "igamma", "igammac", "igamma_grad_a", "random_gamma_grad"}
_POINTWISE |= {"regularized_incomplete_beta", "bessel_i0e", "bessel_i1e", "nextafter", "atan2", "cbrt", "zeta"}
_POINTWISE |= {"asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "and", "or", "xor", "not", "pow", "rem", "div"}
_POINTWISE |= {"integer_pow", "shift_left", "shift_right_arithmetic", "shift_right_logical", "population_count", "clz"}


def _along(e: Equation, shapes: Sequence[Sequence[int]], out: Sequence[int]) -> list[Row]:
    if e.primitive in _POINTWISE:
        return spread_rows(shapes, out, range(len(out)))
    rule = _ALONG.get(e.primitive)
    return [] if rule is None else rule(e.params, shapes, out)


@_rules("cumprod", "cummax", "cummin")
def _scanned(params, shapes, out):
    return [[d, d] for d in range(len(out)) if d != params["axis"]]


@_rules("reduce_prod")
def _reduced(params, shapes, out):
    kept = [d for d in range(len(shapes[0])) if d not in params["axes"]]
    return [[d, k] for k, d in enumerate(kept)]


@_rules("sort")
def _sorted(params, shapes, out):
    return [[d] * (len(shapes) + 1) for d in range(len(out)) if d != params["dimension"]]


@_rules("conv_general_dilated")
def _convolved(params, shapes, out):
    """Chunks along images and output channels. Chunks of input channels (images, for the kernel's gradient) are summed.
    """
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return []
    x, kernel, made = params["dimension_numbers"]
    return [[x[0], WHOLE, made[0]], [WHOLE, kernel[0], made[1]], [x[1], kernel[1], SUM]]


@_rules("cholesky", "triangular_solve")
def _of_matrices(params, shapes, out):
    ranks = {len(shape) for shape in (*shapes, out)}
    return [[d] * (len(shapes) + 1) for d in range(len(out) - 2)] if len(ranks) == 1 else []
