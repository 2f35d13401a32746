"""Lowers sums over windows, which may overlap, to a tensor program."""

from __future__ import annotations

from logitless._autochunk.windows import Windows, summed
from logitless.jax._autochunk.dtypes import DTYPES
from logitless.jax._autochunk.lax import handles, spread_out

_MOST = 32  # the most elements of a window along one dimension; each takes an operation


@handles("reduce_window_sum")
def _reduce_window_sum(w, e, x):
    p = e.params
    sizes = [int(s) for s in p["window_dimensions"]]
    if not w.native or not DTYPES.floating(x.dtype) or max(sizes) > _MOST or 0 in (*x.shape, *e.out.shape):
        raise w.refuse(f"windows of {sizes} of {x.dtype}{list(x.shape)} are JAX's own")
    made = w.cast(x, DTYPES.wide(x.dtype))
    for axis, size in enumerate(sizes):
        step, apart, spread = (int(p[key][axis]) for key in ("window_strides", "window_dilation", "base_dilation"))
        low, high = (int(n) for n in p["padding"][axis])
        made = spread_out(w, made, axis, spread) if spread > 1 else made
        made = w.slice(made, axis, max(-low, 0), made.shape[axis] - max(-high, 0))
        made = w.pad(made, axis, max(low, 0), max(high, 0))
        if (size, step) != (1, 1):
            made = summed(w, Windows(size, step, e.out.shape[axis], apart).elements(w, made, axis))
    return w.cast(made, e.out.dtype)
