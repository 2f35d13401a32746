"""Lowers primitives that read and write by index to a tensor program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from logitless._autochunk import segments
from logitless._autochunk.lower import Value
from logitless._autochunk.rows import written_rows
from logitless.jax._autochunk.dtypes import DTYPES
from logitless.jax._autochunk.lax import BOOL, JaxWriter, handles

_MOST = 16  # the most indices of one row; each takes an operation


@dataclass
class Index:
    """How an array of indices [*batch, K] addresses an operand. Each dimension of the operand is paired, indexed or
    whole."""

    batch: tuple[int, ...]
    paired: dict[int, int]  # dimension of the operand -> dimension of the batch with the same index
    columns: dict[int, Value]  # dimension of the operand -> index along it, of shape [*batch]
    whole: list[int]  # dimensions that are read in full
    inside: Value | None  # whether all indices are in range; None if they are known to be


def _columns(w: JaxWriter, indices: Value) -> list[Value]:
    """Returns the index along each addressed dimension."""
    last = indices.rank - 1
    count, batch = indices.shape[last], indices.shape[:last]
    parts, axis = w.parts.get(indices.name, ([], -1))
    if axis == last and len(parts) == count:
        return [_squeezed(w, p, batch) for p in parts]
    if count == 1:
        return [_squeezed(w, indices, batch)]
    return [_squeezed(w, w.slice(indices, last, k, k + 1), batch) for k in range(count)]


def _squeezed(w: JaxWriter, v: Value, shape: Sequence[int]) -> Value:
    found = w.counted(v)
    made = w.reshape(v, shape)
    if found is not None and made.arange is None:
        w.counts[made.name] = found
    return made


def _address(w: JaxWriter, e, x: Value, indices: Value, mapped, fixed, batching, batches, slices) -> Index:
    """Analyses how indices address x. mapped: the dimension that each column of the indices addresses; fixed ones are
    skipped. batching, batches: paired dimensions of the operand and the indices. slices: the size of the slice along
    each dimension."""
    batch = indices.shape[:-1]
    paired = {int(d): int(b) for d, b in zip(batching, batches)}
    columns, tests = {}, []
    for d, column in zip((int(m) for m in mapped), _columns(w, indices)):
        size, part = x.shape[d], slices[d]
        if d in fixed or (part == size and column.is_number(0)):
            continue
        if part != 1:
            raise w.refuse(f"{part} of {size} elements along dimension {d} at an index has no form in a tensor program")
        counted = w.counted(column)
        if counted is not None and batch[counted] == size and counted not in paired.values():
            paired[d] = counted
            continue
        mode = str(e.params["mode"]).rsplit(".", 1)[-1]
        # XLA's gather clamps indices promised to be in range; its scatter drops those that are not.
        if mode == "CLIP" or (mode == "PROMISE_IN_BOUNDS" and e.primitive == "gather" and not w.known(column, size)):
            column = w.map("max", [column, w.number(0, column.dtype)], column.dtype)
            column = w.map("min", [column, w.number(size - 1, column.dtype)], column.dtype)
        elif mode != "PROMISE_IN_BOUNDS":
            tests.append(w.map("ge", [column, w.number(0, column.dtype)], BOOL))
            tests.append(w.map("lt", [column, w.number(size, column.dtype)], BOOL))
        columns[d] = w.broadcast(column, batch)
    inside = None
    for test in tests:
        inside = test if inside is None else w.map("logical_and", [inside, test], BOOL)
    whole = [d for d in range(x.rank) if d not in columns and d not in paired]
    for d in whole:
        if slices[d] != x.shape[d]:
            raise w.refuse(f"{slices[d]} of {x.shape[d]} elements along dimension {d} have no form in a tensor program")
    return Index(tuple(batch), paired, columns, whole, inside)


def _merged(w: JaxWriter, x: Value, at: Index) -> tuple[Value, Index, list[int]]:
    """Merges the addressed dimensions into one. Returns the operand as [paired, addressed, whole], its addressing, and
    the permutation of its dimensions."""
    order = [*at.paired, *at.columns, *at.whole]
    x = w.transpose(x, order)
    first, count = len(at.paired), len(at.columns)
    flat = None
    for k, column in enumerate(at.columns.values()):
        size = x.shape[first + k]
        flat = column if flat is None else w.add(w.scaled(flat, size), column)
    if at.inside is not None:  # an index out of range in one dimension may be in range once merged
        flat = w.map("select", [at.inside, flat, w.number(-1, flat.dtype)], flat.dtype)
    shape = [*x.shape[:first], math.prod(x.shape[first : first + count]), *x.shape[first + count :]]
    paired = {i: b for i, b in enumerate(at.paired.values())}
    whole = list(range(first + 1, len(shape)))
    return w.reshape(x, shape), Index(at.batch, paired, {first: flat}, whole, at.inside), order


def _free(at: Index) -> list[int]:
    """Returns the batch dimensions that are not paired and not of size 1."""
    return [b for b in range(len(at.batch)) if b not in at.paired.values() and at.batch[b] != 1]


def _several(x: Value, at: Index) -> list[int] | None:
    """Returns the batch dimension for each dimension of the operand, if it is a gather of several indices per row
    without whole dimensions. Returns None otherwise."""
    free = _free(at)
    if len(free) != 1 or at.whole or len(at.columns) != 1:
        return None
    return [free[0] if d in at.columns else at.paired[d] for d in range(x.rank)]


def _as_operand(w: JaxWriter, v: Value, at: Index, order: list[int]) -> Value:
    """Returns v [*batch] with its dimensions in the operand's order."""
    used = sorted(order)
    return w.transpose(w.reshape(v, [at.batch[b] for b in used]), [used.index(b) for b in order])


