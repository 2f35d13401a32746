"""Policy losses: GRPO, Dr. GRPO, DAPO, GSPO, PPO, with a divergence from a reference and an entropy bonus.

Each loss is a surrogate per token, min(rho A, clip(rho) A). They differ in the ratio rho, the clip and the divisor. The
policy's head takes one GEMM forward and three backward, and four with an entropy bonus; PyTorch on a GPU mostly takes
two without one. A reference takes one, without gradients. Logits are not stored, and gradients of frozen tensors are
not computed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional

from .head import Reference, Tokens, scalar, sequences
from .options import HEAD, choice, count, flag, head_of, number

POLICY: dict[str, Any] = dict(
    mask=None, old_per_token_logps=None, ref_per_token_logps=None, ref_hidden=None, ref_weight=None, ref_bias=None,
    beta=0.0, kl_estimator="k3", entropy_coef=0.0, delta=None, normalizer=None, **HEAD,
)

TEXTS = dict(
    arguments="""hidden: [B, T, D], the states that predicted the tokens; {floats}.
        weight: [V, D], the dtype of hidden, or float32 beside 16 bits. bias: [V].
        {target}: [B, T], int32 or int64: the sampled tokens; ``ignore_index`` where there is none.
        mask: [B, T], bool or numbers: tokens with 0 are ignored, like those of ``ignore_index``.
        old_per_token_logps: [B, T], of the policy that sampled the tokens; None: this policy's own, with a ratio of 1.
        ref_per_token_logps: [B, T], of the reference; or ref_hidden [B, T, D'], ref_weight [V, D'], ref_bias [V]: one
            GEMM, no gradients. Without ref_weight, the reference uses the policy's current head.
        beta: at least 0, the weight of the divergence: above 0 with a reference, and 0 without one.
        kl_estimator: per token, with d = log pi_ref - log pi: "k1" -d, "k2" d^2 / 2, "k3" exp(d) - d - 1.
        torch: entropy_coef: the entropy of a token, times this, is subtracted from its loss; costs one more GEMM
        torch:     backward, two on a GPU.
        jax: entropy_coef: the entropy of a token, times this, is subtracted from its loss; costs one more GEMM backward.
        delta: upper bound of the ratio, clipped or not (two-sided clipping); None: no bound.
        normalizer: a positive number, or {array} of one element, that replaces the divisor: the tokens of all
            micro-batches, for example.
        {head}""",
    returns="""Returns:
        PolicyLoss: the loss, with a gradient; log-probabilities, entropies, divergence and clip ratios, without one.

    Memory: the head's plan, within ``memory_budget``, and a few numbers per token.
    torch: On a GPU, if exp(z) of all tokens fits and entropy_coef is 0, a GEMM is saved: the plan's workspace and
    torch: weight's gradient then exist from the forward on.

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one.""",
)


class _Clip(NamedTuple):
    low: float
    high: float
    delta: Optional[float]


def group_advantages(xp, rewards, group_size, *, scale, epsilon):
    """Returns advantages [B] of rewards [B], with ``group_size`` consecutive completions per prompt.

    An advantage is the reward minus the group's mean. With ``scale``, it is divided by the group's standard deviation
    (n - 1, as in TRL) + epsilon (GRPO, Shao et al. 2024). Without it, this is Dr. GRPO (Liu et al. 2025). Raises
    ValueError if B is not a multiple of group_size, and TypeError for integer rewards.
    """
    size = count("group_size", group_size, 2 if flag("scale", scale) else 1)
    found = xp.states("rewards", rewards)
    if found.ndim != 1 or found.shape[0] % size:
        raise ValueError(f"rewards: expected [B], B a multiple of {size}, got {list(found.shape)}")
    if not xp.is_floating(found):
        raise TypeError(f"rewards: expected a floating type, got {found.dtype}")
    groups = found.reshape(-1, size)
    apart = groups - groups.mean(1)[:, None]
    if scale:
        apart = apart / (xp.deviation(groups)[:, None] + number("epsilon", epsilon, 0.0))
    return apart.reshape(-1)


# --- Losses of log-probabilities [B, T].


def _apart(xp, name: str, given, found: Tokens):
    """Returns log pi minus the given log-probabilities [B, T]; 0 for ignored tokens."""
    other = xp.fixed(name, given, found.logps.dtype, tuple(found.logps.shape))
    return xp.where(found.valid, found.logps - other, 0.0)


def _kl(xp, estimator: str, apart):
    """Estimates the divergence from log pi - log pi_ref [B, T] (Schulman, Approximating KL divergence, 2020)."""
    if estimator == "k1":
        return apart
    return 0.5 * apart**2 if estimator == "k2" else xp.expm1(-apart) + apart


def _sum(xp, values, valid):
    """Sums over the tokens that count; the others may hold anything."""
    return xp.where(valid, values, 0.0).sum()


def _mean(xp, values, valid):
    return _sum(xp, values, valid) / xp.at_least(valid.sum(), 1)


def _sequence_mean(xp, values, valid):
    """Returns [B]: the mean over each sequence's tokens; 0 without tokens."""
    return xp.where(valid, values, 0.0).sum(-1) / xp.at_least(valid.sum(-1), 1)


