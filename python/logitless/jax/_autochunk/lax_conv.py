"""Convolutions of JAX: of patches that are apart or a kernel as large as the image, and along one axis."""

from __future__ import annotations

import math

from logitless._autochunk.convolutions import MOST_TAPS, Convolution
from logitless._autochunk.patches import Patches
from logitless.jax._autochunk.dtypes import DTYPES
from logitless.jax._autochunk.lax import handles


@handles("conv_general_dilated")
def _convolution(w, e, x, kernel):
    p, out = e.params, e.out.dtype
    x_spec, kernel_spec, out_spec = p["dimension_numbers"]
    sizes = tuple(x.shape[d] for d in x_spec[2:])
    patch = tuple(kernel.shape[d] for d in kernel_spec[2:])
    plain = p["feature_group_count"] == p["batch_group_count"] == 1 and math.prod(patch) > 0
    plain = plain and all(low == high == 0 for low, high in p["padding"])
    plain = plain and all(by == 1 for by in (*p["lhs_dilation"], *p["rhs_dilation"]))
    apart = all(k == step or k == size for k, step, size in zip(patch, p["window_strides"], sizes))
    narrow = x.dtype in DTYPES.narrow and out == DTYPES.f32
    if x.dtype != kernel.dtype or not DTYPES.floating(x.dtype) or not (x.dtype == out or narrow):
        raise w.refuse(f"a convolution of {x.dtype} and {kernel.dtype} to {out} has no form in a tensor program")
    x, kernel = w.transpose(x, list(x_spec)), w.transpose(kernel, list(kernel_spec))
    if plain and apart:
        made = Patches(x.shape[1], sizes, patch).convolved(w, x, kernel, out)
        natural = [0, made.rank - 1, *range(1, made.rank - 1)]  # [N, count..., O]
    else:
        made, natural = _along_rows(w, p, x, kernel, out), [0, 1, 2]
    w.precisions.add(p["precision"])
    dims = [0] * made.rank
    for place, d in zip(out_spec, natural):
        dims[place] = d
    return w.transpose(made, dims)


def _along_rows(w, p, x, kernel, out):
    """Returns a convolution along one axis as [N, O, count]. x: [N, C, L], kernel: [O, C / groups, K]."""
    if not w.native or x.rank != 3 or 0 in (*x.shape, *kernel.shape):
        raise w.refuse("a convolution of patches that overlap, but along one axis by the library, has no form")
    parts = p["batch_group_count"]
    if parts > 1:  # each part of the batch has its own kernels, as a group of channels has
        rows, channels, length = x.shape[0] // parts, x.shape[1], x.shape[2]
        x = w.transpose(w.reshape(x, [parts, rows, channels, length]), [1, 0, 2, 3])
        x = w.reshape(x, [rows, parts * channels, length])
    [apart], [(low, high)] = p["lhs_dilation"], p["padding"]
    if apart > 1:  # zeros between elements
        rows, length = w.reshape(x, [*x.shape, 1]), x.shape[2]
        spread = w.reshape(w.pad(rows, 3, 0, apart - 1), [*x.shape[:2], length * apart])
        x = w.slice(spread, 2, 0, (length - 1) * apart + 1)
    x = w.slice(x, 2, max(-low, 0), x.shape[2] - max(-high, 0))
    groups = max(parts, p["feature_group_count"])
    [step], [between] = p["window_strides"], p["rhs_dilation"]
    made = Convolution(x.shape[2], kernel.shape[2], step, between, max(low, 0), max(high, 0), groups)
    if min(made.taps, made.count) > MOST_TAPS or made.count < 1:
        raise w.refuse(f"a convolution of {made.taps} elements a window has no form; expected at most {MOST_TAPS}")
    return made.convolved(w, x, kernel, out)
