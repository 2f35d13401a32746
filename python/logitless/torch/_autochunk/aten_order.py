"""Lowers ATen operations with an order to a tensor program: running sums, sorts, diagonals, multi-class margins."""

from __future__ import annotations

import math

import torch

from logitless.torch._autochunk.aten import axis_of, handles, value_of

# --- running sums


@handles("flip")
def _flip(w, out, x, dims):
    for dim in dims:
        x = w.flip(x, axis_of(dim, x.rank))
    return x


@handles("cumsum")
def _cumsum(w, out, x, dim, dtype=None):
    x = w.cast(x, out.dtype)
    return w.scan("cumsum", x, axis_of(dim, x.rank)) if x.rank else x


@handles("logcumsumexp")
def _logcumsumexp(w, out, x, dim):
    return w.scan("cumlse", x, axis_of(dim, x.rank)) if x.rank else x


# --- sorting


def _sortable(w, x):
    return w.cast(x, torch.int32) if x.dtype == torch.bool else x


def _sorted(w, x, dim, count, descending):
    """Returns (values, indices) in x's shape, with size count along dim."""
    if x.rank == 0:
        return x, w.number(0, torch.int64)
    values, index = w.sort(_sortable(w, x), axis_of(dim, x.rank), count, descending)
    return w.cast(values, x.dtype), index


def _size(x, dim):
    return x.shape[axis_of(dim, x.rank)] if x.rank else 1


@handles("sort")
def _sort(w, out, x, dim=-1, descending=False, stable=None):
    return _sorted(w, x, dim, _size(x, dim), descending)


@handles("topk")
def _topk(w, out, x, k, dim=-1, largest=True, sorted=True):
    return _sorted(w, x, dim, k, largest)


def _at(w, out, pair, dim, k):
    """Returns the k-th of the sorted elements."""
    parts = (w.slice(v, axis_of(dim, v.rank), k, k + 1) if v.rank else v for v in pair)
    return tuple(w.reshape(part, o.shape) for part, o in zip(parts, out))


@handles("kthvalue")
def _kthvalue(w, out, x, k, dim=-1, keepdim=False):
    return _at(w, out, _sorted(w, x, dim, k, False), dim, k - 1)