def _per_row(w: JaxWriter, at: Index) -> list[int]:
    """Returns the one batch dimension that is not paired, if its size is not 1. Raises for more than `_MOST` indices a
    row."""
    free = _free(at)
    if len(free) > 1 or (free and at.batch[free[0]] > _MOST):
        sizes = [at.batch[b] for b in free]
        raise w.refuse(f"{sizes} indices of each row have no form in a tensor program; expected at most {_MOST}")
    return free


def _of_rows(w: JaxWriter, v: Value, at: Index, free: list[int], k: int, tail: Sequence[int] = ()) -> Value:
    """Returns v [*batch, *tail] at the k-th index of each row, with dimensions in the order of the paired ones."""
    for b in free:
        v = w.slice(v, b, k, k + 1)
    counted = list(at.paired.values())
    dims = sorted(counted)
    v = w.reshape(v, [*(at.batch[b] for b in dims), *tail])
    return w.transpose(v, [*(dims.index(b) for b in counted), *range(len(dims), len(dims) + len(tail))])


def _rows_first(at: Index) -> Index:
    """Returns the addressing with paired dimensions in the operand's order."""
    return Index(at.batch, dict(sorted(at.paired.items())), at.columns, at.whole, at.inside)


def _placed(w: JaxWriter, v: Value, rank: int, offsets: Sequence[int]) -> Value:
    """Moves the whole dimensions of [*batch, *whole] to the positions in offsets."""
    first = rank - len(offsets)
    batch, whole = iter(range(first)), iter(range(first, rank))
    return w.transpose(v, [next(whole) if d in offsets else next(batch) for d in range(rank)])


def _numbers(w: JaxWriter, x: Value, indices: Value, mapped, slices) -> dict[int, int]:
    """Returns the dimensions of which a slice of several elements is read at a constant offset, with that offset."""
    found = {}
    for d, column in zip((int(m) for m in mapped), _columns(w, indices)):
        if slices[d] not in (1, x.shape[d]) and column.number is not None:
            found[d] = min(max(int(column.number), 0), x.shape[d] - slices[d])
    return found


