"""cut_cross_entropy's names, for a change of import. ``linear_cross_entropy`` is the package's own function.
``LinearCrossEntropy`` takes the weight in each call, unlike the module of that name in ``logitless.torch``."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor, nn

from .loss import linear_cross_entropy

__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]


class LinearCrossEntropy(nn.Module):
    """``linear_cross_entropy(e, c, targets, bias)`` with fixed options. Options about approximate gradients are
    accepted, and gradients are exact.

    ``forward(e, c, targets, bias=None)``: e [..., D], c [V, D], targets [...], bias [V].
    """

    def __init__(
        self,
        ignore_index: int = -100,
        softcap: Optional[float] = None,
        reduction: str = "mean",
        shift: bool | int = 0,
        filter_eps: float | str | None = "auto",
        accum_e_fp32: bool = False,
        accum_c_fp32: bool = False,
        filter_e_grad: bool = True,
        filter_c_grad: bool = True,
        impl: Any = "cce",
        return_lse: bool = False,
    ):
        super().__init__()
        self.options = dict(
            ignore_index=ignore_index, softcap=softcap, reduction=reduction, shift=shift, filter_eps=filter_eps,
            accum_e_fp32=accum_e_fp32, accum_c_fp32=accum_c_fp32, filter_e_grad=filter_e_grad,
            filter_c_grad=filter_c_grad, impl=impl, return_lse=return_lse,
        )

    def forward(
        self, e: Tensor, c: Tensor, targets: Tensor, bias: Optional[Tensor] = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        return linear_cross_entropy(e, c, targets, bias, **self.options)
