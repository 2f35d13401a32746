"""Lowers the random numbers of JAX to a tensor program, bit for bit: both draw them from a counter.

JAX computes `bits >> 9 | 1.0` as an f32, minus 1. This pattern is the function `random` of tensor programs.
"""

from __future__ import annotations

import math

import jax

from logitless._autochunk import noise
from logitless._autochunk.lower import Value
from logitless.jax._autochunk.dtypes import DTYPES
from logitless.jax._autochunk.lax import BOOL, handles

_ONE = 0x3F800000  # the bits of 1.0


@handles("random_bits")
def _random_bits(w, e, words):
    shape, width = tuple(e.out.shape), e.params["bit_width"]
    if words.shape != (2,) or words.dtype != DTYPES.i32:
        raise w.refuse("random bits of several keys or another generator have no form; expected one threefry2x32 key")
    if width != 32 or not jax.config.jax_threefry_partitionable:
        raise w.refuse(f"{width} random bits have no form; expected those of f32, and jax_threefry_partitionable")
    if math.prod(shape) >= 1 << 31:
        raise w.refuse(f"random numbers of {list(shape)} are more than a counter tells apart")
    keys = [w.cast(w.reshape(w.slice(words, 0, i, i + 1), ()), DTYPES.i64) for i in range(2)]
    counter, step = w.number(0, DTYPES.i64), 1
    for axis in reversed(range(len(shape))):
        if shape[axis] > 1:
            index = w.iota([s if d == axis else 1 for d, s in enumerate(shape)], axis)
            counter = w.add(w.scaled(index, step), counter)
        step *= shape[axis]
    drawn = w.map("random", [*keys, w.broadcast(counter, shape)], DTYPES.f32)
    return _bits(w, drawn, "bits")


def _bits(w, drawn: Value, kind: str) -> Value:
    """Returns a placeholder for random bits on the way to a number. No other primitive may read it."""
    made = Value(w.fresh("bits"), DTYPES.i64, drawn.shape)
    w.bits[made.name] = kind, drawn
    return made


def _step(w, x, expected: str) -> Value:
    kind, drawn = w.bits.get(x.name, ("", x))
    if kind != expected:
        raise w.refuse("bits of integers have no form in a tensor program but those of random numbers in f32")
    return drawn


@handles("shift_right_logical")
def _shift(w, e, x, by):
    drawn = _step(w, x, "bits")
    if not by.is_number(9):
        raise w.refuse("bits of random numbers have no form in a tensor program; expected those of f32")
    return _bits(w, drawn, "mantissa")


@handles("or")
def _or(w, e, a, b):
    if e.out.dtype == BOOL:
        return w.map("logical_or", [a, b], BOOL)
    drawn = _step(w, a, "mantissa")
    if not b.is_number(_ONE):
        raise w.refuse("bits of random numbers have no form in a tensor program; expected those of f32")
    return _bits(w, drawn, "number")


@handles("bitcast_convert_type")
def _bitcast(w, e, x):
    """Returns a number in [1, 2). JAX then subtracts 1, which gives the drawn number without rounding."""
    return w.add(_step(w, x, "number"), w.number(1, DTYPES.f32))


@handles("logitless_gumbel")
def _gumbel(w, e, key, counter):
    return noise.gumbel(w, key, counter, e.params["vocab"])
