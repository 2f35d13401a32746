"""Lowers ordered primitives to a tensor program: running sums and sorts."""

from __future__ import annotations

from logitless._autochunk.composed import inverse_erf
from logitless._autochunk.integers import turned
from logitless._autochunk.lower import rounded
from logitless.jax._autochunk.dtypes import DTYPES
from logitless.jax._autochunk.lax import BOOL, handles

@handles("rev")
def _rev(w, e, x):
    count = w.counted(x)
    for axis in e.params["dimensions"]:
        x = w.flip(x, int(axis))
    if count is not None and list(e.params["dimensions"]) == [count]:
        w.backwards[x.name] = count
    return x


def _scanned(kind, w, e, x):
    return w.scan(kind, x, int(e.params["axis"]), bool(e.params["reverse"]))


@handles("cumsum")
def _cumsum(w, e, x):
    return _scanned("cumsum", w, e, x)


@handles("cumlogsumexp")
def _cumlogsumexp(w, e, x):
    return _scanned("cumlse", w, e, x)


@handles("cumprod", "cummax", "cummin")
def _running(w, e, x):
    """Lowers running products of floats and running extremes."""
    name = e.primitive
    if not w.native or (name == "cumprod" and not DTYPES.floating(x.dtype)):
        raise w.refuse(f"{name} of {x.dtype} is JAX's own, for executor='python'")
    if name == "cumprod":
        return _scanned("cumprod", w, e, x)
    made = _scanned("cummax", w, e, turned(w, x) if name == "cummin" else x)
    return turned(w, made) if name == "cummin" else made


@handles("sort")
def _sort(w, e, *operands):
    """Lowers a sort by one key. Other operands must count along its dimension; they become the indices."""
    axis, key = int(e.params["dimension"]), operands[0]
    if e.params["num_keys"] != 1:
        raise w.refuse(f"a sort by {e.params['num_keys']} keys has no form in a tensor program; expected one")
    for other in operands[1:]:
        if axis not in (w.counted(other), w.backwards.get(other.name)):
            raise w.refuse("a sort that moves other arrays has no form in a tensor program; expected jnp.argsort")
    wide = w.cast(key, DTYPES.i32) if key.dtype == BOOL else key
    values, index = w.sort(wide, axis, key.shape[axis], False)
    last = w.number(key.shape[axis] - 1, index.dtype)
    moved = [w.sub(last, index) if o.name in w.backwards else index for o in operands[1:]]
    made = [w.cast(values, key.dtype), *(w.cast(m, o.dtype) for m, o in zip(moved, operands[1:]))]
    return tuple(made) if len(made) > 1 else made[0]


@handles("top_k")
def _top_k(w, e, x):
    axis = int(e.params.get("axis", -1)) % x.rank
    values, index = w.sort(x, axis, int(e.params["k"]), True)
    return values, w.cast(index, e.outputs[1].dtype)


@handles("round")
def _round(w, e, x):
    if int(e.params["rounding_method"]) == 1:
        return rounded(w, x)
    size = w.map("abs", [x], x.dtype)
    below = w.map("floor", [size], x.dtype)
    up = w.map("ge", [w.sub(size, below), w.number(0.5, x.dtype)], BOOL)  # exact, as size + 0.5 is not
    size = w.map("select", [up, w.add(below, w.number(1, x.dtype)), below], x.dtype)
    return w.mul(w.map("sign", [x], x.dtype), size)


@handles("erf_inv")
def _erf_inv(w, e, x):
    return w.cast(inverse_erf(w, w.cast(x, DTYPES.wide(x.dtype))), x.dtype)
