"""Sampled softmax. ``_losses/sampled.py`` has its formula and docstring."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from ..._losses import sampled as shared
from .. import _xp as xp


@xp.takes({}, shared.sampled_softmax_loss)
def sampled_softmax_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, bias: ArrayLike | None = None,
    *, num_sampled: int | None = None, sampler: str = "log_uniform", seed: ArrayLike | None = None,
    sampled_ids: ArrayLike | None = None, sampled_log_counts: ArrayLike | None = None,
    target_log_counts: ArrayLike | None = None, remove_accidental_hits: bool = True,
    token_weight: ArrayLike | None = None, reduction: str = "mean", normalizer: float | ArrayLike | None = None,
    ignore_index: int = -100, logit_scale: float = 1.0, memory_budget: int | str | None = None,
) -> jax.Array:
    """Sampled softmax (Jean et al. 2015)."""
    return shared.sampled_softmax_loss(
        xp, hidden, weight, targets, bias, num_sampled=num_sampled, sampler=sampler, seed=seed, sampled_ids=sampled_ids,
        sampled_log_counts=sampled_log_counts, target_log_counts=target_log_counts,
        remove_accidental_hits=remove_accidental_hits, token_weight=token_weight, reduction=reduction,
        normalizer=normalizer, ignore_index=ignore_index, logit_scale=logit_scale, memory_budget=memory_budget,
    )
