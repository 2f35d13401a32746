"""Sampled softmax. ``_losses/sampled.py`` has its formula and docstring."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from ..._losses import sampled as shared
from ..._losses.options import ready
from .. import _xp as xp


@ready(xp, shared, {})
def sampled_softmax_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None,
    *, num_sampled: Optional[int] = None, sampler: str = "log_uniform", seed: Optional[int] = None,
    sampled_ids: Optional[Tensor] = None, sampled_log_counts: Optional[Tensor] = None,
    target_log_counts: Optional[Tensor] = None, remove_accidental_hits: bool = True,
    token_weight: Optional[Tensor] = None, reduction: str = "mean", normalizer: Optional[float | Tensor] = None,
    ignore_index: int = -100, logit_scale: float = 1.0, memory_budget: Optional[int | str] = None,
    expected_ignored: float = 0.0,
) -> Tensor:
    """Sampled softmax (Jean et al. 2015)."""
