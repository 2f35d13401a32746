"""The contrastive loss InfoNCE. ``_losses/contrastive.py`` has the docstring."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from ..._losses import contrastive as shared
from .. import _xp as xp


@xp.takes({}, shared.info_nce_loss)
def info_nce_loss(
    query: ArrayLike, key: ArrayLike,
    *, negatives: ArrayLike | None = None, targets: ArrayLike | None = None, temperature: float | ArrayLike = 0.07,
    normalize: bool = True, symmetric: bool = False, reduction: str = "mean", memory_budget: int | str | None = None,
) -> jax.Array:
    """InfoNCE (van den Oord et al. 2018), without the similarities of all pairs."""
    return shared.info_nce_loss(
        xp, query, key, negatives=negatives, target=targets, temperature=temperature, normalize=normalize,
        symmetric=symmetric, reduction=reduction, memory_budget=memory_budget
    )
