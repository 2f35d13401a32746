"""Formulas of samples and best entries whose vocabulary is sharded over ranks. A rank computes the logits of its own
entries, a chunk of tokens at a time. Ranks exchange a few numbers of each token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from .distillation import logits_of
from .sampling import Filters

# The search for the least entry of top_p settles the bits of a float32, four at a time: 15 candidates a round.
_BITS, _ROUNDS = 4, 8


class Ranks(Protocol):
    """The ranks of a group, each of a range of the vocabulary, and their exchanges."""

    width: int  # the most entries of a rank

    def own(self, z: Any) -> tuple[Any, Any]:
        """Returns this rank's logits [n, rows] and their vocabulary ids [rows]; one of -inf for a rank without entries."""

    def largest(self, x: Any) -> Any:
        """Returns the largest value over ranks, elementwise."""

    def summed(self, x: Any) -> Any:
        """Returns the sum over ranks, elementwise, with the same bits on each."""

    def joined(self, x: Any) -> Any:
        """Returns the columns of all ranks' x [n, k] in rank order: [n, ranks * k]."""

    def first_largest(self, x: Any, ids: Any) -> Any:
        """Returns the id [n] of the largest x [n, rows] of all ranks, the least id of equal ones."""

    def best(self, x: Any, ids: Any, k: int) -> Any:
        """Returns the ids [n, k] of the k largest x [n, rows] of all ranks, largest first, equal ones by id."""


def tokens(xp: Any, ranks: Ranks, given: Mapping[str, Any], form: Filters) -> Any:
    """Returns token ids [n], as ``sampling.sample`` of the whole vocabulary does. given: its arguments, with this rank's
    part of weight, bias and logit_bias."""
    z = logits_of(xp, given, "", form.softcap, form.scale)
    if "logit_bias" in given:
        z = z + given["logit_bias"]
    z, ids = ranks.own(z)
    if form.greedy:
        return ranks.first_largest(z, ids)
    temperature = xp.columns(given["temperature"])
    z = (z - ranks.largest(xp.most(z))) / xp.where(temperature > 0, temperature, 1.0)
    least = _least_kept(xp, ranks, given, form, z)
    noise = xp.where(temperature > 0, xp.gumbel_of_ids(given["key"], given["counter"], ids), 0.0)
    chosen = z + noise
    return ranks.first_largest(chosen if least is None else xp.where(z >= least, chosen, -math.inf), ids)


def best_entries(xp: Any, ranks: Ranks, given: Mapping[str, Any], softcap: float, scale: float, k: int) -> Any:
    """Returns the ids [n, k] of the largest logits of all ranks, largest first."""
    return ranks.best(*ranks.own(logits_of(xp, given, "", softcap, scale)), k)


def _least_kept(xp: Any, ranks: Ranks, given: Mapping[str, Any], form: Filters, z: Any) -> Any:
    """Returns the least logit [n, 1] that the filters keep; None without filters. z [n, rows]: at most 0, which the
    largest logit of all ranks is."""
    least = None
    top_p = xp.columns(given["top_p"]) if form.top_p else None
    if form.top_k:
        local = min(form.top_k, z.shape[1])
        mine = xp.top_k(z, local)[0]
        wanted = min(form.top_k, ranks.width)
        if local < wanted:
            padding = xp.full_like(z[:, :1], -math.inf)
            mine = xp.concatenate([mine, xp.broadcast_to(padding, (z.shape[0], wanted - local))], 1)
        ordered = xp.top_k(ranks.joined(mine), form.top_k)[0]
        if form.top_p:
            probabilities = xp.softmax(ordered)
            kept = (xp.cumsum(probabilities) - probabilities < top_p) | (top_p >= 1)
            ordered = xp.where(kept, ordered, math.inf)
        least = xp.least(ordered)
    elif form.top_p:
        least = xp.where(top_p >= 1, -math.inf, _least_of_mass(xp, ranks, z, top_p))
    if form.min_p:
        enough = xp.log(xp.columns(given["min_p"]))
        least = enough if least is None else xp.maximum(least, enough)
    return least


def _least_of_mass(xp: Any, ranks: Ranks, z: Any, top_p: Any) -> Any:
    """Returns the least logit [n, 1] of the smallest set of the largest entries with a probability of at least top_p.

    An entry is in the set if the larger ones have less. Distances to the largest logit are at least 0, so their bits have
    their order as integers. The largest distance of the set is found by its bits, from the upper ones down. Each round
    takes the sums of exponentials at less than 15 candidate distances.
    """
    below = xp.mass_below(z)
    bound = top_p * ranks.summed(below(xp.as_bits(xp.full_like(z[:, :1], math.inf))))
    found = xp.as_bits(xp.full_like(z[:, :1], 0.0))
    for step in reversed(range(_ROUNDS)):
        bits = _BITS if step < _ROUNDS - 1 else _BITS - 1  # without the sign
        digits = xp.arange((1 << bits) - 1, z) + 1
        candidates = found + xp.astype(digits << _BITS * step, found.dtype)
        passed = ranks.summed(below(candidates)) < bound
        found = found + xp.astype(passed.sum(-1)[:, None] << _BITS * step, found.dtype)
    return -xp.of_bits(found)
