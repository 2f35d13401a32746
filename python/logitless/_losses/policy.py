"""Policy losses: GRPO and its successors, PPO, with a divergence from a reference and an entropy bonus.

Each loss has a surrogate per token of the importance ratio rho = pi / pi_old and the advantage A, and a reduction;
``policy_terms.py`` has both. The policy's head takes one GEMM forward and three backward, and four with an entropy
bonus; PyTorch on a GPU mostly takes two without one. A reference takes one, without gradients. Logits are not stored,
and gradients of frozen tensors are not computed.
"""

from __future__ import annotations

from typing import Any

from . import policy_terms as terms
from .head import Reference, scalar, sequences
from .options import HEAD, choice, count, flag, head_of, number

ESTIMATORS = "k1", "k2", "k3"

POLICY: dict[str, Any] = dict(
    mask=None, old_per_token_logps=None, ref_per_token_logps=None, ref_hidden=None, ref_weight=None, ref_bias=None,
    beta=0.0, kl_estimator="k3", use_bias_correction_kl=False, entropy_coef=0.0, top_entropy_quantile=1.0, delta=None,
    importance_sampling_level=None, sampling_per_token_logps=None, importance_sampling_mode="sequence_mask",
    importance_sampling_clip_min=None, importance_sampling_clip_max=3.0, off_policy_mask_threshold=None,
    normalizer=None, **HEAD,
)

TEXTS = dict(
    arguments="""hidden: [B, T, D], the states that predicted the tokens; {floats}.
        weight: [V, D], the dtype of hidden, or one of both float32 beside 16 bits. bias: [V].
        {target}: [B, T], int32 or int64: the sampled tokens; ``ignore_index`` where there is none.
        mask: [B, T], bool or numbers: tokens with 0 are ignored, like those of ``ignore_index``.
        old_per_token_logps: [B, T], of the policy that sampled the tokens; None: this policy's own, with a ratio of 1.
        ref_per_token_logps: [B, T], of the reference; or ref_hidden [B, T, D'], ref_weight [V, D'], ref_bias [V]: one
            GEMM, no gradients. Without ref_weight, the reference uses the policy's current head.
        beta: at least 0, the weight of the divergence: above 0 with a reference, and 0 without one.
        kl_estimator: per token, with d = log pi_ref - log pi: "k1" -d, "k2" d^2 / 2, "k3" exp(d) - d - 1.
        use_bias_correction_kl: the divergence is multiplied by rho, with its gradient.
        torch: entropy_coef: the entropy of a token, times this, is subtracted from its loss; costs one more GEMM
        torch:     backward, two on a GPU.
        jax: entropy_coef: the entropy of a token, times this, is subtracted from its loss; costs one more GEMM backward.
        top_entropy_quantile: from 0 to 1: so large a fraction of the batch's tokens, those of highest entropy, has a
            policy loss and an entropy bonus. The divisor and the divergence are of all tokens.
        delta: upper bound of the ratio, clipped or not (two-sided clipping); None: no bound. Only beside epsilon_low.
        importance_sampling_level: rho is "token" the token's ratio, "sequence" the geometric mean of its sequence's
            (advantages are [B]), "sequence_token" this value with the token's own gradient. None: the loss's default.
        sampling_per_token_logps: [B, T], of the engine that sampled the tokens, where its numbers are not those of
            old_per_token_logps: the policy loss is multiplied by the weight pi_old / pi_sampling, without a gradient.
        importance_sampling_mode: "token_truncate" clips this weight of a token from importance_sampling_clip_min to
            importance_sampling_clip_max; "token_mask" makes it 0 beyond them; "sequence_truncate", "sequence_mask": the
            same with the product of a sequence's weights. None is no bound.
        off_policy_mask_threshold: tokens of negative advantage have no policy loss in sequences whose mean of
            log pi_sampling - log pi (pi_old without a sampler) is above this.
        normalizer: a positive number, or {array} of one element, that replaces the divisor: the tokens of all
            micro-batches, for example.
        {head}
        temperature: also {an_array} [B, T], of the tokens' samplers.""",
    returns="""Returns:
        PolicyLoss: the loss, with a gradient; log-probabilities, entropies, divergence, clip ratios and the mean weight
        of the sampler, without one.

    Memory: the head's plan, within ``memory_budget``, and a few numbers per token.
    torch: On a GPU, if exp(z) of all tokens fits and entropy_coef is 0, a GEMM is saved: the plan's workspace and
    torch: weight's gradient then exist from the forward on.

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one.""",
)


