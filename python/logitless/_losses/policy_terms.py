"""Terms of the policy losses: importance ratios, surrogates, weights of the sampler, token masks, reductions.

Arrays are [B, T], or [B, 1] with one number per sequence. Definitions are those of the papers that docs/use/ready_losses.md
lists, with the conventions of TRL's GRPOTrainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional

from .options import choice, number

LEVELS = "token", "sequence", "sequence_token"
MODES = "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"


class Batch(NamedTuple):
    """Inputs of a surrogate. Advantages and ignored tokens are finite."""

    logps: Any  # log pi
    apart: Any  # log pi - log pi_old
    ratio: Any  # the importance ratio rho, by importance_sampling_level
    advantages: Any
    valid: Any  # bool: tokens that count
    selected: Any  # bool: tokens with a policy gradient; None: all
    weight: Any  # pi_old / pi_sampling, bounded; None: 1


class Surrogate(NamedTuple):
    """Losses of tokens, and bools that tell which of them the clip stops, from below and from above; None: no such clip.
    """

    each: Any
    low: Any = None
    high: Any = None


class Objective(NamedTuple):
    """A surrogate of a batch, and the default of importance_sampling_level. level None: the surrogate has a ratio of
    its own. per_sequence: advantages are [B]."""

    surrogate: Callable[[Any, Batch], Surrogate]
    level: Optional[str] = "token"
    per_sequence: bool = False


# --- Sums and means.


def total(xp, values, valid):
    """Sums over the tokens that count; the others may hold anything."""
    return xp.where(valid, values, 0.0).sum()


def mean(xp, values, valid):
    return total(xp, values, valid) / xp.at_least(valid.sum(), 1)


def sequence_total(xp, values, valid):
    """Returns [B, 1]: the sum over each sequence's tokens that count."""
    return xp.where(valid, values, 0.0).sum(-1)[:, None]


def sequence_mean(xp, values, valid):
    """Returns [B, 1]: the mean over each sequence's tokens; 0 without tokens."""
    return sequence_total(xp, values, valid) / xp.at_least(valid.sum(-1), 1)[:, None]


# --- Reductions: the sum of a batch's losses, and its divisor.


def by_sequence(xp, each, valid) -> tuple[Any, Any]:
    """Sums the token means of sequences."""
    return sequence_mean(xp, each, valid).sum(), max(each.shape[0], 1)


def by_token(xp, each, valid) -> tuple[Any, Any]:
    return total(xp, each, valid), xp.at_least(valid.sum(), 1)


def by_sequence_count(xp, each, valid) -> tuple[Any, Any]:
    return total(xp, each, valid), max(each.shape[0], 1)


# --- Ratios.


def _limit(xp, x) -> float:
    """Returns a bound of exponents, such that a product of two powers and an advantage does not overflow."""
    return math.log(xp.finfo(x.dtype).max) / 2 - 5


def power(xp, x):
    """Returns exp(x), bounded: powers beyond the bound have a gradient of 0, not NaN."""
    return xp.exp(xp.at_most(x, _limit(xp, x)))


def ratio_of(xp, level: str, apart, valid):
    """Returns the importance ratio: a token's, or the geometric mean of its sequence's [B, 1] (GSPO). The value of
    "sequence_token" is the sequence's, with each token's own gradient (GSPO-token)."""
    if level == "token":
        return power(xp, apart)
    ratio = power(xp, sequence_mean(xp, apart, valid))
    if level == "sequence":
        return ratio
    return xp.stop_gradient(ratio) * xp.exp(apart - xp.stop_gradient(apart))


def divergence(xp, estimator: str, apart):
    """Estimates the divergence from log pi - log pi_ref (Schulman, Approximating KL divergence, 2020)."""
    if estimator == "k1":
        return apart
    return 0.5 * apart**2 if estimator == "k2" else xp.expm1(xp.at_most(-apart, _limit(xp, apart))) + apart


