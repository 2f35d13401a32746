"""Tokens sampled from a vocabulary head, and its best log-probabilities, without the logits. ``_losses/sampling.py`` has
the docstrings."""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from .._losses import sampling as shared
from .._options import DEFAULT, either_name
from . import _sampled_over_ranks, _xp as xp
from .groups import raise_on_all_ranks
from .losses._formulas import FORMULAS, chunked
from .ranks import Sharding

FORMULAS["sample"] = lambda given, *form: shared.sample(xp, given, shared.Filters(*form))
FORMULAS["best_entries"] = lambda given, *form: shared.best_entries(xp, given, *form)


class Sample(NamedTuple):
    """Sampled tokens."""

    tokens: Tensor  # [...] int64
    log_prob: Tensor  # [...] float32 (float64 for float64 inputs)


class TopLogProbs(NamedTuple):
    """Log-probabilities of targets and of the best entries."""

    log_prob: Optional[Tensor]  # [...] of the target; None without one
    top_log_probs: Tensor  # [..., K], largest first
    top_ids: Tensor  # [..., K] int64


@either_name
@xp.takes({}, shared.draw, {"seed": "seed"})
def linear_sample(
    hidden: Tensor, weight: Tensor, bias: Optional[Tensor] = None,
    *,
    temperature: float | Tensor = 1.0,
    top_k: Optional[int] = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    logit_bias: Optional[Tensor] = None,
    seed: Optional[int] = None,
    counter: Optional[Tensor] = None,
    generator: Optional[torch.Generator] = None,
    softcap: Optional[float] = None,
    logit_scale: float = DEFAULT.logit_scale,
    memory_budget: int | str | None = None,
    sharding: Optional[Sharding] = None,
) -> Sample:
    """Samples a token at each position from ``softmax(logits)``."""

    def drawn() -> Sample:
        own = xp.drawn_seed(seed, xp.array("hidden", hidden), generator)
        return Sample(*shared.draw(
            xp, chunked, hidden, weight, bias, own, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            logit_bias=logit_bias, counter=counter, softcap=softcap, logit_scale=logit_scale,
            memory_budget=memory_budget, sharding=sharding,
        ))  # fmt: skip

    return raise_on_all_ranks(_sampled_over_ranks.group_name(hidden, weight, bias, sharding), drawn)


@either_name
@xp.takes({}, shared.best)
def linear_top_logprobs(
    hidden: Tensor, weight: Tensor, target: Optional[Tensor] = None, bias: Optional[Tensor] = None,
    *,
    k: int,
    softcap: Optional[float] = None,
    logit_scale: float = DEFAULT.logit_scale,
    memory_budget: int | str | None = None,
    sharding: Optional[Sharding] = None,
) -> TopLogProbs:
    """Returns the k largest log-probabilities at each position."""
    return TopLogProbs(*shared.best(
        xp, chunked, hidden, weight, target, bias, k=k, softcap=softcap, logit_scale=logit_scale,
        memory_budget=memory_budget, sharding=sharding,
    ))  # fmt: skip
