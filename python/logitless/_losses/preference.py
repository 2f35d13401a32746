"""Preference losses: DPO, IPO, SimPO, ORPO and CPO on pairs, KTO on single sequences.

Pairs are arranged as in TRL and Liger. The first half of the sequences is chosen, the second rejected: pair i is
sequences i and B + i. The policy's head takes one GEMM forward and three backward. A reference takes one, without
gradients. Logits are not stored, and gradients of frozen tensors are not computed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .head import Reference, Tokens, scalar, sequences, shifted
from .options import Head, choice, flag, head_of, number

DPO_TYPES = (
    "sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "sppo_hard", "apo_zero", "apo_down", "bco_pair", "aot",
    "aot_pair", "aot_unpaired", "discopop",
)
SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_pair", "aot_unpaired")

# Keywords of dpo_loss about the reference.
REFERENCE: dict[str, Any] = dict(
    ref_chosen_logps=None, ref_rejected_logps=None, ref_hidden=None, ref_weight=None, ref_bias=None,
    reference_free=False, shift=False,
)


# --- Losses of log-probabilities.


def _smoothed(xp, logits, label_smoothing: float):
    """Returns the negative log-likelihood of the preference, if labels are wrong with probability label_smoothing."""
    return -xp.log_sigmoid(logits) * (1 - label_smoothing) - xp.log_sigmoid(-logits) * label_smoothing


def _exo(xp, logits, label_smoothing: float):
    """Returns the KL divergence of the policy's preference from the smoothed label."""
    right, wrong = xp.log_sigmoid(logits), xp.log_sigmoid(-logits)
    of_right = xp.exp(right) * (right - math.log1p(-label_smoothing))
    return of_right + xp.exp(wrong) * (wrong - math.log(label_smoothing))


def _dpo(xp, kind: str, chosen, rejected, beta: float, smoothing: float):
    """Returns the loss [B] from log-ratios [B] of policy to reference."""
    margin = chosen - rejected
    if kind == "sigmoid":
        return _smoothed(xp, beta * margin, smoothing)
    if kind == "robust":
        flipped = smoothing * xp.log_sigmoid(-beta * margin)
        return (_smoothed(xp, beta * margin, smoothing) + 2 * flipped) / (1 - 2 * smoothing)
    if kind == "hinge":
        return xp.relu(1 - beta * margin)
    if kind == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    if kind == "exo_pair":
        return _exo(xp, beta * margin, smoothing or 1e-3)
    if kind == "nca_pair":
        both = xp.log_sigmoid(-beta * chosen) + xp.log_sigmoid(-beta * rejected)
        return -xp.log_sigmoid(beta * chosen) - 0.5 * both
    if kind == "sppo_hard":
        return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2
    if kind == "apo_zero":
        return 1 - xp.sigmoid(beta * chosen) + xp.sigmoid(beta * rejected)
    return xp.sigmoid(beta * chosen) + 1 - xp.sigmoid(beta * margin)


def _of_batch(xp, kind: str, policy, reference, beta: float, smoothing: float, delta, tau: float):
    """Returns the loss [B] of every kind. policy, reference: log-probabilities [B] of chosen and rejected sequences.
    Kinds that sort log-ratios couple the pairs of the batch."""
    chosen, rejected = policy[0] - reference[0], policy[1] - reference[1]
    if kind == "bco_pair":
        if delta is None:
            delta = xp.stop_gradient(xp.concatenate([beta * chosen, beta * rejected]).mean())
        return -xp.log_sigmoid(beta * chosen - delta) - xp.log_sigmoid(delta - beta * rejected)
    if kind == "aot":
        of_policy, of_reference = policy[0] - policy[1], reference[0] - reference[1]
        return _smoothed(xp, beta * (xp.sort(of_policy) - xp.sort(of_reference)), smoothing)
    if kind in ("aot_pair", "aot_unpaired"):
        return _smoothed(xp, beta * (xp.sort(chosen) - xp.sort(rejected)), smoothing)
    if kind == "discopop":
        x = beta * (chosen - rejected)
        log_g = xp.log_sigmoid(x / tau)  # added to -x, since exp(-x) may be infinite where g is 0
        return -xp.log_sigmoid(x) * xp.sigmoid(-x / tau) + xp.exp(log_g - x)
    return _dpo(xp, kind, chosen, rejected, beta, smoothing)


