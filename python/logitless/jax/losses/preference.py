"""Losses of preferences: DPO, IPO, SimPO, ORPO, CPO of pairs, KTO of single sequences.

Pairs lie as TRL and Liger have them: the first half of the sequences is chosen, the second rejected, pair i being
sequences i and B + i. The policy's head runs once forward and three times backward, a reference's once, without
gradients; no logits exist. Of frozen tensors no gradient is computed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid
from jax.typing import ArrayLike

from ..._losses import HEAD, Head, HeadKeywords, choice, flag, head_of, number, takes
from .. import _arguments
from ._head import Reference, fixed, sequences, shaped, shifted, tokens

if TYPE_CHECKING:
    from typing_extensions import Unpack

DPO_TYPES = (
    "sigmoid", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "sppo_hard", "apo_zero", "apo_down", "bco_pair", "aot",
    "aot_pair", "aot_unpaired", "discopop",
)
SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot", "aot_pair", "aot_unpaired")


REFERENCE = dict(
    ref_chosen_logps=None, ref_rejected_logps=None, ref_hidden=None, ref_weight=None, ref_bias=None,
    reference_free=False, shift=False,
)


class ReferenceKeywords(HeadKeywords, total=False):
    """Of ``dpo_loss``."""

    ref_chosen_logps: ArrayLike | None
    ref_rejected_logps: ArrayLike | None
    ref_hidden: ArrayLike | None
    ref_weight: ArrayLike | None
    ref_bias: ArrayLike | None
    reference_free: bool
    shift: bool


class PreferenceLoss(NamedTuple):
    """Only ``loss`` has a gradient: jax.value_and_grad(lambda *a: (r := dpo_loss(*a)).loss, ...), or with has_aux=True
    (r.loss, r). Log-probabilities are of sequences, summed or averaged as the loss has them."""

    loss: jax.Array  # []
    chosen_logps: jax.Array  # [B]
    rejected_logps: jax.Array  # [B]
    chosen_rewards: jax.Array  # [B]
    rejected_rewards: jax.Array  # [B]
    nll_loss: jax.Array  # []: mean negative log-probability of the chosen tokens

    @property
    def margins(self) -> jax.Array:
        """[B]: by how much the chosen reward is greater."""
        return self.chosen_rewards - self.rejected_rewards

    @property
    def accuracies(self) -> jax.Array:
        """[B]: 1 where it is, else 0."""
        return (self.margins > 0).astype(self.margins.dtype)


class KTOLoss(NamedTuple):
    """Only ``loss`` has a gradient."""

    loss: jax.Array  # []
    logps: jax.Array  # [B]
    rewards: jax.Array  # [B]
    kl: jax.Array  # []


class _Pairs(NamedTuple):
    """Of B pairs."""

    chosen: jax.Array  # [B]
    rejected: jax.Array  # [B]
    nll: jax.Array  # []
    targets: jax.Array  # [2 B, T], as it was scored
    scored: jax.Array  # [B] bool: both sequences have tokens

    def result(self, loss: jax.Array, chosen_rewards: jax.Array, rejected_rewards: jax.Array) -> PreferenceLoss:
        parts = self.chosen, self.rejected, chosen_rewards, rejected_rewards, self.nll
        return PreferenceLoss(loss, *map(jax.lax.stop_gradient, parts))


def _target(targets: jax.Array, shift: bool, head: Head) -> jax.Array:
    return shifted(targets, head.ignore_index) if flag("shift", shift) else targets


def _with_nll(
    hidden, weight, targets, bias, head: Head, shift: bool, nll_target
) -> tuple[Tokens, jax.Array, jax.Array]:
    """Tokens of targets, and log-probabilities of nll_target and whether they count, of the chosen half: one pass."""
    batch, length = targets.shape
    given = shaped("nll_target", _arguments.indices("nll_target", nll_target), (batch, length), (batch // 2, length))
    likely = _target(given[: batch // 2].astype(targets.dtype), shift, head)
    both = jnp.stack([targets, jnp.concatenate([likely, jnp.full_like(likely, head.ignore_index)])], -1)
    found = tokens(hidden, weight, both, bias, head)
    of_targets = found._replace(logps=found.logps[..., 0], valid=found.valid[..., 0])
    return of_targets, found.logps[: batch // 2, :, 1], found.valid[: batch // 2, :, 1]


def _pairs(hidden, weight, targets, bias, head: Head, shift: bool, average: bool, nll_target=None) -> _Pairs:
    hidden, targets = sequences(hidden, targets, even=True)
    targets = _target(targets, shift, head)
    half = hidden.shape[0] // 2
    if nll_target is None:
        found = tokens(hidden, weight, targets, bias, head)
        likely, counted = found.logps[:half], found.valid[:half]
    else:
        found, likely, counted = _with_nll(hidden, weight, targets, bias, head, shift, nll_target)
    logps = found.sums(flag("average_log_prob", average))
    nll = -likely.sum() / jnp.maximum(counted.sum(), 1)
    some = found.valid.any(-1)
    return _Pairs(logps[:half], logps[half:], nll, targets, some[:half] & some[half:])


def _reference_pairs(
    pairs: _Pairs, weight, bias, head: Head, reference: Reference, chosen, rejected, free: bool, average: bool
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities [B] of the reference, without gradients."""
    any_given = chosen if chosen is not None else rejected
    computed = reference.check("ref_chosen_logps", any_given)
    if flag("reference_free", free):
        if computed or any_given is not None:
            raise ValueError("reference_free: expected False beside a reference, got True")
        return jnp.zeros_like(pairs.chosen), jnp.zeros_like(pairs.chosen)
    if computed:
        of = reference.tokens(weight, pairs.targets, bias, head).sums(average)
        return of[: len(of) // 2], of[len(of) // 2 :]
    if any_given is None:
        raise ValueError(
            "ref_chosen_logps: expected it with ref_rejected_logps, or ref_hidden, or reference_free=True, got None"
        )
    want = pairs.chosen.shape
    return fixed("ref_chosen_logps", chosen, want), fixed("ref_rejected_logps", rejected, want)


def _smoothed(logits: jax.Array, label_smoothing: float) -> jax.Array:
    """The negative log-likelihood of the preference, labels being wrong with a probability of label_smoothing."""
    return -log_sigmoid(logits) * (1 - label_smoothing) - log_sigmoid(-logits) * label_smoothing


def _exo(logits: jax.Array, label_smoothing: float) -> jax.Array:
    """KL of the policy's preference from the smoothed label."""
    right, wrong = log_sigmoid(logits), log_sigmoid(-logits)
    of_right = jnp.exp(right) * (right - math.log1p(-label_smoothing))
    return of_right + jnp.exp(wrong) * (wrong - math.log(label_smoothing))


def _dpo(kind: str, chosen: jax.Array, rejected: jax.Array, beta: float, smoothing: float) -> jax.Array:
    """[B], of the log-ratios of policy to reference [B]."""
    margin = chosen - rejected
    if kind == "sigmoid":
        return _smoothed(beta * margin, smoothing)
    if kind == "robust":
        return (_smoothed(beta * margin, smoothing) + 2 * smoothing * log_sigmoid(-beta * margin)) / (1 - 2 * smoothing)
    if kind == "hinge":
        return jnp.maximum(1 - beta * margin, 0.0)
    if kind == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    if kind == "exo_pair":
        return _exo(beta * margin, smoothing or 1e-3)
    if kind == "nca_pair":
        both = log_sigmoid(-beta * chosen) + log_sigmoid(-beta * rejected)
        return -log_sigmoid(beta * chosen) - 0.5 * both
    if kind == "sppo_hard":
        return (chosen - 0.5 / beta)**2 + (rejected + 0.5 / beta)**2
    if kind == "apo_zero":
        return 1 - sigmoid(beta * chosen) + sigmoid(beta * rejected)
    return sigmoid(beta * chosen) + 1 - sigmoid(beta * margin)


def _of_batch(
    kind: str, pairs: _Pairs, reference: tuple[jax.Array, jax.Array], beta: float, smoothing: float, delta, tau: float
) -> jax.Array:
    """[B] of every kind; those of sorted log-ratios are of the batch."""
    chosen, rejected = pairs.chosen - reference[0], pairs.rejected - reference[1]
    if kind == "bco_pair":
        mean = jax.lax.stop_gradient(jnp.concatenate([beta * chosen, beta * rejected]).mean())
        center = mean if delta is None else delta
        return -log_sigmoid(beta * chosen - center) - log_sigmoid(center - beta * rejected)
    if kind == "aot":
        of_policy, of_reference = pairs.chosen - pairs.rejected, reference[0] - reference[1]
        return _smoothed(beta * (jnp.sort(of_policy) - jnp.sort(of_reference)), smoothing)
    if kind in ("aot_pair", "aot_unpaired"):
        return _smoothed(beta * (jnp.sort(chosen) - jnp.sort(rejected)), smoothing)
    if kind == "discopop":
        x = beta * (chosen - rejected)
        log_g = log_sigmoid(x / tau)  # together with -x: exp(-x) may be infinite where g is 0
        return -log_sigmoid(x) * sigmoid(-x / tau) + jnp.exp(log_g - x)
    return _dpo(kind, chosen, rejected, beta, smoothing)


def _of_kind(name: str, wanted: str, kind: str, value):
    if value is not None and kind != wanted:
        raise ValueError(f"{name}: expected None with loss_type {kind!r}, got {value!r}")
    return value


def _smoothing_of(kind: str, label_smoothing) -> float:
    found = number("label_smoothing", label_smoothing, 0.0, below=0.5)
    if found and kind not in SMOOTHED:
        raise ValueError(f"label_smoothing: expected 0.0 for loss_type {kind!r}, which has none, got {label_smoothing}")
    return found


@takes(HEAD)
def dpo_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    ref_chosen_logps: ArrayLike | None = None,
    ref_rejected_logps: ArrayLike | None = None,
    ref_hidden: ArrayLike | None = None,
    ref_weight: ArrayLike | None = None,
    ref_bias: ArrayLike | None = None,
    reference_free: bool = False,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    bco_delta: float | ArrayLike | None = None,
    discopop_tau: float | None = None,
    average_log_prob: bool = False,
    shift: bool = False,
    **head: Unpack[HeadKeywords],
) -> PreferenceLoss:
    """Direct preference optimization (Rafailov et al. 2023, equation 7) and its relatives, as TRL names them.

    With r_w and r_l the log-ratios log pi(y) - log pi_ref(y) of chosen and rejected sequences and d = r_w - r_l:

    - "sigmoid": -(1 - e) log s(beta d) - e log s(-beta d), e = label_smoothing: cDPO (Mitchell 2023)
    - "robust": (-(1 - e) log s(beta d) + e log s(-beta d)) / (1 - 2 e) (Chowdhury et al. 2024)
    - "hinge": max(0, 1 - beta d) (SLiC, RSO: Liu et al. 2023)
    - "ipo": (d - 1 / (2 beta))^2 (Azar et al. 2023); ``ipo_loss`` averages over tokens
    - "exo_pair": KL of (s(beta d), s(-beta d)) from (1 - e, e), e = label_smoothing or 1e-3 (Ji et al. 2024)
    - "nca_pair": -log s(beta r_w) - (log s(-beta r_w) + log s(-beta r_l)) / 2 (Chen et al. 2024)
    - "sppo_hard": (r_w - 1 / (2 beta))^2 + (r_l + 1 / (2 beta))^2 (Wu et al. 2024)
    - "apo_zero": 1 - s(beta r_w) + s(beta r_l); "apo_down": s(beta r_w) + 1 - s(beta d) (D'Oosterlinck et al. 2024)
    - "bco_pair": -log s(beta r_w - bco_delta) - log s(bco_delta - beta r_l) (Jung et al. 2024)
    - "aot": "sigmoid" with the sorted log pi_w - log pi_l less the sorted log pi_ref_w - log pi_ref_l for d;
      "aot_pair", "aot_unpaired" in newer TRL: with the sorted r_w less the sorted r_l (Melnyk et al. 2024)
    - "discopop": (1 - g) -log s(x) + g exp(-x), x = beta d, g = s(x / discopop_tau) (Lu et al. 2024)

    Args:
        hidden: [2 B, T, D], chosen sequences, then rejected ones; float32, bfloat16 or float16.
        weight: [V, D], the dtype of hidden. bias: [V].
        targets: [2 B, T], int32 or int64; prompts and padding are ``ignore_index``.
        ref_chosen_logps, ref_rejected_logps: [B], of the reference; averaged where average_log_prob is.
        ref_hidden, ref_weight, ref_bias: instead of these, the reference's hidden states [2 B, T, D'] and head
            [V, D'], [V]: one pass, no gradients. Without ref_weight the policy's head, as of now.
        reference_free: no reference: its log-probabilities are 0.
        beta: above 0. label_smoothing: from 0 to below 0.5.
        bco_delta: of "bco_pair", a number or array of one, without a gradient: TRL has a running mean of the rewards.
            None: the mean of beta r_w and beta r_l of these pairs.
        discopop_tau: of "discopop", above 0; None: 0.05.
        average_log_prob: divide by the tokens of the sequence.
        shift: hidden and targets are of the same positions, and position t predicts targets t + 1.
        {head}

    Returns:
        PreferenceLoss: the mean over the pairs, and without gradients the log-probabilities and the rewards beta r.

    Memory: the head's plan, within ``memory_budget``, and a few numbers a token. 1 pass forward, 3 backward.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
    """
    options = head_of(head)
    kind = choice("loss_type", loss_type, DPO_TYPES)
    beta = number("beta", beta, above=0.0)
    smoothing = _smoothing_of(kind, label_smoothing)
    delta = _of_kind("bco_delta", "bco_pair", kind, bco_delta)
    delta = None if delta is None else _one("bco_delta", delta)
    tau = _of_kind("discopop_tau", "discopop", kind, discopop_tau)
    tau = 0.05 if tau is None else number("discopop_tau", tau, above=0.0)
    pairs = _pairs(hidden, weight, targets, bias, options, shift, average_log_prob)
    reference = _reference_pairs(
        pairs, weight, bias, options, Reference(ref_hidden, ref_weight, ref_bias), ref_chosen_logps, ref_rejected_logps,
        reference_free, average_log_prob,
    )
    chosen, rejected = pairs.chosen - reference[0], pairs.rejected - reference[1]
    loss = _of_batch(kind, pairs, reference, beta, smoothing, delta, tau).mean()
    return pairs.result(loss, beta * chosen, beta * rejected)


