"""Lowers ATen operations that read and write by index to a tensor program."""

from __future__ import annotations

import math

import torch

from logitless._autochunk import segments
from logitless._autochunk.lower import Value
from logitless._autochunk.rows import written_rows
from logitless.torch._autochunk.aten import axis_of, bounds_of, handles, stepped, value_of


@handles("embedding")
def _embedding(w, out, table, index, *ignored):
    w.check(index, table.shape[0], 0)
    return w.filled(w.take(table, index), index, list(range(index.rank)), table.shape[0])


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
    axis, index = axis_of(dim, x.rank), w.reshape(index, [math.prod(index.shape)])
    w.check(index, x.shape[axis], axis)
    return w.filled(_taken(w, x, axis, index, out.shape), index, [axis], x.shape[axis])


def _taken(w, x, axis, index, shape):
    """Gathers x along one axis by an index of any rank."""
    front = [axis, *(d for d in range(x.rank) if d != axis)]
    rows = w.take(w.transpose(x, front), index)
    dims = [index.rank + d for d in range(axis)] + list(range(index.rank))
    dims += [index.rank + d for d in range(axis, x.rank - 1)]
    return w.reshape(w.transpose(rows, dims), shape)


_MOST = 16  # the most indices of scatter along the axis; each takes an operation
_MOST_DISTINCT = 1  # on a CPU, those of a sort or topk: more of them are put into zeros by one operation


def _axis(w, x, dim, index):
    """Returns the axis of a scatter, whose index must have x's size along all other axes."""
    axis = axis_of(dim, x.rank)
    for d, (s, full) in enumerate(zip(index.shape, x.shape)):
        if d != axis and s != full:
            raise w.refuse(
                f"an index of {list(index.shape)} for {list(x.shape)} has no form; expected equal but for dim {dim}"
            )
    w.check(index, x.shape[axis] if x.rank else 1, axis)
    return axis


def _columns(w, x, dim, index):
    """Returns (axis, the index of each column) of a scatter with few indices along the axis."""
    axis = _axis(w, x, dim, index)
    if index.shape[axis] > _MOST:
        raise w.refuse(f"{index.shape[axis]} indices along dim {dim} have no form; expected at most {_MOST}")
    return axis, [_column(w, index, axis, k) for k in range(index.shape[axis])]


def _column(w, x, axis, k):
    return w.reshape(w.slice(x, axis, k, k + 1), [s for d, s in enumerate(x.shape) if d != axis])


@handles("gather")
def _gather(w, out, x, dim, index, sparse_grad=False):
    if x.rank == 0:
        return w.reshape(x, index.shape)
    axis = axis_of(dim, x.rank)
    for d, size in enumerate(index.shape):
        if d != axis:
            x = w.slice(x, d, 0, size)
    size = x.shape[axis]
    w.check(index, size, axis)
    if index.shape[axis] != 1:
        return w.filled(w.gather(x, index, axis), index, list(range(index.rank)), size)
    column = _column(w, index, axis, 0)
    return w.reshape(w.filled(w.pick(x, column, axis), column, list(range(column.rank)), size), index.shape)


def _is_wide(w, x, axis, index, source) -> bool:
    """Returns whether the elements of a row are put by one operation, not compared with each index."""
    if index.rank == 0:
        return False
    distinct = w.distinct.get(index.name) == axis and isinstance(source, Value) and source.rank > 0
    one_put = w.device == "cpu" and distinct and x.is_number(0) and w.dtypes.floating(x.dtype)
    return index.shape[axis] > (_MOST_DISTINCT if one_put else _MOST)


