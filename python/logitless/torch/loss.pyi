from typing import Any, Literal, Optional, overload

import torch
from torch import Tensor, nn

from .ranks import Sharding

_Reduction = Literal["none", "mean", "sum"]
_Precision = Literal["ieee", "tf32", "bf16x3"]
_Bytes = Optional[int | str]

# logitless: hidden [..., D], weight [V, D], target [...] or [..., K] with target_weight.
@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor] = None,
    *,
    reduction: _Reduction = "mean",
    ignore_index: Optional[int] = None,
    # The terms and weights of the loss, written by tools/python_c_api.py {
    label_smoothing: float = 0.0,  # in [0, 1]: the share of the loss spread over all classes
    z_loss: float = 0.0,  # >= 0: z_loss * lse^2 is added to each token's loss
    class_weight: Optional[Tensor] = None,  # [V]
    token_weight: Optional[Tensor] = None,  # [...]
    target_weight: Optional[Tensor] = None,  # [..., K]
    # }
    softcap: Optional[float] = None,
    logit_scale: float = 1.0,
    temperature: Optional[float | Tensor] = None,
    normalizer: Optional[float | Tensor] = None,
    shift: bool | int = False,
    accuracy: Literal[False] = False,
    return_lse: Literal[False] = False,
    return_argmax: Literal[False] = False,
    return_target_logits: Literal[False] = False,
    precision: Optional[_Precision] = None,
    memory_budget: _Bytes = None,
    expected_ignored: float = 0.0,
    sharding: Optional[Sharding] = None,
) -> Tensor: ...
@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor] = None,
    *,
    reduction: _Reduction = "mean",
    ignore_index: Optional[int] = None,
    # The terms and weights of the loss, written by tools/python_c_api.py {
    label_smoothing: float = 0.0,  # in [0, 1]: the share of the loss spread over all classes
    z_loss: float = 0.0,  # >= 0: z_loss * lse^2 is added to each token's loss
    class_weight: Optional[Tensor] = None,  # [V]
    token_weight: Optional[Tensor] = None,  # [...]
    target_weight: Optional[Tensor] = None,  # [..., K]
    # }
    softcap: Optional[float] = None,
    logit_scale: float = 1.0,
    temperature: Optional[float | Tensor] = None,
    normalizer: Optional[float | Tensor] = None,
    shift: bool | int = False,
    accuracy: bool = False,
    return_lse: bool = False,
    return_argmax: bool = False,
    return_target_logits: bool = False,
    precision: Optional[_Precision] = None,
    memory_budget: _Bytes = None,
    expected_ignored: float = 0.0,
    sharding: Optional[Sharding] = None,
) -> Tensor | tuple[Tensor, ...]: ...

# torch.nn.functional.linear_cross_entropy
@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Optional[Tensor] = None,
    weight: Optional[Tensor] = None,
    reduction: _Reduction = "mean",
    ignore_index: Optional[int] = None,
    label_smoothing: float = 0.0,
    options: Any = None,
) -> Tensor: ...

# cut_cross_entropy.linear_cross_entropy
@overload
def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Optional[Tensor] = None,
    ignore_index: int = -100,
    softcap: Optional[float] = None,
    reduction: _Reduction = "mean",
    shift: bool | int = False,
    return_lse: bool = False,
    filter_eps: float | str | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: Any = "cce",
    vocab_parallel_options: None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor] = None,
    *,
    ignore_index: int = -100,
    softcap: Optional[float] = None,
    logit_scale: float = 1.0,
    temperature: Optional[float | Tensor] = None,
    return_argmax: Literal[False] = False,
    keep: Optional[bool] = None,
    precision: Optional[_Precision] = None,
    memory_budget: _Bytes = None,
    expected_ignored: float = 0.0,
    sharding: Optional[Sharding] = None,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor] = None,
    *,
    ignore_index: int = -100,
    softcap: Optional[float] = None,
    logit_scale: float = 1.0,
    temperature: Optional[float | Tensor] = None,
    return_argmax: Literal[True],
    keep: Optional[bool] = None,
    precision: Optional[_Precision] = None,
    memory_budget: _Bytes = None,
    expected_ignored: float = 0.0,
    sharding: Optional[Sharding] = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    *,
    selected_ids: Optional[Tensor] = None,
    ignore_index: int = -100,
    softcap: Optional[float] = None,
    logit_scale: float = 1.0,
    temperature: Optional[float | Tensor] = None,
    return_argmax: bool = False,
    keep: Optional[bool] = None,
    precision: Optional[_Precision] = None,
    memory_budget: _Bytes = None,
    expected_ignored: float = 0.0,
    sharding: Optional[Sharding] = None,
) -> tuple[Any, ...]: ...

class LinearCrossEntropy(nn.Module):
    dim: int
    vocab: int
    options: dict[str, Any]
    weight: nn.Parameter
    bias: Optional[nn.Parameter]
    def __init__(
        self,
        dim: int,
        vocab: int,
        bias: bool = False,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
        **options: Any,
    ) -> None: ...
    def forward(self, hidden: Tensor, target: Tensor, **more: Any) -> Any: ...
    def extra_repr(self) -> str: ...
