"""Functions of one element that are composed of a program's functions, or approximated by them, the same for both
frameworks. Each computes in float32 or wider."""

from __future__ import annotations

import math
from collections.abc import Callable

from logitless._autochunk.lower import Value, Writer


def _exp2(w: Writer, x: Value) -> Value:
    return w.map("pow", [_number(w, 2.0, x), x], x.dtype)


def _asin(w: Writer, x: Value) -> Value:
    one = _number(w, 1.0, x)
    return _atan(w, w.div(x, _sqrt(w, w.mul(w.sub(one, x), w.add(one, x)))))


def _acos(w: Writer, x: Value) -> Value:
    # pi / 2 - asin(x) would lose the digits of results near 0.
    one = _number(w, 1.0, x)
    return w.scaled(_atan(w, _sqrt(w, w.div(w.sub(one, x), w.add(one, x)))), 2.0)


def _tan(w: Writer, x: Value) -> Value:
    return w.div(w.map("sin", [x], x.dtype), w.map("cos", [x], x.dtype))


def _sinh(w: Writer, x: Value) -> Value:
    # (u + u / (u + 1)) / 2 with u = e^|x| - 1: no digits are lost near 0.
    u = w.map("expm1", [w.map("abs", [x], x.dtype)], x.dtype)
    near = w.scaled(w.add(u, w.div(u, w.add(u, _number(w, 1.0, x)))), 0.5)
    return _signed(w, _or_half_exp(w, x, near), x)


def _cosh(w: Writer, x: Value) -> Value:
    e = w.map("exp", [w.map("abs", [x], x.dtype)], x.dtype)
    return _or_half_exp(w, x, w.scaled(w.add(e, w.div(_number(w, 1.0, x), e)), 0.5))


def _or_half_exp(w: Writer, x: Value, near: Value) -> Value:
    """Returns e^|x| / 2 where that is all, as a product that overflows no sooner than the result; `near` elsewhere."""
    a = w.map("abs", [x], x.dtype)
    root = w.map("exp", [w.scaled(a, 0.5)], x.dtype)
    far = w.mul(w.scaled(root, 0.5), root)
    return w.map("select", [w.map("gt", [a, _number(w, 20.0, x)], w.dtypes.i8), far, near], x.dtype)


def _asinh(w: Writer, x: Value) -> Value:
    # log(a + sqrt(a^2 + 1)) = log1p(a + a^2 / (1 + sqrt(a^2 + 1))); a^2 may overflow: log(2 a) there.
    one = _number(w, 1.0, x)
    a = w.map("abs", [x], x.dtype)
    square = w.mul(a, a)
    near = w.map("log1p", [w.add(a, w.div(square, w.add(one, _sqrt(w, w.add(square, one)))))], x.dtype)
    far = w.add(w.map("log", [a], x.dtype), _number(w, math.log(2.0), x))
    large = w.map("gt", [a, _number(w, 1e9, x)], w.dtypes.i8)
    return _signed(w, w.map("select", [large, far, near], x.dtype), x)


def _acosh(w: Writer, x: Value) -> Value:
    # log1p(t + sqrt(2 t + t^2)), t = x - 1; t^2 may overflow: log(2 x) there.
    t = w.sub(x, _number(w, 1.0, x))
    near = w.map("log1p", [w.add(t, _sqrt(w, w.add(w.scaled(t, 2.0), w.mul(t, t))))], x.dtype)
    far = w.add(w.map("log", [x], x.dtype), _number(w, math.log(2.0), x))
    made = w.map("select", [w.map("gt", [x, _number(w, 1e9, x)], w.dtypes.i8), far, near], x.dtype)
    below = w.map("lt", [x, _number(w, 1.0, x)], w.dtypes.i8)
    return w.map("select", [below, _number(w, math.nan, x), made], x.dtype)


def _atanh(w: Writer, x: Value) -> Value:
    return w.scaled(w.map("log1p", [w.div(w.scaled(x, 2.0), w.sub(_number(w, 1.0, x), x))], x.dtype), 0.5)


def _number(w: Writer, number: float, like: Value) -> Value:
    return w.number(number, like.dtype, like.shape)


def _sqrt(w: Writer, x: Value) -> Value:
    return w.map("sqrt", [x], x.dtype)


def _atan(w: Writer, x: Value) -> Value:
    return w.map("atan", [x], x.dtype)


def _signed(w: Writer, magnitude: Value, x: Value) -> Value:
    return w.mul(magnitude, w.map("sign", [x], x.dtype))


