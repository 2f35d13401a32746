"""ATen operations that read and write by index, in a tensor program."""

from __future__ import annotations

import math

import torch

from logitless._autochunk.lower import Value
from logitless.torch._autochunk.aten import axis_of, handles, value_of


@handles("embedding")
def _embedding(w, out, table, index, *ignored):
    return w.take(table, index)


@handles("embedding_dense_backward")
def _embedding_backward(w, out, gradient, index, rows, padding, scale_by_frequency):
    if scale_by_frequency:
        raise w.refuse("scale_grad_by_freq has no form in a tensor program")
    if padding >= 0:
        kept = w.map("ne", [index, w.number(padding, index.dtype)], torch.bool)
        kept = w.broadcast_dims(kept, gradient.shape, list(range(index.rank)))
        gradient = w.map("select", [kept, gradient, w.number(0, gradient.dtype)], gradient.dtype)
    return w.cast(w.scatter_add(index, gradient, rows), out.dtype)


@handles("index_select")
def _index_select(w, out, x, dim, index):
    return _taken(w, x, axis_of(dim, x.rank), w.reshape(index, [math.prod(index.shape)]), out.shape)


def _taken(w, x, axis, index, shape):
    """x along one axis by an index of any rank."""
    front = [axis, *(d for d in range(x.rank) if d != axis)]
    rows = w.take(w.transpose(x, front), index)
    dims = [index.rank + d for d in range(axis)] + list(range(index.rank))
    dims += [index.rank + d for d in range(axis, x.rank - 1)]
    return w.reshape(w.transpose(rows, dims), shape)


_MOST = 16  # written along an axis, one operation each


def _axis(w, x, dim, index):
    """The axis of gather and scatter, whose index has all that x has along the others."""
    axis = axis_of(dim, x.rank)
    for d, (s, full) in enumerate(zip(index.shape, x.shape)):
        if d != axis and s != full:
            raise w.refuse(
                f"an index of {list(index.shape)} for {list(x.shape)} has no form; expected equal but for dim {dim}"
            )
    return axis


def _columns(w, x, dim, index):
    """(axis, the index of each column) of scatter, whose index has few entries along the axis."""
    axis = _axis(w, x, dim, index)
    if index.shape[axis] > _MOST:
        raise w.refuse(f"{index.shape[axis]} indices along dim {dim} have no form; expected at most {_MOST}")
    return axis, [_column(w, index, axis, k) for k in range(index.shape[axis])]


def _column(w, x, axis, k):
    return w.reshape(w.slice(x, axis, k, k + 1), [s for d, s in enumerate(x.shape) if d != axis])


@handles("gather")
def _gather(w, out, x, dim, index, sparse_grad=False):
    axis = _axis(w, x, dim, index)
    if index.shape[axis] != 1:
        return w.gather(x, index, axis)
    return w.reshape(w.pick(x, _column(w, index, axis, 0), axis), index.shape)


def _scattered(w, x, dim, index, source, added):
    axis, columns = _columns(w, x, dim, index)
    for k, column in enumerate(columns):
        one_each = isinstance(source, Value) and source.rank > 0
        part = w.cast(_column(w, source, axis, k), x.dtype) if one_each else value_of(w, source, x.dtype)
        x = _written(w, x, axis, column, part, added)
    return x


def _written(w, x, axis, index, part, added):
    """x with one element of each row replaced by part, or part added to it; both have the shape without the axis."""
    if x.is_number(0):
        return w.one_hot(index, part, x.shape, axis)
    if added:
        return w.add(x, w.one_hot(index, part, x.shape, axis))
    others = [d for d in range(x.rank) if d != axis]
    part = w.broadcast_dims(w.broadcast(part, [x.shape[d] for d in others]), x.shape, others)
    return w.map("select", [w.at(index, x.shape, axis), part, x], x.dtype)


@handles("scatter")
def _scatter(w, out, x, dim, index, source, reduce=None):
    if reduce is not None:
        raise w.refuse(f"reduce={reduce!r} has no form in a tensor program")
    return _scattered(w, x, dim, index, source, False)


@handles("scatter_add")
def _scatter_add(w, out, x, dim, index, source):
    axis = _axis(w, x, dim, index)
    if index.shape[axis] != 1 and w.dtypes.floating(x.dtype):
        source = w.slice(source, axis, 0, index.shape[axis])
        made = w.put(index, w.cast(source, x.dtype), x.shape[axis], axis)
        return made if x.is_number(0) else w.add(x, made)
    return _scattered(w, x, dim, index, source, True)