@takes({**REFERENCE, **HEAD})
def ipo_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    beta: float = 0.1,
    average_log_prob: bool = True,
    **more: Unpack[ReferenceKeywords],
) -> PreferenceLoss:
    """Identity preference optimization (Azar et al. 2023, equation 17): the mean of (d - 1 / (2 beta))^2, d the
    log-ratio of the chosen sequence less that of the rejected one, beta the paper's tau.

    average_log_prob: as in TRL; with False the log-ratios are sums over tokens, as in the paper. All else as of
    ``dpo_loss``: the reference's arguments, shift, results, memory and errors.
        {head}
    """
    return dpo_loss(
        hidden, weight, targets, bias, beta=beta, average_log_prob=average_log_prob, loss_type="ipo", **more
    )


@takes(HEAD)
def simpo_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    beta: float = 0.1,
    gamma: float = 0.5,
    alpha: float = 0.0,
    label_smoothing: float = 0.0,
    shift: bool = False,
    **head: Unpack[HeadKeywords],
) -> PreferenceLoss:
    """Simple preference optimization (Meng et al. 2024), without a reference:
    -log s(beta (m_w - m_l) - gamma), m the mean log-probability of a sequence's tokens.

    beta and gamma have the defaults of TRL and Liger; the paper takes beta from 2 to 2.5 and gamma from 0.3 to 1.6.
    alpha: weight of the chosen tokens' mean negative log-probability, which is added (CPO-SimPO). label_smoothing: from
    0 to below 0.5. Shapes, shift, memory and errors: as ``dpo_loss``. Rewards: beta m.
        {head}
    """
    options = head_of(head)
    beta = number("beta", beta, above=0.0)
    gamma, alpha = number("gamma", gamma), number("alpha", alpha, 0.0)
    smoothing = number("label_smoothing", label_smoothing, 0.0, below=0.5)
    pairs = _pairs(hidden, weight, targets, bias, options, shift, True)
    loss = _smoothed(beta * (pairs.chosen - pairs.rejected) - gamma, smoothing).mean()
    return pairs.result(loss + alpha * pairs.nll if alpha else loss, beta * pairs.chosen, beta * pairs.rejected)


