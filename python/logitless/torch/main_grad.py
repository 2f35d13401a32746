"""Losses whose backward adds the weight's gradient to a tensor of the caller, such as Megatron's ``main_grad``."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor

from . import call
from ._arguments import named
from .dtensor import spread_of
from .groups import raise_on_all_ranks
from .ranks import Sharding
from .run import MainGrad


def token_losses(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor] = None,
    *,
    main_grad: MainGrad,
    ignore_index: int,
    logit_scale: float,
    return_argmax: bool,
    sharding: Optional[Sharding],
    memory_budget: int | str | None,
    expected_ignored: float = 0.0,
) -> Any:
    """Computes ``linear_cross_entropy`` with reduction "none". Each backward adds weight's gradient, before it is
    rounded, to ``main_grad.tensor``. Autograd gets the result of ``main_grad.added()`` instead.

    Extra memory: the library's kernels add to float32 and to weight's dtype, without memory of the weight's size.
    Elsewhere the gradient takes [V, D] float32 (float64 for float64) until it is added: other dtypes, devices without
    kernels, and rows on a GPU that are not aligned to 16 bytes.

    Raises as ``linear_cross_entropy``. ValueError or TypeError: main_grad's shape, device or dtype.
    NotImplementedError: a traced call.
    """
    tensor = main_grad.tensor
    if not tensor.is_floating_point():
        raise TypeError(f"main_grad: expected a floating dtype, got {tensor.dtype}")
    if tensor.shape != weight.shape or tensor.device != weight.device:
        raise ValueError(
            f"main_grad: expected {list(weight.shape)} on {weight.device}, got {list(tensor.shape)} on {tensor.device}"
        )
    arguments = named(
        hidden=hidden, weight=weight, target=target, bias=bias, reduction="none", ignore_index=ignore_index,
        logit_scale=logit_scale, return_argmax=return_argmax, sharding=sharding, memory_budget=memory_budget,
        expected_ignored=expected_ignored,
    )
    spread = spread_of(arguments)
    return raise_on_all_ranks(spread.group, lambda: call.cross_entropy(arguments, spread, main_grad=main_grad))