def _wrapped(w, index, size):
    """Negative indices count from the end."""
    if index.dtype == torch.bool:
        raise w.refuse("a mask as an index has no form in a tensor program: its shape depends on values")
    if index.arange is not None:
        return index
    negative = w.map("lt", [index, w.number(0, index.dtype)], torch.bool)
    return w.map("select", [negative, w.add(index, w.number(size, index.dtype)), index], index.dtype)


def _one_per_row(w, x, indices):
    """(axis, index) where all but the last index count the rows: x[arange(N), i], x[arange(B)[:, None], arange(T), i].
    None for others."""
    count = len(indices)
    if any(i is None for i in indices) or count < 2:
        return None
    shape = torch.broadcast_shapes(*(i.shape for i in indices))
    if len(shape) != count - 1 or tuple(shape) != x.shape[: count - 1]:
        return None
    for place, index in enumerate(indices[:-1]):
        along = None if index.arange is None else index.arange + len(shape) - index.rank
        if along != place and not (x.shape[place] == 1 and index.is_number(0)):
            return None
    return count - 1, w.broadcast(_wrapped(w, indices[-1], x.shape[count - 1]), shape)


@handles("index", "_unsafe_index")
def _index(w, out, x, indices):
    given = [d for d, i in enumerate(indices) if i is not None]
    if len(given) == 1:
        axis = given[0]
        return _taken(w, x, axis, _wrapped(w, indices[axis], x.shape[axis]), out.shape)
    rows = _one_per_row(w, x, indices)
    if rows is not None:
        axis, index = rows
        rest = [s for d, s in enumerate(x.shape) if d != axis]
        return w.pick(x, w.broadcast_dims(index, rest, list(range(index.rank))), axis)
    flat, rows = _flat_index(w, x, indices, given)
    return w.reshape(w.take(w.reshape(x, [rows, *x.shape[len(given) :]]), flat), out.shape)


def _flat_index(w, x, indices, given):
    """One index, and the rows it counts, in place of several of the first dimensions."""
    if given != list(range(len(given))):
        raise w.refuse("several indices with a slice before or between them have no form in a tensor program")
    shape = torch.broadcast_shapes(*(i.shape for i in indices if i is not None))
    flat = w.number(0, torch.int64)
    for d in given:
        index = w.cast(_wrapped(w, indices[d], x.shape[d]), torch.int64)
        flat = w.add(w.scaled(flat, x.shape[d]) if d else flat, index)
    return w.broadcast(flat, shape), math.prod(x.shape[: len(given)])


@handles("index_put", "_unsafe_index_put")
def _index_put(w, out, x, indices, source, accumulate=False):
    given = [d for d, i in enumerate(indices) if i is not None]
    rows = _one_per_row(w, x, indices)
    if rows is not None:
        axis, index = rows
        rest = [s for d, s in enumerate(x.shape) if d != axis]
        index = w.broadcast_dims(index, rest, list(range(index.rank)))
        return _written(w, x, axis, index, w.broadcast(w.cast(source, x.dtype), rest), accumulate)
    if not accumulate:
        raise w.refuse("writing by these indices without adding has no form in a tensor program")
    source = w.cast(source, x.dtype)
    if len(given) == 1:
        axis = given[0]
        index = _wrapped(w, indices[axis], x.shape[axis])
        source = w.broadcast(source, [*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])
        counted = list(range(axis, axis + index.rank))
        source = w.transpose(source, counted + [d for d in range(source.rank) if d not in counted])
        added = w.scatter_add(index, source, x.shape[axis])
        return w.add(x, w.transpose(added, [*range(1, axis + 1), 0, *range(axis + 1, x.rank)]))
    index, rows = _flat_index(w, x, indices, given)
    source = w.broadcast(source, [*index.shape, *x.shape[len(given) :]])
    return w.add(x, w.reshape(w.scatter_add(index, source, rows), x.shape))


@handles("index_add")
def _index_add(w, out, x, dim, index, source, alpha=1):
    if axis_of(dim, x.rank) != 0:
        raise w.refuse(f"dim is {dim}, expected 0")
    source = source if alpha == 1 else w.scaled(source, alpha)
    return w.add(x, w.scatter_add(index, source, x.shape[0]))