def _scattered_wide(w, x, axis, index, source, added):
    """Scatters more indices per row than are written one by one."""
    one_each = isinstance(source, Value) and source.rank > 0
    if one_each:
        for d, size in enumerate(index.shape):
            source = w.slice(source, d, 0, size)
    updates = w.broadcast(w.cast(source, x.dtype) if one_each else value_of(w, source, x.dtype), index.shape)
    size = x.shape[axis]
    if added:
        made = w.put(index, updates, size, axis)
        return made if x.is_number(0) else w.add(x, made)
    if one_each and w.distinct.get(index.name) != axis:
        raise w.refuse(
            f"{index.shape[axis]} writes along dim {axis} have no form where indices may be equal; expected those of a "
            f"sort or topk, at most {_MOST}, or scatter_add"
        )
    made = w.put(index, updates, size, axis) if one_each else w.broadcast(value_of(w, source, x.dtype), x.shape)
    if x.is_number(0) and one_each:
        return made
    hits = w.put(index, w.number(1, torch.int32, index.shape), size, axis)
    return w.map("select", [w.map("ne", [hits, w.number(0, torch.int32)], torch.bool), made, x], x.dtype)


def _scattered(w, x, dim, index, source, added):
    if _is_wide(w, x, axis_of(dim, x.rank), index, source):
        return _scattered_wide(w, x, _axis(w, x, dim, index), index, source, added)
    axis, columns = _columns(w, x, dim, index)
    for k, column in enumerate(columns):
        one_each = isinstance(source, Value) and source.rank > 0
        part = w.cast(_column(w, source, axis, k), x.dtype) if one_each else value_of(w, source, x.dtype)
        x = _written(w, x, axis, column, part, added)
    return x


def _written(w, x, axis, index, part, added):
    """Replaces one element of each row of x by part, or adds part to it. index and part have the shape without the
    axis."""
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


@handles("scatter_reduce")
def _scatter_reduce(w, out, x, dim, index, source, reduce, include_self=True):
    if reduce == "sum" and include_self:
        return _scatter_add(w, out, x, dim, index, source)
    if not w.native or x.rank == 0:
        raise w.refuse(f"reduce={reduce!r}, include_self={include_self} is PyTorch's own")
    axis = _axis(w, x, dim, index)
    source = w.slice(w.cast(source, x.dtype), axis, 0, index.shape[axis])
    return segments.reduced(w, x, axis, index, source, reduce, include_self)


def _wrapped(w, index, size, dim):
    """Maps negative indices to positions counted from the end."""
    if index.dtype == torch.bool:
        raise w.refuse(
            "a mask as an index has no form in a tensor program: its shape depends on values; expected torch.where"
        )
    from_end = not w.asked.startswith(("aten.index_copy", "aten.index_add"))
    w.check(index, size, dim, -size if from_end else 0)
    if index.arange is not None:
        return index
    negative = w.map("lt", [index, w.number(0, index.dtype)], torch.bool)
    return w.map("select", [negative, w.add(index, w.number(size, index.dtype)), index], index.dtype)


def _one_per_row(w, x, indices):
    """Returns (axis, index) if all indices but the last enumerate the rows: x[arange(N), i], x[arange(B)[:, None],
    arange(T), i]. Returns None otherwise."""
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
    return count - 1, w.broadcast(_wrapped(w, indices[-1], x.shape[count - 1], count - 1), shape)


@handles("index", "_unsafe_index")
def _index(w, out, x, indices):
    given = [d for d, i in enumerate(indices) if i is not None]
    if len(given) == 1:
        axis = given[0]
        index = _wrapped(w, indices[axis], x.shape[axis], axis)
        made = _taken(w, x, axis, index, out.shape)
        return w.filled(made, index, [axis + d for d in range(index.rank)], x.shape[axis])
    rows = _one_per_row(w, x, indices)
    if rows is not None:
        axis, index = rows
        rest = [s for d, s in enumerate(x.shape) if d != axis]
        counted = list(range(index.rank))
        return w.filled(w.pick(x, w.broadcast_dims(index, rest, counted), axis), index, counted, x.shape[axis])
    flat, rows = _flat_index(w, x, indices, given)
    made = w.take(w.reshape(x, [rows, *x.shape[len(given) :]]), flat)
    return w.reshape(w.filled(made, flat, list(range(flat.rank)), rows), out.shape)


