"""Log-probabilities over the sets of token ids that a sampler kept. ``_losses/kept.py`` has the docstring."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from .._losses import kept as shared
from .._options import DEFAULT
from . import _xp as xp


@xp.takes({}, shared.kept_logprobs)
def linear_kept_logprobs(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None,
    *,
    kept_ids: Tensor,
    kept_offsets: Optional[Tensor] = None,
    temperature: float | Tensor = 1.0,
    softcap: Optional[float] = None,
    logit_scale: float = DEFAULT.logit_scale,
    ignore_index: int = DEFAULT.ignore_index,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the log-probability of each target among the token ids that a sampler kept."""
    return shared.kept_logprobs(
        xp, hidden, weight, target, bias, kept_ids=kept_ids, kept_offsets=kept_offsets, temperature=temperature,
        softcap=softcap, logit_scale=logit_scale, ignore_index=ignore_index,
    )  # fmt: skip
