"""Log-probabilities over the sets of token ids that a sampler kept. ``_losses/kept.py`` has the docstring."""

from __future__ import annotations

import jax
from jax.typing import ArrayLike

from .._losses import kept as shared
from .._options import DEFAULT
from . import _xp as xp


@xp.takes({}, shared.kept_logprobs)
def linear_kept_logprobs(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, bias: ArrayLike | None = None,
    *,
    kept_ids: ArrayLike,
    kept_offsets: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    softcap: float | None = None,
    logit_scale: float = DEFAULT.logit_scale,
    ignore_index: int = DEFAULT.ignore_index,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the log-probability of each target among the token ids that a sampler kept."""
    return shared.kept_logprobs(
        xp, hidden, weight, targets, bias, kept_ids=kept_ids, kept_offsets=kept_offsets, temperature=temperature,
        softcap=softcap, logit_scale=logit_scale, ignore_index=ignore_index,
    )  # fmt: skip
