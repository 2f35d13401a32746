"""Tokens sampled from a vocabulary head, and its best log-probabilities, without the logits. ``_losses/sampling.py`` has
the docstrings."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.typing import ArrayLike

from .._losses import sampling as shared
from .._options import DEFAULT, either_name
from . import _xp as xp
from ._sampled_over_ranks import axis_of
from .losses._formulas import FORMULAS, chunked
from .sharding import Sharding
from .vocab_parallel import AxisName

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
    sharding: Sharding | None = None,
) -> Sample:
    """Samples a token at each position from ``softmax(logits)``."""
    return _drawn(dict(locals()))


def _drawn(given: dict[str, Any]) -> Sample:
    """Returns the sample of a call's arguments."""
    hidden, weight, bias, key = (given.pop(name) for name in ("hidden", "weight", "bias", "key"))
    parts = None
    if not xp.is_number(given["temperature"]) or given["temperature"] != 0:
        if key is None:
            raise TypeError("key: expected a key of jax.random, unless temperature is 0; got None")
        parts = xp.key(key, name="key")
    return Sample(*shared.draw(xp, chunked, hidden, weight, bias, parts, **given))


@xp.takes({}, shared.best)
def linear_top_logprobs(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike | None = None, bias: ArrayLike | None = None,
    *,
    k: int,
    softcap: float | None = None,
    logit_scale: float = DEFAULT.logit_scale,
    memory_budget: int | str | None = None,
    sharding: Sharding | None = None,
) -> TopLogProbs:
    """Returns the k largest log-probabilities at each position."""
    return TopLogProbs(*shared.best(
        xp, chunked, hidden, weight, targets, bias, k=k, softcap=softcap, logit_scale=logit_scale,
        memory_budget=memory_budget, sharding=sharding,
    ))  # fmt: skip


def vocab_parallel_sample(
    hidden: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None,
    *,
    axis_name: AxisName,
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
    """linear_sample with the vocabulary sharded over ``axis_name``; call it inside jax.shard_map.

    Args:
        hidden: [..., D], the same on each shard of the axis.
        weight: [V / shards, D]: the shard's rows of the full weight, in order.
        bias, logit_bias: [V / shards].
        axis_name: the mesh axis or axes.
        Other arguments are those of linear_sample, the same on each shard; memory_budget is for each shard.

    Returns:
        Sample(tokens, log_prob), [...] each, the same on each shard: global token ids, and what
        ``vocab_parallel_logprobs`` returns for them.

    Raises: as linear_sample. ValueError if weight is not sharded over the axis, where shard_map checks it (check_vma).
    """
    given = dict(locals())
    given["sharding"] = axis_of(given.pop("axis_name"))
    return _drawn(given)


@either_name
def vocab_parallel_top_logprobs(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike | None = None, bias: ArrayLike | None = None,
    *,
    axis_name: AxisName,
    k: int,
    softcap: float | None = None,
    logit_scale: float = DEFAULT.logit_scale,
    memory_budget: int | str | None = None,
) -> TopLogProbs:
    """linear_top_logprobs with the vocabulary sharded over ``axis_name``; call it inside jax.shard_map.

    Args:
        hidden: [..., D], and targets: [...], global token ids: the same on each shard of the axis.
        weight: [V / shards, D]: the shard's rows of the full weight, in order. bias: [V / shards].
        axis_name: the mesh axis or axes.
        Other arguments are those of linear_top_logprobs; memory_budget is for each shard.

    Returns:
        TopLogProbs of global token ids, the same on each shard.

    Raises: as ``vocab_parallel_sample``.
    """
    return TopLogProbs(*shared.best(
        xp, chunked, hidden, weight, targets, bias, k=k, softcap=softcap, logit_scale=logit_scale,
        memory_budget=memory_budget, sharding=axis_of(axis_name),
    ))  # fmt: skip