@takes(HEAD)
def cpo_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    beta: float = 0.1,
    alpha: float = 1.0,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    average_log_prob: bool | None = None,
    nll_target: ArrayLike | None = None,
    shift: bool = False,
    **head: Unpack[HeadKeywords],
) -> PreferenceLoss:
    """Contrastive preference optimization (Xu et al. 2024): -log s(beta (log pi_w - log pi_l)) + alpha NLL,
    NLL the mean negative log-probability of the chosen tokens.

    loss_type: "sigmoid"; "hinge", max(0, 1 - beta d); "ipo", (d - 1 / (2 beta))^2, as in TRL. alpha: TRL's cpo_alpha.
    label_smoothing: from 0 to below 0.5, of "sigmoid". average_log_prob: divide by the tokens of the sequence; None:
    with "ipo", as TRL does. nll_target: as of ``orpo_loss``. Shapes, shift, memory and errors: as ``dpo_loss``.
    Rewards: beta log pi. The NLL takes no pass of its own.
        {head}
    """
    options = head_of(head)
    kind = choice("loss_type", loss_type, ("sigmoid", "hinge", "ipo"))
    beta, alpha = number("beta", beta, above=0.0), number("alpha", alpha, 0.0)
    smoothing = _smoothing_of(kind, label_smoothing)
    average = kind == "ipo" if average_log_prob is None else average_log_prob
    pairs = _pairs(hidden, weight, targets, bias, options, shift, average, nll_target)
    loss = _dpo(kind, pairs.chosen, pairs.rejected, beta, smoothing).mean()
    return pairs.result(loss + alpha * pairs.nll if alpha else loss, beta * pairs.chosen, beta * pairs.rejected)


