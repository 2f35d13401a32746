"""Formulas of whole logits in JAX's own operations, a chunk of tokens at a time. They serve where autochunk cannot:
without the library, and on devices that it has no kernels for.

A call is a scan over chunks. The gradients of a sum are computed with it, and those of tokens and of float16 in the
backward. Sums of d_weight over the chunks are float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .._losses.chunks import ROWS, Sizes, block_bytes, described, is_sum, plan_of
from ._arguments import sum_dtype
from ._axes import axes_of, varying
from ._portable import _add, _cut, _put, _windows
from .head import GRADIENTS, all_gradients, type_of, wanted_gradients

FORMULAS: dict[str, Callable[..., Any]] = {}  # by name, of (given, *form)
OF_VOCAB: dict[str, tuple[str, Callable[[jax.Array], jax.Array]]] = {}  # a formula's argument [V], of rows of weight


class Operand(NamedTuple):
    """A weight as an operand of ``_xp.product``."""

    weight: jax.Array
    sums: jax.Array | None  # [V, D] in the dtype of sums: its cotangent is the gradient of weight

    def product(self, hidden: jax.Array) -> jax.Array:
        return _product(hidden, self.weight, self.sums)


@jax.custom_vjp
def _product(hidden: jax.Array, weight: jax.Array, sums: jax.Array | None) -> jax.Array:
    return jnp.matmul(hidden.astype(weight.dtype), weight.T, preferred_element_type=sum_dtype(weight.dtype))


def _product_backward(saved, cotangent):
    hidden, weight, summed = saved
    unit = 1.0
    if weight.dtype == jnp.float16:  # of size 1 in float16
        largest = jnp.where(jnp.isfinite(cotangent), jnp.abs(cotangent), 0.0).max(initial=0.0)
        unit = jnp.where(largest > 0.0, largest, 1.0)
    d, number = (cotangent / unit).astype(weight.dtype), cotangent.dtype
    d_hidden = jnp.matmul(d, weight, preferred_element_type=number) * unit
    d_weight = jnp.matmul(d.T, hidden.astype(d.dtype), preferred_element_type=number) * unit if summed else None
    return d_hidden.astype(hidden.dtype), None, d_weight


_product.defvjp(lambda hidden, weight, sums: (_product(hidden, weight, sums), (hidden, weight, sums is not None)), _product_backward)


class _Call(NamedTuple):
    """A formula with everything but its arrays."""

    what: str
    form: tuple
    budget: int


def _first(given: Mapping[str, Any]) -> str:
    return "" if "weight" in given else "teacher_"


def _sizes(call: _Call, given: Mapping[str, jax.Array], wanted: tuple[str, ...]) -> Sizes:
    hidden, weight = (given[_first(given) + part] for part in ("hidden", "weight"))
    number, host = sum_dtype(weight.dtype).itemsize, jax.default_backend() == "cpu"
    fixed = 0
    if "weight" in wanted:  # XLA's CPU compiler stores a product before it is added
        fixed = weight.size * number * (int(weight.dtype.itemsize != number or host) + host)
    if call.what in OF_VOCAB:
        fixed += 4 * min(block_bytes(call.budget), weight.size * number)
    dim = sum(given[name].shape[1] for name in ("hidden", "teacher_hidden") if name in given)
    return Sizes(call.what, hidden.shape[0], weight.shape[0], dim, number, bool(wanted), fixed)


def _of_vocab(weight: jax.Array, budget: int, add: Callable[..., Any], carry: Any) -> Any:
    """Runs ``carry = add(carry, start, fresh, rows in the dtype of sums)`` for blocks of weight."""
    size = max(1, min(weight.shape[0], block_bytes(budget) // max(1, weight.shape[1] * 4)))

    def block(start, fresh, carry):
        return add(carry, start, fresh, _cut(weight, start, size).astype(sum_dtype(weight.dtype)))

    return _windows(weight.shape[0], size, block, carry)


def _run(
    call: _Call, wanted: tuple[str, ...], given: Mapping[str, jax.Array], upstream: jax.Array | None
) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
    """Returns the outputs of a formula, and the gradients ``wanted`` by the names of the inputs. upstream: the gradient
    of its output, [] or [N]; None: 1."""
    number, tokens = sum_dtype(given[_first(given) + "weight"].dtype), given[_first(given) + "hidden"].shape[0]
    axes = axes_of(*given.values())
    given = dict(given)
    rows = {name for name, array in given.items() if name in ROWS and array.ndim}
    size = min(plan_of(_sizes(call, given, wanted), call.budget).tokens, tokens)
    leaves: dict[str, jax.Array] = {}
    if "weight" in wanted:
        leaves["weight"] = jnp.zeros(given["weight"].shape, number)
    if "bias" in wanted:
        leaves["bias"] = given["bias"]
    of_vocab = OF_VOCAB.get(call.what)
    if of_vocab is not None:
        name, function = of_vocab
        weight = given["weight"]
        found = varying({name: jnp.zeros(weight.shape[0], number)}, axes)[name]
        given[name] = _of_vocab(weight, call.budget, lambda all_, start, _, w: _put(all_, start, function(w)), found)
        if "weight" in wanted:
            leaves[name] = given[name]
    leaves = varying(leaves, axes)
    sums = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    if "hidden" in wanted:
        sums["hidden"] = jnp.zeros_like(given["hidden"])
    sums = varying(sums, axes)

    def formula(part: dict[str, Any], leaves: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        part = part | leaves
        for name in ("weight", "teacher_weight"):
            if name in given:
                part[name] = Operand(given[name], leaves.get(name))
        made = FORMULAS[call.what](part, *call.form)
        return made if isinstance(made, tuple) else (made,)

    def of_chunk(start: Any) -> dict[str, jax.Array]:
        return {name: _cut(a, start, size) if name in rows else a for name, a in given.items()}

    shapes = jax.eval_shape(formula, jax.eval_shape(of_chunk, 0), leaves)
    outputs = tuple(
        varying({"": jnp.zeros((tokens, *s.shape[1:]) if s.shape else (), s.dtype)}, axes)[""] for s in shapes
    )

    def chunk(start, fresh, carry):
        outputs, sums = carry
        part = of_chunk(start)
        if fresh is not None and not shapes[0].shape:
            part["rows"] = jnp.where(fresh, part["rows"], 0.0)
        if not wanted:
            made = formula(part, {})
        else:
            # The gradient of hidden has the dtype of sums, until it is rounded once.
            own = leaves | ({"hidden": part["hidden"].astype(number)} if "hidden" in wanted else {})
            made, pull = jax.vjp(lambda leaves: formula(part, leaves)[0], own)
            d = jnp.ones((), made.dtype) if upstream is None else upstream
            d = jnp.broadcast_to(d if d.ndim == 0 else _cut(d, start, size), made.shape)
            if fresh is not None and made.ndim:
                d = jnp.where(fresh, d, 0.0)
            (gradients,) = pull(varying({"": d.astype(made.dtype)}, axes_of(made))[""])
            made = (made,)
            sums = {
                name: _add(total, start, gradients[name]) if name == "hidden" else total + gradients[name]
                for name, total in sums.items()
            }
        outputs = tuple(
            total + part if part.ndim == 0 else _put(total, start, part) for total, part in zip(outputs, made)
        )
        return outputs, sums

    outputs, sums = _windows(tokens, max(size, 1), chunk, (outputs, sums))
    if of_vocab is not None and "weight" in wanted:
        d = sums.pop(name)

        def add(total, start, fresh, w):
            one = _cut(d, start, w.shape[0])
            (gradient,) = jax.vjp(function, w)[1](one if fresh is None else jnp.where(fresh, one, 0.0))
            return _add(total, start, gradient)

        sums["weight"] = _of_vocab(given["weight"], call.budget, add, sums["weight"])
    return outputs, {name: sums[name].astype(given[name].dtype) for name in wanted}


def _one_by_one(call: _Call, wanted: tuple[str, ...], given: Mapping[str, jax.Array], upstream: jax.Array | None = None):
    """Runs a call; vmap runs one example after another."""
    given = {name: a for name, a in given.items() if a is not None}
    axes = axes_of(*given.values(), *([] if upstream is None else [upstream]))
    given = varying(given, axes)
    names = tuple(given)
    more = () if upstream is None else tuple(varying({"": upstream}, axes).values())

    @jax.custom_batching.sequential_vmap
    def run(arrays, more):
        return _run(call, wanted, dict(zip(names, arrays)), *more or (None,))

    return run(tuple(given.values()), more)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(call: _Call, inputs: dict, fixed: dict) -> jax.Array:
    return _one_by_one(call, (), {**inputs, **fixed})[0][0]


def _is_joint(call: _Call, given: Mapping[str, Any]) -> bool:
    """Returns whether gradients are computed with the result."""
    return is_sum(call.what, call.form) and given["weight"].dtype != jnp.float16


def _forward(call: _Call, inputs: dict, fixed: dict):
    wanted = wanted_gradients(inputs)
    values = {name: None if p is None else p.value for name, p in inputs.items()}
    fixed = {name: p.value for name, p in fixed.items()}
    types = {name: type_of(value) for name, value in values.items()}
    if not _is_joint(call, values):
        return _one_by_one(call, (), {**values, **fixed})[0][0], (wanted, values, fixed, types)
    names = tuple(of for name, of in GRADIENTS.items() if wanted[name].size)
    (loss,), found = _one_by_one(call, names, {**values, **fixed})
    kept = {of: found.get(of, jnp.empty((0,), jnp.float32)) for of in GRADIENTS.values()}
    return loss, (wanted, kept, {}, types)


def _backward(call: _Call, saved, cotangent):
    wanted, kept, fixed, types = saved
    names = tuple(of for name, of in GRADIENTS.items() if wanted[name].size)
    axes = axes_of(*[a for a in (*kept.values(), *fixed.values()) if a is not None])
    found = {}
    if isinstance(cotangent, SymbolicZero) or not names:
        pass
    elif fixed:
        found = _one_by_one(call, names, {**kept, **fixed}, cotangent)[1]
    else:
        found = {of: (kept[of].astype(cotangent.dtype) * cotangent).astype(kept[of].dtype) for of in names}
    return all_gradients({name: found[of] for name, of in GRADIENTS.items() if of in found}, types, axes), None


_differentiable.defvjp(_forward, _backward, symbolic_zeros=True)


# They are jitted since a shard_map that runs eagerly does not accept a custom_vjp itself.
@functools.partial(jax.jit, static_argnums=(0,))
def _loss(call: _Call, inputs: dict, fixed: dict) -> jax.Array:
    return _differentiable(call, inputs, fixed)


@functools.partial(jax.jit, static_argnums=(0,))
def _outputs(call: _Call, given: dict) -> tuple[jax.Array, ...]:
    return _one_by_one(call, (), given)[0]


def run(what: str, budget: int, given: dict[str, jax.Array], *form: Any):
    """Returns what the formula returns. A loss has gradients by hidden, weight and bias."""
    call = _Call(what, form, budget)
    if what in ("divergence", "margin"):
        axes = axes_of(*given.values())
        inputs = {of: given.get(of) for of in GRADIENTS.values()}
        fixed = {name: a for name, a in given.items() if name not in inputs}
        return _loss(call, varying(inputs, axes), varying(fixed, axes))
    made = _outputs(call, jax.lax.stop_gradient(given))
    return made if len(made) > 1 else made[0]


def explain(what: str, budget: int, reason: str, given: dict[str, jax.Array], *form: Any) -> str:
    """Describes the plan of a call and of its gradients by hidden and weight."""
    call = _Call(what, form, budget)
    sizes = _sizes(call, given, ("hidden", "weight"))
    when = "gradients with the loss" if _is_joint(call, given) else "gradients in the backward"
    return described(sizes, plan_of(sizes, budget), "JAX", reason, when)