# --- Rewards and advantages.


def _rewards(xp, rewards, size: int = 1):
    found = xp.states("rewards", rewards)
    if found.ndim != 1 or found.shape[0] % size:
        raise ValueError(f"rewards: expected [B], B a multiple of {size}, got {list(found.shape)}")
    if not xp.is_floating(found):
        raise TypeError(f"rewards: expected a floating type, got {found.dtype}")
    return found


def group_advantages(xp, rewards, group_size, *, scale, epsilon):
    """Returns advantages [B] of rewards [B], with ``group_size`` consecutive completions per prompt.

    An advantage is the reward minus the group's mean. scale: with True or "group", it is divided by the group's standard
    deviation (n - 1, as in TRL) + epsilon (GRPO, Shao et al. 2024); with "batch", by that of all rewards (Liu et al.
    2025, Part I: tricks or traps?); with False or "none" by nothing: Dr. GRPO (Liu et al. 2025). Raises ValueError if B
    is not a multiple of group_size, and TypeError for integer rewards.
    """
    if isinstance(scale, bool):
        scale = "group" if scale else "none"
    scale = choice("scale", scale, ("group", "batch", "none"))
    size = count("group_size", group_size, 1 if scale == "none" else 2)
    found = _rewards(xp, rewards, size)
    groups = found.reshape(-1, size)
    apart = groups - groups.mean(1)[:, None]
    if scale != "none":
        spread = xp.deviation(groups if scale == "group" else found[None])
        apart = apart / (spread[:, None] + number("epsilon", epsilon, 0.0))
    return apart.reshape(-1)


def kl_penalized_rewards(xp, rewards, old_per_token_logps, ref_per_token_logps, *, beta, mask, kl_estimator):
    """Returns rewards [B] minus beta times each sequence's divergence from the reference, the sum of its tokens'.

    The divergence is then a part of the reward, not of the loss, and has no gradient (RLOO, Ahmadian et al. 2024, and
    TRL's RLOOTrainer; Ouyang et al. 2022).

    Args:
        rewards: [B], a floating type.
        old_per_token_logps: [B, T], of the policy that sampled the tokens. ref_per_token_logps: [B, T].
        mask: [B, T], bool or numbers: tokens with 0 are ignored. None: all count.
        kl_estimator: as in ``grpo_loss``; "k1" is those papers'.
    """
    found = _rewards(xp, rewards)
    estimator = choice("kl_estimator", kl_estimator, ESTIMATORS)
    logps = xp.array("old_per_token_logps", old_per_token_logps)
    shape = tuple(logps.shape)
    if logps.ndim != 2 or shape[0] != found.shape[0]:
        raise ValueError(f"old_per_token_logps: expected [{found.shape[0]}, T], got {list(shape)}")
    apart = xp.fixed("old_per_token_logps", logps, found.dtype) - xp.fixed(
        "ref_per_token_logps", ref_per_token_logps, found.dtype, shape
    )
    valid = apart == apart if mask is None else xp.shaped("mask", mask, shape) != 0
    each = terms.divergence(xp, estimator, xp.where(valid, apart, 0.0))
    return found - number("beta", beta, 0.0) * terms.sequence_total(xp, each, valid)[:, 0]


# --- Arguments, and the head.


