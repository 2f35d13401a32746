"""Preference losses: DPO, IPO, SimPO, ORPO and CPO on pairs, KTO on single sequences.

Pairs are arranged as in TRL and Liger. The first half of the sequences is chosen, the second rejected: pair i is
sequences i and B + i. The policy's head takes one GEMM forward and three backward. A reference takes one, without
gradients. Logits are not stored, and gradients of frozen tensors are not computed.
"""

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
    """Keywords of ``dpo_loss`` about the reference."""

    ref_chosen_logps: ArrayLike | None
    ref_rejected_logps: ArrayLike | None
    ref_hidden: ArrayLike | None
    ref_weight: ArrayLike | None
    ref_bias: ArrayLike | None
    reference_free: bool
    shift: bool


class PreferenceLoss(NamedTuple):
    """A preference loss. Only ``loss`` has a gradient: jax.value_and_grad(lambda *a: (r := dpo_loss(*a)).loss, ...), or
    with has_aux=True (r.loss, r). Log-probabilities are of sequences, summed or averaged as the loss uses them."""

    loss: jax.Array  # []
    chosen_logps: jax.Array  # [B]
    rejected_logps: jax.Array  # [B]
    chosen_rewards: jax.Array  # [B]
    rejected_rewards: jax.Array  # [B]
    nll_loss: jax.Array  # []: mean negative log-probability of the chosen tokens

    @property
    def margins(self) -> jax.Array:
        """[B]: the chosen reward minus the rejected one."""
        return self.chosen_rewards - self.rejected_rewards

    @property
    def accuracies(self) -> jax.Array:
        """[B]: 1 where the margin is positive, else 0."""
        return (self.margins > 0).astype(self.margins.dtype)


class KTOLoss(NamedTuple):
    """A KTO loss. Only ``loss`` has a gradient."""

    loss: jax.Array  # []
    logps: jax.Array  # [B]
    rewards: jax.Array  # [B]
    kl: jax.Array  # []


class _Pairs(NamedTuple):
    """Log-probabilities of B pairs."""

    chosen: jax.Array  # [B]
    rejected: jax.Array  # [B]
    nll: jax.Array  # []
    targets: jax.Array  # [2 B, T], as scored
    scored: jax.Array  # [B] bool: both sequences have tokens

    def result(self, loss: jax.Array, chosen_rewards: jax.Array, rejected_rewards: jax.Array) -> PreferenceLoss:
        parts = self.chosen, self.rejected, chosen_rewards, rejected_rewards, self.nll
        return PreferenceLoss(loss, *map(jax.lax.stop_gradient, parts))


def _target(targets: jax.Array, shift: bool, head: Head) -> jax.Array:
    return shifted(targets, head.ignore_index) if flag("shift", shift) else targets


def _with_nll(
    hidden, weight, targets, bias, head: Head, shift: bool, nll_target
) -> tuple[Tokens, jax.Array, jax.Array]:
    """Returns the tokens of targets. For the chosen half, it also returns the log-probabilities of nll_target and
    whether they count, from the same GEMM."""
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
    """Returns the reference's log-probabilities [B], without gradients."""
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
    """Returns the negative log-likelihood of the preference, if labels are wrong with probability label_smoothing."""
    return -log_sigmoid(logits) * (1 - label_smoothing) - log_sigmoid(-logits) * label_smoothing


def _exo(logits: jax.Array, label_smoothing: float) -> jax.Array:
    """Returns the KL divergence of the policy's preference from the smoothed label."""
    right, wrong = log_sigmoid(logits), log_sigmoid(-logits)
    of_right = jnp.exp(right) * (right - math.log1p(-label_smoothing))
    return of_right + jnp.exp(wrong) * (wrong - math.log(label_smoothing))


