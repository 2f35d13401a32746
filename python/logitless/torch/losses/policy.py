"""Policy losses: GRPO, Dr. GRPO, DAPO, GSPO, PPO, with a divergence from a reference and an entropy bonus.

Each loss is a surrogate per token, min(rho A, clip(rho) A). They differ in the ratio rho, the clip and the divisor. The
policy's head takes one GEMM forward and three backward: four with an entropy bonus, and on a GPU mostly two without
one. A reference takes one, without gradients. Logits are not stored, and gradients of frozen tensors are not computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
from torch import Tensor

from ..._losses import HEAD, HEAD_DOCS, Function, HeadKeywords, choice, count, flag, head_of, number
from ._head import Reference, Tokens, sequences, shaped, takes, tensor, tokens

if TYPE_CHECKING:
    from typing_extensions import Unpack

POLICY: dict[str, Any] = dict(
    mask=None, old_per_token_logps=None, ref_per_token_logps=None, ref_hidden=None, ref_weight=None, ref_bias=None,
    beta=0.0, kl_estimator="k3", entropy_coef=0.0, delta=None, normalizer=None, **HEAD,
)

_ARGUMENTS = f"""hidden: [B, T, D], the states that predicted the tokens; float32, bfloat16, float16, or float64 slowly.
        weight: [V, D], the dtype of hidden. bias: [V].
        target: [B, T], int32 or int64: the sampled tokens; ``ignore_index`` where there is none.
        mask: [B, T], bool or numbers: tokens with 0 are ignored, like those of ``ignore_index``.
        old_per_token_logps: [B, T], of the policy that sampled the tokens; None: this policy's own, with a ratio of 1.
        ref_per_token_logps: [B, T], of the reference; or ref_hidden [B, T, D'], ref_weight [V, D'], ref_bias [V]: one
            GEMM, no gradients. Without ref_weight, the reference uses the policy's current head.
        beta: at least 0, the weight of the divergence: above 0 with a reference, and 0 without one.
        kl_estimator: per token, with d = log pi_ref - log pi: "k1" -d, "k2" d^2 / 2, "k3" exp(d) - d - 1.
        entropy_coef: the entropy of a token, times this, is subtracted from its loss; costs one more GEMM backward, two
            on a GPU.
        delta: upper bound of the ratio, clipped or not (two-sided clipping); None: no bound.
        normalizer: a positive number, or tensor of one element, that replaces the divisor: the tokens of all
            micro-batches, for example.
        {HEAD_DOCS}"""

_RETURNS = """Returns:
        PolicyLoss: the loss, with a gradient; log-probabilities, entropies, divergence and clip ratios, without one.

    Memory: the head's plan, within ``memory_budget``, and a few numbers per token. On a GPU, if exp(z) of all tokens
    fits and entropy_coef is 0, a GEMM is saved: the plan's workspace and weight's gradient then exist from the forward
    on.

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one."""


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


class _Clip(NamedTuple):
    low: float
    high: float
    delta: Optional[float]


def _documented(function: Function) -> Function:
    """Fills {arguments} and {returns} of a docstring."""
    if function.__doc__:
        function.__doc__ = function.__doc__.replace("{arguments}", _ARGUMENTS).replace("{returns}", _RETURNS)
    return function


def group_advantages(rewards: Tensor, group_size: int, *, scale: bool = True, epsilon: float = 1e-4) -> Tensor:
    """Returns advantages [B] of rewards [B], with ``group_size`` consecutive completions per prompt.

    An advantage is the reward minus the group's mean. With ``scale``, it is divided by the group's standard deviation
    (n - 1, as in TRL) + epsilon (GRPO, Shao et al. 2024). Without it, this is Dr. GRPO (Liu et al. 2025). Raises
    ValueError if B is not a multiple of group_size, and TypeError for integer rewards.
    """
    size = count("group_size", group_size, 2 if flag("scale", scale) else 1)
    if tensor("rewards", rewards).dim() != 1 or rewards.shape[0] % size:
        raise ValueError(f"rewards: expected [B], B a multiple of {size}, got {list(rewards.shape)}")
    if not rewards.is_floating_point():
        raise TypeError(f"rewards: expected a floating type, got {rewards.dtype}")
    groups = rewards.reshape(-1, size)
    apart = groups - groups.mean(1, keepdim=True)
    if scale:
        apart = apart / (groups.std(1, keepdim=True) + number("epsilon", epsilon, 0.0))
    return apart.flatten()


def _masked(target: Tensor, mask: Optional[Tensor], ignore_index: int) -> Tensor:
    if mask is None:
        return target
    return torch.where(shaped("mask", mask, tuple(target.shape)) != 0, target, ignore_index)


def _apart(name: str, given: Tensor, found: Tokens) -> Tensor:
    """Returns log pi minus the given log-probabilities [B, T]; 0 for ignored tokens."""
    other = shaped(name, given, tuple(found.logps.shape)).detach().to(found.logps.dtype)
    return torch.where(found.valid, found.logps - other, 0.0)


def _kl(estimator: str, apart: Tensor) -> Tensor:
    """Estimates the divergence from log pi - log pi_ref [B, T] (Schulman, Approximating KL divergence, 2020)."""
    if estimator == "k1":
        return apart
    return 0.5 * apart.square() if estimator == "k2" else torch.expm1(-apart) + apart


def _sum(values: Tensor, valid: Tensor) -> Tensor:
    """Sums over the tokens that count; the others may hold anything."""
    return torch.where(valid, values, 0.0).sum()


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    return _sum(values, valid) / valid.sum().clamp(min=1)


def _sequence_mean(values: Tensor, valid: Tensor) -> Tensor:
    """Returns [B, 1]: the mean over each sequence's tokens; 0 without tokens."""
    return torch.where(valid, values, 0.0).sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)