def _policy_loss(
    xp, hidden, weight, target, advantages, bias, options, objective: terms.Objective, reduce=terms.by_token
) -> tuple[Any, ...]:
    """Returns the fields of PolicyLoss."""
    head = head_of(options, xp)
    beta, entropy_coef = number("beta", options["beta"], 0.0), number("entropy_coef", options["entropy_coef"])
    estimator = choice("kl_estimator", options["kl_estimator"], ESTIMATORS)
    corrects = flag("use_bias_correction_kl", options["use_bias_correction_kl"])
    fraction = number("top_entropy_quantile", options["top_entropy_quantile"], 0.0, 1.0)
    threshold = options["off_policy_mask_threshold"]
    threshold = None if threshold is None else number("off_policy_mask_threshold", threshold, above=0.0)
    correction = terms.correction_of(options)
    level = options["importance_sampling_level"]
    if level is not None:
        if objective.level is None:
            raise ValueError(f"importance_sampling_level: expected None for a loss of whole sequences, got {level!r}")
        choice("importance_sampling_level", level, terms.LEVELS)
    level = level or objective.level or "token"
    reference = Reference(options["ref_hidden"], options["ref_weight"], options["ref_bias"])
    ref_logps, mask, divisor = options["ref_per_token_logps"], options["mask"], options["normalizer"]
    computed = reference.check(xp, "ref_per_token_logps", ref_logps)
    if (computed or ref_logps is not None) != (beta > 0):
        wanted = "it or ref_hidden beside" if beta else "None, and no ref_hidden, beside"
        raise ValueError(f"ref_per_token_logps: expected {wanted} beta={beta}, got {'none' if beta else 'a reference'}")
    hidden, target = sequences(xp, hidden, target)
    shape = tuple(target.shape)
    per_sequence = objective.per_sequence or level == "sequence"
    scale = xp.shaped("advantages", advantages, shape[:1], *([] if per_sequence else [shape]))
    if mask is not None:
        target = xp.where(xp.shaped("mask", mask, shape) != 0, target, head.ignore_index)
    found = xp.tokens(hidden, weight, target, bias, head, entropy_coef != 0)

    logps, valid = found.logps, found.valid

    def given(name: str, value):
        return xp.fixed(name, value, logps.dtype, shape)

    def apart(one, other):
        return xp.where(valid, one - other, 0.0)

    scale = xp.fixed("advantages", scale, logps.dtype)
    scale = xp.where(valid, scale, 0.0) if scale.ndim == 2 else xp.where(valid.any(-1), scale, 0.0)[:, None]
    old = options["old_per_token_logps"]
    old = xp.stop_gradient(logps) if old is None else given("old_per_token_logps", old)
    sampling = options["sampling_per_token_logps"]
    sampling = None if sampling is None else given("sampling_per_token_logps", sampling)
    weights = None if sampling is None else terms.sampler_weight(xp, correction, apart(old, sampling), valid)
    entropy = xp.stop_gradient(found.entropy)
    selected = terms.highest(xp, entropy, valid, fraction) if fraction < 1 else None

    moved = apart(logps, old)
    ratio = terms.ratio_of(xp, level, moved, valid)
    part = objective.surrogate(xp, terms.Batch(logps, moved, ratio, scale, valid, selected, weights))
    each = part.each
    if threshold is not None:
        drift = apart(old if sampling is None else sampling, xp.stop_gradient(logps))
        each = xp.where(terms.near(xp, drift, scale, valid, threshold), each, 0.0)
    nothing = xp.zeros_like(logps[:1, :1])
    kl = nothing
    if beta:
        if computed:
            ref_logps = reference.tokens(xp, weight, target, bias, head).logps
        kl = terms.divergence(xp, estimator, apart(logps, given("ref_per_token_logps", ref_logps)))
        kl = kl * ratio if corrects else kl
        each = each + beta * kl
    if entropy_coef:
        bonus = found.entropy if selected is None else xp.where(selected, found.entropy, 0.0)
        each = each - entropy_coef * bonus
    total, default = reduce(xp, xp.broadcast_to(each, shape), valid)
    loss = total / (default if divisor is None else scalar(xp, "normalizer", divisor, above=0.0))
    low, high = (nothing if stopped is None else stopped for stopped in (part.low, part.high))
    weights = nothing + 1 if weights is None else weights
    means = (terms.mean(xp, xp.stop_gradient(values), valid) for values in (kl, low, high, weights))
    return loss, xp.stop_gradient(logps), entropy, *means


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
    objective = terms.clipped(options, epsilon_low, epsilon_high)
    return _policy_loss(xp, hidden, weight, target, advantages, bias, options, objective, terms.by_sequence)


