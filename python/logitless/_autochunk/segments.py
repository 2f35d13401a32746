"""Means, extremes and products of what is written to the same place, in any framework."""

from __future__ import annotations

from logitless._autochunk.integers import turned
from logitless._autochunk.lower import Value, Writer

_MOST = 16  # the most values along the axis that are merged one by one


def reduced(w: Writer, x: Value, axis: int, index: Value, source: Value, kind: str, own: bool) -> Value:
    """Merges the source into x at an index along the axis. index and source have one shape, x's but along the axis.
    kind: sum, mean, prod, amax or amin. own: x's element counts where something is written to it."""
    if kind in ("sum", "mean"):
        return _summed(w, x, axis, index, source, kind, own)
    if kind == "amin":
        return turned(w, reduced(w, turned(w, x), axis, index, turned(w, source), "amax", own))
    if index.shape[axis] <= _MOST:
        return _one_by_one(w, x, axis, index, source, "max" if kind == "amax" else "mul", own)
    if kind == "prod":
        raise w.refuse(f"products of {index.shape[axis]} values have no form; expected at most {_MOST}")
    return _largest(w, x, axis, index, source, own)


def _counts(w: Writer, index: Value, size: int, axis: int) -> Value:
    return w.put(index, w.number(1, w.dtypes.i32, index.shape), size, axis)


def _is_positive(w: Writer, count: Value) -> Value:
    return w.map("gt", [count, w.number(0, count.dtype)], w.dtypes.i8)


def _summed(w: Writer, x: Value, axis: int, index: Value, source: Value, kind: str, own: bool) -> Value:
    if kind == "mean" and not w.dtypes.floating(x.dtype):
        raise w.refuse(f"means of {x.dtype} have no form in a tensor program; expected floats")
    size, wide = x.shape[axis], w.dtypes.wide(x.dtype)
    count = _counts(w, index, size, axis)
    total = w.put(index, w.cast(source, wide), size, axis)
    start = w.cast(x, wide)
    start = start if own else w.map("select", [_is_positive(w, count), w.number(0, wide), start], wide)
    total = w.add(start, total)
    if kind == "mean":
        one = w.number(1, count.dtype)
        count = w.add(count, one) if own else w.map("max", [one, count], count.dtype)
        total = w.div(total, w.cast(count, wide))
    return w.cast(total, x.dtype)


def _one_by_one(w: Writer, x: Value, axis: int, index: Value, source: Value, merge: str, own: bool) -> Value:
    others = [d for d in range(x.rank) if d != axis]
    seen = w.number(own, w.dtypes.i8, x.shape)
    for k in range(index.shape[axis]):
        at, part = (w.reshape(w.slice(v, axis, k, k + 1), [v.shape[d] for d in others]) for v in (index, source))
        hit, part = w.at(at, x.shape, axis), w.broadcast_dims(part, x.shape, others)
        merged = w.map("select", [seen, w.map(merge, [x, part], x.dtype), part], x.dtype)
        x = w.map("select", [hit, merged, x], x.dtype)
        seen = seen if own else w.map("logical_or", [seen, hit], w.dtypes.i8)
    return x


def _largest(w: Writer, x: Value, axis: int, index: Value, source: Value, own: bool) -> Value:
    """Sorts by values, then by places: the last value of a place is its largest, or NaN."""
    count, size = index.shape[axis], x.shape[axis]
    source, order = w.sort(source, axis, count, False)
    places, order = w.sort(w.gather(index, order, axis), axis, count, False)
    source = w.gather(source, order, axis)
    end = [1 if d == axis else s for d, s in enumerate(index.shape)]
    after = w.concat([w.slice(places, axis, 1, count), w.number(-1, places.dtype, end)], axis)
    last = w.map("ne", [places, after], w.dtypes.i8)
    nothing = w.number(0, source.dtype)
    largest = w.put(places, w.map("select", [last, source, nothing], source.dtype), size, axis)
    found = w.map("max", [x, largest], x.dtype) if own else largest
    return w.map("select", [_is_positive(w, _counts(w, index, size, axis)), found, x], x.dtype)
