"""Lowers ATen operations on overlapping windows to a tensor program: unfold, fold and pooling."""

from __future__ import annotations

import math

import torch

from logitless._autochunk.windows import Windows, summed
from logitless.torch._autochunk.aten import axis_of, handles
from logitless.torch._autochunk.dtypes import DTYPES

_MOST = 32  # the most elements of a window; each takes an operation


def _check(w, x, elements):
    if not w.native or x.rank == 0 or 0 in x.shape:
        raise w.refuse(f"windows of {x.dtype}{list(x.shape)} are PyTorch's own")
    if elements > _MOST:
        raise w.refuse(f"windows of {elements} elements have no form in a tensor program; expected at most {_MOST}")


@handles("unfold")
def _unfold(w, out, x, dim, size, step):
    _check(w, x, size)
    axis = axis_of(dim, x.rank)
    if 0 in out.shape:
        return w.number(0, x.dtype, out.shape)
    parts = Windows(size, step, out.shape[axis]).elements(w, x, axis)
    made = w.concat([w.reshape(part, [*part.shape, 1]) for part in parts], x.rank)
    known = w.range_of(x)  # of the indices of a gradient
    if known is not None:
        w.bounds[made.name] = known
    return made


def _two(numbers, default=None) -> list[int]:
    numbers = default if numbers is None or list(numbers) == [] else list(numbers)
    return list(numbers) * 2 if len(numbers) == 1 else list(numbers)


class _Pools:
    """The windows of a pooling over the last two dimensions."""

    def __init__(self, w, x, counts, kernel, stride, padding, dilation=(1,), ceil=False):
        self.kernel = _two(kernel)
        _check(w, x, math.prod(self.kernel))
        if ceil or not DTYPES.floating(x.dtype):
            raise w.refuse(f"a pooling of {x.dtype}, or with ceil_mode, has no form in a tensor program")
        self.padding, steps, apart = _two(padding), _two(stride, self.kernel), _two(dilation)
        self.axes, self.sizes = (x.rank - 2, x.rank - 1), x.shape[-2:]
        self.windows = [Windows(*of) for of in zip(self.kernel, steps, counts, apart)]
        self.steps, self.apart = steps, apart

    def padded(self, w, x, number=0.0):
        for axis, by in zip(self.axes, self.padding):
            if number == 0:
                x = w.pad(x, axis, by, by)
            elif by:
                edge = w.number(number, x.dtype, [by if d == axis else s for d, s in enumerate(x.shape)])
                x = w.concat([edge, x, edge], axis)
        return x

    def sums(self, w, x):
        for axis, windows in zip(self.axes, self.windows):
            x = summed(w, windows.elements(w, x, axis))
        return x

    def divisors(self, w, dtype, counts_padding, divisor):
        """Returns the number of elements of each window: a number, or of the shape [rows, columns]."""
        if divisor is not None or counts_padding or not any(self.padding):
            return w.number(divisor or math.prod(self.kernel), dtype)
        ones = w.number(1, dtype, self.sizes)
        for axis, (by, windows) in enumerate(zip(self.padding, self.windows)):
            ones = summed(w, windows.elements(w, w.pad(w.written(ones), axis, by, by), axis))
        return ones


@handles("avg_pool2d")
def _avg_pool(w, out, x, kernel, stride=(), padding=(0,), ceil=False, counts_padding=True, divisor=None):
    pools = _Pools(w, x, out.shape[-2:], kernel, stride, padding, ceil=ceil)
    sums = pools.sums(w, pools.padded(w, w.cast(x, DTYPES.wide(x.dtype))))
    return w.cast(w.div(sums, pools.divisors(w, sums.dtype, counts_padding, divisor)), out.dtype)


@handles("avg_pool2d_backward")
def _avg_pool_backward(w, out, cotangent, x, kernel, stride, padding, ceil, counts_padding, divisor):
    pools = _Pools(w, x, cotangent.shape[-2:], kernel, stride, padding, ceil=ceil)
    made = w.cast(cotangent, DTYPES.wide(x.dtype))
    made = w.div(made, pools.divisors(w, made.dtype, counts_padding, divisor))
    for axis, by, size, windows in zip(pools.axes, pools.padding, pools.sizes, pools.windows):
        made = windows.added(w, [made] * windows.size, axis, size + 2 * by)
        made = w.slice(made, axis, by, by + size)
    return w.cast(made, out.dtype)


@handles("max_pool2d_with_indices")
def _max_pool(w, out, x, kernel, stride=(), padding=(0,), dilation=(1,), ceil=False):
    """Returns the first of the largest elements of each window, or its last NaN, and its place in the image."""
    pools = _Pools(w, x, out[0].shape[-2:], kernel, stride, padding, dilation, ceil)
    shape, best, place = tuple(out[0].shape), None, None
    padded = pools.padded(w, x, -math.inf)
    rows = pools.windows[0].elements(w, padded, pools.axes[0])
    for i, row in enumerate(rows):
        for j, v in enumerate(pools.windows[1].elements(w, row, pools.axes[1])):
            at = _place(w, pools, shape, i, j)
            if best is None:
                best, place = v, at
                continue
            tests = [w.map("gt", [v, best], torch.bool), w.map("ne", [v, v], torch.bool)]
            wins = w.map("logical_or", tests, torch.bool)
            best, place = (w.map("select", [wins, a, b], a.dtype) for a, b in ((v, best), (at, place)))
    return best, place