COMPOSED: dict[str, Callable[[Writer, Value], Value]] = {
    "exp2": _exp2,
    "log2": lambda w, x: w.scaled(w.map("log", [x], x.dtype), 1.0 / math.log(2.0)),
    "log10": lambda w, x: w.scaled(w.map("log", [x], x.dtype), 1.0 / math.log(10.0)),
    "asin": _asin,
    "acos": _acos,
    "tan": _tan,
    "sinh": _sinh,
    "cosh": _cosh,
    "asinh": _asinh,
    "acosh": _acosh,
    "atanh": _atanh,
}


def atan2(w: Writer, y: Value, x: Value) -> Value:
    """Returns the angle of (x, y) in [-pi, pi]. That of (0, 0) is 0, whatever the signs."""

    def test(name, a, b):
        return w.map(name, [a, b], w.dtypes.i8)

    def choose(condition, a, b):
        return w.map("select", [condition, a, b], x.dtype)

    zero, infinite = _number(w, 0.0, x), _number(w, math.inf, x)
    ends = [test("eq", w.map("abs", [v], v.dtype), infinite) for v in (x, y)]
    diagonal = w.map("logical_and", ends, w.dtypes.i8)  # both infinite: the quotient of their signs is meant
    x, y = (choose(diagonal, w.map("sign", [v], v.dtype), v) for v in (x, y))
    # The sign of y, also of a zero, by its reciprocal.
    below = test("lt", choose(test("eq", y, zero), w.div(_number(w, 1.0, x), y), y), zero)
    angle = _atan(w, w.div(y, x))
    left = w.add(angle, choose(below, _number(w, -math.pi, x), _number(w, math.pi, x)))
    upright = choose(below, _number(w, -math.pi / 2, x), _number(w, math.pi / 2, x))
    made = choose(test("eq", x, zero), upright, choose(test("lt", x, zero), left, angle))
    origin = w.map("logical_and", [test("eq", x, zero), test("eq", y, zero)], w.dtypes.i8)
    unknown = test("ne", y, y)  # NaN
    return choose(unknown, y, choose(origin, zero, made))


def hypot(w: Writer, x: Value, y: Value) -> Value:
    """Returns sqrt(x^2 + y^2), whose squares do not overflow."""
    a, b = (w.map("abs", [v], v.dtype) for v in (x, y))
    most, least = w.map("max", [a, b], x.dtype), w.map("min", [a, b], x.dtype)
    share = w.div(least, most)
    made = w.mul(most, _sqrt(w, w.add(w.mul(share, share), _number(w, 1.0, x))))
    made = w.map("select", [w.map("eq", [least, _number(w, 0.0, x)], w.dtypes.i8), most, made], x.dtype)
    infinite = _number(w, math.inf, x)
    ends = [w.map("eq", [v, infinite], w.dtypes.i8) for v in (a, b)]
    return w.map("select", [w.map("logical_or", ends, w.dtypes.i8), infinite, made], x.dtype)


# Coefficients of M. Giles, "Approximating the erfinv function" (2010): polynomials in w = -log(1 - x^2), around 2.5,
# and in its square root, around 3.
_NEAR = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087)
_NEAR += (-0.00125372503, -0.00417768164, 0.246640727, 1.50140941)
_FAR = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773)
_FAR += (-0.0076224613, 0.00943887047, 1.00167406, 2.83297682)


def inverse_erf(w: Writer, x: Value) -> Value:
    """Returns erfinv(x): to f32 rounding for f32, refined by two Newton steps for f64."""

    def polynomial(at, coefficients):
        made = w.number(coefficients[0], at.dtype)
        for c in coefficients[1:]:
            made = w.add(w.mul(made, at), w.number(c, at.dtype))
        return made

    def number(n):
        return w.number(n, x.dtype)

    log = w.map("neg", [w.map("log1p", [w.map("neg", [w.mul(x, x)], x.dtype)], x.dtype)], x.dtype)
    near = polynomial(w.sub(log, number(2.5)), _NEAR)
    far = polynomial(w.sub(w.map("sqrt", [log], x.dtype), number(3)), _FAR)
    made = w.mul(w.map("select", [w.map("lt", [log, number(5)], w.dtypes.i8), near, far], x.dtype), x)
    for _ in range(2 if x.dtype == w.dtypes.f64 else 0):
        off = w.sub(w.map("erf", [made], x.dtype), x)
        made = w.sub(made, w.mul(w.scaled(off, math.sqrt(math.pi) / 2), w.map("exp", [w.mul(made, made)], x.dtype)))
    size = w.map("abs", [x], x.dtype)
    ends = w.div(x, number(0))  # 1 and -1
    return w.map("select", [w.map("eq", [size, number(1)], w.dtypes.i8), ends, made], x.dtype)
