"""Lists of entries, each of one token and one row of weight: sums and dot products, with gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ._arguments import sum_dtype

_GATHERED = 16 << 20  # bytes of gathered rows, and of their products, at a time


def summed(values: jax.Array, index: jax.Array, count: int) -> jax.Array:
    """Returns the sums [count] of values with equal indices."""
    return jax.ops.segment_sum(values, index, count)


def largest(values: jax.Array, index: jax.Array, count: int) -> jax.Array:
    """Returns the largest value of each index, -inf without any."""
    return jax.ops.segment_max(values, index, count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rows(x: jax.Array, index: jax.Array, dtype: Any) -> jax.Array:
    """Returns x[index] in a dtype, in which a gradient is summed, and then rounded once."""
    return jnp.take(x, index, axis=0).astype(dtype)


def _rows_forward(x, index, dtype):
    return rows(x, index, dtype), (index, jnp.empty((0, *x.shape), x.dtype))


def _rows_backward(dtype, saved, cotangent):
    index, like = saved
    return jnp.zeros(like.shape[1:], dtype).at[index].add(cotangent).astype(like.dtype), None


rows.defvjp(_rows_forward, _rows_backward)


@jax.custom_vjp
def dots(hidden: jax.Array, weight: jax.Array, rows: jax.Array, ids: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns the dot products [M] of hidden[rows] and weight[ids] in float32, or float64; 0 where not valid."""
    parts = _parts(hidden, rows, ids, valid)

    def of_part(_, part):
        x, w = _gathered(hidden, weight, *part)
        return None, (x * w).sum(-1)

    return jax.lax.scan(of_part, None, parts)[1].reshape(-1)[: rows.shape[0]]


def _parts(hidden, *lists):
    """Returns lists of entries [chunks, step], with entries that are not valid after the last one."""
    count = lists[0].shape[0]
    step = max(1, min(count, _GATHERED // max(1, 12 * hidden.shape[1])))
    chunks = -(-count // step)
    return tuple(jnp.pad(x, (0, chunks * step - count)).reshape(chunks, step) for x in lists)


def _gathered(hidden, weight, rows, ids, valid):
    x = jnp.where(valid[:, None], jnp.take(hidden, rows, axis=0), jnp.zeros((), hidden.dtype))
    number = sum_dtype(hidden.dtype)
    return x.astype(number), jnp.take(weight, ids, axis=0).astype(number)


def _forward(hidden, weight, rows, ids, valid):
    return dots(hidden, weight, rows, ids, valid), (hidden, weight, rows, ids, valid)


def _backward(saved, cotangent):
    hidden, weight, *lists = saved
    parts = _parts(hidden, *lists, cotangent)

    def add(sums, part):
        rows, ids, valid, d = part
        x, w = _gathered(hidden, weight, rows, ids, valid)
        d = jnp.where(valid, d, 0.0)[:, None]
        return (sums[0].at[rows].add(d * w), sums[1].at[ids].add(d * x)), None

    zeros = tuple(jnp.zeros(a.shape, cotangent.dtype) for a in (hidden, weight))
    d_hidden, d_weight = jax.lax.scan(add, zeros, parts)[0]
    return d_hidden.astype(hidden.dtype), d_weight.astype(weight.dtype), None, None, None


dots.defvjp(_forward, _backward)
