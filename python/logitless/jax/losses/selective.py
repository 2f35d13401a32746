"""Log-probabilities of given token ids, for sampling and evaluation. ``_losses/selective.py`` has the docstring."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from jax.typing import ArrayLike

from ..._losses import selective as shared
from ..._losses.options import HEAD, HeadKeywords, ready
from .. import _xp as xp

if TYPE_CHECKING:
    from typing_extensions import Unpack


@ready(xp, shared, HEAD)
def selective_log_softmax(
    hidden: ArrayLike, weight: ArrayLike, index: ArrayLike, bias: ArrayLike | None = None,
    *, batch_invariant: bool = False, **head: Unpack[HeadKeywords],
) -> jax.Array:
    """``log_softmax(logits, -1).gather(-1, index)`` of a head, without the logits."""