@handles("gather")
def _gather(w, e, x, indices):
    n = e.params["dimension_numbers"]
    batching = getattr(n, "operand_batching_dims", ())
    batches = getattr(n, "start_indices_batching_dims", ())
    slices, offsets = e.params["slice_sizes"], [int(d) for d in n.offset_dims]
    kept = [d for d in range(x.rank) if d not in (*n.collapsed_slice_dims, *batching)]
    fixed = _numbers(w, x, indices, n.start_index_map, slices)
    for d, begin in fixed.items():
        x = w.slice(x, d, begin, begin + slices[d])
    at = _address(w, e, x, indices, n.start_index_map, fixed, batching, batches, slices)
    inside, shape = at.inside, [x.shape[d] for d in at.whole]
    if len(at.columns) > 1:
        x, at, _ = _merged(w, x, at)
    if not at.columns and not at.paired:
        made = w.broadcast_dims(x, [*at.batch, *shape], list(range(len(at.batch), len(at.batch) + x.rank)))
    elif not at.columns:
        raise w.refuse("an index that counts every dimension has no form in a tensor program")
    else:
        made = _picked(w, x, _rows_first(at)) if at.paired else _taken(w, x, at)
    made = w.reshape(made, [*at.batch, *shape])
    if inside is not None:
        made = _filled(w, e, made, w.broadcast_dims(inside, made.shape, list(range(len(at.batch)))))
    # Addressed dimensions of size 1 that are not collapsed are among the offsets.
    if len(offsets) != len(shape):
        made = w.reshape(made, [*at.batch, *(e.params["slice_sizes"][d] for d in kept)])
    return _placed(w, made, made.rank, offsets)


def _filled(w, e, made, inside):
    fill = e.params.get("fill_value")
    if fill is None:
        floats, bools = DTYPES.floating(made.dtype), made.dtype == BOOL
        fill = math.nan if floats else True if bools else int(np.iinfo(made.dtype).min)
    return w.map("select", [inside, made, w.number(fill, made.dtype)], made.dtype)


def _taken(w, x, at: Index) -> Value:
    """Gathers whole rows: [*batch, *whole]."""
    [(axis, index)] = at.columns.items()
    return w.take(w.transpose(x, [axis, *at.whole]), index)


def _picked(w, x, at: Index) -> Value:
    """Picks one or a few elements of each row: [*batch, *whole]."""
    [(axis, index)] = at.columns.items()
    order = _several(x, at)
    if order is not None:
        several = partial(w.gather, index=_as_operand(w, index, at, order), axis=axis)
        found = w.softmaxes.pick(x, several, axis)
        found = several(x) if found is None else found
        used = sorted(order)
        return w.reshape(w.transpose(found, [order.index(b) for b in used]), at.batch)
    rest = [d for d in range(x.rank) if d != axis]
    free = _per_row(w, at)
    shape = [x.shape[d] for d in rest]
    counted = [rest.index(d) for d in at.paired]
    picks = []
    for k in range(at.batch[free[0]] if free else 1):
        column = w.broadcast_dims(_of_rows(w, index, at, free, k), shape, counted)
        found = w.softmaxes.pick(x, partial(w.pick, index=column, axis=axis), axis)
        found = w.pick(x, column, axis) if found is None else found  # dimensions in the order of the operand
        found = w.transpose(found, [*counted, *(rest.index(d) for d in at.whole)])
        order = list(at.paired.values())
        found = w.transpose(found, [*(order.index(b) for b in sorted(order)), *range(len(order), found.rank)])
        sizes = [1 if b not in order else at.batch[b] for b in range(len(at.batch))]
        picks.append(w.reshape(found, [*sizes, *(x.shape[d] for d in at.whole)]))
    return w.concat(picks, free[0]) if free else picks[0]


