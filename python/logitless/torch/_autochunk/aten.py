"""Lowers ATen operations to a tensor program: one function per operation, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from logitless._autochunk.integers import cut_quotient, floor_quotient, turned
from logitless._autochunk.lower import Value, Writer, rounded, rules_of
from logitless._autochunk.remainders import floor_divided, floored
from logitless._autochunk.softmax import settled
from logitless.torch._autochunk.dtypes import DTYPES

# name -> function(writer, result, *arguments). Tensor arguments are Values. result is the fake tensor that PyTorch
# infers, or a tuple of them.
HANDLERS: dict[str, Callable] = {}
handles = rules_of(HANDLERS)


def axis_of(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


def _axes(axes, rank: int) -> list[int]:
    if axes is None or axes == []:
        return list(range(rank))
    axes = [axes] if isinstance(axes, int) else axes
    return sorted(axis_of(a, rank) for a in axes)


def value_of(w: Writer, x, dtype: torch.dtype) -> Value:
    return w.cast(x, dtype) if isinstance(x, Value) else w.number(x, dtype)


def _common(w: Writer, a, b) -> torch.dtype:
    """Returns the dtype in which PyTorch computes."""

    def sample(x):
        return torch.empty((1,) * x.rank, dtype=x.dtype, device="meta") if isinstance(x, Value) else x

    return torch.result_type(sample(a), sample(b))


# --- one element at a time


def _unary(name, w, out, x):
    return w.map(name, [w.cast(x, out.dtype)], out.dtype)


for _name in ("neg", "abs", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "tanh", "erf", "sigmoid", "sin", "cos"):
    HANDLERS[_name] = partial(_unary, _name)
for _name in ("atan", "erfc", "lgamma", "digamma"):
    HANDLERS[_name] = partial(_unary, _name)
HANDLERS["floor"] = partial(_unary, "floor")


@handles("sign", "sgn")
def _sign(w, out, x):
    made = w.map("sign", [x], out.dtype)
    if not w.native or not out.dtype.is_floating_point:
        return made
    # PyTorch's sign of NaN and of -0 is 0.
    some = w.map("gt", [w.map("abs", [x], out.dtype), w.number(0, out.dtype)], torch.bool)
    return w.map("select", [some, made, w.number(0, out.dtype)], out.dtype)


def _binary(name, w, out, a, b, alpha=1):
    if out.dtype == torch.bool:
        logical = {"mul": "logical_and", "add": "logical_or", "min": "logical_and", "max": "logical_or"}.get(name)
        if logical is None or alpha != 1:
            raise w.refuse("this arithmetic of bools has no form in a tensor program")
        return w.map(logical, [value_of(w, a, torch.bool), value_of(w, b, torch.bool)], torch.bool)
    b = value_of(w, b, out.dtype)
    return w.map(name, [value_of(w, a, out.dtype), b if alpha == 1 else w.scaled(b, alpha)], out.dtype)


for _name in ("add", "sub", "mul"):
    HANDLERS[_name] = partial(_binary, _name)
HANDLERS["maximum"] = partial(_binary, "max")
HANDLERS["minimum"] = partial(_binary, "min")


@handles("rsub")
def _rsub(w, out, a, b, alpha=1):
    a = value_of(w, a, out.dtype)
    return w.map("sub", [value_of(w, b, out.dtype), a if alpha == 1 else w.scaled(a, alpha)], out.dtype)


@handles("div")
def _div(w, out, a, b, rounding_mode=None):
    if rounding_mode is not None:
        if rounding_mode == "floor" or not out.dtype.is_floating_point:
            _check_divisor(w, out, b)
        operands = _stored(w, a, out.dtype), _stored(w, b, out.dtype)
        if not out.dtype.is_floating_point:
            return (floor_quotient if rounding_mode == "floor" else cut_quotient)(w, *operands)[0]
        if rounding_mode == "floor":
            return _in_wide(w, out, floor_divided, *operands)
        return _truncated(w, w.map("div", operands, out.dtype))
    return w.map("div", [value_of(w, a, out.dtype), value_of(w, b, out.dtype)], out.dtype)


def _ceiling(w, x):
    return w.map("neg", [w.map("floor", [w.map("neg", [x], x.dtype)], x.dtype)], x.dtype)


def _truncated(w, x):
    negative = w.map("lt", [x, w.number(0, x.dtype)], torch.bool)
    return w.map("select", [negative, _ceiling(w, x), w.map("floor", [x], x.dtype)], x.dtype)


def _stored(w, x, dtype):
    """Returns a value, and a number as the dtype has it: PyTorch divides by that."""
    number = x.number if isinstance(x, Value) else x
    if number is None or dtype not in DTYPES.narrow:
        return value_of(w, x, dtype)
    return w.number(torch.tensor(number, dtype=dtype).item(), dtype, x.shape if isinstance(x, Value) else ())


def _in_wide(w, out, function, a, b):
    """Computes 16-bit operands in f32, as PyTorch does."""
    wide = DTYPES.wide(out.dtype)
    return w.cast(function(w, *(w.broadcast(w.cast(x, wide), out.shape) for x in (a, b))), out.dtype)


def _check_divisor(w, out, b):
    """Refuses the quotients, cut to a whole number, that the library alone has: those of floats, and of integers by a
    number that is not 0."""
    number = b.number if isinstance(b, Value) else b
    if not w.native or not (number or out.dtype.is_floating_point):
        raise w.refuse(f"quotients of {out.dtype} cut to whole numbers are PyTorch's own")


@handles("ceil")
def _ceil(w, out, x):
    return _ceiling(w, x) if x.dtype.is_floating_point else x


@handles("round")
def _round(w, out, x, decimals=0):
    if decimals != 0:
        raise w.refuse(f"decimals={decimals} has no form in a tensor program; expected 0")
    return rounded(w, x) if x.dtype.is_floating_point else x


@handles("trunc")
def _trunc(w, out, x):
    return _truncated(w, x) if x.dtype.is_floating_point else x


@handles("reciprocal")
def _reciprocal(w, out, x):
    return w.map("div", [w.number(1, out.dtype), w.cast(x, out.dtype)], out.dtype)


@handles("relu")
def _relu(w, out, x):
    return w.map("max", [w.number(0, x.dtype), x], out.dtype)  # of equal zeros the second: -0 stays


@handles("pow")
def _pow(w, out, x, exponent):
    if not out.dtype.is_floating_point:
        if isinstance(exponent, int) and exponent in (1, 2):
            x = w.cast(x, out.dtype)
            return x if exponent == 1 else w.mul(x, x)
        raise w.refuse(f"powers of {out.dtype} have no form in a tensor program")
    base = value_of(w, x, out.dtype)
    if not isinstance(exponent, Value):
        if exponent == 1:
            return base
        if exponent == 2:
            return w.mul(base, base)
        if exponent == 3:
            return w.mul(w.mul(base, base), base)
        if exponent in (0.5, -0.5):
            return w.map("sqrt" if exponent > 0 else "rsqrt", [base], out.dtype)
        if exponent == -1:
            return w.map("div", [w.number(1, out.dtype), base], out.dtype)
    return w.map("pow", [base, value_of(w, exponent, out.dtype)], out.dtype)


def _compare(name, w, out, a, b):
    dtype = _common(w, a, b)
    return w.map(name, [value_of(w, a, dtype), value_of(w, b, dtype)], torch.bool)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    HANDLERS[_name] = partial(_compare, _name)


@handles("isnan")
def _isnan(w, out, x):
    return w.map("ne", [x, x], torch.bool)


def _logical(name, w, out, *operands):
    if out.dtype != torch.bool:
        raise w.refuse(f"bits of {out.dtype} have no form in a tensor program; expected bools")
    return w.map(name, [value_of(w, x, torch.bool) for x in operands], torch.bool)


for _name in ("and", "or", "not"):
    HANDLERS[f"logical_{_name}"] = HANDLERS[f"bitwise_{_name}"] = partial(_logical, f"logical_{_name}")


@handles("logical_xor", "bitwise_xor")
def _xor(w, out, a, b):
    if out.dtype != torch.bool:
        raise w.refuse(f"bits of {out.dtype} have no form in a tensor program; expected bools")
    return w.map("ne", [value_of(w, a, torch.bool), value_of(w, b, torch.bool)], torch.bool)


@handles("where")
def _where(w, out, condition, a, b):
    return w.map("select", [condition, value_of(w, a, out.dtype), value_of(w, b, out.dtype)], out.dtype)


@handles("remainder", "fmod")
def _remainder(w, out, a, b):
    """Returns a - floor(a / b) b; fmod's quotient is cut toward 0."""
    _check_divisor(w, out, b)
    operands, cut = (_stored(w, a, out.dtype), _stored(w, b, out.dtype)), w.op.startswith("aten.fmod")
    if not out.dtype.is_floating_point:
        return (cut_quotient if cut else floor_quotient)(w, *operands)[1]
    return w.map("fmod", operands, out.dtype) if cut else _in_wide(w, out, floored, *operands)