def _by_sequence(each: Tensor, valid: Tensor) -> tuple[Tensor, Any]:
    """Returns the sum over sequences of their token means, and its divisor."""
    return _sequence_mean(each, valid).sum(), max(each.shape[0], 1)


def _by_token(each: Tensor, valid: Tensor) -> tuple[Tensor, Any]:
    return _sum(each, valid), valid.sum().clamp(min=1)


def _by_constant(length: Optional[int]) -> Callable[[Tensor, Tensor], tuple[Tensor, Any]]:
    return lambda each, valid: (_sum(each, valid), max(each.shape[0] * (length or each.shape[1]), 1))


def _exp(apart: Tensor) -> Tensor:
    """Returns exp, bounded so that products with it do not overflow: ratios beyond have a gradient of 0, not NaN.
    """
    return apart.clamp(max=math.log(torch.finfo(apart.dtype).max) - 10).exp()


def _token_ratio(apart: Tensor, valid: Tensor) -> Tensor:
    return _exp(apart)


def _sequence_ratio(apart: Tensor, valid: Tensor) -> Tensor:
    """Returns [B, 1]: the geometric mean of a sequence's ratios."""
    return _exp(_sequence_mean(apart, valid))


def _sequence_token_ratio(apart: Tensor, valid: Tensor) -> Tensor:
    """Returns [B, T]: a sequence's ratio, with each token's own gradient (GSPO-token)."""
    return _exp(_sequence_mean(apart, valid)).detach() * (apart - apart.detach()).exp()


def _advantages(advantages: Any, shape: tuple[int, ...]) -> Tensor:
    found = shaped("advantages", advantages, shape[:1], shape).detach()
    return found[:, None] if found.dim() == 1 else found


def _surrogate(ratio: Tensor, advantages: Tensor, clip: _Clip) -> Tensor:
    bounded = ratio if clip.delta is None else ratio.clamp(max=clip.delta)
    return -torch.minimum(bounded * advantages, ratio.clamp(1 - clip.low, 1 + clip.high) * advantages)