def _dpo(kind: str, chosen: jax.Array, rejected: jax.Array, beta: float, smoothing: float) -> jax.Array:
    """Returns the loss [B] from log-ratios [B] of policy to reference."""
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
    """Returns the loss [B] of every kind. Kinds that sort log-ratios couple the pairs of the batch."""
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
        log_g = log_sigmoid(x / tau)  # added to -x, since exp(-x) may be infinite where g is 0
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
        hidden: [2 B, T, D], chosen sequences, then rejected ones; float32, bfloat16 or float16.
        weight: [V, D], the dtype of hidden. bias: [V].
        targets: [2 B, T], int32 or int64; prompts and padding are ``ignore_index``.
        ref_chosen_logps, ref_rejected_logps: [B], of the reference; averaged if average_log_prob is set.
        ref_hidden, ref_weight, ref_bias: instead of these, the reference's hidden states [2 B, T, D'] and head [V, D'],
            [V]: one GEMM, no gradients. Without ref_weight, the reference uses the policy's current head.
        reference_free: no reference: its log-probabilities are 0.
        beta: above 0. label_smoothing: at least 0 and below 0.5.
        bco_delta: for "bco_pair": a number or array of one element, without a gradient. TRL uses a running mean of the
            rewards. None: the mean of beta r_w and beta r_l of these pairs.
        discopop_tau: for "discopop", above 0; None: 0.05.
        average_log_prob: divide by the number of tokens of the sequence.
        shift: hidden and targets have the same positions, and position t predicts target t + 1.
        {head}

    Returns:
        PreferenceLoss: the mean over the pairs; without gradients, the log-probabilities and the rewards beta r.

    Memory: the head's plan, within ``memory_budget``, and a few numbers per token. Cost: 1 GEMM forward, 3 backward.

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one.
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
    """Identity preference optimization (Azar et al. 2023, equation 17): the mean of (d - 1 / (2 beta))^2. Here d is the
    log-ratio of the chosen sequence minus that of the rejected one, and beta is the paper's tau.

    average_log_prob: as in TRL; with False the log-ratios are sums over tokens, as in the paper. Other arguments,
    results, memory and errors: as in ``dpo_loss``.
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
    pairs = _pairs(hidden, weight, targets, bias, options, shift, average, nll_target)
    loss = _dpo(kind, pairs.chosen, pairs.rejected, beta, smoothing).mean()
    return pairs.result(loss + alpha * pairs.nll if alpha else loss, beta * pairs.chosen, beta * pairs.rejected)


def _log_odds(logps: jax.Array) -> jax.Array:
    """Returns log(p / (1 - p)) given log p. p = 1 is replaced by the next smaller number."""
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
    pairs = _pairs(hidden, weight, targets, bias, options, shift, True, nll_target)
    ratio = _log_odds(pairs.chosen) - _log_odds(pairs.rejected)
    loss = pairs.nll - beta * jnp.where(pairs.scored, log_sigmoid(ratio), 0.0).mean()
    return pairs.result(loss, beta * pairs.chosen, beta * pairs.rejected)


def _log_ratio(
    hidden, weight, targets, bias, head: Head, ref_logps, reference: Reference, average: bool, shift: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns (log pi [B], log pi - log pi_ref [B]) of single sequences."""
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
    """KTO's estimate of the divergence from the reference (Ethayarajh et al. 2024), a number without a gradient: max(0,
    mean(log pi - log pi_ref)). The sequences are prompts with completions of other prompts. Over several processes,
    average their results. Arguments: as in ``kto_loss``. Cost: one GEMM, and one more for a reference.
        {head}
    """
    states = jax.lax.stop_gradient(_arguments.floats("hidden", hidden))
    vocab_ids = jax.lax.stop_gradient(_arguments.floats("weight", weight))
    of_vocab = None if bias is None else jax.lax.stop_gradient(jnp.asarray(bias))
    ratio = _log_ratio(
        states, vocab_ids, targets, of_vocab, head_of(head), ref_logps, Reference(ref_hidden, ref_weight, ref_bias),
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
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024), on sequences that are each desirable or undesirable.

    Let r = log pi(y) - log pi_ref(y) be the log-ratio, and kl the divergence. The loss of a sequence is:

    - "kto": desirable_weight (1 - s(beta (r - kl))) if desirable, undesirable_weight (1 - s(beta (kl - r))) if not
    - "apo_zero_unpaired": the same with kl = 0 (D'Oosterlinck et al. 2024)

    Args:
        hidden: [B, T, D]. targets: [B, T]. weight: [V, D]. bias: [V].
        preference_labels: [B] bool: whether the sequence is desirable.
        kl: a number, or an array of one element: ``kto_kl`` of mismatched pairs; 0.0 omits it.
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
    """Returns a number, or an array of one element, as a scalar without a gradient."""
    if isinstance(value, (bool, int, float)):
        return jnp.float32(number(name, value))
    if jnp.size(_arguments.array(name, value)) != 1:
        raise ValueError(f"{name}: expected an array of one number, got {list(jnp.shape(value))}")
    return jax.lax.stop_gradient(jnp.asarray(value, jnp.float32).reshape(()))