def _log_odds(logps: jax.Array) -> jax.Array:
    """log(p / (1 - p)) of log p; of p = 1 that of the next number below."""
    below_one = jnp.minimum(logps, -jnp.finfo(logps.dtype).eps)
    return logps - jnp.log(-jnp.expm1(below_one))


@takes(HEAD)
def orpo_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    beta: float = 0.1,
    nll_target: ArrayLike | None = None,
    shift: bool = False,
    **head: Unpack[HeadKeywords],
) -> PreferenceLoss:
    """Odds ratio preference optimization (Hong et al. 2024), without a reference:
    NLL - beta log s(log odds_w - log odds_l), odds = p / (1 - p) of p = exp(mean log-probability of the tokens), NLL
    the mean negative log-probability of the chosen tokens.

    beta: from 0, the paper's lambda. nll_target: [2 B, T] or [B, T], int32 or int64, what the NLL is of instead of the
    chosen sequences' targets, and shifted as that: with the words of prompts, too, as TRL has it. Those of rejected
    sequences do not count. A pair of which a sequence has no token has no odds, and adds 0 to that term (NaN in TRL).
    Shapes, shift, memory and errors: as ``dpo_loss``. Rewards: beta m, m the mean log-probability. The NLL takes no
    pass of its own.
        {head}
    """
    options = head_of(head)
    beta = number("beta", beta, 0.0)
    pairs = _pairs(hidden, weight, targets, bias, options, shift, True, nll_target)
    ratio = _log_odds(pairs.chosen) - _log_odds(pairs.rejected)
    loss = pairs.nll - beta * jnp.where(pairs.scored, log_sigmoid(ratio), 0.0).mean()
    return pairs.result(loss, beta * pairs.chosen, beta * pairs.rejected)