def _normalizer(value: Any, default: Any) -> Any:
    if value is None:
        return default
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"normalizer: expected a tensor of one number, got {list(value.shape)}")
        return value.detach().reshape(())
    return number("normalizer", value, above=0.0)


def _clip_of(low: Any, high: Any, delta: Any) -> _Clip:
    low, high = number("epsilon_low", low, 0.0, 1.0), number("epsilon_high", high, 0.0)
    return _Clip(low, high, None if delta is None else number("delta", delta, above=1 + high))


def _policy_loss(hidden, weight, target, advantages, bias, options, ratio_of, reduce, clip) -> PolicyLoss:
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
    sequences(hidden, target)
    target = _masked(target, options["mask"], head.ignore_index)
    scale = _advantages(advantages, tuple(target.shape))
    found = tokens(hidden, weight, target, bias, head, entropy=entropy_coef != 0)

    old = options["old_per_token_logps"]
    apart = _apart("old_per_token_logps", found.logps.detach() if old is None else old, found)
    ratio = ratio_of(apart, found.valid)
    scale = scale.to(ratio.dtype)
    each = _surrogate(ratio, scale, limits)
    kl = torch.zeros_like(found.logps[:1, :1])
    if beta:
        if computed:
            ref_logps = reference.tokens(weight, target, bias, head).logps
        kl = _kl(estimator, _apart("ref_per_token_logps", ref_logps, found))
        each = each + beta * kl
    if entropy_coef:
        each = each - entropy_coef * found.entropy
    total, default = reduce(each.expand_as(found.logps), found.valid)
    loss = total / _normalizer(options["normalizer"], default)
    with torch.no_grad():
        low = _mean(((ratio < 1 - limits.low) & (scale < 0)).expand_as(found.valid), found.valid)
        high = _mean(((ratio > 1 + limits.high) & (scale > 0)).expand_as(found.valid), found.valid)
        mean_kl = _mean(kl.expand_as(found.logps), found.valid)
    return PolicyLoss(loss, found.logps.detach(), found.entropy.detach(), mean_kl, low, high)


@_documented
@takes(POLICY)
def grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    bias: Optional[Tensor] = None,
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
        hidden, weight, target, advantages, bias, options, _token_ratio, _by_sequence, (epsilon_low, epsilon_high)
    )


@takes(POLICY)
def dr_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    bias: Optional[Tensor] = None,
    *,
    max_completion_length: Optional[int] = None,
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
        hidden, weight, target, advantages, bias, options, _token_ratio, _by_constant(length),
        (epsilon_low, epsilon_high),
    )


@takes(POLICY)
def dapo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    bias: Optional[Tensor] = None,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.28,
    **options: Unpack[PolicyKeywords],
) -> PolicyLoss:
    """DAPO (Yu et al. 2025, equation 8): ``grpo_loss``'s token losses with a higher upper clip, and their mean over all
    tokens of the batch. Over several processes or micro-batches, pass the total token count as ``normalizer``.
    Arguments, results, memory and errors: as in ``grpo_loss``."""
    return _policy_loss(
        hidden, weight, target, advantages, bias, options, _token_ratio, _by_token, (epsilon_low, epsilon_high)
    )


@takes(POLICY)
def gspo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    bias: Optional[Tensor] = None,
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
        shaped("advantages", advantages, tuple(tensor("target", target).shape[:1]))
    ratio = _sequence_token_ratio if token_level else _sequence_ratio
    return _policy_loss(
        hidden, weight, target, advantages, bias, options, ratio, _by_sequence, (epsilon_low, epsilon_high)
    )


@takes(POLICY)
def ppo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    bias: Optional[Tensor] = None,
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
        hidden, weight, target, advantages, bias, options, _token_ratio, _by_token, (epsilon_low, epsilon_high)
    )
