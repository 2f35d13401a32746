"""Quotients and the order of integers, in any framework. Tensor programs divide floats alone, which round."""

from __future__ import annotations

import math

from logitless._autochunk.lower import Value, Writer, broadcast_shapes

_EXACT = 2**53  # f64 has every integer up to here


def cut_quotient(w: Writer, a: Value, b: Value) -> tuple[Value, Value]:
    """Returns a / b truncated toward 0, and the remainder. Both wrap, and both are arbitrary where b is 0."""
    return _small(w, a, b) or _cut_quotient(w, a, b)


def _cut_quotient(w: Writer, a: Value, b: Value) -> tuple[Value, Value]:
    whole, found = a.dtype, w.range_of(a)
    quotient = _rounded(w, a, b)
    left = w.sub(a, w.mul(quotient, b))
    if whole == w.dtypes.i32 or (found is not None and max(map(abs, found)) <= _EXACT):
        return quotient, left  # no quotient of such numbers is rounded to an integer, or past one
    more = _rounded(w, left, b)
    quotient, left = w.add(quotient, more), w.sub(left, w.mul(more, b))
    # It is off by one at most: then as much as b is left, or something of the other sign than a.
    least = [w.map("min", [x, w.map("neg", [x], whole)], whole) for x in (left, b)]  # of -2^63, too
    beyond = _both(w, w.map("le", least, w.dtypes.i8), _not_zero(w, left))
    off = w.map("logical_or", [beyond, _both(w, _not_zero(w, left), _apart(w, left, a))], w.dtypes.i8)
    by = w.map("select", [_apart(w, left, b), w.number(-1, whole), w.number(1, whole)], whole)
    by = w.map("select", [off, by, w.number(0, whole)], whole)
    return w.add(quotient, by), w.sub(left, w.mul(by, b))


def floor_quotient(w: Writer, a: Value, b: Value) -> tuple[Value, Value]:
    """Returns the quotient rounded toward -inf, and a remainder with the sign of b."""
    return _small(w, a, b) or _with_bounds(w, a, b, *_floor_quotient(w, a, b))


def _floor_quotient(w: Writer, a: Value, b: Value) -> tuple[Value, Value]:
    whole = a.dtype
    quotient, left = _cut_quotient(w, a, b)
    below = _both(w, _not_zero(w, left), _apart(w, left, b))
    quotient = w.sub(quotient, w.cast(below, whole))
    return quotient, w.map("select", [below, w.add(left, b), left], whole)


def _small(w: Writer, a: Value, b: Value) -> tuple[Value, Value] | None:
    """Returns 0 and a if 0 <= a < b for all inputs, else None."""
    found, divisor = w.range_of(a), w.range_of(b)
    if found is None or divisor is None or not 0 <= found[0] <= found[1] < divisor[0]:
        return None
    shape = broadcast_shapes(a.shape, b.shape)
    return w.number(0, a.dtype, shape), w.broadcast(a, shape)


def _with_bounds(w: Writer, a: Value, b: Value, quotient: Value, left: Value) -> tuple[Value, Value]:
    """Notes what is known of a floored quotient by a positive number, and of its remainder."""
    if b.number is None or b.number <= 0:
        return quotient, left
    found = w.range_of(a)
    if left.number is None:
        w.bounds[left.name] = 0, b.number - 1
    if quotient.number is None and found is not None and all(map(math.isfinite, found)):
        w.bounds[quotient.name] = tuple(int(end) // int(b.number) for end in found)
    return quotient, left


def _rounded(w: Writer, a: Value, b: Value) -> Value:
    f64 = w.dtypes.f64
    return w.cast(w.div(w.cast(a, f64), w.cast(b, f64)), a.dtype)


def _both(w: Writer, a: Value, b: Value) -> Value:
    return w.map("logical_and", [a, b], w.dtypes.i8)


def _not_zero(w: Writer, x: Value) -> Value:
    return w.map("ne", [x, w.number(0, x.dtype)], w.dtypes.i8)


def _apart(w: Writer, a: Value, b: Value) -> Value:
    """Returns whether one is negative and the other is not."""
    signs = [w.map("lt", [x, w.number(0, x.dtype)], w.dtypes.i8) for x in (a, b)]
    return w.map("ne", signs, w.dtypes.i8)


def turned(w: Writer, x: Value) -> Value:
    """Reverses the order of numbers. Integers become -1 - x, since the least one has no negative."""
    if w.dtypes.floating(x.dtype):
        return w.map("neg", [x], x.dtype)
    return w.sub(w.number(-1, x.dtype), x)