def _scatter_address(w, e, x, indices, updates):
    n = e.params["dimension_numbers"]
    batching = tuple(int(d) for d in getattr(n, "operand_batching_dims", ()))
    inserted = (*(int(d) for d in n.inserted_window_dims), *batching)
    window = [int(d) for d in n.update_window_dims]
    kept = [d for d in range(x.rank) if d not in inserted]
    slices = [1] * x.rank
    for d, u in zip(kept, window):
        slices[d] = updates.shape[u]
    batches = getattr(n, "scatter_indices_batching_dims", ())
    mapped = n.scatter_dims_to_operand_dims
    adds = e.primitive.endswith(("add", "sub"))  # zeros beside the updates change nothing
    fixed = _numbers(w, x, indices, mapped, slices) if adds else {}
    for d, begin in fixed.items():
        updates = w.pad(updates, window[kept.index(d)], begin, x.shape[d] - slices[d] - begin)
        slices[d] = x.shape[d]
    at = _address(w, e, x, indices, mapped, fixed, batching, batches, slices)
    if not at.columns and (at.paired or math.prod(at.batch) != 1):
        raise w.refuse("an index that counts every dimension has no form in a tensor program")
    front = [d for d in range(updates.rank) if d not in window]
    updates = w.transpose(updates, [*front, *window])
    return at, w.reshape(updates, [*at.batch, *(x.shape[d] for d in at.whole)])


@handles("scatter-add", "scatter_add", "scatter-sub", "scatter_sub")
def _scatter_add(w, e, x, indices, updates):
    if e.primitive.endswith("sub"):
        updates = w.map("neg", [updates], updates.dtype)
    at, updates = _scatter_address(w, e, x, indices, updates)
    if at.inside is not None:
        hit = w.broadcast_dims(at.inside, updates.shape, list(range(len(at.batch))))
        updates = w.map("select", [hit, updates, w.number(0, updates.dtype)], updates.dtype)
    shape, order = x.shape, list(range(x.rank))
    if len(at.columns) > 1:
        x, at, order = _merged(w, x, at)
    merged = [shape[d] for d in order]
    if not at.columns:
        made = w.add(x, w.reshape(updates, x.shape))
    elif at.paired:
        made = _added_to_rows(w, x, _rows_first(at), updates)
    else:
        [(axis, index)] = at.columns.items()
        added = w.scatter_add(index, updates, x.shape[axis])
        front = [axis, *at.whole]
        made = w.add(x, w.transpose(added, [front.index(d) for d in range(x.rank)]))
    return w.transpose(w.reshape(made, merged), [order.index(d) for d in range(len(order))])


def _rows_of_updates(w, x, at: Index, free, k, index, updates) -> tuple[Value, Value]:
    """Returns the index and the update of each row, in the operand's shape without the addressed dimension."""
    [axis] = at.columns
    rest = [d for d in range(x.rank) if d != axis]
    counted = [rest.index(d) for d in at.paired]
    column = w.broadcast_dims(_of_rows(w, index, at, free, k), [x.shape[d] for d in rest], counted)
    part = _of_rows(w, updates, at, free, k, [x.shape[d] for d in at.whole])
    have = [*at.paired, *at.whole]
    return column, w.transpose(part, [have.index(d) for d in rest])


def _put_into_rows(w, x, at: Index, free: int, index, updates) -> Value:
    """Adds many updates per row along the addressed dimension, which corresponds to the free batch dimension."""
    [axis] = at.columns
    kept = [b for b in range(len(at.batch)) if b == free or b in at.paired.values()]
    have = [axis if b == free else next(d for d, p in at.paired.items() if p == b) for b in kept]
    sizes = [at.batch[b] for b in kept]
    full = [at.batch[free] if d == axis else s for d, s in enumerate(x.shape)]
    order = sorted(have)
    index = w.transpose(w.reshape(index, sizes), [have.index(d) for d in order])
    index = w.broadcast_dims(index, full, order)
    have = [*have, *at.whole]
    updates = w.reshape(updates, [*sizes, *(x.shape[d] for d in at.whole)])
    return w.put(index, w.transpose(updates, [have.index(d) for d in range(x.rank)]), x.shape[axis], axis)