def _place(w, pools, shape, *offsets):
    """Returns the place of an element of each window in the image; that of padding before it is the nearest one's."""
    flat = None
    along = zip(pools.axes, offsets, pools.steps, pools.apart, pools.padding, pools.sizes)
    for axis, k, step, apart, by, size in along:
        index = w.iota([s if d == axis else 1 for d, s in enumerate(shape)], axis)
        index = w.add(w.scaled(index, step), w.number(k * apart - by, torch.int64))
        index = w.map("max", [index, w.number(0, torch.int64)], torch.int64)
        flat = index if flat is None else w.add(w.scaled(flat, size), index)
    return w.broadcast(flat, shape)


@handles("max_pool2d_with_indices_backward")
def _max_pool_backward(w, out, cotangent, x, kernel, stride, padding, dilation, ceil, indices):
    _check(w, x, 1)
    rank = x.rank - 2
    flat = [w.reshape(v, [*v.shape[:rank], math.prod(v.shape[rank:])]) for v in (indices, cotangent)]
    return w.reshape(w.put(*flat, math.prod(x.shape[rank:]), rank), x.shape)


@handles("_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward")
def _adaptive_avg_pool(w, out, *operands):
    """Lowers means over equal parts of the image."""
    backward = w.op.startswith("aten._adaptive_avg_pool2d_backward")
    made, small = w.cast(operands[0], DTYPES.wide(out.dtype)), operands[0].shape if backward else out.shape
    large = out.shape if backward else operands[0].shape
    _check(w, made, 1)
    if any(n % k for n, k in zip(large[-2:], small[-2:])):
        raise w.refuse(f"a pooling of {list(large[-2:])} to {list(small[-2:])} has no form; expected equal parts")
    (rows, columns), rank = (n // k for n, k in zip(large[-2:], small[-2:])), len(large) - 2
    parts = [*small[:rank], small[rank], rows, small[rank + 1], columns]
    if backward:
        made = w.broadcast_dims(w.div(made, w.number(rows * columns, made.dtype)), parts, [*range(rank + 1), rank + 2])
    else:
        made = w.reduce("reduce_sum", w.reshape(made, parts), [rank + 1, rank + 3])
        made = w.div(made, w.number(rows * columns, made.dtype))
    return w.cast(w.reshape(made, out.shape), out.dtype)


class _Blocks:
    """The blocks of F.unfold and F.fold: windows over the last two dimensions of images."""

    def __init__(self, w, x, sizes, kernel, dilation, padding, stride):
        self.kernel, self.padding = _two(kernel), _two(padding)
        _check(w, x, math.prod(self.kernel))
        self.padded = [size + 2 * by for size, by in zip(sizes, self.padding)]
        self.sizes, steps, apart = sizes, _two(stride), _two(dilation)
        along = zip(self.kernel, steps, apart, self.padded)
        self.counts = [(size - by * (k - 1) - 1) // step + 1 for k, step, by, size in along]
        self.windows = [Windows(*of) for of in zip(self.kernel, steps, self.counts, apart)]


@handles("im2col")
def _unfold_blocks(w, out, x, kernel, dilation, padding, stride):
    blocks, axis = _Blocks(w, x, x.shape[-2:], kernel, dilation, padding, stride), x.rank - 2
    for d, by in enumerate(blocks.padding):
        x = w.pad(x, axis + d, by, by)
    rows = blocks.windows[0].elements(w, x, axis)
    parts = [part for row in rows for part in blocks.windows[1].elements(w, row, axis + 1)]
    made = w.concat([w.reshape(p, [*p.shape[:axis], 1, *p.shape[axis:]]) for p in parts], axis)
    return w.reshape(made, out.shape)


@handles("col2im")
def _fold_blocks(w, out, x, size, kernel, dilation, padding, stride):
    blocks, lead = _Blocks(w, x, tuple(size), kernel, dilation, padding, stride), out.shape[:-2]
    x = w.reshape(w.cast(x, DTYPES.wide(x.dtype)), [*lead, math.prod(blocks.kernel), *blocks.counts])
    axis = len(lead)
    parts = [w.slice(x, axis, k, k + 1) for k in range(x.shape[axis])]
    parts = [w.reshape(p, [*lead, *blocks.counts]) for p in parts]
    columns = blocks.kernel[1]
    rows = [parts[i : i + columns] for i in range(0, len(parts), columns)]
    rows = [blocks.windows[1].added(w, row, axis + 1, blocks.padded[1]) for row in rows]
    made = blocks.windows[0].added(w, rows, axis, blocks.padded[0])
    for d, (by, size_of) in enumerate(zip(blocks.padding, blocks.sizes)):
        made = w.slice(made, axis + d, by, by + size_of)
    return w.cast(made, out.dtype)
