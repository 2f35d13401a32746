"""Policy losses: GRPO and its successors, PPO, with a divergence from a reference and an entropy bonus.
``_losses/policy.py`` has their formulas and docstrings."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
from jax.typing import ArrayLike

from ..._losses import policy as shared
from ..._losses.options import HeadKeywords, ready
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
    use_bias_correction_kl: bool
    entropy_coef: float
    top_entropy_quantile: float
    delta: float | None
    importance_sampling_level: str | None
    sampling_per_token_logps: ArrayLike | None
    importance_sampling_mode: str
    importance_sampling_clip_min: float | None
    importance_sampling_clip_max: float | None
    off_policy_mask_threshold: float | None
    normalizer: ArrayLike | None


class PolicyLoss(NamedTuple):
    """A policy loss. Only ``loss`` has a gradient. Means are over the tokens that count."""

    loss: jax.Array  # []
    logps: jax.Array  # [B, T], the old_per_token_logps of later steps; 0 for ignored tokens
    entropy: jax.Array  # [B, T], nats; 0 for ignored tokens
    kl: jax.Array  # []: mean estimated divergence from the reference; 0 without one
    clip_ratio_low: jax.Array  # []: fraction of tokens of negative advantage whose ratio is below the clip
    clip_ratio_high: jax.Array  # []: fraction of tokens of positive advantage whose ratio is above it
    importance_weight: jax.Array  # []: mean bounded weight pi_old / pi_sampling; 1 without sampling_per_token_logps


_of_policy = ready(xp, shared, shared.POLICY, PolicyLoss, shared.TEXTS)


@ready(xp, shared, {})
def group_advantages(
    rewards: ArrayLike, group_size: int, *, scale: bool | str = True, epsilon: float = 1e-4
) -> jax.Array:
    """Returns advantages [B] of rewards [B], with ``group_size`` consecutive completions per prompt."""


@ready(xp, shared, {})
def kl_penalized_rewards(
    rewards: ArrayLike, old_per_token_logps: ArrayLike, ref_per_token_logps: ArrayLike,
    *, beta: float, mask: ArrayLike | None = None, kl_estimator: str = "k1",
) -> jax.Array:
    """Returns rewards [B] minus beta times each sequence's divergence from the reference."""


@_of_policy
def grpo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, advantages: ArrayLike, bias: ArrayLike | None = None,
    *, epsilon_low: float = 0.2, epsilon_high: float = 0.2, **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """Group relative policy optimization (Shao et al. 2024)."""


@_of_policy
def dr_grpo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, advantages: ArrayLike, bias: ArrayLike | None = None,
    *, max_completion_length: int | None = None, epsilon_low: float = 0.2, epsilon_high: float = 0.2,
    **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """Dr. GRPO (Liu et al. 2025)."""


@_of_policy
def dapo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, advantages: ArrayLike, bias: ArrayLike | None = None,
    *, epsilon_low: float = 0.2, epsilon_high: float = 0.28, **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """DAPO (Yu et al. 2025)."""


@_of_policy
def gspo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, advantages: ArrayLike, bias: ArrayLike | None = None,
    *, epsilon_low: float = 3e-4, epsilon_high: float = 4e-4, **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """Group sequence policy optimization (Zheng et al. 2025)."""


@_of_policy
def bnpo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, advantages: ArrayLike, bias: ArrayLike | None = None,
    *, epsilon_low: float = 0.2, epsilon_high: float = 0.2, **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """TRL's loss type "bnpo"."""


@_of_policy
def luspo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, advantages: ArrayLike, bias: ArrayLike | None = None,
    *, epsilon_low: float = 2e-3, epsilon_high: float = 2.5e-3, **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """Length-unbiased sequence policy optimization (2026)."""


@_of_policy
def gmpo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, advantages: ArrayLike, bias: ArrayLike | None = None,
    *, epsilon_low: float = 0.4, epsilon_high: float = 0.4, **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """Geometric-mean policy optimization (Zhao et al. 2025)."""


@_of_policy
def cispo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, advantages: ArrayLike, bias: ArrayLike | None = None,
    *, epsilon_high: float = 5.0, **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """CISPO (MiniMax-M1, 2025)."""


@_of_policy
def sapo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, advantages: ArrayLike, bias: ArrayLike | None = None,
    *, sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05, **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """Soft adaptive policy optimization (Gao et al. 2025)."""


@_of_policy
def vespo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, advantages: ArrayLike, bias: ArrayLike | None = None,
    *, vespo_k_pos: float = 2.0, vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
    **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """Variational sequence-level soft policy optimization (2026)."""


@_of_policy
def ppo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, advantages: ArrayLike, bias: ArrayLike | None = None,
    *, epsilon_low: float = 0.2, epsilon_high: float = 0.2, **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """The policy loss of proximal policy optimization (Schulman et al. 2017)."""
