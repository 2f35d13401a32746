"""The loss of several heads, or of several tokens ahead. ``_losses/multi_token.py`` has the docstring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Optional

from torch import Tensor

from ..._losses import multi_token as shared
from ..._losses.options import HeadKeywords, ready
from .. import _xp as xp

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..._c_api import LossTermArguments

    class MultiTokenKeywords(HeadKeywords, LossTermArguments, total=False):
        """Keywords of ``multi_token_loss`` about the head and the terms of the loss."""


class MultiTokenLoss(NamedTuple):
    """A loss of several heads. Only ``loss`` has a gradient."""

    loss: Tensor  # []
    head_losses: Tensor  # [M]: of each head, without its weight
    accuracies: Optional[Tensor]  # [M]: fraction of tokens that a head predicts; None if not asked for


@ready(xp, shared, shared.OPTIONS, MultiTokenLoss, shared.TEXTS)
def multi_token_loss(
    hidden: Tensor | Sequence[Tensor], weight: Tensor | Sequence[Tensor], target: Tensor,
    bias: Optional[Tensor | Sequence[Tensor]] = None,
    *, shifts: Optional[Sequence[int]] = None, head_weights: Optional[Sequence[float]] = None,
    segment_ids: Optional[Tensor] = None, reduction: str = "mean", normalizer: Optional[float | Tensor] = None,
    accuracy: bool = False, **options: Unpack[MultiTokenKeywords],
) -> MultiTokenLoss:
    """Cross entropy of several heads that predict tokens further ahead (multi-token prediction, Medusa, EAGLE)."""