def dr_grpo_loss(
    xp, hidden, weight, target, advantages, bias, *, max_completion_length, epsilon_low, epsilon_high, **options
):
    """Dr. GRPO (Liu et al. 2025): the sum of ``grpo_loss``'s token losses, divided by the constant B
    max_completion_length. So the loss does not depend on the lengths of completions. None: T. Advantages are not
    divided by a standard deviation (``group_advantages(..., scale=False)``). Arguments, results, memory and errors: as
    in ``grpo_loss``."""
    length = None if max_completion_length is None else count("max_completion_length", max_completion_length)

    def by_constant(xp, each, valid):
        return terms.total(xp, each, valid), max(each.shape[0] * (length or each.shape[1]), 1)

    objective = terms.clipped(options, epsilon_low, epsilon_high)
    return _policy_loss(xp, hidden, weight, target, advantages, bias, options, objective, by_constant)


def dapo_loss(xp, hidden, weight, target, advantages, bias, *, epsilon_low, epsilon_high, **options):
    """DAPO (Yu et al. 2025, equation 8): ``grpo_loss``'s token losses with a higher upper clip, and their mean over all
    tokens of the batch. Over several processes or micro-batches, pass the total token count as ``normalizer``.
    Arguments, results, memory and errors: as in ``grpo_loss``."""
    objective = terms.clipped(options, epsilon_low, epsilon_high)
    return _policy_loss(xp, hidden, weight, target, advantages, bias, options, objective)


def bnpo_loss(xp, hidden, weight, target, advantages, bias, *, epsilon_low, epsilon_high, **options):
    """TRL's loss type "bnpo": ``grpo_loss``'s token losses, and their mean over the tokens of the local batch.
    Arguments, results, memory and errors: as in ``grpo_loss``."""
    return dapo_loss(
        xp, hidden, weight, target, advantages, bias, epsilon_low=epsilon_low, epsilon_high=epsilon_high, **options
    )


def gspo_loss(xp, hidden, weight, target, advantages, bias, *, epsilon_low, epsilon_high, **options):
    """Group sequence policy optimization (Zheng et al. 2025): the mean over sequences of -min(s A, clip(s) A), with the
    geometric mean s of a sequence's token ratios. Advantages are [B].

    importance_sampling_level: "sequence_token" is the paper's GSPO-token, with advantages [B, T]: each token has the
        value s, with its own gradient. Arguments, results, memory and errors: as in ``grpo_loss``.
    """
    objective = terms.clipped(options, epsilon_low, epsilon_high, "sequence")
    return _policy_loss(xp, hidden, weight, target, advantages, bias, options, objective, terms.by_sequence)


def luspo_loss(xp, hidden, weight, target, advantages, bias, *, epsilon_low, epsilon_high, **options):
    """Length-unbiased sequence policy optimization (2026, arXiv 2602.05261): ``gspo_loss`` with each sequence's loss
    times its length, so the sum over tokens divided by B. Arguments, results, memory and errors: as in ``gspo_loss``.
    """
    objective = terms.clipped(options, epsilon_low, epsilon_high, "sequence")
    return _policy_loss(xp, hidden, weight, target, advantages, bias, options, objective, terms.by_sequence_count)