def _flat_index(w, x, indices, given):
    """Merges indices of several leading dimensions into one. Returns it and the number of rows that it addresses."""
    if given != list(range(len(given))):
        raise w.refuse("several indices with a slice before or between them have no form in a tensor program")
    shape = torch.broadcast_shapes(*(i.shape for i in indices if i is not None))
    flat, outside = w.number(0, torch.int64), []
    for d in given:
        index = w.cast(_wrapped(w, indices[d], x.shape[d], d), torch.int64)
        flat = w.add(w.scaled(flat, x.shape[d]) if d else flat, index)
        if w.device != "cpu" and not w.known(index, x.shape[d]):  # a merged index may hide one out of range
            outside.append(w.map("logical_not", [w.inside(index, x.shape[d])], torch.bool))
    for test in outside:
        flat = w.map("select", [test, w.number(-1, torch.int64), flat], torch.int64)
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
    if len(given) == 1 and indices[given[0]].dtype == torch.bool:
        return _put_where(w, x, indices[given[0]], given[0], source, accumulate)
    if not accumulate:
        return _written_rows(w, x, indices, given, w.cast(source, x.dtype))
    source = w.cast(source, x.dtype)
    if len(given) == 1:
        axis = given[0]
        index = _wrapped(w, indices[axis], x.shape[axis], axis)
        source = w.broadcast(source, [*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])
        counted = list(range(axis, axis + index.rank))
        source = w.transpose(source, counted + [d for d in range(source.rank) if d not in counted])
        added = w.scatter_add(index, source, x.shape[axis])
        return _sum(w, x, w.transpose(added, [*range(1, axis + 1), 0, *range(axis + 1, x.rank)]))
    index, rows = _flat_index(w, x, indices, given)
    source = w.broadcast(source, [*index.shape, *x.shape[len(given) :]])
    return _sum(w, x, w.reshape(w.scatter_add(index, source, rows), x.shape))


def _sum(w, x, added):
    """Returns x + added, for sums that start from 0 and are therefore no -0."""
    return added if x.is_number(0) else w.add(x, added)


def _put_where(w, x, mask, axis, source, accumulate):
    """Lowers x[mask] = a scalar."""
    if math.prod(source.shape) != 1 or accumulate:
        raise w.refuse(
            "writing several values where a mask says has no form in a tensor program: how many depends on values; "
            "expected one number, torch.where or masked_scatter"
        )
    mask = w.broadcast_dims(mask, x.shape, list(range(axis, axis + mask.rank)))
    return w.map("select", [mask, w.cast(w.reshape(source, ()), x.dtype), x], x.dtype)


def _written_rows(w, x, indices, given, source):
    """Replaces rows of x by those of the source; for equal indices the last one wins."""
    if len(given) == 1:
        axis = given[0]
        index = _wrapped(w, indices[axis], x.shape[axis], axis)
        source = w.broadcast(source, [*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])
        counted = list(range(axis, axis + index.rank))
        source = w.transpose(source, counted + [d for d in range(source.rank) if d not in counted])
        front = [axis, *(d for d in range(x.rank) if d != axis)]
        made = written_rows(w, w.transpose(x, front), index, source)
        return w.transpose(made, [front.index(d) for d in range(x.rank)])
    index, rows = _flat_index(w, x, indices, given)
    source = w.broadcast(source, [*index.shape, *x.shape[len(given) :]])
    return w.reshape(written_rows(w, w.reshape(x, [rows, *x.shape[len(given) :]]), index, source), x.shape)


def _places(w, mask):
    """Returns, for each true element of a flattened mask, the number of true elements before it; 0 for the others."""
    flat = w.reshape(mask, [math.prod(mask.shape)])
    before = w.scan("cumsum", w.cast(flat, torch.int64), 0)
    return w.map("select", [flat, w.sub(before, w.number(1, torch.int64)), w.number(0, torch.int64)], torch.int64)


@handles("masked_scatter")
def _masked_scatter(w, out, x, mask, source):
    """Replaces the elements where the mask is true by the source's elements, in order."""
    shape, count = out.shape, math.prod(out.shape)
    x, mask = w.broadcast(x, shape), w.broadcast(mask, shape)
    taken = w.take(w.reshape(source, [math.prod(source.shape)]), _places(w, mask))
    flat = w.map("select", [w.reshape(mask, [count]), taken, w.reshape(x, [count])], x.dtype)
    return w.reshape(flat, shape)


