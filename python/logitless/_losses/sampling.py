"""Sampling from a head and its best entries, computed a chunk of tokens at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from .distillation import logits_of


class Filters(NamedTuple):
    """The parts of a sampler that are constants of its program."""

    softcap: float  # 0: none
    scale: float
    top_k: int  # 0: all entries
    top_p: bool
    min_p: bool
    greedy: bool  # the temperature is 0 for every token


def sample(xp, given: Mapping[str, Any], form: Filters):
    """Returns token ids [N] by the Gumbel-max trick: the entry with the largest z / temperature + noise, among those
    that the filters keep, is one of the softmax of z / temperature over them.

    given: hidden, weight and bias of the head; logit_bias [V]; temperature, top_p, min_p: [] or [N]; key [2] and
    counter [N] of the noise.
    """
    z = logits_of(xp, given, "", form.softcap, form.scale)
    if "logit_bias" in given:
        z = z + given["logit_bias"]
    if form.greedy:
        return xp.argmax(z)
    temperature = xp.columns(given["temperature"])
    z = z / xp.where(temperature > 0, temperature, 1.0)
    least = None
    if form.top_k or form.top_p:
        ordered = xp.top_k(z, form.top_k or z.shape[1])[0]
        least = ordered[:, -1:]
        if form.top_p:
            # The smallest set of the largest entries whose probabilities sum to at least top_p.
            probabilities = xp.softmax(ordered)
            top_p = xp.columns(given["top_p"])
            kept = (xp.cumsum(probabilities) - probabilities < top_p) | (top_p >= 1)
            least = xp.least(xp.where(kept, ordered, math.inf))
    if form.min_p:
        enough = xp.most(z) + xp.log(xp.columns(given["min_p"]))
        least = enough if least is None else xp.maximum(least, enough)
    noise = xp.where(temperature > 0, xp.gumbel(given["key"], given["counter"], z.shape[1]), 0.0)
    chosen = z + noise
    return xp.argmax(chosen if least is None else xp.where(z >= least, chosen, -math.inf))


def best_entries(xp, given: Mapping[str, Any], softcap: float, scale: float, k: int):
    """Returns the k token ids of the largest logits [N, k], largest first."""
    return xp.top_k(logits_of(xp, given, "", softcap, scale), k)[1]