def _log_odds(xp, logps):
    """Returns log(p / (1 - p)) given log p. p = 1 is replaced by the next smaller number."""
    below_one = xp.at_most(logps, -xp.finfo(logps.dtype).eps)
    return logps - xp.log(-xp.expm1(below_one))


# --- Log-probabilities of pairs and sequences.


class _Pairs(NamedTuple):
    """Log-probabilities of B pairs."""

    chosen: Any  # [B]
    rejected: Any  # [B]
    nll: Any  # []
    target: Any  # [2 B, T], as scored
    scored: Any  # [B] bool: both sequences have tokens

    def result(self, xp, loss, chosen_rewards, rejected_rewards) -> tuple[Any, ...]:
        """Returns the fields of PreferenceLoss."""
        parts = self.chosen, self.rejected, chosen_rewards, rejected_rewards, self.nll
        return loss, *(xp.stop_gradient(part) for part in parts)


def _target(xp, target, shift: bool, head: Head):
    return shifted(xp, target, head.ignore_index) if flag("shift", shift) else target


def _with_nll(xp, hidden, weight, target, bias, head: Head, shift: bool, nll_target) -> tuple[Tokens, Any, Any]:
    """Returns the tokens of target. For the chosen half, it also returns the log-probabilities of nll_target and
    whether they count, from the same GEMM."""
    batch, length = target.shape
    given = xp.indices("nll_target", nll_target, (batch, length), (batch // 2, length))
    likely = _target(xp, xp.astype(given[: batch // 2], target.dtype), shift, head)
    both = xp.stack([target, xp.concatenate([likely, xp.full_like(likely, head.ignore_index)])], -1)
    found = xp.tokens(hidden, weight, both, bias, head)
    of_target = found._replace(logps=found.logps[..., 0], valid=found.valid[..., 0])
    return of_target, found.logps[: batch // 2, :, 1], found.valid[: batch // 2, :, 1]


def _pairs(xp, hidden, weight, target, bias, head: Head, shift: bool, average: bool, nll_target=None) -> _Pairs:
    hidden, target = sequences(xp, hidden, target, even=True)
    target = _target(xp, target, shift, head)
    half = hidden.shape[0] // 2
    if nll_target is None:
        found = xp.tokens(hidden, weight, target, bias, head)
        likely, counted = found.logps[:half], found.valid[:half]
    else:
        found, likely, counted = _with_nll(xp, hidden, weight, target, bias, head, shift, nll_target)
    chosen, rejected = xp.halves(found.sums(xp, flag("average_log_prob", average)))
    nll = -likely.sum() / xp.at_least(counted.sum(), 1)
    some = found.valid.any(-1)
    return _Pairs(chosen, rejected, nll, target, some[:half] & some[half:])


def _reference_pairs(
    xp, pairs: _Pairs, weight, bias, head: Head, reference: Reference, chosen, rejected, free: bool, average: bool
) -> tuple[Any, Any]:
    """Returns the reference's log-probabilities [B], without gradients."""
    any_given = chosen if chosen is not None else rejected
    computed = reference.check(xp, "ref_chosen_logps", any_given)
    if flag("reference_free", free):
        if computed or any_given is not None:
            raise ValueError("reference_free: expected False beside a reference, got True")
        return xp.zeros_like(pairs.chosen), xp.zeros_like(pairs.chosen)
    if computed:
        return xp.halves(reference.tokens(xp, weight, pairs.target, bias, head).sums(xp, average))
    if any_given is None:
        raise ValueError(
            "ref_chosen_logps: expected it with ref_rejected_logps, or ref_hidden, or reference_free=True, got None"
        )
    given = (("ref_chosen_logps", chosen), ("ref_rejected_logps", rejected))
    c, r = (xp.fixed(name, logps, pairs.chosen.dtype, tuple(pairs.chosen.shape)) for name, logps in given)
    return c, r


def _of_kind(name: str, wanted: str, kind: str, value):
    if value is not None and kind != wanted:
        raise ValueError(f"{name}: expected None with loss_type {kind!r}, got {value!r}")
    return value


def _smoothing_of(kind: str, label_smoothing) -> float:
    found = number("label_smoothing", label_smoothing, 0.0, below=0.5)
    if found and kind not in SMOOTHED:
        raise ValueError(f"label_smoothing: expected 0.0 for loss_type {kind!r}, which has none, got {label_smoothing}")
    return found


# --- Public losses.


def dpo_loss(
    xp, hidden, weight, target, bias, *, ref_chosen_logps, ref_rejected_logps, ref_hidden, ref_weight, ref_bias,
    reference_free, beta, loss_type="sigmoid", label_smoothing=0.0, bco_delta=None, discopop_tau=None, average_log_prob,
    shift, **head,
):
    """Direct preference optimization (Rafailov et al. 2023, equation 7) and its variants, with TRL's names.

    Let r_w and r_l be the log-ratios log pi(y) - log pi_ref(y) of chosen and rejected sequences, and d = r_w - r_l. The
    loss of a pair is:

    - "sigmoid": -(1 - e) log s(beta d) - e log s(-beta d), e = label_smoothing: cDPO (Mitchell 2023)
    - "robust": (-(1 - e) log s(beta d) + e log s(-beta d)) / (1 - 2 e) (Chowdhury et al. 2024)
    - "hinge": max(0, 1 - beta d) (SLiC, RSO: Liu et al. 2023)
    - "ipo": (d - 1 / (2 beta))^2 (Azar et al. 2023); ``ipo_loss`` averages over tokens
    - "exo_pair": KL of (s(beta d), s(-beta d)) from (1 - e, e), e = label_smoothing or 1e-3 (Ji et al. 2024)
    - "nca_pair": -log s(beta r_w) - (log s(-beta r_w) + log s(-beta r_l)) / 2 (Chen et al. 2024)
    - "sppo_hard": (r_w - 1 / (2 beta))^2 + (r_l + 1 / (2 beta))^2 (Wu et al. 2024)
    - "apo_zero": 1 - s(beta r_w) + s(beta r_l); "apo_down": s(beta r_w) + 1 - s(beta d) (D'Oosterlinck et al. 2024)
    - "bco_pair": -log s(beta r_w - bco_delta) - log s(bco_delta - beta r_l) (Jung et al. 2024)
    - "aot": "sigmoid" with d = sorted(log pi_w - log pi_l) - sorted(log pi_ref_w - log pi_ref_l);
      "aot_pair", "aot_unpaired" in newer TRL: with d = sorted(r_w) - sorted(r_l) (Melnyk et al. 2024)
    - "discopop": (1 - g) -log s(x) + g exp(-x), x = beta d, g = s(x / discopop_tau) (Lu et al. 2024)

    Args:
        hidden: [2 B, T, D], chosen sequences, then rejected ones; {floats}.
        weight: [V, D], the dtype of hidden, or one of both float32 beside 16 bits. bias: [V].
        {target}: [2 B, T], int32 or int64; prompts and padding are ``ignore_index``.
        ref_chosen_logps, ref_rejected_logps: [B], of the reference; averaged if average_log_prob is set.
        ref_hidden, ref_weight, ref_bias: instead of these, the reference's hidden states [2 B, T, D'] and head [V, D'],
            [V]: one GEMM, no gradients. Without ref_weight, the reference uses the policy's current head.
        reference_free: no reference: its log-probabilities are 0.
        beta: above 0. label_smoothing: at least 0 and below 0.5.
        bco_delta: for "bco_pair": a number or {array} of one element, without a gradient. TRL uses a running mean of the
            rewards. None: the mean of beta r_w and beta r_l of these pairs.
        discopop_tau: for "discopop", above 0; None: 0.05.
        average_log_prob: divide by the number of tokens of the sequence.
        shift: hidden and {target} have the same positions, and position t predicts target t + 1.
        {head}

    Returns:
        PreferenceLoss: the mean over the pairs; without gradients, the log-probabilities and the rewards beta r.

    Memory: the head's plan, within ``memory_budget``, and a few numbers per token. Cost: 1 GEMM forward, 3 backward.
    torch: On a GPU, if exp(z) of all tokens fits, it is 2 backward. The plan's workspace and weight's gradient then
    torch: exist from the forward on.

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one.
    """
    options = head_of(head)
    kind = choice("loss_type", loss_type, DPO_TYPES)
    beta = number("beta", beta, above=0.0)
    smoothing = _smoothing_of(kind, label_smoothing)
    delta = _of_kind("bco_delta", "bco_pair", kind, bco_delta)
    delta = None if delta is None else scalar(xp, "bco_delta", delta)
    tau = _of_kind("discopop_tau", "discopop", kind, discopop_tau)
    tau = 0.05 if tau is None else number("discopop_tau", tau, above=0.0)
    pairs = _pairs(xp, hidden, weight, target, bias, options, shift, average_log_prob)
    policy = pairs.chosen, pairs.rejected
    delta = None if delta is None else xp.as_like(delta, pairs.chosen)
    reference = _reference_pairs(
        xp, pairs, weight, bias, options, Reference(ref_hidden, ref_weight, ref_bias), ref_chosen_logps,
        ref_rejected_logps, reference_free, average_log_prob,
    )
    chosen, rejected = (p - r for p, r in zip(policy, reference))
    loss = _of_batch(xp, kind, policy, reference, beta, smoothing, delta, tau).mean()
    return pairs.result(xp, loss, beta * chosen, beta * rejected)


def ipo_loss(xp, hidden, weight, target, bias, *, beta, average_log_prob, **more):
    """Identity preference optimization (Azar et al. 2023, equation 17): the mean of (d - 1 / (2 beta))^2. Here d is the
    log-ratio of the chosen sequence minus that of the rejected one, and beta is the paper's tau.

    average_log_prob: as in TRL; with False the log-ratios are sums over tokens, as in the paper. Other arguments,
    results, memory and errors: as in ``dpo_loss``.
        {head}
    """
    return dpo_loss(
        xp, hidden, weight, target, bias, beta=beta, average_log_prob=average_log_prob, loss_type="ipo", **more
    )


def simpo_loss(xp, hidden, weight, target, bias, *, beta, gamma, alpha, label_smoothing, shift, **head):
    """Simple preference optimization (Meng et al. 2024), without a reference: -log s(beta (m_w - m_l) - gamma), with
    the mean log-probability m of a sequence's tokens.

    beta, gamma: the defaults are those of TRL and Liger; the paper uses 2 to 2.5 and 0.3 to 1.6. alpha: weight of the
    added mean negative log-probability of the chosen tokens (CPO-SimPO). label_smoothing: at least 0 and below 0.5.
    Shapes, shift, memory and errors: as in ``dpo_loss``. Rewards: beta m.
        {head}
    """
    options = head_of(head)
    beta = number("beta", beta, above=0.0)
    gamma, alpha = number("gamma", gamma), number("alpha", alpha, 0.0)
    smoothing = number("label_smoothing", label_smoothing, 0.0, below=0.5)
    pairs = _pairs(xp, hidden, weight, target, bias, options, shift, True)
    loss = _smoothed(xp, beta * (pairs.chosen - pairs.rejected) - gamma, smoothing).mean()
    loss = loss + alpha * pairs.nll if alpha else loss
    return pairs.result(xp, loss, beta * pairs.chosen, beta * pairs.rejected)


def cpo_loss(
    xp, hidden, weight, target, bias, *, beta, alpha, loss_type, label_smoothing, average_log_prob, nll_target, shift,
    **head,
):
    """Contrastive preference optimization (Xu et al. 2024): -log s(beta (log pi_w - log pi_l)) + alpha NLL, with the
    mean negative log-probability NLL of the chosen tokens.

    loss_type: "sigmoid"; "hinge", max(0, 1 - beta d); "ipo", (d - 1 / (2 beta))^2, as in TRL. alpha: TRL's cpo_alpha.
    label_smoothing: for "sigmoid", at least 0 and below 0.5. average_log_prob: divide by the number of tokens of the
    sequence; None: only with "ipo", as TRL does. nll_target: as in ``orpo_loss``. Shapes, shift, memory and errors: as
    in ``dpo_loss``. Rewards: beta log pi. The NLL takes no GEMM of its own.
        {head}
    """
    options = head_of(head)
    kind = choice("loss_type", loss_type, ("sigmoid", "hinge", "ipo"))
    beta, alpha = number("beta", beta, above=0.0), number("alpha", alpha, 0.0)
    smoothing = _smoothing_of(kind, label_smoothing)
    average = kind == "ipo" if average_log_prob is None else average_log_prob
    pairs = _pairs(xp, hidden, weight, target, bias, options, shift, average, nll_target)
    loss = _dpo(xp, kind, pairs.chosen, pairs.rejected, beta, smoothing).mean()
    loss = loss + alpha * pairs.nll if alpha else loss
    return pairs.result(xp, loss, beta * pairs.chosen, beta * pairs.rejected)


def orpo_loss(xp, hidden, weight, target, bias, *, beta, nll_target, shift, **head):
    """Odds ratio preference optimization (Hong et al. 2024), without a reference: NLL - beta log s(log odds_w - log
    odds_l). The odds are p / (1 - p), with p = exp(mean log-probability of the tokens). NLL is the mean negative
    log-probability of the chosen tokens.

    beta: at least 0, the paper's lambda. nll_target: [2 B, T] or [B, T], int32 or int64: targets of the NLL instead of
    the chosen sequences' own, with the same shift; they may include the prompt, as in TRL. Entries of rejected
    sequences are ignored. A pair with an empty sequence has no odds, and adds 0 to that term (NaN in TRL). Shapes,
    shift, memory and errors: as in ``dpo_loss``. Rewards: beta m, with the mean log-probability m. The NLL takes no
    GEMM of its own.
        {head}
    """
    options = head_of(head)
    beta = number("beta", beta, 0.0)
    pairs = _pairs(xp, hidden, weight, target, bias, options, shift, True, nll_target)
    ratio = _log_odds(xp, pairs.chosen) - _log_odds(xp, pairs.rejected)
    loss = pairs.nll - beta * xp.where(pairs.scored, xp.log_sigmoid(ratio), 0.0).mean()
    return pairs.result(xp, loss, beta * pairs.chosen, beta * pairs.rejected)


def _log_ratio(
    xp, hidden, weight, target, bias, head: Head, ref_logps, reference: Reference, average: bool, shift: bool
) -> tuple[Any, Any]:
    """Returns (log pi [B], log pi - log pi_ref [B]) of single sequences."""
    hidden, target = sequences(xp, hidden, target)
    target = _target(xp, target, shift, head)
    logps = xp.tokens(hidden, weight, target, bias, head).sums(xp, flag("average_log_prob", average))
    if reference.check(xp, "ref_logps", ref_logps):
        return logps, logps - reference.tokens(xp, weight, target, bias, head).sums(xp, average)
    if ref_logps is None:
        raise ValueError("ref_logps: expected it or ref_hidden, got None")
    return logps, logps - xp.fixed("ref_logps", ref_logps, logps.dtype, tuple(logps.shape))


def kto_kl(
    xp, hidden, weight, target, bias, *, ref_logps, ref_hidden, ref_weight, ref_bias, average_log_prob, shift, **head
):
    """KTO's estimate of the divergence from the reference (Ethayarajh et al. 2024), a number without a gradient: max(0,
    mean(log pi - log pi_ref)). The sequences are prompts with completions of other prompts. Over several processes,
    average their results. Arguments: as in ``kto_loss``. Cost: one GEMM, and one more for a reference.
        {head}
    """
    options, reference = head_of(head), Reference(ref_hidden, ref_weight, ref_bias)

    def mean(hidden, weight, bias):
        ratio = _log_ratio(
            xp, hidden, weight, target, bias, options, ref_logps, reference, average_log_prob, shift
        )[1]
        return xp.at_least(ratio.sum() / max(ratio.shape[0], 1), 0.0)

    return xp.without_gradients(mean, hidden, weight, bias)


def kto_loss(
    xp, hidden, weight, target, preference_labels, bias, *, kl, ref_logps, ref_hidden, ref_weight, ref_bias, beta,
    desirable_weight, undesirable_weight, loss_type, average_log_prob, shift, **head,
):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024), on sequences that are each desirable or undesirable.

    Let r = log pi(y) - log pi_ref(y) be the log-ratio, and kl the divergence. The loss of a sequence is:

    - "kto": desirable_weight (1 - s(beta (r - kl))) if desirable, undesirable_weight (1 - s(beta (kl - r))) if not
    - "apo_zero_unpaired": the same with kl = 0 (D'Oosterlinck et al. 2024)

    Args:
        hidden: [B, T, D]. {target}: [B, T]. weight: [V, D]. bias: [V].
        preference_labels: [B] bool: whether the sequence is desirable.
        kl: a number, or {an_array} of one element: ``kto_kl`` of mismatched pairs; 0.0 omits it.
        ref_logps: [B]; or ref_hidden, ref_weight, ref_bias: as in ``dpo_loss``.
        beta: above 0. desirable_weight, undesirable_weight: at least 0.
        average_log_prob, shift: as in ``dpo_loss``.
        {head}

    Returns:
        KTOLoss: the mean over the sequences; without gradients, log pi, the rewards beta r, and kl.

    Memory and errors: as in ``dpo_loss``.
    """
    options = head_of(head)
    kind = choice("loss_type", loss_type, ("kto", "apo_zero_unpaired"))
    beta = number("beta", beta, above=0.0)
    weights = number("desirable_weight", desirable_weight, 0.0), number("undesirable_weight", undesirable_weight, 0.0)
    if (kl is None) == (kind == "kto"):
        one = f"a number or {xp.NAMES.an_array} of one, as of kto_kl"
        wanted = one if kl is None else f"None with loss_type {kind!r}"
        raise ValueError(f"kl: expected {wanted}, got {kl!r}")
    divergence = scalar(xp, "kl", 0.0 if kl is None else kl)
    logps, ratio = _log_ratio(
        xp, hidden, weight, target, bias, options, ref_logps, Reference(ref_hidden, ref_weight, ref_bias),
        average_log_prob, shift,
    )
    good = xp.shaped("preference_labels", preference_labels, tuple(logps.shape))
    if good.dtype != xp.boolean:
        raise TypeError(f"preference_labels: expected bool, got {good.dtype}")
    divergence = xp.as_like(divergence, ratio)
    gain = xp.sigmoid(beta * xp.where(good, ratio - divergence, divergence - ratio))
    loss = (xp.where(good, weights[0], weights[1]) * (1 - gain)).sum() / max(logps.shape[0], 1)
    return loss, *(xp.stop_gradient(part) for part in (logps, beta * ratio, divergence))
