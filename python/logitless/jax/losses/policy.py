"""Policy losses: GRPO, Dr. GRPO, DAPO, GSPO, PPO, with a divergence from a reference and an entropy bonus.

Each loss is a surrogate per token, min(rho A, clip(rho) A). They differ in the ratio rho, the clip and the divisor. The
policy's head takes one GEMM forward and three backward (four with an entropy bonus). A reference takes one, without
gradients. Logits are not stored, and gradients of frozen tensors are not computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..._losses import HEAD, HEAD_DOCS, Function, HeadKeywords, choice, count, flag, head_of, number, takes
from .. import _arguments
from ._head import Reference, Tokens, fixed, sequences, shaped, tokens

if TYPE_CHECKING:
    from typing_extensions import Unpack

POLICY: dict[str, Any] = dict(
    mask=None, old_per_token_logps=None, ref_per_token_logps=None, ref_hidden=None, ref_weight=None, ref_bias=None,
    beta=0.0, kl_estimator="k3", entropy_coef=0.0, delta=None, normalizer=None, **HEAD,
)

_ARGUMENTS = f"""hidden: [B, T, D], the states that predicted the tokens; float32, bfloat16 or float16.
        weight: [V, D], the dtype of hidden. bias: [V].
        targets: [B, T], int32 or int64: the sampled tokens; ``ignore_index`` where there is none.
        mask: [B, T], bool or numbers: tokens with 0 are ignored, like those of ``ignore_index``.
        old_per_token_logps: [B, T], of the policy that sampled the tokens; None: this policy's own, with a ratio of 1.
        ref_per_token_logps: [B, T], of the reference; or ref_hidden [B, T, D'], ref_weight [V, D'], ref_bias [V]: one
            GEMM, no gradients. Without ref_weight, the reference uses the policy's current head.
        beta: at least 0, the weight of the divergence: above 0 with a reference, and 0 without one.
        kl_estimator: per token, with d = log pi_ref - log pi: "k1" -d, "k2" d^2 / 2, "k3" exp(d) - d - 1.
        entropy_coef: the entropy of a token, times this, is subtracted from its loss; costs one more GEMM backward.
        delta: upper bound of the ratio, clipped or not (two-sided clipping); None: no bound.
        normalizer: a positive number, or array of one element, that replaces the divisor: the tokens of all
            micro-batches, for example.
        {HEAD_DOCS}"""

_RETURNS = """Returns:
        PolicyLoss: the loss, with a gradient; log-probabilities, entropies, divergence and clip ratios, without one.

    Memory: the head's plan, within ``memory_budget``, and a few numbers per token.

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one."""


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


class _Clip(NamedTuple):
    low: float
    high: float
    delta: float | None


def _documented(function: Function) -> Function:
    """Fills {arguments} and {returns} of a docstring."""
    if function.__doc__:
        function.__doc__ = function.__doc__.replace("{arguments}", _ARGUMENTS).replace("{returns}", _RETURNS)
    return function


def group_advantages(rewards: ArrayLike, group_size: int, *, scale: bool = True, epsilon: float = 1e-4) -> jax.Array:
    """Returns advantages [B] of rewards [B], with ``group_size`` consecutive completions per prompt.

    An advantage is the reward minus the group's mean. With ``scale``, it is divided by the group's standard deviation
    (n - 1, as in TRL) + epsilon (GRPO, Shao et al. 2024). Without it, this is Dr. GRPO (Liu et al. 2025). Raises
    ValueError if B is not a multiple of group_size, and TypeError for integer rewards.
    """
    size = count("group_size", group_size, 2 if flag("scale", scale) else 1)
    found = _arguments.floats("rewards", rewards)
    if found.ndim != 1 or found.shape[0] % size:
        raise ValueError(f"rewards: expected [B], B a multiple of {size}, got {list(found.shape)}")
    groups = found.reshape(-1, size)
    apart = groups - groups.mean(1, keepdims=True)
    if scale:
        apart = apart / (groups.std(1, keepdims=True, ddof=1) + number("epsilon", epsilon, 0.0))
    return apart.reshape(-1)


def _masked(targets: jax.Array, mask: ArrayLike | None, ignore_index: int) -> jax.Array:
    if mask is None:
        return targets
    return jnp.where(shaped("mask", mask, targets.shape) != 0, targets, ignore_index)


def _apart(name: str, given: ArrayLike, found: Tokens) -> jax.Array:
    """Returns log pi minus the given log-probabilities [B, T]; 0 for ignored tokens."""
    other = fixed(name, given, found.logps.shape)
    return jnp.where(found.valid, found.logps - other, 0.0)


def _kl(estimator: str, apart: jax.Array) -> jax.Array:
    """Estimates the divergence from log pi - log pi_ref [B, T] (Schulman, Approximating KL divergence, 2020)."""
    if estimator == "k1":
        return apart
    return 0.5 * apart**2 if estimator == "k2" else jnp.expm1(-apart) + apart


def _sum(values: jax.Array, valid: jax.Array) -> jax.Array:
    """Sums over the tokens that count; the others may hold anything."""
    return jnp.where(valid, values, 0.0).sum()


def _mean(values: jax.Array, valid: jax.Array) -> jax.Array:
    return _sum(values, valid) / jnp.maximum(valid.sum(), 1)


def _sequence_mean(values: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns [B, 1]: the mean over each sequence's tokens; 0 without tokens."""
    return jnp.where(valid, values, 0.0).sum(-1, keepdims=True) / jnp.maximum(valid.sum(-1, keepdims=True), 1)