def _by_sequence(xp, each, valid) -> tuple[Any, Any]:
    """Returns the sum over sequences of their token means, and its divisor."""
    return _sequence_mean(xp, each, valid).sum(), max(each.shape[0], 1)


def _by_token(xp, each, valid) -> tuple[Any, Any]:
    return _sum(xp, each, valid), xp.at_least(valid.sum(), 1)


def _exp(xp, apart):
    """Returns exp, bounded so that products with it do not overflow: ratios beyond have a gradient of 0, not NaN.
    """
    return xp.exp(xp.at_most(apart, math.log(xp.finfo(apart.dtype).max) - 10))


def _token_ratio(xp, apart, valid):
    return _exp(xp, apart)


def _sequence_ratio(xp, apart, valid):
    """Returns [B, 1]: the geometric mean of a sequence's ratios."""
    return _exp(xp, _sequence_mean(xp, apart, valid))[:, None]


def _sequence_token_ratio(xp, apart, valid):
    """Returns [B, T]: a sequence's ratio, with each token's own gradient (GSPO-token)."""
    return xp.stop_gradient(_sequence_ratio(xp, apart, valid)) * xp.exp(apart - xp.stop_gradient(apart))


def _surrogate(xp, ratio, advantages, clip: _Clip):
    bounded = ratio if clip.delta is None else xp.at_most(ratio, clip.delta)
    return -xp.minimum(bounded * advantages, xp.clip(ratio, 1 - clip.low, 1 + clip.high) * advantages)


# --- Arguments, and the head.


def _clip_of(low, high, delta) -> _Clip:
    low, high = number("epsilon_low", low, 0.0, 1.0), number("epsilon_high", high, 0.0)
    return _Clip(low, high, None if delta is None else number("delta", delta, above=1 + high))


def _policy_loss(
    xp, hidden, weight, target, advantages, bias, options, clip, ratio_of=_token_ratio, reduce=_by_token,
    of_tokens: bool = True,
) -> tuple[Any, ...]:
    """Returns the fields of PolicyLoss. of_tokens: advantages may be [B, T], not only [B]."""
    head = head_of(options)
    beta, entropy_coef = number("beta", options["beta"], 0.0), number("entropy_coef", options["entropy_coef"])
    estimator = choice("kl_estimator", options["kl_estimator"], ("k1", "k2", "k3"))
    limits = _clip_of(clip[0], clip[1], options["delta"])
    reference = Reference(options["ref_hidden"], options["ref_weight"], options["ref_bias"])
    ref_logps, mask, divisor = options["ref_per_token_logps"], options["mask"], options["normalizer"]
    computed = reference.check(xp, "ref_per_token_logps", ref_logps)
    if (computed or ref_logps is not None) != (beta > 0):
        wanted = "it or ref_hidden beside" if beta else "None, and no ref_hidden, beside"
        raise ValueError(f"ref_per_token_logps: expected {wanted} beta={beta}, got {'none' if beta else 'a reference'}")
    hidden, target = sequences(xp, hidden, target)
    shape = tuple(target.shape)
    scale = xp.shaped("advantages", advantages, shape[:1], *([shape] if of_tokens else []))
    if mask is not None:
        target = xp.where(xp.shaped("mask", mask, shape) != 0, target, head.ignore_index)
    found = xp.tokens(hidden, weight, target, bias, head, entropy_coef != 0)

    scale = xp.fixed("advantages", scale, found.logps.dtype)
    scale = scale[:, None] if scale.ndim == 1 else scale
    old = options["old_per_token_logps"]
    apart = _apart(xp, "old_per_token_logps", found.logps if old is None else old, found)
    ratio = ratio_of(xp, apart, found.valid)
    each = _surrogate(xp, ratio, scale, limits)
    kl = xp.zeros_like(found.logps[:1, :1])
    if beta:
        if computed:
            ref_logps = reference.tokens(xp, weight, target, bias, head).logps
        kl = _kl(xp, estimator, _apart(xp, "ref_per_token_logps", ref_logps, found))
        each = each + beta * kl
    if entropy_coef:
        each = each - entropy_coef * found.entropy
    total, default = reduce(xp, xp.broadcast_to(each, found.logps.shape), found.valid)
    loss = total / (default if divisor is None else scalar(xp, "normalizer", divisor, above=0.0))
    low = _mean(xp, (ratio < 1 - limits.low) & (scale < 0), found.valid)
    high = _mean(xp, (ratio > 1 + limits.high) & (scale > 0), found.valid)
    kl = _mean(xp, xp.stop_gradient(kl), found.valid)
    return loss, *(xp.stop_gradient(part) for part in (found.logps, found.entropy, kl, low, high))