@handles("clamp", "clamp_min", "clamp_max", "hardtanh")
def _clamp(w, out, x, low=None, high=None):
    if w.op.startswith("aten.clamp_max"):
        low, high = None, low
    x = w.cast(x, out.dtype)
    if low is not None:
        x = w.map("max", [value_of(w, low, out.dtype), x], out.dtype)
    if high is not None:
        x = w.map("min", [value_of(w, high, out.dtype), x], out.dtype)
    return x


@handles("gelu")
def _gelu(w, out, x, approximate="none"):
    x = w.cast(x, DTYPES.wide(x.dtype))
    if approximate == "tanh":
        cube = w.mul(w.mul(x, x), x)
        inner = w.scaled(w.add(x, w.scaled(cube, 0.044715)), math.sqrt(2.0 / math.pi))
        share = w.map("tanh", [inner], x.dtype)
    else:
        share = w.map("erf", [w.scaled(x, math.sqrt(0.5))], x.dtype)
    return w.cast(w.mul(w.scaled(x, 0.5), w.add(share, w.number(1, x.dtype))), out.dtype)


# --- views and copies


@handles("alias", "detach", "clone", "contiguous", "lift_fresh_copy", "lift_fresh", "_conj", "positive")
def _same(w, out, x, **ignored):
    return x