# --- The sampler's weights, and masks.


class Correction(NamedTuple):
    """Bounds of the weights pi_old / pi_sampling. level: "token" or "sequence". masks: weights beyond the bounds are 0,
    not clipped."""

    level: str
    masks: bool
    low: float
    high: float


def correction_of(options: Mapping[str, Any]) -> Correction:
    mode = choice("importance_sampling_mode", options["importance_sampling_mode"], MODES)
    least, most = options["importance_sampling_clip_min"], options["importance_sampling_clip_max"]
    low = 0.0 if least is None else number("importance_sampling_clip_min", least, 0.0)
    high = math.inf if most is None else number("importance_sampling_clip_max", most, above=low)
    level, bound = mode.split("_")
    if bound == "truncate" and least is None and most is None:
        raise ValueError(f"importance_sampling_clip_max: expected it or a clip_min with mode {mode!r}, got None")
    return Correction(level, bound == "mask", low, high)


def sampler_weight(xp, correction: Correction, apart, valid):
    """Returns bounded weights from log pi_old - log pi_sampling. A sequence's weight is the product of its tokens'."""
    ratio = power(xp, sequence_total(xp, apart, valid) if correction.level == "sequence" else apart)
    if correction.masks:
        return xp.where((ratio < correction.low) | (ratio > correction.high), 0.0, ratio)
    return xp.clip(ratio, correction.low, correction.high)


def highest(xp, entropy, valid, fraction: float):
    """Returns bool: tokens whose entropy is at least the (1 - fraction) quantile of those that count (Wang et al. 2025).
    """
    if not math.prod(valid.shape):
        return valid
    ordered = xp.sort(xp.where(valid, entropy, math.inf).reshape(-1))
    last = xp.at_least(valid.sum() - 1, 0)
    return valid & (entropy >= xp.take(ordered, last - xp.astype(fraction * last, xp.class_dtype)))


def near(xp, apart, advantages, valid, threshold: float):
    """Returns bool: all but tokens of negative advantage in sequences that left the sampler by more than the threshold
    (DeepSeek-V3.2, equation 9). apart: log pi_sampling - log pi."""
    return (advantages >= 0) | (sequence_mean(xp, apart, valid) <= threshold)


# --- Surrogates.


def _corrected(xp, batch: Batch, each):
    """Multiplies losses by the sampler's weights and drops those of tokens that are not selected."""
    if batch.weight is not None:
        each = each * batch.weight
    return each if batch.selected is None else xp.where(batch.selected, each, 0.0)


def _without_delta(options: Mapping[str, Any]) -> None:
    if options["delta"] is not None:
        raise ValueError(f"delta: expected None for a loss without min(rho A, clip(rho) A), got {options['delta']!r}")


def clipped(options: Mapping[str, Any], epsilon_low, epsilon_high, level: str = "token") -> Objective:
    """-min(rho A, clip(rho) A), with rho at most delta."""
    low, high = number("epsilon_low", epsilon_low, 0.0, 1.0), number("epsilon_high", epsilon_high, 0.0)
    delta = None if options["delta"] is None else number("delta", options["delta"], above=1 + high)

    def surrogate(xp, batch: Batch) -> Surrogate:
        ratio, scale = batch.ratio, batch.advantages
        bounded = ratio if delta is None else xp.at_most(ratio, delta)
        each = -xp.minimum(bounded * scale, xp.clip(ratio, 1 - low, 1 + high) * scale)
        return Surrogate(
            _corrected(xp, batch, each), (ratio < 1 - low) & (scale < 0), (ratio > 1 + high) & (scale > 0)
        )

    return Objective(surrogate, level)


