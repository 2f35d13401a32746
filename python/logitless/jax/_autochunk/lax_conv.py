"""Convolutions of JAX that are matrix products, with non-overlapping patches or a kernel as large as the image."""

from __future__ import annotations

import math

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
    if not plain or not apart or x.dtype != kernel.dtype or not (x.dtype == out or narrow):
        raise w.refuse("a convolution of patches that overlap has no form in a tensor program")
    w.precisions.add(p["precision"])
    patches = Patches(x.shape[x_spec[1]], sizes, patch)
    made = patches.convolved(w, w.transpose(x, list(x_spec)), w.transpose(kernel, list(kernel_spec)), out)
    # The product is [N, count..., O]; it is permuted to the requested layout.
    natural = [0, made.rank - 1, *range(1, made.rank - 1)]
    dims = [0] * made.rank
    for place, d in zip(out_spec, natural):
        dims[place] = d
    return w.transpose(made, dims)
