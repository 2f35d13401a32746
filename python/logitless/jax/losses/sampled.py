"""Sampled softmax. ``_losses/sampled.py`` has its formula and docstring."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from ..._losses import sampled as shared
from ..._losses.options import ready
from .. import _xp as xp


@ready(xp, shared, {})
def sampled_softmax_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, bias: ArrayLike | None = None,
    *, num_sampled: int | None = None, sampler: str = "log_uniform", seed: ArrayLike | None = None,
    sampled_ids: ArrayLike | None = None, sampled_log_counts: ArrayLike | None = None,
    target_log_counts: ArrayLike | None = None, remove_accidental_hits: bool = True,
    token_weight: ArrayLike | None = None, reduction: str = "mean", normalizer: float | ArrayLike | None = None,
    ignore_index: int = -100, logit_scale: float = 1.0, memory_budget: int | str | None = None,
    expected_ignored: float = 0.0,
) -> jax.Array:
    """Sampled softmax (Jean et al. 2015)."""