def cispo(options: Mapping[str, Any], epsilon_high) -> Objective:
    """-stop_gradient(min(rho, epsilon_high)) A log pi."""
    _without_delta(options)
    cap = number("epsilon_high", epsilon_high, above=0.0)

    def surrogate(xp, batch: Batch) -> Surrogate:
        ratio, scale = xp.stop_gradient(batch.ratio), batch.advantages
        each = -xp.at_most(ratio, cap) * scale * batch.logps
        return Surrogate(_corrected(xp, batch, each), high=(ratio > cap) & (scale > 0))

    return Objective(surrogate)


def sapo(options: Mapping[str, Any], temperature_pos, temperature_neg) -> Objective:
    """-4 / tau sigmoid(tau (rho - 1)) A, with a temperature tau for each sign of A."""
    _without_delta(options)
    positive = number("sapo_temperature_pos", temperature_pos, above=0.0)
    negative = number("sapo_temperature_neg", temperature_neg, above=0.0)

    def surrogate(xp, batch: Batch) -> Surrogate:
        scale = batch.advantages
        tau = xp.where(scale > 0, xp.full_like(scale, positive), negative)
        each = -xp.sigmoid(tau * (batch.ratio - 1)) * (4 / tau) * scale
        return Surrogate(_corrected(xp, batch, each))

    return Objective(surrogate)


def vespo(options: Mapping[str, Any], k_pos, lambda_pos, k_neg, lambda_neg) -> Objective:
    """-stop_gradient(W^k exp(lambda (1 - W))) A log pi, with the ratio W of the whole sequence to the sampler.

    The bounds are TRL's: a token's log-ratio is within 20, and log W from log(1e-8) to 20.
    """
    _without_delta(options)
    k = number("vespo_k_pos", k_pos, 0.0), number("vespo_k_neg", k_neg, 0.0)
    decay = number("vespo_lambda_pos", lambda_pos, above=0.0), number("vespo_lambda_neg", lambda_neg, above=0.0)
    if options["sampling_per_token_logps"] is not None and correction_of(options).level != "token":
        given = options["importance_sampling_mode"]
        raise ValueError(
            f"importance_sampling_mode: expected 'token_truncate' or 'token_mask' for vespo_loss, got {given!r}"
        )
    least, most = math.log(1e-8), 20.0

    def surrogate(xp, batch: Batch) -> Surrogate:
        scale = batch.advantages
        log_w = sequence_total(xp, xp.clip(xp.stop_gradient(batch.apart), -most, most), batch.valid)
        if batch.weight is not None:
            of_sampler = xp.log(xp.at_least(batch.weight, math.exp(least)))
            log_w = log_w + sequence_total(xp, xp.at_most(of_sampler, most), batch.valid)
        log_w = xp.clip(log_w, least, most)

        def of_sign(of_positive: float, of_negative: float):
            return xp.where(scale >= 0, xp.full_like(scale, of_positive), of_negative)

        phi = power(xp, of_sign(*k) * log_w + of_sign(*decay) * (1 - xp.exp(log_w)))
        return Surrogate(_corrected(xp, batch._replace(weight=None), -phi * scale * batch.logps))

    return Objective(surrogate, None)


def gmpo(options: Mapping[str, Any], epsilon_low, epsilon_high) -> Objective:
    """-A times the geometric mean of a sequence's ratios, each clipped on the side that A would push it to. Tokens that
    are not selected are left out of the mean."""
    _without_delta(options)
    low, high = number("epsilon_low", epsilon_low, 0.0), number("epsilon_high", epsilon_high, 0.0)

    def surrogate(xp, batch: Batch) -> Surrogate:
        apart, scale = batch.apart, batch.advantages
        bounded = xp.where(scale > 0, xp.at_most(apart, high), xp.at_least(apart, -low))
        counted = batch.valid if batch.selected is None else batch.selected
        each = -power(xp, sequence_mean(xp, bounded, counted)) * scale
        return Surrogate(
            _corrected(xp, batch._replace(selected=None), each), (apart < -low) & (scale < 0),
            (apart > high) & (scale > 0),
        )

    return Objective(surrogate, None, per_sequence=True)
