"""Remainders of floats, and their quotients cut to whole numbers, in any framework. They stand on fmod, which is exact
where the quotient is not."""

from __future__ import annotations

from logitless._autochunk.lower import Value, Writer


def floored(w: Writer, a: Value, b: Value) -> Value:
    """Returns a - floor(a / b) b, with the sign of b."""
    left = w.map("fmod", [a, b], a.dtype)
    return w.map("select", [_apart(w, left, b), w.add(left, b), left], a.dtype)


def floor_divided(w: Writer, a: Value, b: Value) -> Value:
    """Returns floor(a / b) of the exact quotient; where b is 0, a / b."""
    left, quotient = w.map("fmod", [a, b], a.dtype), w.div(a, b)
    whole = w.div(w.sub(a, left), b)  # up to rounding
    whole = w.map("select", [_apart(w, left, b), w.sub(whole, _number(w, 1, a)), whole], a.dtype)
    below = w.map("floor", [whole], a.dtype)
    up = w.map("gt", [w.sub(whole, below), _number(w, 0.5, a)], w.dtypes.i8)
    nearest = w.map("select", [up, w.add(below, _number(w, 1, a)), below], a.dtype)
    # A zero has the sign of the quotient.
    made = w.map("select", [_is(w, "ne", whole), nearest, w.scaled(quotient, 0)], a.dtype)
    return w.map("select", [_is(w, "eq", b), quotient, made], a.dtype)


def _apart(w: Writer, left: Value, b: Value) -> Value:
    """Returns whether something is left that has another sign than b."""
    signs = [_is(w, "lt", x) for x in (left, b)]
    return w.map("logical_and", [_is(w, "ne", left), w.map("ne", signs, w.dtypes.i8)], w.dtypes.i8)


def _is(w: Writer, test: str, x: Value) -> Value:
    return w.map(test, [x, _number(w, 0, x)], w.dtypes.i8)


def _number(w: Writer, number: float, like: Value) -> Value:
    return w.number(number, like.dtype, like.shape)