def _by_sequence(each: jax.Array, valid: jax.Array) -> tuple[jax.Array, Any]:
    """Returns the sum over sequences of their token means, and its divisor."""
    return _sequence_mean(each, valid).sum(), max(each.shape[0], 1)


def _by_token(each: jax.Array, valid: jax.Array) -> tuple[jax.Array, Any]:
    return _sum(each, valid), jnp.maximum(valid.sum(), 1)


def _by_constant(length: int | None) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, Any]]:
    return lambda each, valid: (_sum(each, valid), max(each.shape[0] * (length or each.shape[1]), 1))


def _exp(apart: jax.Array) -> jax.Array:
    """Returns exp, bounded so that products with it do not overflow: ratios beyond have a gradient of 0, not NaN.
    """
    return jnp.exp(jnp.minimum(apart, math.log(jnp.finfo(apart.dtype).max) - 10))


def _token_ratio(apart: jax.Array, valid: jax.Array) -> jax.Array:
    return _exp(apart)


def _sequence_ratio(apart: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns [B, 1]: the geometric mean of a sequence's ratios."""
    return _exp(_sequence_mean(apart, valid))


def _sequence_token_ratio(apart: jax.Array, valid: jax.Array) -> jax.Array:
    """Returns [B, T]: a sequence's ratio, with each token's own gradient (GSPO-token)."""
    of_sequence = jax.lax.stop_gradient(_sequence_ratio(apart, valid))
    return of_sequence * jnp.exp(apart - jax.lax.stop_gradient(apart))


def _advantages(advantages: Any, shape: tuple[int, ...]) -> jax.Array:
    found = fixed("advantages", advantages, shape[:1], shape)
    return found[:, None] if found.ndim == 1 else found


def _surrogate(ratio: jax.Array, advantages: jax.Array, clip: _Clip) -> jax.Array:
    bounded = ratio if clip.delta is None else jnp.minimum(ratio, clip.delta)
    return -jnp.minimum(bounded * advantages, jnp.clip(ratio, 1 - clip.low, 1 + clip.high) * advantages)


def _normalizer(value: Any, default: Any) -> Any:
    if value is None:
        return default
    if isinstance(value, (bool, int, float)):
        return number("normalizer", value, above=0.0)
    found = _arguments.array("normalizer", value)
    if found.size != 1:
        raise ValueError(f"normalizer: expected an array of one number, got {list(found.shape)}")
    return jax.lax.stop_gradient(found.reshape(()))


def _clip_of(low: Any, high: Any, delta: Any) -> _Clip:
    low, high = number("epsilon_low", low, 0.0, 1.0), number("epsilon_high", high, 0.0)
    return _Clip(low, high, None if delta is None else number("delta", delta, above=1 + high))


def _policy_loss(hidden, weight, targets, advantages, bias, options, ratio_of, reduce, clip) -> PolicyLoss:
    head = head_of(options)
    beta, entropy_coef = number("beta", options["beta"], 0.0), number("entropy_coef", options["entropy_coef"])
    estimator = choice("kl_estimator", options["kl_estimator"], ("k1", "k2", "k3"))
    limits = _clip_of(clip[0], clip[1], options["delta"])
    reference = Reference(options["ref_hidden"], options["ref_weight"], options["ref_bias"])
    ref_logps = options["ref_per_token_logps"]
    computed = reference.check("ref_per_token_logps", ref_logps)
    if (computed or ref_logps is not None) != (beta > 0):
        wanted = "it or ref_hidden beside" if beta else "None, and no ref_hidden, beside"
        raise ValueError(f"ref_per_token_logps: expected {wanted} beta={beta}, got {'none' if beta else 'a reference'}")
    hidden, targets = sequences(hidden, targets)
    targets = _masked(targets, options["mask"], head.ignore_index)
    scale = _advantages(advantages, targets.shape)
    found = tokens(hidden, weight, targets, bias, head)

    old = options["old_per_token_logps"]
    apart = _apart("old_per_token_logps", found.logps if old is None else old, found)
    ratio = ratio_of(apart, found.valid)
    each = _surrogate(ratio, scale, limits)
    kl = jnp.zeros_like(found.logps[:1, :1])
    if beta:
        if computed:
            ref_logps = reference.tokens(weight, targets, bias, head).logps
        kl = _kl(estimator, _apart("ref_per_token_logps", ref_logps, found))
        each = each + beta * kl
    if entropy_coef:
        each = each - entropy_coef * found.entropy
    total, default = reduce(jnp.broadcast_to(each, found.logps.shape), found.valid)
    loss = total / _normalizer(options["normalizer"], default)
    low = _mean((ratio < 1 - limits.low) & (scale < 0), found.valid)
    high = _mean((ratio > 1 + limits.high) & (scale > 0), found.valid)
    parts = found.logps, found.entropy, _mean(kl, found.valid), low, high
    return PolicyLoss(loss, *map(jax.lax.stop_gradient, parts))


@_documented
@takes(POLICY)
def grpo_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    advantages: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """Group relative policy optimization (Shao et al. 2024, equation 3).

    The mean over sequences of their token means of -min(rho A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A) + beta
    KL, with rho = pi / pi_old. The paper uses beta = 0.04.

    Args:
        {arguments}
        advantages: [B] or [B, T], such as those of ``group_advantages``. No gradient.
        epsilon_low: from 0 to 1. epsilon_high: at least 0.

    {returns}
    """
    return _policy_loss(
        hidden, weight, targets, advantages, bias, options, _token_ratio, _by_sequence, (epsilon_low, epsilon_high)
    )


@takes(POLICY)
def dr_grpo_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    advantages: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    max_completion_length: int | None = None,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """Dr. GRPO (Liu et al. 2025): the sum of ``grpo_loss``'s token losses, divided by the constant B
    max_completion_length. So the loss does not depend on the lengths of completions. None: T. Advantages are not
    divided by a standard deviation (``group_advantages(..., scale=False)``). Arguments, results, memory and errors: as
    in ``grpo_loss``."""
    length = None if max_completion_length is None else count("max_completion_length", max_completion_length)
    return _policy_loss(
        hidden, weight, targets, advantages, bias, options, _token_ratio, _by_constant(length),
        (epsilon_low, epsilon_high),
    )


@takes(POLICY)
def dapo_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    advantages: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.28,
    **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """DAPO (Yu et al. 2025, equation 8): ``grpo_loss``'s token losses with a higher upper clip, and their mean over all
    tokens of the batch. Over several processes or micro-batches, pass the total token count as ``normalizer``.
    Arguments, results, memory and errors: as in ``grpo_loss``."""
    return _policy_loss(
        hidden, weight, targets, advantages, bias, options, _token_ratio, _by_token, (epsilon_low, epsilon_high)
    )


@takes(POLICY)
def gspo_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    advantages: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    token_level: bool = False,
    epsilon_low: float = 3e-4,
    epsilon_high: float = 4e-4,
    **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """Group sequence policy optimization (Zheng et al. 2025): the mean over sequences of -min(s A, clip(s) A), with the
    geometric mean s of a sequence's token ratios.

    token_level: the paper's GSPO-token, with advantages [B, T]: each token has the value s, with its own gradient.
        Otherwise advantages are [B]. Arguments, results, memory and errors: as in ``grpo_loss``.
    """
    if not flag("token_level", token_level):
        fixed("advantages", advantages, jnp.shape(targets)[:1])
    ratio = _sequence_token_ratio if token_level else _sequence_ratio
    return _policy_loss(
        hidden, weight, targets, advantages, bias, options, ratio, _by_sequence, (epsilon_low, epsilon_high)
    )


@takes(POLICY)
def ppo_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    advantages: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """The policy loss of proximal policy optimization (Schulman et al. 2017, equations 7 and 9).

    The mean over all tokens of -min(rho A, clip(rho) A) - entropy_coef H + beta KL, with a token's entropy H in nats
    over the full vocabulary. The paper uses entropy_coef = 0.01. Advantages are [B, T], such as a critic's, or [B].
    Arguments, results, memory and errors: as in ``grpo_loss``.
    """
    return _policy_loss(
        hidden, weight, targets, advantages, bias, options, _token_ratio, _by_token, (epsilon_low, epsilon_high)
    )
