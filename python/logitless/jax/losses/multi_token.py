"""The loss of several heads, or of several tokens ahead. ``_losses/multi_token.py`` has the docstring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
from jax.typing import ArrayLike

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

    loss: jax.Array  # []
    head_losses: jax.Array  # [M]: of each head, without its weight
    accuracies: jax.Array | None  # [M]: fraction of tokens that a head predicts; None if not asked for


@ready(xp, shared, shared.OPTIONS, MultiTokenLoss, shared.TEXTS)
def multi_token_loss(
    hidden: ArrayLike | Sequence[ArrayLike], weight: ArrayLike | Sequence[ArrayLike], targets: ArrayLike,
    bias: ArrayLike | Sequence[ArrayLike] | None = None,
    *, shifts: Sequence[int] | None = None, head_weights: Sequence[float] | None = None,
    segment_ids: ArrayLike | None = None, reduction: str = "mean", normalizer: ArrayLike | None = None,
    accuracy: bool = False, **options: Unpack[MultiTokenKeywords],
) -> MultiTokenLoss:
    """Cross entropy of several heads that predict tokens further ahead (multi-token prediction, Medusa, EAGLE)."""
