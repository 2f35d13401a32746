"""Policy losses: GRPO, Dr. GRPO, DAPO, GSPO, PPO, with a divergence from a reference and an entropy bonus.
``_losses/policy.py`` has their formulas and docstrings."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Optional

from torch import Tensor

from ..._losses import policy as shared
from ..._losses.options import HeadKeywords
from .. import _xp as xp

if TYPE_CHECKING:
    from typing_extensions import Unpack


class PolicyKeywords(HeadKeywords, total=False):
    mask: Optional[Tensor]
    old_per_token_logps: Optional[Tensor]
    ref_per_token_logps: Optional[Tensor]
    ref_hidden: Optional[Tensor]
    ref_weight: Optional[Tensor]
    ref_bias: Optional[Tensor]
    beta: float
    kl_estimator: str
    entropy_coef: float
    delta: Optional[float]
    normalizer: Optional[float | Tensor]


class PolicyLoss(NamedTuple):
    """A policy loss. Only ``loss`` has a gradient. Means are over the tokens that count."""

    loss: Tensor  # []
    logps: Tensor  # [B, T], the old_per_token_logps of later steps; 0 for ignored tokens
    entropy: Tensor  # [B, T], nats; 0 for ignored tokens
    kl: Tensor  # []: mean estimated divergence from the reference; 0 without one
    clip_ratio_low: Tensor  # []: fraction of tokens of negative advantage whose ratio is below the clip
    clip_ratio_high: Tensor  # []: fraction of tokens of positive advantage whose ratio is above it


@xp.takes({}, shared.group_advantages)
def group_advantages(rewards: Tensor, group_size: int, *, scale: bool = True, epsilon: float = 1e-4) -> Tensor:
    """Returns advantages [B] of rewards [B], with ``group_size`` consecutive completions per prompt."""
    return shared.group_advantages(xp, rewards, group_size, scale=scale, epsilon=epsilon)


@xp.takes(shared.POLICY, shared.grpo_loss, shared.TEXTS)
def grpo_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, bias: Optional[Tensor] = None,
    *, epsilon_low: float = 0.2, epsilon_high: float = 0.2, **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """Group relative policy optimization (Shao et al. 2024)."""
    return PolicyLoss(*shared.grpo_loss(
        xp, hidden, weight, target, advantages, bias, epsilon_low=epsilon_low, epsilon_high=epsilon_high, **options
    ))


@xp.takes(shared.POLICY, shared.dr_grpo_loss, shared.TEXTS)
def dr_grpo_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, bias: Optional[Tensor] = None,
    *, max_completion_length: Optional[int] = None, epsilon_low: float = 0.2, epsilon_high: float = 0.2,
    **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """Dr. GRPO (Liu et al. 2025)."""
    return PolicyLoss(*shared.dr_grpo_loss(
        xp, hidden, weight, target, advantages, bias, max_completion_length=max_completion_length,
        epsilon_low=epsilon_low, epsilon_high=epsilon_high, **options
    ))


@xp.takes(shared.POLICY, shared.dapo_loss, shared.TEXTS)
def dapo_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, bias: Optional[Tensor] = None,
    *, epsilon_low: float = 0.2, epsilon_high: float = 0.28, **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """DAPO (Yu et al. 2025)."""
    return PolicyLoss(*shared.dapo_loss(
        xp, hidden, weight, target, advantages, bias, epsilon_low=epsilon_low, epsilon_high=epsilon_high, **options
    ))


@xp.takes(shared.POLICY, shared.gspo_loss, shared.TEXTS)
def gspo_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, bias: Optional[Tensor] = None,
    *, token_level: bool = False, epsilon_low: float = 3e-4, epsilon_high: float = 4e-4,
    **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """Group sequence policy optimization (Zheng et al. 2025)."""
    return PolicyLoss(*shared.gspo_loss(
        xp, hidden, weight, target, advantages, bias, token_level=token_level, epsilon_low=epsilon_low,
        epsilon_high=epsilon_high, **options
    ))


@xp.takes(shared.POLICY, shared.ppo_loss, shared.TEXTS)
def ppo_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, bias: Optional[Tensor] = None,
    *, epsilon_low: float = 0.2, epsilon_high: float = 0.2, **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """The policy loss of proximal policy optimization (Schulman et al. 2017)."""
    return PolicyLoss(*shared.ppo_loss(
        xp, hidden, weight, target, advantages, bias, epsilon_low=epsilon_low, epsilon_high=epsilon_high, **options
    ))
