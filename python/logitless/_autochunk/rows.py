"""Writes whole rows by index, for any framework."""

from __future__ import annotations

import math

from logitless._autochunk.lower import Value, Writer


def written_rows(w: Writer, x: Value, index: Value, source: Value) -> Value:
    """Writes source [I..., ...] into the rows index [I...] of x [V, ...]. For equal indices the last one wins."""
    count, rows = math.prod(index.shape), x.shape[0]
    index, source = w.reshape(index, [count]), w.reshape(source, [count, *x.shape[1:]])
    same = source.number is not None
    if count > 1 and not same:
        last = w.broadcast_dims(_last_of_equal(w, index), source.shape, [0])
        source = w.map("select", [last, source, w.number(0, x.dtype)], x.dtype)
    ones = w.number(1, w.dtypes.i32, [count])
    hits = w.map("ne", [w.scatter_add(index, ones, rows), w.number(0, w.dtypes.i32)], w.dtypes.i8)
    if same:
        made = source if source.rank == 0 else w.number(source.number, x.dtype)
    else:
        whole = w.cast(source, w.dtypes.i32) if x.dtype == w.dtypes.i8 else source
        made = w.cast(w.scatter_add(index, whole, rows), x.dtype)
    return w.map("select", [w.broadcast_dims(hits, x.shape, [0]), made, x], x.dtype)


def _last_of_equal(w: Writer, index: Value) -> Value:
    """Marks the last of equal indices. A stable sort makes equal indices neighbours, in their order."""
    count = index.shape[0]
    values, order = w.sort(index, 0, count, False)
    differ = w.map("ne", [w.slice(values, 0, 0, count - 1), w.slice(values, 0, 1, count)], w.dtypes.i8)
    ends = w.concat([w.cast(differ, w.dtypes.i32), w.number(1, w.dtypes.i32, [1])], 0)
    return w.map("ne", [w.put(order, ends, count, 0), w.number(0, w.dtypes.i32)], w.dtypes.i8)