@handles("_to_copy", "convert_element_type")
def _to_copy(w, out, x, dtype=None, device=None, **ignored):
    return value_of(w, x, out.dtype)  # vmap casts a number of the function's


@handles("copy", "copy_")
def _copy(w, out, to, x, non_blocking=False):
    return w.broadcast(w.cast(x, out.dtype), out.shape)


@handles("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze")
def _view(w, out, x, *ignored):
    return w.reshape(x, out.shape)


@handles("expand")
def _expand(w, out, x, sizes, implicit=False):
    return w.broadcast(x, out.shape)


@handles("repeat")
def _repeat(w, out, x, counts):
    x = w.reshape(x, [1] * (len(counts) - x.rank) + list(x.shape))
    split = w.reshape(x, [n for s in x.shape for n in (1, s)])
    return w.reshape(w.broadcast(split, [n for pair in zip(counts, x.shape) for n in pair]), out.shape)


@handles("roll")
def _roll(w, out, x, shifts, dims=()):
    shifts = [shifts] if isinstance(shifts, int) else shifts
    dims = [dims] if isinstance(dims, int) else dims
    flat = x if dims else w.reshape(x, [math.prod(x.shape)])
    for shift, dim in zip(shifts, dims or [0]):
        axis = axis_of(dim, flat.rank)
        size = flat.shape[axis]
        at = (size - shift) % size if size else 0
        flat = w.concat([w.slice(flat, axis, at, size), w.slice(flat, axis, 0, at)], axis)
    return w.reshape(flat, x.shape)


@handles("permute")
def _permute(w, out, x, dims):
    return w.transpose(x, [axis_of(d, x.rank) for d in dims])