def gmpo_loss(xp, hidden, weight, target, advantages, bias, *, epsilon_low, epsilon_high, **options):
    """Geometric-mean policy optimization (Zhao et al. 2025): the mean over sequences of -A exp(m), where m is a mean over
    tokens. It is of min(log rho, epsilon_high) where A is positive, and elsewhere of max(log rho, -epsilon_low).

    Advantages are [B]. Tokens that top_entropy_quantile drops are left out of m. Arguments, results, memory and errors:
    as in ``grpo_loss``, but the clip is in log space, and there is no delta and no importance_sampling_level.
    """
    objective = terms.gmpo(options, epsilon_low, epsilon_high)
    return _policy_loss(xp, hidden, weight, target, advantages, bias, options, objective, terms.by_sequence)


def cispo_loss(xp, hidden, weight, target, advantages, bias, *, epsilon_high, **options):
    """CISPO (MiniMax-M1, 2025; ScaleRL, Khatri et al. 2025): the mean over all tokens of -w A log pi, with the weight
    w = min(rho, epsilon_high) without a gradient. So clipped tokens keep a gradient.

    epsilon_high: above 0, the bound of rho itself, as in TRL and ScaleRL. Arguments, results, memory and errors: as in
        ``grpo_loss``, without delta.
    """
    return _policy_loss(xp, hidden, weight, target, advantages, bias, options, terms.cispo(options, epsilon_high))


def sapo_loss(
    xp, hidden, weight, target, advantages, bias, *, sapo_temperature_pos, sapo_temperature_neg, **options
):
    """Soft adaptive policy optimization (Gao et al. 2025): the mean over sequences of their token means of
    -4 / tau sigmoid(tau (rho - 1)) A, a soft gate in the place of the clip.

    sapo_temperature_pos, sapo_temperature_neg: tau where A is positive, and elsewhere; above 0. Arguments, results,
        memory and errors: as in ``grpo_loss``, without delta.
    """
    objective = terms.sapo(options, sapo_temperature_pos, sapo_temperature_neg)
    return _policy_loss(xp, hidden, weight, target, advantages, bias, options, objective, terms.by_sequence)


def vespo_loss(
    xp, hidden, weight, target, advantages, bias, *, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg,
    **options,
):
    """Variational sequence-level soft policy optimization (2026, arXiv 2602.10693): the mean over all tokens of
    -phi A log pi, with phi = W^k exp(lambda (1 - W)) without a gradient. W is the ratio of the whole sequence, the
    product of its tokens' ratios.

    vespo_k_pos, vespo_lambda_pos: k and lambda where A is at least 0; vespo_k_neg, vespo_lambda_neg: elsewhere. k is at
        least 0, lambda above 0. With sampling_per_token_logps, W is the ratio to the sampler: the bounded weights of
        its tokens are factors of W, in a token mode. Arguments, results, memory and errors: as in ``grpo_loss``,
        without delta and importance_sampling_level.
    """
    objective = terms.vespo(options, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg)
    return _policy_loss(xp, hidden, weight, target, advantages, bias, options, objective)


def ppo_loss(xp, hidden, weight, target, advantages, bias, *, epsilon_low, epsilon_high, **options):
    """The policy loss of proximal policy optimization (Schulman et al. 2017, equations 7 and 9).

    The mean over all tokens of -min(rho A, clip(rho) A) - entropy_coef H + beta KL, with a token's entropy H in nats
    over the full vocabulary. The paper uses entropy_coef = 0.01. Advantages are [B, T], such as a critic's, or [B].
    Arguments, results, memory and errors: as in ``grpo_loss``.
    """
    objective = terms.clipped(options, epsilon_low, epsilon_high)
    return _policy_loss(xp, hidden, weight, target, advantages, bias, options, objective)