@handles("median")
def _median(w, out, x, dim=None, keepdim=False):
    """Returns the lower median of an even count, and NaN if there is one: a sort puts it last."""
    if dim is None:
        flat = w.reshape(x, [math.prod(x.shape)])
        return _median(w, (out, torch.empty((), dtype=torch.int64, device="meta")), flat, 0)[0]
    count = _size(x, dim)
    pair = _sorted(w, x, dim, count, False)
    middle, last = _at(w, out, pair, dim, (count - 1) // 2), _at(w, out, pair, dim, count - 1)
    if not x.dtype.is_floating_point:
        return middle
    missing = w.map("ne", [last[0], last[0]], torch.bool)
    return tuple(w.map("select", [missing, n, m], m.dtype) for n, m in zip(last, middle))


@handles("bucketize", "searchsorted")
def _bucketize(w, out, x, bounds, out_int32=False, right=False, side=None, sorter=None):
    """Counts the bounds, in ascending order, that are before each element."""
    if w.op.startswith("aten.searchsorted"):
        x, bounds = bounds, x
    if bounds.rank != 1 or sorter is not None:
        raise w.refuse("bounds of several rows, or a sorter, have no form in a tensor program; expected one row")
    dtype = torch.promote_types(x.dtype, bounds.dtype)
    spread = w.reshape(value_of(w, x, dtype), [*x.shape, 1])
    after = w.map("gt" if right or side == "right" else "ge", [value_of(w, bounds, dtype), spread], torch.bool)
    before = w.map("logical_not", [after], torch.bool)  # all bounds are before NaN
    return w.reduce("reduce_sum", w.cast(before, out.dtype), [x.rank])


# --- diagonals


def _on_diagonal(w, shape, rows, columns, offset):
    """Returns whether the index along `columns` equals that along `rows` plus the offset."""
    ones = [1] * len(shape)
    row = w.iota([*ones[:rows], shape[rows], *ones[rows + 1 :]], rows)
    column = w.iota([*ones[:columns], shape[columns], *ones[columns + 1 :]], columns)
    return w.broadcast(w.map("eq", [w.add(row, w.number(offset, torch.int64)), column], torch.bool), shape)


@handles("eye")
def _eye(w, out, *sizes, **ignored):
    return w.cast(_on_diagonal(w, list(out.shape), 0, 1, 0), out.dtype)


@handles("diagonal")
def _diagonal(w, out, x, offset=0, dim1=0, dim2=1):
    rows, columns = axis_of(dim1, x.rank), axis_of(dim2, x.rank)
    count = out.shape[-1]
    first = max(-offset, 0)
    x = w.slice(x, rows, first, first + count)
    index = w.add(w.iota([count], 0), w.number(first + offset, torch.int64))
    rest = [d for d in range(x.rank) if d != columns]
    index = w.broadcast_dims(index, [x.shape[d] for d in rest], [rest.index(rows)])
    picked = w.pick(x, index, columns)
    place = rest.index(rows)
    return w.transpose(picked, [*(d for d in range(picked.rank) if d != place), place])


@handles("diagonal_scatter")
def _diagonal_scatter(w, out, x, source, offset=0, dim1=0, dim2=1):
    rows, columns = axis_of(dim1, x.rank), axis_of(dim2, x.rank)
    first = max(-offset, 0)
    source = w.pad(w.cast(source, x.dtype), source.rank - 1, first, x.shape[rows] - first - source.shape[-1])
    others = [d for d in range(x.rank) if d not in (rows, columns)]
    # The source's dimensions are the others, then the diagonal. They are permuted to x's order.
    have = [*others, rows]
    source = w.transpose(source, [have.index(d) for d in sorted(have)])
    whole = w.broadcast_dims(source, x.shape, sorted(have))
    return w.map("select", [_on_diagonal(w, list(x.shape), rows, columns, offset), whole, x], x.dtype)


# --- multi-class margins


@handles("multi_margin_loss_backward")
def _multi_margin_backward(w, out, cotangent, x, target, p, margin, weight=None, reduction=1):
    """The gradient of the mean over classes of max(0, margin - x[target] + x)^p, without the target's class, times its
    weight."""
    shape = x.shape
    x = w.reshape(x, [1, *shape]) if x.rank == 1 else x
    rows, classes = x.shape
    target = w.broadcast(w.reshape(target, [math.prod(target.shape)]), [rows])
    own = w.reshape(w.pick(x, target, 1), [rows, 1])
    over = w.add(w.sub(x, own), w.number(margin, x.dtype))
    slope = w.number(1, x.dtype) if p == 1 else w.scaled(over, 2)
    factor = w.scaled(w.cast(w.reshape(cotangent, [math.prod(cotangent.shape), 1]), x.dtype), 1 / classes)
    factor = w.scaled(factor, 1 / rows) if reduction == 1 else factor
    if weight is not None:
        factor = w.mul(factor, w.reshape(w.take(w.cast(weight, x.dtype), target), [rows, 1]))
    counted = w.map("gt", [over, w.number(0, x.dtype)], torch.bool)
    others = w.map("logical_not", [w.at(target, x.shape, 1)], torch.bool)
    counted = w.map("logical_and", [counted, others], torch.bool)
    each = w.map("select", [counted, w.mul(slope, factor), w.number(0, x.dtype)], x.dtype)
    total = w.reduce("reduce_sum", each, [1])
    made = w.add(each, w.one_hot(target, w.map("neg", [total], x.dtype), x.shape, 1))
    return w.reshape(made, shape)