@handles("transpose")
def _transpose(w, out, x, a, b):
    dims = list(range(x.rank))
    a, b = axis_of(a, x.rank), axis_of(b, x.rank)
    dims[a], dims[b] = dims[b], dims[a]
    return w.transpose(x, dims)


@handles("t")
def _t(w, out, x):
    return w.transpose(x, list(range(x.rank))[::-1])


def bounds_of(x, axis, begin, end) -> tuple[int, int]:
    """Returns the bounds of a slice along an axis, in [0, size]."""
    size = x.shape[axis]
    begin = 0 if begin is None else begin
    end = size if end is None else end
    begin, end = (b + size if b < 0 else b for b in (begin, end))
    begin = min(max(begin, 0), size)
    return begin, min(max(end, begin), size)


@handles("slice")
def _slice(w, out, x, dim=0, begin=None, end=None, step=1):
    axis = axis_of(dim, x.rank)
    begin, end = bounds_of(x, axis, begin, end)
    if step == 1:
        return w.slice(x, axis, begin, end)
    front = [axis, *(d for d in range(x.rank) if d != axis)]
    rows = w.take(w.transpose(x, front), stepped(w, begin, step, out.shape[axis]))
    return w.transpose(rows, [front.index(d) for d in range(x.rank)])


def stepped(w, begin, step, count):
    """Returns [begin, begin + step, ...] with count elements."""
    return w.add(w.scaled(w.iota([count], 0), step), w.number(begin, torch.int64))


@handles("select")
def _select(w, out, x, dim, index):
    axis = axis_of(dim, x.rank)
    index = index + x.shape[axis] if index < 0 else index
    return w.reshape(w.slice(x, axis, index, index + 1), out.shape)


@handles("split_with_sizes", "split")
def _split(w, out, x, sizes, dim=0):
    axis, begin, parts = axis_of(dim, x.rank), 0, []
    for part in out:
        parts.append(w.slice(x, axis, begin, begin + part.shape[axis]))
        begin += part.shape[axis]
    return tuple(parts)


@handles("unbind")
def _unbind(w, out, x, dim=0):
    return tuple(_select(w, part, x, dim, i) for i, part in enumerate(out))


@handles("cat")
def _cat(w, out, parts, dim=0):
    rank = len(out.shape)
    parts = [w.cast(p, out.dtype) for p in parts if p.rank == rank]  # PyTorch skips tensors of shape [0]
    return w.concat(parts, axis_of(dim, rank))


