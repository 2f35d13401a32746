"""The contrastive loss InfoNCE. ``_losses/contrastive.py`` has the docstring."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from ..._losses import contrastive as shared
from .. import _xp as xp


@xp.takes({}, shared.info_nce_loss)
def info_nce_loss(
    query: Tensor, key: Tensor,
    *, negatives: Optional[Tensor] = None, target: Optional[Tensor] = None, temperature: float | Tensor = 0.07,
    normalize: bool = True, symmetric: bool = False, reduction: str = "mean", memory_budget: Optional[int | str] = None,
) -> Tensor:
    """InfoNCE (van den Oord et al. 2018), without the similarities of all pairs."""
    return shared.info_nce_loss(
        xp, query, key, negatives=negatives, target=target, temperature=temperature, normalize=normalize,
        symmetric=symmetric, reduction=reduction, memory_budget=memory_budget
    )
