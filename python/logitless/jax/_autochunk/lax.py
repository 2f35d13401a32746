"""Lowers each primitive of JAX to a tensor program: one function per primitive, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np

from logitless._autochunk.composed import COMPOSED, atan2
from logitless._autochunk.heads import HeadWriter
from logitless._autochunk.integers import cut_quotient, turned
from logitless._autochunk.lower import Value, Writer, broadcast_shapes, rules_of
from logitless.jax._autochunk.dtypes import DTYPES
from logitless.jax._autochunk.softmax import Softmaxes
from logitless.jax._autochunk.trace import Equation

# name -> function(writer, equation, *operands) -> its result, or a tuple of results.
HANDLERS: dict[str, Callable] = {}
handles = rules_of(HANDLERS)

BOOL = DTYPES.i8


class JaxWriter(Writer):
    """A writer that tracks how indices are computed, since JAX writes out their arithmetic."""

    def __init__(self):
        super().__init__(DTYPES)
        self.axes: frozenset[str] = frozenset()  # the axes of a shard_map over which values vary
        self.bound: dict[str, Callable] = {}  # the functions behind the names in the texts of calls
        self.counts: dict[str, int] = {}  # for values that count along a dimension from 0: the dimension
        self.bits: dict[str, tuple[str, Value]] = {}  # random bits: the right shift so far, and the f32 number
        self.backwards: dict[str, int] = {}  # for values that count along a dimension from its end: the dimension
        self.parts: dict[str, tuple[list[Value], int]] = {}  # operands and axis of each concatenation
        self.precisions: set = set()  # precisions that matrix products ask for
        self.softmaxes = Softmaxes(self)

    def written(self, v: Value) -> Value:
        if v.name in self.bits:
            raise self.refuse("bits of random numbers have no form in a tensor program; expected f32 numbers")
        return super().written(v)

    def counted(self, v: Value) -> int | None:
        """Returns the dimension whose index each element holds, or None."""
        if v.arange is not None or v.number is not None:
            return v.arange
        if v.name in self.repeats:
            source, dims = self.repeats[v.name]
            found = self.counted(source)
            return None if found is None or source.shape[found] != v.shape[dims[found]] else dims[found]
        return self.counts.get(v.name)


class NativeWriter(HeadWriter, JaxWriter):
    """A writer of programs that the library runs."""

    native = True


# --- one element at a time


def _unary(name, w, e, x):
    return w.map(name, [x], e.out.dtype)


for _name in ("neg", "log1p", "expm1", "sqrt", "rsqrt", "tanh", "erf", "sin", "cos", "floor", "atan", "erfc", "lgamma", "digamma"):
    HANDLERS[_name] = partial(_unary, _name)
HANDLERS["sign"] = partial(_unary, "sign")
HANDLERS["logistic"] = partial(_unary, "sigmoid")


def _composed(function, w, e, *operands):
    wide = DTYPES.wide(operands[0].dtype)
    return w.cast(function(w, *(w.cast(x, wide) for x in operands)), e.out.dtype)


for _name, _function in COMPOSED.items():
    HANDLERS[_name] = partial(_composed, _function)
HANDLERS["atan2"] = partial(_composed, atan2)


@handles("polygamma")
def _polygamma(w, e, order, x):
    if order.number not in (0, 1):
        raise w.refuse("polygamma of another order than 0 and 1 has no form in a tensor program")
    return w.map("trigamma" if order.number else "digamma", [x], e.out.dtype)


@handles("abs")
def _abs(w, e, x):
    return x if w.softmaxes.of(x, "sum") is not None else w.map("abs", [x], x.dtype)


@handles("exp")
def _exp(w, e, x):
    return w.softmaxes.exp(w.map("exp", [x], x.dtype), x)


@handles("log")
def _log(w, e, x):
    found = w.softmaxes.log(x)
    return w.map("log", [x], x.dtype) if found is None else found


@handles("ceil")
def _ceil(w, e, x):
    return w.map("neg", [w.map("floor", [w.map("neg", [x], x.dtype)], x.dtype)], x.dtype)


@handles("square")
def _square(w, e, x):
    return w.mul(x, x)


@handles("one_minus_square")
def _one_minus_square(w, e, x):
    one = w.number(1, x.dtype)
    return w.mul(w.add(one, x), w.sub(one, x))  # exact wherever 1 - x is


@handles("is_finite")
def _is_finite(w, e, x):
    test = w.map("lt", [w.map("abs", [x], x.dtype), w.number(math.inf, x.dtype)], BOOL)
    return w.softmaxes.finite(test, x)


def _arithmetic(name, w, e, a, b):
    if e.out.dtype == BOOL:
        logical = {"mul": "logical_and", "max": "logical_or", "min": "logical_and"}.get(name)
        if logical is None:
            raise w.refuse("this arithmetic of bools has no form in a tensor program")
        return w.map(logical, [a, b], BOOL)
    neutral = {"max": -math.inf, "min": math.inf}.get(name)
    if neutral is not None:
        for x, other in ((a, b), (b, a)):
            if x.is_number(neutral):
                return w.broadcast(other, e.out.shape)
        a, b = _by_sign(name, a, b)
    if name == "div" and not DTYPES.floating(e.out.dtype):
        return _whole_quotient(w, a, b)[0]
    find = getattr(w.softmaxes, name, None)
    found = find(a, b) if find is not None and DTYPES.floating(e.out.dtype) else None
    if found is not None:
        return w.broadcast(found, e.out.shape)
    made = w.map(name, [a, b], e.out.dtype)
    if name == "sub":
        return w.softmaxes.shift(made, a, b)
    return w.softmaxes.quotient(made, a, b) if name == "div" else made


def _by_sign(name, a, b):
    """Orders operands. max and min give the second of equal zeros; JAX gives 0 for a maximum and -0 for a minimum."""
    number, x = (b, a) if b.number is not None else (a, b)
    if not number.is_number(0):
        return a, b
    first = (math.copysign(1, number.number) < 0) == (name == "max")
    return (number, x) if first else (x, number)


for _name in ("add", "sub", "mul", "div", "max", "min"):
    HANDLERS[_name] = partial(_arithmetic, _name)
HANDLERS["add_any"] = partial(_arithmetic, "add")


@handles("pow")
def _pow(w, e, x, exponent):
    if not DTYPES.floating(e.out.dtype):
        raise w.refuse(f"powers of {e.out.dtype} have no form in a tensor program")
    return w.map("pow", [x, w.cast(exponent, x.dtype)], x.dtype)


@handles("integer_pow")
def _integer_pow(w, e, x):
    y = e.params["y"]
    if y < 0 and not DTYPES.floating(x.dtype):
        raise w.refuse(f"the power {y} of {x.dtype} has no form in a tensor program")
    made, square, left = None, x, abs(y)
    while left:
        if left & 1:
            made = square if made is None else w.mul(made, square)
        left >>= 1
        square = w.mul(square, square) if left else square
    made = w.number(1, x.dtype, x.shape) if made is None else made
    return made if y >= 0 else w.div(w.number(1, x.dtype), made)


@handles("rem")
def _rem(w, e, a, b):
    """Returns a - trunc(a / b) b."""
    if DTYPES.floating(e.out.dtype):
        if not w.native:
            raise w.refuse("remainders of floats are JAX's own")
        return w.map("fmod", [w.broadcast(x, e.out.shape) for x in (a, b)], e.out.dtype)
    return _whole_quotient(w, a, b)[1]


def _whole_quotient(w, a, b):
    """Returns a / b of integers truncated toward 0, and the remainder. Division by 0 gives -1."""
    if not w.native:
        raise w.refuse("quotients of integers are JAX's own")
    a, b = (w.broadcast(v, broadcast_shapes(a.shape, b.shape)) for v in (a, b))
    quotient, left = cut_quotient(w, a, b)
    if b.number:
        return quotient, left
    none = w.map("eq", [b, w.number(0, b.dtype)], BOOL)
    choices = (w.number(-1, a.dtype), quotient), (a, left)
    return tuple(w.map("select", [none, *choice], a.dtype) for choice in choices)


def _compare(name, w, e, a, b):
    if name == "lt" and b.is_number(0) and w.counted(a) is not None:
        return w.number(False, BOOL, e.out.shape)  # values that count from 0 are not negative
    if name in ("ge", "gt") and b.is_number(0) and w.softmaxes.of(a, "sum") is not None:
        return w.number(True, BOOL, e.out.shape)
    return w.map(name, [a, b], BOOL)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    HANDLERS[_name] = partial(_compare, _name)


def _logical(name, w, e, *operands):
    if e.out.dtype != BOOL:
        raise w.refuse(f"bits of {e.out.dtype} have no form in a tensor program; expected bools")
    return w.map(name, operands, BOOL)


for _name in ("and", "or", "not"):
    HANDLERS[_name] = partial(_logical, f"logical_{_name}")
HANDLERS["xor"] = partial(_logical, "ne")


@handles("select_n")
def _select_n(w, e, which, *cases):
    if which.dtype == BOOL:
        first, second = cases if len(cases) == 2 else (cases[0], cases[0])
        made = w.map("select", [which, second, first], e.out.dtype)
        return w.softmaxes.guarded(w.broadcast(made, e.out.shape), which, first, second)
    made = cases[-1]
    for i, case in reversed(list(enumerate(cases[:-1]))):
        hit = w.map("eq", [which, w.number(i, which.dtype)], BOOL)
        made = w.map("select", [hit, case, made], e.out.dtype)
    return made


@handles("clamp")
def _clamp(w, e, low, x, high):
    made = w.map("max", _by_sign("max", x, low), x.dtype)
    return w.map("min", _by_sign("min", made, high), x.dtype)


# --- views and copies


@handles("stop_gradient", "copy", "copy_p", "name", "optimization_barrier", "device_put", "reshard")
def _same(w, e, *x):
    return x[0] if len(e.outputs) == 1 else x


@handles("convert_element_type")
def _convert(w, e, x):
    count = w.counted(x)
    made = _whole_of(w, x, e.out.dtype) if w.native and DTYPES.floating(x.dtype) else w.cast(x, e.out.dtype)
    if count is not None and not DTYPES.floating(made.dtype):
        w.counts[made.name] = count
    return w.softmaxes.cast(made, x)


def _whole_of(w, x, dtype):
    """Casts floats as XLA does: to the nearest representable integer, NaN to 0."""
    if DTYPES.floating(dtype) or dtype == BOOL or x.number is not None:
        return w.cast(x, dtype)
    ends = np.iinfo(dtype)
    made = w.cast(x, dtype)
    for test, end in (("ge", ends.max), ("le", ends.min)):
        over = w.map(test, [x, w.number(float(end), x.dtype)], BOOL)
        made = w.map("select", [over, w.number(end, dtype), made], dtype)
    return w.map("select", [w.map("ne", [x, x], BOOL), w.number(0, dtype), made], dtype)


@handles("reduce_precision")
def _reduce_precision(w, e, x):
    bits = e.params["exponent_bits"], e.params["mantissa_bits"]
    kinds = {(8, 7): DTYPES.bf16, (5, 10): DTYPES.f16, (8, 23): DTYPES.f32, (11, 52): DTYPES.f64}
    if bits not in kinds:
        raise w.refuse(f"{bits[0]} bits of exponent and {bits[1]} of mantissa have no form in a tensor program")
    narrow = kinds[bits]
    wider = DTYPES.floating(narrow) and narrow.itemsize >= x.dtype.itemsize
    return x if wider else w.cast(w.cast(x, narrow), x.dtype)


@handles("broadcast_in_dim")
def _broadcast_in_dim(w, e, x, *sizes):
    if sizes:
        raise w.refuse("sizes that depend on values have no form in a tensor program")
    shape, dims = e.out.shape, [int(d) for d in e.params["broadcast_dimensions"]]
    if math.prod(shape) == math.prod(x.shape):
        return _reshaped(w, x, shape)
    kept = [i for i, d in enumerate(dims) if x.shape[i] == shape[d]]
    small = _reshaped(w, x, [x.shape[i] for i in kept])
    return w.broadcast_dims(small, shape, [dims[i] for i in kept])


def _reshaped(w, x, shape):
    """Reshapes a value. A value that counts along a dimension still counts if only dimensions of 1 change."""
    count = w.counted(x)
    made = w.reshape(x, shape)
    if count is not None and made.arange is None:
        before = [s for s in x.shape[:count] if s != 1]
        places = [d for d, s in enumerate(shape) if s == x.shape[count] and [n for n in shape[:d] if n != 1] == before]
        if places and [s for s in shape if s != 1] == [s for s in x.shape if s != 1]:
            w.counts[made.name] = places[0]
    return made


@handles("reshape", "squeeze", "expand_dims")
def _reshape(w, e, x, *sizes):
    if sizes:
        raise w.refuse("sizes that depend on values have no form in a tensor program")
    if e.primitive == "reshape" and e.params.get("dimensions"):  # the order in which the elements are read
        x = w.transpose(x, [int(d) for d in e.params["dimensions"]])
    return _reshaped(w, x, e.out.shape)


@handles("transpose")
def _transpose(w, e, x):
    return w.transpose(x, [int(d) for d in e.params["permutation"]])


@handles("slice")
def _slice(w, e, x):
    strides = e.params["strides"] or [1] * x.rank
    for axis, (begin, end, step) in enumerate(zip(e.params["start_indices"], e.params["limit_indices"], strides)):
        if step == 1:
            x = w.slice(x, axis, int(begin), int(end))
            continue
        count = e.out.shape[axis]
        index = w.add(w.scaled(w.iota([count], 0), int(step)), w.number(int(begin), DTYPES.i64))
        front = [axis, *(d for d in range(x.rank) if d != axis)]
        x = w.transpose(w.take(w.transpose(x, front), index), [front.index(d) for d in range(x.rank)])
    return x


@handles("split")
def _split(w, e, x):
    axis, begin, parts = e.params["axis"], 0, []
    for size in e.params["sizes"]:
        parts.append(w.slice(x, axis, begin, begin + size))
        begin += size
    return tuple(parts) if len(parts) > 1 else parts[0]


@handles("unstack")
def _unstack(w, e, x):
    axis = e.params["axis"]
    parts = [w.reshape(w.slice(x, axis, k, k + 1), e.out.shape) for k in range(x.shape[axis])]
    return tuple(parts) if len(parts) > 1 else parts[0]


@handles("tile")
def _tile(w, e, x):
    split = w.reshape(x, [n for s in x.shape for n in (1, s)])
    spread = w.broadcast(split, [n for pair in zip(e.params["reps"], x.shape) for n in pair])
    return w.reshape(spread, e.out.shape)


@handles("pad")
def _pad(w, e, x, number):
    if number.number is None:
        raise w.refuse("padding with a computed value has no form in a tensor program; expected a number")
    for axis, (low, high, interior) in enumerate(e.params["padding_config"]):
        low, high = int(low), int(high)
        if interior != 0:
            if number.number != 0:
                raise w.refuse(f"padding of {interior} between elements has no form but with zeros")
            x = spread_out(w, x, axis, int(interior) + 1)
        x = w.slice(x, axis, max(-low, 0), x.shape[axis] - max(-high, 0))
        low, high = max(low, 0), max(high, 0)
        if number.number == 0:
            x = w.pad(x, axis, low, high)
        else:
            first, last = (
                w.number(number.number, x.dtype, [n if d == axis else s for d, s in enumerate(x.shape)])
                for n in (low, high)
            )
            x = w.concat([first, x, last], axis)
    return x


def spread_out(w, x, axis, step):
    """Inserts zeros between the elements along an axis: the gradient of a strided slice."""
    front = [axis, *(d for d in range(x.rank) if d != axis)]
    size = (x.shape[axis] - 1) * step + 1 if x.shape[axis] else 0
    made = w.scatter_add(w.scaled(w.iota([x.shape[axis]], 0), step), w.transpose(x, front), size)
    return w.transpose(made, [front.index(d) for d in range(x.rank)])


@handles("concatenate")
def _concatenate(w, e, *parts):
    return _joined(w, parts, e.params["dimension"])


@handles("stack")
def _stack(w, e, *parts):
    axis = e.params["axis"]
    return _joined(w, [_reshaped(w, p, [*p.shape[:axis], 1, *p.shape[axis:]]) for p in parts], axis)


def _joined(w, parts, axis):
    made = w.concat(parts, axis)
    if made.name:
        w.parts[made.name] = list(parts), axis
    return made


# --- without operands


@handles("iota")
def _iota(w, e, *sizes):
    if sizes:
        raise w.refuse("sizes that depend on values have no form in a tensor program")
    axis, dtype = e.params["dimension"], e.out.dtype
    made = w.iota(e.out.shape, axis, DTYPES.i32 if DTYPES.floating(dtype) else dtype)
    w.counts[made.name] = axis
    return w.cast(made, dtype)


@handles("empty", "empty2")
def _empty(w, e):
    return w.number(0, e.out.dtype, e.out.shape)


# --- reductions


def _axes(e):
    return sorted(int(a) for a in e.params["axes"])


@handles("reduce_sum")
def _reduce_sum(w, e, x):
    found = w.softmaxes.sum(x, _axes(e))
    return _reduced(w, "reduce_sum", x, _axes(e)) if found is None else found


def _reduced(w, kind, x, axes):
    """Reduces a value; dimensions of size 1 are dropped without a reduction."""
    ones = [d for d in axes if x.shape[d] == 1]
    axes = [d - sum(one < d for one in ones) for d in axes if d not in ones]
    x = w.reshape(x, [s for d, s in enumerate(x.shape) if d not in ones])
    return w.reduce(kind, x, axes) if axes else x


@handles("reduce_max")
def _reduce_max(w, e, x):
    if x.dtype == BOOL:
        return _any(w, e, x)
    return w.softmaxes.maximum(_largest(w, e, x), x, _axes(e))


def _largest(w, e, x):
    if any(x.shape[d] == 0 for d in _axes(e)):
        raise w.refuse("a maximum of nothing has no form in a tensor program")
    return _reduced(w, "reduce_max", x, _axes(e))


@handles("reduce_min")
def _reduce_min(w, e, x):
    if x.dtype == BOOL:
        return _all(w, e, x)
    return turned(w, _largest(w, e, turned(w, x)))


@handles("reduce_prod")
def _reduce_prod(w, e, x):
    if not w.native or not DTYPES.floating(x.dtype):
        raise w.refuse(f"products of {x.dtype} are JAX's own")
    return _reduced(w, "reduce_product", x, _axes(e))


@handles("argmax", "argmin")
def _argmax(w, e, x):
    x = w.cast(x, DTYPES.i32) if x.dtype == BOOL else x
    x = turned(w, x) if e.primitive == "argmin" else x
    return w.cast(w.reduce("argmax", x, _axes(e), dtype=DTYPES.i64), e.out.dtype)


@handles("reduce_or")
def _any(w, e, x):
    if x.dtype != BOOL:
        raise w.refuse(f"bits of {x.dtype} have no form in a tensor program; expected bools")
    if 0 in x.shape and 0 not in e.out.shape:
        return w.number(False, BOOL, e.out.shape)
    most = w.reduce("reduce_max", w.cast(x, DTYPES.i32), _axes(e))
    return w.map("ne", [most, w.number(0, DTYPES.i32)], BOOL)


@handles("reduce_and")
def _all(w, e, x):
    return w.map("logical_not", [_any(w, e, w.map("logical_not", [x], BOOL))], BOOL)


# --- matrix products


@handles("dot_general")
def _dot_general(w, e, a, b):
    (ca, cb), (ba, bb) = ([tuple(int(d) for d in dims) for dims in pair] for pair in e.params["dimension_numbers"])
    w.precisions.add(e.params.get("precision"))
    out = e.out.dtype
    if not DTYPES.floating(out):
        raise w.refuse(f"products that give {out} have no form in a tensor program; expected floats")
    factors = a.dtype if a.dtype == b.dtype else jnp.promote_types(a.dtype, b.dtype)
    if DTYPES.f64 in (factors, out):
        factors = DTYPES.f64
    elif factors != out and out != DTYPES.f32:
        factors = DTYPES.f32
    elif w.native and {a.dtype, b.dtype} == {DTYPES.f32, DTYPES.bf16} and e.params.get("precision") is None:
        # JAX transposes a 16-bit product with an f32 result into this form; the f32 operand is rounded.
        factors = DTYPES.bf16
    made = DTYPES.f32 if factors in DTYPES.narrow and out == DTYPES.f32 else factors
    a, b = w.cast(a, factors), w.cast(b, factors)
    return w.cast(w.dot(a, b, (list(ca), list(cb)), (list(ba), list(bb)), made), out)


def swapped_product(product: Equation, turn: Equation) -> Equation | None:
    """Returns the transpose of a matrix product as a matrix product with swapped operands, or None."""
    (ca, cb), (ba, bb) = product.params["dimension_numbers"]
    if len(ba) or len(product.out.shape) != 2 or tuple(turn.params["permutation"]) != (1, 0):
        return None
    ranks = [len(x.shape) for x in product.inputs]
    if ranks[0] - len(ca) != 1 or ranks[1] - len(cb) != 1:
        return None
    params = {**product.params, "dimension_numbers": ((cb, ca), (bb, ba))}
    return Equation("dot_general", params, product.inputs[::-1], turn.outputs, product.source, product.called)