def _added_to_rows(w, x, at: Index, updates) -> Value:
    [(axis, index)] = at.columns.items()
    order = _several(x, at)
    free = _free(at)
    if order is not None and DTYPES.floating(x.dtype):
        index, updates = (_as_operand(w, v, at, order) for v in (index, updates))
        made = w.put(index, updates, x.shape[axis], axis)
        return made if x.is_number(0) else w.add(x, made)
    if len(free) == 1 and at.batch[free[0]] > _MOST:
        made = _put_into_rows(w, x, at, free[0], index, updates)
        return made if x.is_number(0) else w.add(x, made)
    free = _per_row(w, at)
    for k in range(at.batch[free[0]] if free else 1):
        column, part = _rows_of_updates(w, x, at, free, k, index, updates)
        hot = w.one_hot(column, part, x.shape, axis)
        x = hot if x.is_number(0) else w.add(x, hot)
    return x


def _written_slice(w, e, x, indices, updates) -> Value | None:
    """Returns x with a slice replaced by the updates, where one index is constant and addresses several elements of one
    dimension, as ``x.at[:, 100:].set(y)``; else None."""
    n = e.params["dimension_numbers"]
    if math.prod(indices.shape[:-1]) != 1 or getattr(n, "operand_batching_dims", ()):
        return None
    [*windows] = (int(d) for d in n.update_window_dims)
    kept = [d for d in range(x.rank) if d not in (int(i) for i in n.inserted_window_dims)]
    slices = [1] * x.rank
    for d, u in zip(kept, windows):
        slices[d] = updates.shape[u]
    begins = {int(d): column.number for d, column in zip(n.scatter_dims_to_operand_dims, _columns(w, indices))}
    cut = [d for d in range(x.rank) if slices[d] != x.shape[d]]
    if len(cut) != 1 or begins.get(cut[0]) is None or any(begins.get(d, 0) != 0 for d in range(x.rank) if d not in cut):
        return None
    [axis] = cut
    begin, end = int(begins[axis]), int(begins[axis]) + slices[axis]
    if begin < 0 or end > x.shape[axis]:
        return None
    if updates.number is not None:  # fuses with what reads the result
        return w.map("select", [w.between(x.shape, axis, begin, end), w.number(updates.number, x.dtype), x], x.dtype)
    updates = w.reshape(updates, slices)
    return w.concat([w.slice(x, axis, 0, begin), updates, w.slice(x, axis, end, x.shape[axis])], axis)


@handles("scatter")
def _scatter(w, e, x, indices, updates):
    written = _written_slice(w, e, x, indices, updates)
    if written is not None:
        return written
    at, updates = _scatter_address(w, e, x, indices, updates)
    if len(at.columns) == 1 and not at.paired and math.prod(at.batch) != 1:
        [(axis, index)] = at.columns.items()
        if at.inside is not None:
            index = w.map("select", [at.inside, index, w.number(-1, index.dtype)], index.dtype)
        front = [axis, *at.whole]
        made = written_rows(w, w.transpose(x, front), index, updates)
        return w.transpose(made, [front.index(d) for d in range(x.rank)])
    at = _rows_first(at)
    if len(at.columns) != 1 or (not at.paired and math.prod(at.batch) != 1):
        raise w.refuse("writing whole rows by index without adding has no form in a tensor program")
    [(axis, index)] = at.columns.items()
    free = _per_row(w, at)
    others = [d for d in range(x.rank) if d != axis]
    for k in range(at.batch[free[0]] if free else 1):
        column, part = _rows_of_updates(w, x, at, free, k, index, updates)
        x = w.map("select", [w.at(column, x.shape, axis), w.broadcast_dims(part, x.shape, others), x], x.dtype)
    return x


_MERGED = {"max": "amax", "min": "amin", "mul": "prod"}