def _log_ratio(
    hidden, weight, targets, bias, head: Head, ref_logps, reference: Reference, average: bool, shift: bool
) -> tuple[jax.Array, jax.Array]:
    """(log pi [B], log pi - log pi_ref [B]) of single sequences."""
    hidden, targets = sequences(hidden, targets)
    targets = _target(targets, shift, head)
    found = tokens(hidden, weight, targets, bias, head)
    logps = found.sums(flag("average_log_prob", average))
    if reference.check("ref_logps", ref_logps):
        return logps, logps - reference.tokens(weight, targets, bias, head).sums(average)
    if ref_logps is None:
        raise ValueError("ref_logps: expected it or ref_hidden, got None")
    return logps, logps - fixed("ref_logps", ref_logps, logps.shape)


@takes(HEAD)
def kto_kl(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    ref_logps: ArrayLike | None = None,
    ref_hidden: ArrayLike | None = None,
    ref_weight: ArrayLike | None = None,
    ref_bias: ArrayLike | None = None,
    average_log_prob: bool = False,
    shift: bool = False,
    **head: Unpack[HeadKeywords],
) -> jax.Array:
    """KTO's estimate of the divergence from the reference (Ethayarajh et al. 2024), a number without a
    gradient: max(0, mean(log pi - log pi_ref)), of prompts with the answers to others. Over several processes take the
    mean of theirs. Arguments: as ``kto_loss``. One pass, one more of a reference.
        {head}
    """
    states = jax.lax.stop_gradient(_arguments.floats("hidden", hidden))
    words = jax.lax.stop_gradient(_arguments.floats("weight", weight))
    of_words = None if bias is None else jax.lax.stop_gradient(jnp.asarray(bias))
    ratio = _log_ratio(
        states, words, targets, of_words, head_of(head), ref_logps, Reference(ref_hidden, ref_weight, ref_bias),
        average_log_prob, shift,
    )[1]
    return jnp.maximum(ratio.sum() / max(ratio.size, 1), 0.0)


