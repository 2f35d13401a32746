"""Convolutions of PyTorch of patches that are apart, or along one axis, and their gradients."""

from __future__ import annotations

import math

from logitless._autochunk.convolutions import MOST_TAPS, Convolution
from logitless._autochunk.lower import Value
from logitless._autochunk.patches import Patches
from logitless.torch._autochunk.aten import handles
from logitless.torch._autochunk.dtypes import DTYPES


def _patches(w, x, weight, stride, padding, dilation, transposed, groups) -> Patches | None:
    """Returns the patches of a convolution that reads each element once, or None."""
    kernel = tuple(weight.shape[2:])
    apart = tuple(stride) == kernel and not any(padding) and groups == 1 and not transposed
    spread = any(by != 1 and k != 1 for by, k in zip(dilation, kernel))
    if not apart or spread or math.prod(kernel) == 0 or not DTYPES.floating(x.dtype):
        return None
    return Patches(x.shape[1], tuple(x.shape[2:]), kernel)


def _along_rows(w, x, weight, stride, padding, dilation, transposed, groups) -> Convolution:
    taps = weight.shape[-1]
    if not w.native or x.rank != 3 or transposed or 0 in (*x.shape, *weight.shape) or not DTYPES.floating(x.dtype):
        raise w.refuse("a convolution of patches that overlap, but along one axis by the library, has no form")
    if taps > MOST_TAPS:
        raise w.refuse(f"a convolution of {taps} elements a window has no form; expected at most {MOST_TAPS}")
    return Convolution(x.shape[2], taps, stride[0], dilation[0], padding[0], padding[0], groups)


def _last(w, grad: Value) -> Value:
    """Transposes [N, O, count...] to [N, count..., O]."""
    return w.transpose(grad, [0, *range(2, grad.rank), 1])


def _summed(w, grad: Value, dims) -> Value:
    return w.cast(w.reduce("reduce_sum", w.cast(grad, DTYPES.wide(grad.dtype)), dims), grad.dtype)


@handles("convolution")
def _convolution(w, out, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    how = (w, x, weight, stride, padding, dilation, transposed, groups)
    patches = _patches(*how)
    if patches is None:
        made = _along_rows(*how).convolved(w, x, weight)
        return made if bias is None else w.add(made, w.reshape(bias, [bias.shape[0], 1]))
    made = patches.convolved(w, x, weight)
    if bias is not None:
        made = w.add(made, bias)
    return w.transpose(made, [0, made.rank - 1, *range(1, made.rank - 1)])


@handles("convolution_backward")
def _convolution_backward(
    w, out, grad, x, weight, sizes, stride, padding, dilation, transposed, output_padding, groups, wanted
):
    how = (w, x, weight, stride, padding, dilation, transposed, groups)
    patches = _patches(*how)
    d_x = d_weight = d_bias = None
    if patches is None:
        rows = _along_rows(*how)
        d_x = rows.gradient_of_rows(w, x, weight, grad) if wanted[0] else None
        d_weight = rows.gradient_of_weight(w, x, weight, grad) if wanted[1] else None
        return d_x, d_weight, _summed(w, grad, [0, 2]) if wanted[2] else None
    grad, kernel = _last(w, grad), patches.weight(w, weight)
    of_images = list(range(grad.rank - 1))
    if wanted[0]:
        d_x = patches.image(w, w.dot(grad, kernel, ([grad.rank - 1], [0])))
    if wanted[1]:
        d_weight = w.reshape(w.dot(grad, patches.of(w, x), (of_images, patches.outer)), weight.shape)
    if wanted[2]:
        d_bias = _summed(w, grad, of_images)
    return d_x, d_weight, d_bias