@handles("masked_scatter_backward")
def _masked_scatter_backward(w, out, cotangent, mask, sizes):
    mask = w.broadcast(mask, cotangent.shape)
    count = math.prod(cotangent.shape)
    kept = w.map("select", [mask, cotangent, w.number(0, cotangent.dtype)], cotangent.dtype)
    made = w.scatter_add(_places(w, mask), w.reshape(kept, [count]), math.prod(out.shape))
    return w.reshape(made, out.shape)


@handles("index_add")
def _index_add(w, out, x, dim, index, source, alpha=1):
    axis = axis_of(dim, x.rank)
    w.check(index, x.shape[axis], axis)
    source = source if alpha == 1 else w.scaled(source, alpha)
    front = [axis, *(d for d in range(x.rank) if d != axis)]
    added = w.scatter_add(index, w.transpose(source, front), x.shape[axis])
    return _sum(w, x, w.transpose(added, [front.index(d) for d in range(x.rank)]))


@handles("index_reduce")
def _index_reduce(w, out, x, dim, index, source, reduce, include_self=True):
    if not w.native or x.rank == 0:
        raise w.refuse(f"reduce={reduce!r} is PyTorch's own")
    axis = axis_of(dim, x.rank)
    w.check(index, x.shape[axis], axis)
    index = w.broadcast_dims(w.reshape(index, [math.prod(index.shape)]), source.shape, [axis])
    return segments.reduced(w, x, axis, index, w.cast(source, x.dtype), reduce, include_self)


# --- writing slices


@handles("slice_scatter")
def _slice_scatter(w, out, x, source, dim=0, begin=None, end=None, step=1):
    axis = axis_of(dim, x.rank)
    begin, end = bounds_of(x, axis, begin, end)
    size = x.shape[axis]
    if step != 1:
        return _stepped_scatter(w, x, source, axis, stepped(w, begin, step, -(-(end - begin) // step)))
    source = w.broadcast(w.cast(source, x.dtype), [end - begin if d == axis else s for d, s in enumerate(x.shape)])
    if x.is_number(0):
        return w.pad(source, axis, begin, size - end)
    if source.number is not None:  # fuses with what reads it
        inside = w.between(x.shape, axis, begin, end)
        return w.map("select", [inside, w.number(source.number, x.dtype), x], x.dtype)
    return w.concat([w.slice(x, axis, 0, begin), source, w.slice(x, axis, end, size)], axis)


def _stepped_scatter(w, x, source, axis, index):
    """Replaces rows of x along the axis. The indices must be distinct."""
    if x.dtype == torch.bool:
        wide = _stepped_scatter(w, w.cast(x, torch.int32), w.cast(source, torch.int32), axis, index)
        return w.cast(wide, x.dtype)
    front = [axis, *(d for d in range(x.rank) if d != axis)]
    back = [front.index(d) for d in range(x.rank)]
    source = w.broadcast(w.cast(source, x.dtype), [index.shape[0] if d == axis else s for d, s in enumerate(x.shape)])
    rows = w.transpose(w.scatter_add(index, w.transpose(source, front), x.shape[axis]), back)
    if x.is_number(0):
        return rows
    ones = w.scatter_add(index, w.number(1, torch.int32, index.shape), x.shape[axis])
    hits = w.broadcast_dims(w.map("ne", [ones, w.number(0, torch.int32)], torch.bool), x.shape, [axis])
    return w.map("select", [hits, rows, x], x.dtype)


@handles("select_scatter")
def _select_scatter(w, out, x, source, dim, index):
    axis = axis_of(dim, x.rank)
    index = index + x.shape[axis] if index < 0 else index
    source = w.reshape(source, [1 if d == axis else s for d, s in enumerate(x.shape)])
    return _slice_scatter(w, out, x, source, axis, index, index + 1)