@takes(HEAD)
def kto_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    preference_labels: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    kl: ArrayLike | None = None,
    ref_logps: ArrayLike | None = None,
    ref_hidden: ArrayLike | None = None,
    ref_weight: ArrayLike | None = None,
    ref_bias: ArrayLike | None = None,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    loss_type: str = "kto",
    average_log_prob: bool = False,
    shift: bool = False,
    **head: Unpack[HeadKeywords],
) -> KTOLoss:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024), of sequences that are each good or bad. With
    the log-ratio r = log pi(y) - log pi_ref(y) and the divergence kl:

    - "kto": desirable_weight (1 - s(beta (r - kl))) of good ones, undesirable_weight (1 - s(beta (kl - r))) of bad ones
    - "apo_zero_unpaired": the same with kl = 0 (D'Oosterlinck et al. 2024)

    Args:
        hidden: [B, T, D]. targets: [B, T]. weight: [V, D]. bias: [V].
        preference_labels: [B] bool: whether the sequence is good.
        kl: a number, or an array of one: ``kto_kl`` of mismatched pairs; 0.0 leaves it out.
        ref_logps: [B]; or ref_hidden, ref_weight, ref_bias: as of ``dpo_loss``.
        beta, desirable_weight, undesirable_weight: above 0, from 0.
        average_log_prob, shift: as of ``dpo_loss``.
        {head}

    Returns:
        KTOLoss: the mean over the sequences; without gradients log pi, rewards beta r, and kl.

    Memory and errors: as ``dpo_loss``.
    """
    options = head_of(head)
    kind = choice("loss_type", loss_type, ("kto", "apo_zero_unpaired"))
    beta = number("beta", beta, above=0.0)
    weights = number("desirable_weight", desirable_weight, 0.0), number("undesirable_weight", undesirable_weight, 0.0)
    if (kl is None) == (kind == "kto"):
        wanted = "a number or an array of one, as of kto_kl" if kl is None else f"None with loss_type {kind!r}"
        raise ValueError(f"kl: expected {wanted}, got {kl!r}")
    logps, ratio = _log_ratio(
        hidden, weight, targets, bias, options, ref_logps, Reference(ref_hidden, ref_weight, ref_bias),
        average_log_prob, shift,
    )
    good = shaped("preference_labels", preference_labels, logps.shape)
    if good.dtype != jnp.bool_:
        raise TypeError(f"preference_labels: expected bool, got {good.dtype}")
    divergence = _one("kl", 0.0 if kl is None else kl)
    gain = sigmoid(beta * jnp.where(good, ratio - divergence, divergence - ratio))
    loss = (jnp.where(good, weights[0], weights[1]) * (1 - gain)).sum() / max(logps.size, 1)
    return KTOLoss(loss, *map(jax.lax.stop_gradient, (logps, beta * ratio, divergence)))


def _one(name: str, value: ArrayLike) -> jax.Array:
    """A number without a gradient."""
    if isinstance(value, (bool, int, float)):
        return jnp.float32(number(name, value))
    if jnp.size(_arguments.array(name, value)) != 1:
        raise ValueError(f"{name}: expected an array of one number, got {list(jnp.shape(value))}")
    return jax.lax.stop_gradient(jnp.asarray(value, jnp.float32).reshape(()))