# --- Public losses.


def grpo_loss(xp, hidden, weight, target, advantages, bias, *, epsilon_low, epsilon_high, **options):
    """Group relative policy optimization (Shao et al. 2024, equation 3).

    The mean over sequences of their token means of -min(rho A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A) + beta
    KL, with rho = pi / pi_old. The paper uses beta = 0.04.

    Args:
        {arguments}
        advantages: [B] or [B, T], such as those of ``group_advantages``. No gradient.
        epsilon_low: from 0 to 1. epsilon_high: at least 0.

    {returns}
    """
    clip = epsilon_low, epsilon_high
    return _policy_loss(xp, hidden, weight, target, advantages, bias, options, clip, reduce=_by_sequence)


def dr_grpo_loss(
    xp, hidden, weight, target, advantages, bias, *, max_completion_length, epsilon_low, epsilon_high, **options
):
    """Dr. GRPO (Liu et al. 2025): the sum of ``grpo_loss``'s token losses, divided by the constant B
    max_completion_length. So the loss does not depend on the lengths of completions. None: T. Advantages are not
    divided by a standard deviation (``group_advantages(..., scale=False)``). Arguments, results, memory and errors: as
    in ``grpo_loss``."""
    length = None if max_completion_length is None else count("max_completion_length", max_completion_length)

    def by_constant(xp, each, valid):
        return _sum(xp, each, valid), max(each.shape[0] * (length or each.shape[1]), 1)

    clip = epsilon_low, epsilon_high
    return _policy_loss(xp, hidden, weight, target, advantages, bias, options, clip, reduce=by_constant)


def dapo_loss(xp, hidden, weight, target, advantages, bias, *, epsilon_low, epsilon_high, **options):
    """DAPO (Yu et al. 2025, equation 8): ``grpo_loss``'s token losses with a higher upper clip, and their mean over all
    tokens of the batch. Over several processes or micro-batches, pass the total token count as ``normalizer``.
    Arguments, results, memory and errors: as in ``grpo_loss``."""
    return _policy_loss(xp, hidden, weight, target, advantages, bias, options, (epsilon_low, epsilon_high))


def gspo_loss(xp, hidden, weight, target, advantages, bias, *, token_level, epsilon_low, epsilon_high, **options):
    """Group sequence policy optimization (Zheng et al. 2025): the mean over sequences of -min(s A, clip(s) A), with the
    geometric mean s of a sequence's token ratios.

    token_level: the paper's GSPO-token, with advantages [B, T]: each token has the value s, with its own gradient.
        Otherwise advantages are [B]. Arguments, results, memory and errors: as in ``grpo_loss``.
    """
    ratio = _sequence_token_ratio if flag("token_level", token_level) else _sequence_ratio
    clip = epsilon_low, epsilon_high
    return _policy_loss(
        xp, hidden, weight, target, advantages, bias, options, clip, ratio, _by_sequence, of_tokens=token_level
    )


def ppo_loss(xp, hidden, weight, target, advantages, bias, *, epsilon_low, epsilon_high, **options):
    """The policy loss of proximal policy optimization (Schulman et al. 2017, equations 7 and 9).

    The mean over all tokens of -min(rho A, clip(rho) A) - entropy_coef H + beta KL, with a token's entropy H in nats
    over the full vocabulary. The paper uses entropy_coef = 0.01. Advantages are [B, T], such as a critic's, or [B].
    Arguments, results, memory and errors: as in ``grpo_loss``.
    """
    return _policy_loss(xp, hidden, weight, target, advantages, bias, options, (epsilon_low, epsilon_high))
