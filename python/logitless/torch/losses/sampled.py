"""Sampled softmax. ``_losses/sampled.py`` has its formula and docstring."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from ..._losses import sampled as shared
from .. import _xp as xp


@xp.takes({}, shared.sampled_softmax_loss)
def sampled_softmax_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None,
    *, num_sampled: Optional[int] = None, sampler: str = "log_uniform", seed: Optional[int] = None,
    sampled_ids: Optional[Tensor] = None, sampled_log_counts: Optional[Tensor] = None,
    target_log_counts: Optional[Tensor] = None, remove_accidental_hits: bool = True,
    token_weight: Optional[Tensor] = None, reduction: str = "mean", normalizer: Optional[float | Tensor] = None,
    ignore_index: int = -100, logit_scale: float = 1.0, memory_budget: Optional[int | str] = None,
) -> Tensor:
    """Sampled softmax (Jean et al. 2015)."""
    return shared.sampled_softmax_loss(
        xp, hidden, weight, target, bias, num_sampled=num_sampled, sampler=sampler, seed=seed, sampled_ids=sampled_ids,
        sampled_log_counts=sampled_log_counts, target_log_counts=target_log_counts,
        remove_accidental_hits=remove_accidental_hits, token_weight=token_weight, reduction=reduction,
        normalizer=normalizer, ignore_index=ignore_index, logit_scale=logit_scale, memory_budget=memory_budget,
    )