@handles("constant_pad_nd")
def _constant_pad(w, out, x, pads, number=0):
    for i in range(len(pads) // 2):
        axis, low, high = x.rank - 1 - i, pads[2 * i], pads[2 * i + 1]
        x = w.slice(x, axis, max(-low, 0), x.shape[axis] - max(-high, 0))
        low, high = max(low, 0), max(high, 0)
        if number == 0:
            x = w.pad(x, axis, low, high)
        else:
            first, last = (
                w.number(number, x.dtype, [n if d == axis else s for d, s in enumerate(x.shape)]) for n in (low, high)
            )
            x = w.concat([first, x, last], axis)
    return x


# --- without tensor operands


def _filled(number, w, out, *ignored, **also_ignored):
    return w.number(number, out.dtype, out.shape)


# Uninitialised memory is never read before it is written.
for _name in ("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty"):
    HANDLERS[_name] = partial(_filled, 0)
for _name in ("empty_strided", "empty_permuted", "new_empty_strided"):
    HANDLERS[_name] = partial(_filled, 0)
for _name in ("ones", "ones_like", "new_ones"):
    HANDLERS[_name] = partial(_filled, 1)


@handles("full", "full_like", "new_full")
def _full(w, out, first, *rest, **ignored):
    return w.number(rest[-1], out.dtype, out.shape)


@handles("scalar_tensor")
def _scalar_tensor(w, out, number, **ignored):
    return w.number(number, out.dtype)


@handles("arange")
def _arange(w, out, begin, end=None, step=1, **ignored):
    begin = 0 if end is None else begin
    made = w.iota(out.shape, 0)
    if (begin, step) != (0, 1):
        dtype = out.dtype if out.dtype.is_floating_point else torch.int64
        made = w.add(w.mul(w.cast(made, dtype), w.number(step, dtype)), w.number(begin, dtype))
    return w.cast(made, out.dtype)


# --- reductions


@handles("sum")
def _sum(w, out, x, dims=None, keep=False, dtype=None):
    dims = _axes(dims, x.rank)
    if not out.dtype.is_floating_point or not x.dtype.is_floating_point:
        x = w.cast(x, out.dtype)
    if x.dtype == torch.float64:  # casts to a narrower dtype afterwards
        return w.cast(w.reduce("reduce_sum", x, dims, keep), out.dtype)
    direct = out.dtype in (x.dtype, torch.float32, torch.float64)
    return w.cast(w.reduce("reduce_sum", x, dims, keep, out.dtype if direct else None), out.dtype)


@handles("mean")
def _mean(w, out, x, dims=None, keep=False, dtype=None):
    dims = _axes(dims, x.rank)
    x = w.cast(x, out.dtype)
    count = math.prod(x.shape[d] for d in dims)
    total = w.reduce("reduce_sum", x, dims, keep, DTYPES.wide(x.dtype))
    return w.cast(w.div(total, w.number(count, total.dtype)), out.dtype)


def _spread(w, x, dims, correction):
    """Returns mean and variance in the dtype of accumulation, with the reduced dimensions kept."""
    x = w.cast(x, DTYPES.wide(x.dtype))
    count = math.prod(x.shape[d] for d in dims)
    mean = w.div(w.reduce("reduce_sum", x, dims, True), w.number(count, x.dtype))
    apart = w.sub(x, mean)
    total = w.reduce("reduce_sum", w.mul(apart, apart), dims, True)
    if count - correction <= 0:
        raise w.refuse(f"a variance of {count} elements with correction {correction} is no number")
    return mean, w.div(total, w.number(count - correction, x.dtype))


@handles("var")
def _var(w, out, x, dims=None, correction=None, keepdim=False, **ignored):
    _, var = _spread(w, x, _axes(dims, x.rank), 1 if correction is None else correction)
    return w.cast(w.reshape(var, out.shape), out.dtype)


@handles("var_mean")
def _var_mean(w, out, x, dims=None, correction=None, keepdim=False):
    mean, var = _spread(w, x, _axes(dims, x.rank), 1 if correction is None else correction)
    return tuple(w.cast(w.reshape(v, o.shape), o.dtype) for v, o in zip((var, mean), out))


@handles("native_layer_norm")
def _layer_norm(w, out, x, shape, gain, bias, epsilon):
    dims = list(range(x.rank - len(shape), x.rank))
    mean, var = _spread(w, x, dims, 0)
    x = w.cast(x, mean.dtype)
    scale = w.map("rsqrt", [w.add(var, w.number(epsilon, var.dtype))], var.dtype)
    made = w.mul(w.sub(x, mean), scale)
    if gain is not None:
        made = w.mul(made, w.cast(gain, made.dtype))
    if bias is not None:
        made = w.add(made, w.cast(bias, made.dtype))
    return tuple(w.cast(w.reshape(v, o.shape), o.dtype) for v, o in zip((made, mean, scale), out))


def _ordered(w, x):
    """Converts booleans to integers, which have a maximum."""
    return w.cast(x, torch.int32) if x.dtype == torch.bool else x


@handles("amax")
def _amax(w, out, x, dims=None, keep=False):
    return w.cast(w.reduce("reduce_max", _ordered(w, x), _axes(dims, x.rank), keep), out.dtype)


@handles("amin")
def _amin(w, out, x, dims=None, keep=False):
    x = _ordered(w, x)
    least = w.reduce("reduce_max", turned(w, x), _axes(dims, x.rank), keep)
    return w.cast(turned(w, least), out.dtype)


@handles("max", "min")
def _max(w, out, x, dim=None, keep=False):
    least = w.op.startswith("aten.min")
    if 0 in x.shape and (dim is None or x.rank == 0 or x.shape[axis_of(dim, x.rank)] == 0):
        raise IndexError(f"autochunk: {w.prefix}{w.asked}: expected elements along dim {dim}, got {list(x.shape)}")
    dtype, x = x.dtype, _ordered(w, x)
    v = turned(w, x) if least else x
    dims = _axes(dim, x.rank)
    top = w.reduce("reduce_max", v, dims, keep)
    top = w.cast(turned(w, top) if least else top, dtype)
    return top if dim is None else (top, w.reduce("argmax", v, dims, keep, torch.int64))


@handles("argmax", "argmin")
def _argmax(w, out, x, dim=None, keep=False):
    x = _ordered(w, x)
    if w.op.startswith("aten.argmin"):
        x = turned(w, x)
    x = w.reshape(x, [math.prod(x.shape)]) if dim is None else x
    return w.reshape(w.reduce("argmax", x, _axes(0 if dim is None else dim, x.rank), keep, torch.int64), out.shape)


@handles("any", "all")
def _any(w, out, x, dims=None, keep=False):
    every = w.op.startswith("aten.all")
    x = w.cast(x, torch.bool)
    if math.prod(x.shape) == 0 and math.prod(out.shape) > 0:
        return w.number(every, torch.bool, out.shape)
    x = w.map("logical_not", [x], torch.bool) if every else x
    count = w.reduce("reduce_max", w.cast(x, torch.int32), _axes(dims, x.rank), keep)
    return w.map("eq" if every else "ne", [count, w.number(0, torch.int32)], torch.bool)


@handles("linalg_vector_norm")
def _vector_norm(w, out, x, order=2, dims=None, keep=False, dtype=None):
    x, dims = w.cast(x, DTYPES.wide(out.dtype)), _axes(dims, x.rank)
    if order == 2:
        made = w.map("sqrt", [w.reduce("reduce_sum", w.mul(x, x), dims, keep)], x.dtype)
    elif order in (1, math.inf):
        made = w.reduce("reduce_sum" if order == 1 else "reduce_max", w.map("abs", [x], x.dtype), dims, keep)
    else:
        raise w.refuse(f"a norm of order {order} has no form in a tensor program; expected 1, 2 or inf")
    return w.cast(made, out.dtype)


@handles("logsumexp")
def _logsumexp(w, out, x, dims, keep=False):
    x = w.cast(x, DTYPES.wide(out.dtype))
    return w.cast(w.reduce("reduce_lse", x, _axes(dims, x.rank), keep), out.dtype)


@handles("_log_softmax", "_softmax")
def _softmax(w, out, x, dim, half_to_float):
    x, axis = w.cast(x, DTYPES.wide(x.dtype)), axis_of(dim, x.rank)
    lse = settled(w, w.reduce("reduce_lse", x, [axis]))
    made = w.sub(x, w.reshape(lse, [1 if d == axis else s for d, s in enumerate(x.shape)]))
    if w.op.startswith("aten._softmax"):
        made = w.map("exp", [made], made.dtype)
    return w.cast(made, out.dtype)


# --- matrix products


@handles("mm")
def _mm(w, out, a, b):
    return w.dot(a, b, ([1], [0]))


@handles("bmm")
def _bmm(w, out, a, b):
    return w.dot(a, b, ([2], [1]), ([0], [0]))


@handles("mv", "dot")
def _mv(w, out, a, b):
    return w.dot(a, b, ([a.rank - 1], [0]))


@handles("addmm", "baddbmm", "addmv")
def _addmm(w, out, x, a, b, beta=1, alpha=1):
    product = _bmm(w, out, a, b) if a.rank == 3 else _mv(w, out, a, b) if b.rank == 1 else _mm(w, out, a, b)
    return w.add(w.scaled(product, alpha), w.scaled(x, beta)) if beta != 0 else w.scaled(product, alpha)
