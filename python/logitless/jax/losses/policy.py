"""Policy losses: GRPO, Dr. GRPO, DAPO, GSPO, PPO, with a divergence from a reference and an entropy bonus.
``_losses/policy.py`` has their formulas and docstrings."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
from jax.typing import ArrayLike

from ..._losses import policy as shared
from ..._losses.options import HeadKeywords
from .. import _xp as xp

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PolicyKeywords(HeadKeywords, total=False):
    mask: ArrayLike | None
    old_per_token_logps: ArrayLike | None
    ref_per_token_logps: ArrayLike | None
    ref_hidden: ArrayLike | None
    ref_weight: ArrayLike | None
    ref_bias: ArrayLike | None
    beta: float
    kl_estimator: str
    entropy_coef: float
    delta: float | None
    normalizer: ArrayLike | None


class PolicyLoss(NamedTuple):
    """A policy loss. Only ``loss`` has a gradient. Means are over the tokens that count."""

    loss: jax.Array  # []
    logps: jax.Array  # [B, T], the old_per_token_logps of later steps; 0 for ignored tokens
    entropy: jax.Array  # [B, T], nats; 0 for ignored tokens
    kl: jax.Array  # []: mean estimated divergence from the reference; 0 without one
    clip_ratio_low: jax.Array  # []: fraction of tokens of negative advantage whose ratio is below the clip
    clip_ratio_high: jax.Array  # []: fraction of tokens of positive advantage whose ratio is above it


@xp.takes({}, shared.group_advantages)
def group_advantages(rewards: ArrayLike, group_size: int, *, scale: bool = True, epsilon: float = 1e-4) -> jax.Array:
    """Returns advantages [B] of rewards [B], with ``group_size`` consecutive completions per prompt."""
    return shared.group_advantages(xp, rewards, group_size, scale=scale, epsilon=epsilon)


@xp.takes(shared.POLICY, shared.grpo_loss, shared.TEXTS)
def grpo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, advantages: ArrayLike, bias: ArrayLike | None = None,
    *, epsilon_low: float = 0.2, epsilon_high: float = 0.2, **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """Group relative policy optimization (Shao et al. 2024)."""
    return PolicyLoss(*shared.grpo_loss(
        xp, hidden, weight, targets, advantages, bias, epsilon_low=epsilon_low, epsilon_high=epsilon_high, **options
    ))


@xp.takes(shared.POLICY, shared.dr_grpo_loss, shared.TEXTS)
def dr_grpo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, advantages: ArrayLike, bias: ArrayLike | None = None,
    *, max_completion_length: int | None = None, epsilon_low: float = 0.2, epsilon_high: float = 0.2,
    **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """Dr. GRPO (Liu et al. 2025)."""
    return PolicyLoss(*shared.dr_grpo_loss(
        xp, hidden, weight, targets, advantages, bias, max_completion_length=max_completion_length,
        epsilon_low=epsilon_low, epsilon_high=epsilon_high, **options
    ))


@xp.takes(shared.POLICY, shared.dapo_loss, shared.TEXTS)
def dapo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, advantages: ArrayLike, bias: ArrayLike | None = None,
    *, epsilon_low: float = 0.2, epsilon_high: float = 0.28, **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """DAPO (Yu et al. 2025)."""
    return PolicyLoss(*shared.dapo_loss(
        xp, hidden, weight, targets, advantages, bias, epsilon_low=epsilon_low, epsilon_high=epsilon_high, **options
    ))


@xp.takes(shared.POLICY, shared.gspo_loss, shared.TEXTS)
def gspo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, advantages: ArrayLike, bias: ArrayLike | None = None,
    *, token_level: bool = False, epsilon_low: float = 3e-4, epsilon_high: float = 4e-4,
    **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """Group sequence policy optimization (Zheng et al. 2025)."""
    return PolicyLoss(*shared.gspo_loss(
        xp, hidden, weight, targets, advantages, bias, token_level=token_level, epsilon_low=epsilon_low,
        epsilon_high=epsilon_high, **options
    ))


@xp.takes(shared.POLICY, shared.ppo_loss, shared.TEXTS)
def ppo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, advantages: ArrayLike, bias: ArrayLike | None = None,
    *, epsilon_low: float = 0.2, epsilon_high: float = 0.2, **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """The policy loss of proximal policy optimization (Schulman et al. 2017)."""
    return PolicyLoss(*shared.ppo_loss(
        xp, hidden, weight, targets, advantages, bias, epsilon_low=epsilon_low, epsilon_high=epsilon_high, **options
    ))
