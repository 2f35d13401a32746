"""Tokens sampled from a vocabulary head, and its best log-probabilities, without the logits. ``_losses/sampling.py`` has
the docstrings."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax.typing import ArrayLike

from .._losses import sampling as shared
from .._options import DEFAULT
from . import _xp as xp
from .losses._formulas import FORMULAS, chunked

FORMULAS["sample"] = lambda given, *form: shared.sample(xp, given, shared.Filters(*form))
FORMULAS["best_entries"] = lambda given, *form: shared.best_entries(xp, given, *form)


class Sample(NamedTuple):
    """Sampled tokens."""

    tokens: jax.Array  # [...] int32
    log_prob: jax.Array  # [...] float32


class TopLogProbs(NamedTuple):
    """Log-probabilities of targets and of the best entries."""

    log_prob: jax.Array | None  # [...] of the target; None without one
    top_log_probs: jax.Array  # [..., K], largest first
    top_ids: jax.Array  # [..., K] int32


@xp.takes({}, shared.draw, {"seed": "key"})
def linear_sample(
    hidden: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None,
    *,
    key: ArrayLike | None = None,
    temperature: ArrayLike = 1.0,
    top_k: int | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    logit_bias: ArrayLike | None = None,
    counter: ArrayLike | None = None,
    softcap: float | None = None,
    logit_scale: float = DEFAULT.logit_scale,
    memory_budget: int | str | None = None,
) -> Sample:
    """Samples a token at each position from ``softmax(logits)``."""
    parts = None
    if not xp.is_number(temperature) or temperature != 0:
        if key is None:
            raise TypeError("key: expected a key of jax.random, unless temperature is 0; got None")
        parts = xp.key(key, name="key")
    return Sample(*shared.draw(
        xp, chunked, hidden, weight, bias, parts, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        logit_bias=logit_bias, counter=counter, softcap=softcap, logit_scale=logit_scale, memory_budget=memory_budget,
    ))  # fmt: skip


@xp.takes({}, shared.best)
def linear_top_logprobs(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike | None = None, bias: ArrayLike | None = None,
    *,
    k: int,
    softcap: float | None = None,
    logit_scale: float = DEFAULT.logit_scale,
    memory_budget: int | str | None = None,
) -> TopLogProbs:
    """Returns the k largest log-probabilities at each position."""
    return TopLogProbs(*shared.best(
        xp, chunked, hidden, weight, targets, bias, k=k, softcap=softcap, logit_scale=logit_scale,
        memory_budget=memory_budget,
    ))  # fmt: skip