@handles(*(f"scatter{dash}{merge}" for dash in "-_" for merge in _MERGED))
def _scatter_merged(w, e, x, indices, updates):
    """Lowers extremes and products of rows that are written to one place."""
    if not w.native:
        raise w.refuse(f"{e.primitive} is JAX's own")
    at, updates = _scatter_address(w, e, x, indices, updates)
    if len(at.columns) != 1 or at.paired:
        raise w.refuse(f"{e.primitive} of anything but whole rows has no form in a tensor program")
    [(axis, index)] = at.columns.items()
    if at.inside is not None:
        index = w.map("select", [at.inside, index, w.number(-1, index.dtype)], index.dtype)
    front, count = [axis, *at.whole], math.prod(at.batch)
    updates = w.reshape(updates, [count, *(x.shape[d] for d in at.whole)])
    index = w.broadcast_dims(w.reshape(index, [count]), updates.shape, [0])
    made = segments.reduced(w, w.transpose(x, front), 0, index, updates, _MERGED[e.primitive[-3:]], True)
    return w.transpose(made, [front.index(d) for d in range(x.rank)])


def _start(w, x, axis, start, size) -> int | None:
    """Returns the start of a slice if it is constant, else None."""
    if size == x.shape[axis]:
        return 0
    return None if start.number is None else min(max(int(start.number), 0), x.shape[axis] - size)


@handles("dynamic_slice")
def _dynamic_slice(w, e, x, *starts):
    for axis, (start, size) in enumerate(zip(starts, e.params["slice_sizes"])):
        begin = _start(w, x, axis, start, size)
        if begin is not None:
            x = w.slice(x, axis, begin, begin + size)
            continue
        if size != 1:
            raise w.refuse(
                f"{size} of {x.shape[axis]} elements along dimension {axis} from a computed start have no form in a "
                "tensor program"
            )
        start = w.map("max", [start, w.number(0, start.dtype)], start.dtype)
        start = w.map("min", [start, w.number(x.shape[axis] - 1, start.dtype)], start.dtype)
        others = [d for d in range(x.rank) if d != axis]
        row = w.take(w.transpose(x, [axis, *others]), start)
        x = w.reshape(row, [1 if d == axis else s for d, s in enumerate(x.shape)])
    return x


@handles("dynamic_update_slice")
def _dynamic_update_slice(w, e, x, part, *starts):
    begins = [_start(w, x, axis, start, part.shape[axis]) for axis, start in enumerate(starts)]
    if any(b is None for b in begins):
        return _written_at(w, x, part, starts, begins)
    axes = [a for a in range(x.rank) if part.shape[a] != x.shape[a]]
    return _written(w, x, part, axes, begins)


def _written(w, x, part, axes, begins):
    if not axes:
        return part
    axis, rest = axes[0], axes[1:]
    begin, end = begins[axis], begins[axis] + part.shape[axis]
    middle = _written(w, w.slice(x, axis, begin, end), part, rest, begins)
    return w.concat([w.slice(x, axis, 0, begin), middle, w.slice(x, axis, end, x.shape[axis])], axis)


def _written_at(w, x, part, starts, begins) -> Value:
    """Writes a part of size 1 along every dimension whose start is computed, by a select on the dimensions' indices."""
    inside, axes = None, list(range(x.rank))
    for axis, (start, begin, size) in enumerate(zip(starts, begins, part.shape)):
        if size == x.shape[axis]:
            continue
        if begin is not None:
            part = w.pad(part, axis, begin, x.shape[axis] - begin - size)
            tests = [("ge", w.number(begin, start.dtype)), ("lt", w.number(begin + size, start.dtype))]
        elif size == 1:
            start = w.map("max", [start, w.number(0, start.dtype)], start.dtype)
            start = w.map("min", [start, w.number(x.shape[axis] - 1, start.dtype)], start.dtype)
            tests = [("eq", start)]
        else:
            raise w.refuse(f"writing {size} elements at a computed start has no form in a tensor program")
        index = w.iota([x.shape[axis]], 0, start.dtype)
        for name, bound in tests:
            hit = w.broadcast_dims(w.map(name, [index, bound], BOOL), x.shape, [axis])
            inside = hit if inside is None else w.map("logical_and", [inside, hit], BOOL)
    ones = [d for d in axes if part.shape[d] != x.shape[d]]
    small = w.reshape(part, [s for d, s in enumerate(part.shape) if d not in ones])
    whole = w.broadcast_dims(small, x.shape, [d for d in axes if d not in ones])
    return w.map("select", [inside, whole, x], x.dtype)
