"""A loss of torchtune's interface (``torchtune.modules.loss.SFTLoss``), for a recipe's configuration:

    loss:
      _component_: logitless.torch.integrations.torchtune.LinearCrossEntropyLoss
"""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor, nn

try:
    from torchtune.modules.loss import SFTLoss
except ImportError as error:
    raise ImportError(
        "logitless.torch.integrations.torchtune: expected torchtune.modules.loss.SFTLoss, which torchtune has after 0.6.1; with "
        f"an older one use lazy_head(model.output) and torch.nn.CrossEntropyLoss: {error}"
    ) from error

from ... import _library as c
from ..._options import share
from ..loss import linear_cross_entropy


class LinearCrossEntropyLoss(SFTLoss, nn.Module):
    """torchtune's loss of this name, without chunks of logits: the mean over the tokens that are not ignored.

    Args:
        ignore_index: tokens with this target are ignored, as in ``linear_cross_entropy``.
        memory_budget, expected_ignored: of a call, as there.

    ``set_model_output(model)`` makes the model return hidden states and takes its output layer: an ``nn.Linear``, with
    or without a bias, or a ``TiedLinear``. Sharded weights are gathered for the call. ``forward(outputs [B, T, D],
    targets [B, T])`` returns the loss, which is 0 without tokens.

    Raises NotImplementedError for tensor parallelism, and TypeError for another output layer, such as LoRA's.
    """

    def __init__(
        self, ignore_index: int = -100, memory_budget: int | str | None = None, *, expected_ignored: float = 0.0
    ):
        super().__init__()
        c.parse_bytes(memory_budget)
        self.ignore_index, self.memory_budget = ignore_index, memory_budget
        self.expected_ignored = share("expected_ignored", expected_ignored)
        self.linear_projection: Any = None

    def set_model_output(self, model: nn.Module) -> None:
        head = model.output
        _weight_and_bias(head)
        model.skip_output_layer = True
        # It is not registered, since the parameters belong to the model.
        self.__dict__["linear_projection"] = head

    def apply_compile_strategy(self, *args: Any, **kwargs: Any) -> LinearCrossEntropyLoss:
        """Does nothing, since PyTorch cannot compile any part of this loss."""
        return self

    def patch_tp_plan(self, tp_plan: dict) -> dict:
        raise NotImplementedError(
            "LinearCrossEntropyLoss: expected no tensor parallelism, got a plan for it; use torchtune's own loss, or FSDP alone"
        )

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.linear_projection is None:
            raise RuntimeError("LinearCrossEntropyLoss: expected set_model_output(model) before the first call")
        weight, bias = _weight_and_bias(self.linear_projection)
        return linear_cross_entropy(
            outputs, weight, targets, bias, ignore_index=self.ignore_index, memory_budget=self.memory_budget,
            expected_ignored=self.expected_ignored,
        )


def _weight_and_bias(head: Any) -> tuple[Tensor, Optional[Tensor]]:
    tied = getattr(head, "tied_module", None)
    if tied is not None:
        return tied.weight, None
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        return head.weight, head.bias
    raise TypeError(f"model.output: expected torch.nn.Linear or torchtune's TiedLinear, got {type(head).__name__}")
