"""Convolutions of PyTorch that are matrix products, and their gradients."""

from __future__ import annotations

import math

from logitless._autochunk.lower import Value
from logitless._autochunk.patches import Patches
from logitless.torch._autochunk.aten import handles
from logitless.torch._autochunk.dtypes import DTYPES


def _patches(w, x, weight, stride, padding, dilation, transposed, groups) -> Patches:
    kernel = tuple(weight.shape[2:])
    apart = tuple(stride) == kernel and not any(padding) and groups == 1 and not transposed
    spread = any(by != 1 and k != 1 for by, k in zip(dilation, kernel))
    if not apart or spread or math.prod(kernel) == 0 or not DTYPES.floating(x.dtype):
        raise w.refuse("a convolution of patches that overlap has no form in a tensor program")
    return Patches(x.shape[1], tuple(x.shape[2:]), kernel)


def _last(w, grad: Value) -> Value:
    """Transposes [N, O, count...] to [N, count..., O]."""
    return w.transpose(grad, [0, *range(2, grad.rank), 1])


@handles("convolution")
def _convolution(w, out, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    patches = _patches(w, x, weight, stride, padding, dilation, transposed, groups)
    made = patches.convolved(w, x, weight)
    if bias is not None:
        made = w.add(made, bias)
    return w.transpose(made, [0, made.rank - 1, *range(1, made.rank - 1)])


@handles("convolution_backward")
def _convolution_backward(
    w, out, grad, x, weight, sizes, stride, padding, dilation, transposed, output_padding, groups, wanted
):
    patches = _patches(w, x, weight, stride, padding, dilation, transposed, groups)
    grad, kernel = _last(w, grad), patches.weight(w, weight)
    of_images = list(range(grad.rank - 1))
    d_x = d_weight = d_bias = None
    if wanted[0]:
        d_x = patches.image(w, w.dot(grad, kernel, ([grad.rank - 1], [0])))
    if wanted[1]:
        d_weight = w.reshape(w.dot(grad, patches.of(w, x), (of_images, patches.outer)), weight.shape)
    if wanted[2]:
        d_bias = w.cast(w.reduce("reduce_sum", w.cast(grad, DTYPES.wide(grad.dtype)), of_images), grad.dtype)
    return d_x, d_weight, d_bias
