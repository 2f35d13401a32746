"""Preference losses: DPO, IPO, SimPO, ORPO and CPO on pairs, KTO on single sequences.

Pairs are arranged as in TRL and Liger. The first half of the sequences is chosen, the second rejected: pair i is
sequences i and B + i. The policy's head takes one GEMM forward and three backward. A reference takes one, without
gradients. Logits are not stored, and gradients of frozen tensors are not computed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._losses import HEAD, Head, HeadKeywords, choice, flag, head_of, number
from .. import _distributed
from ._head import Reference, Tokens, sequences, shaped, shifted, takes, tokens

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

    ref_chosen_logps: Optional[Tensor]
    ref_rejected_logps: Optional[Tensor]
    ref_hidden: Optional[Tensor]
    ref_weight: Optional[Tensor]
    ref_bias: Optional[Tensor]
    reference_free: bool
    shift: bool


class PreferenceLoss(NamedTuple):
    """A preference loss. Only ``loss`` has a gradient. Log-probabilities are of sequences, summed or averaged as the
    loss uses them."""

    loss: Tensor  # []
    chosen_logps: Tensor  # [B]
    rejected_logps: Tensor  # [B]
    chosen_rewards: Tensor  # [B]
    rejected_rewards: Tensor  # [B]
    nll_loss: Tensor  # []: mean negative log-probability of the chosen tokens

    @property
    def margins(self) -> Tensor:
        """[B]: the chosen reward minus the rejected one."""
        return self.chosen_rewards - self.rejected_rewards

    @property
    def accuracies(self) -> Tensor:
        """[B]: 1 where the margin is positive, else 0."""
        return (self.margins > 0).to(self.margins.dtype)


class KTOLoss(NamedTuple):
    """A KTO loss. Only ``loss`` has a gradient."""

    loss: Tensor  # []
    logps: Tensor  # [B]
    rewards: Tensor  # [B]
    kl: Tensor  # []


class _Pairs(NamedTuple):
    """Log-probabilities of B pairs."""

    chosen: Tensor  # [B]
    rejected: Tensor  # [B]
    nll: Tensor  # []
    target: Tensor  # [2 B, T], as scored
    scored: Tensor  # [B] bool: both sequences have tokens

    def result(self, loss: Tensor, chosen_rewards: Tensor, rejected_rewards: Tensor) -> PreferenceLoss:
        parts = self.chosen, self.rejected, chosen_rewards, rejected_rewards, self.nll
        return PreferenceLoss(loss, *(part.detach() for part in parts))


def _target(target: Tensor, shift: bool, head: Head) -> Tensor:
    return shifted(target, head.ignore_index) if flag("shift", shift) else target


def _with_nll(hidden, weight, target, bias, head: Head, shift: bool, nll_target) -> tuple[Tokens, Tensor, Tensor]:
    """Returns the tokens of target. For the chosen half, it also returns the log-probabilities of nll_target and
    whether they count, from the same GEMM."""
    batch, length = target.shape
    given = shaped("nll_target", nll_target, (batch, length), (batch // 2, length))
    if given.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"nll_target: expected int32 or int64, got {given.dtype}")
    target, given = _distributed.replicated("target", target), _distributed.replicated("nll_target", given)
    likely = _target(given[: batch // 2].to(target), shift, head)
    both = torch.stack([target, torch.cat([likely, torch.full_like(likely, head.ignore_index)])], -1)
    found = tokens(hidden, weight, both, bias, head)
    of_target = found._replace(logps=found.logps[..., 0], valid=found.valid[..., 0])
    return of_target, found.logps[: batch // 2, :, 1], found.valid[: batch // 2, :, 1]


def _pairs(hidden, weight, target, bias, head: Head, shift: bool, average: bool, nll_target=None) -> _Pairs:
    sequences(hidden, target, even=True)
    target = _target(target, shift, head)
    half = hidden.shape[0] // 2
    if nll_target is None:
        found = tokens(hidden, weight, target, bias, head)
        likely, counted = found.logps[:half], found.valid[:half]
    else:
        found, likely, counted = _with_nll(hidden, weight, target, bias, head, shift, nll_target)
    chosen, rejected = found.sums(flag("average_log_prob", average)).split(half)
    nll = -likely.sum() / counted.sum().clamp(min=1)
    some = found.valid.any(-1)
    return _Pairs(chosen, rejected, nll, target, some[:half] & some[half:])


def _reference_pairs(
    pairs: _Pairs, weight, bias, head: Head, reference: Reference, chosen, rejected, free: bool, average: bool
) -> tuple[Tensor, Tensor]:
    """Returns the reference's log-probabilities [B], without gradients."""
    any_given = chosen if chosen is not None else rejected
    computed = reference.check("ref_chosen_logps", any_given)
    if flag("reference_free", free):
        if computed or any_given is not None:
            raise ValueError("reference_free: expected False beside a reference, got True")
        return torch.zeros_like(pairs.chosen), torch.zeros_like(pairs.chosen)
    if computed:
        of = reference.tokens(weight, pairs.target, bias, head).sums(average)
        return of[: len(of) // 2], of[len(of) // 2 :]
    if any_given is None:
        raise ValueError(
            "ref_chosen_logps: expected it with ref_rejected_logps, or ref_hidden, or reference_free=True, got None"
        )
    given = (("ref_chosen_logps", chosen), ("ref_rejected_logps", rejected))
    c, r = (shaped(name, logps, tuple(pairs.chosen.shape)).detach().to(pairs.chosen.dtype) for name, logps in given)
    return c, r


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """Returns the negative log-likelihood of the preference, if labels are wrong with probability label_smoothing."""
    return -F.logsigmoid(logits) * (1 - label_smoothing) - F.logsigmoid(-logits) * label_smoothing


def _exo(logits: Tensor, label_smoothing: float) -> Tensor:
    """Returns the KL divergence of the policy's preference from the smoothed label."""
    right, wrong = F.logsigmoid(logits), F.logsigmoid(-logits)
    return right.exp() * (right - math.log1p(-label_smoothing)) + wrong.exp() * (wrong - math.log(label_smoothing))


def _dpo(kind: str, chosen: Tensor, rejected: Tensor, beta: float, smoothing: float) -> Tensor:
    """Returns the loss [B] from log-ratios [B] of policy to reference."""
    margin = chosen - rejected
    if kind == "sigmoid":
        return _smoothed(beta * margin, smoothing)
    if kind == "robust":
        flipped = smoothing * F.logsigmoid(-beta * margin)
        return (_smoothed(beta * margin, smoothing) + 2 * flipped) / (1 - 2 * smoothing)
    if kind == "hinge":
        return torch.relu(1 - beta * margin)
    if kind == "ipo":
        return (margin - 1 / (2 * beta)).square()
    if kind == "exo_pair":
        return _exo(beta * margin, smoothing or 1e-3)
    if kind == "nca_pair":
        both = F.logsigmoid(-beta * chosen) + F.logsigmoid(-beta * rejected)
        return -F.logsigmoid(beta * chosen) - 0.5 * both
    if kind == "sppo_hard":
        return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()
    if kind == "apo_zero":
        return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
    return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(beta * margin)


def _of_batch(
    kind: str, pairs: _Pairs, reference: tuple[Tensor, Tensor], beta: float, smoothing: float, delta, tau: float
) -> Tensor:
    """Returns the loss [B] of every kind. Kinds that sort log-ratios couple the pairs of the batch."""
    chosen, rejected = pairs.chosen - reference[0], pairs.rejected - reference[1]
    if kind == "bco_pair":
        center = torch.cat([beta * chosen, beta * rejected]).mean().detach() if delta is None else delta
        return -F.logsigmoid(beta * chosen - center) - F.logsigmoid(center - beta * rejected)
    if kind == "aot":
        of_policy, of_reference = pairs.chosen - pairs.rejected, reference[0] - reference[1]
        return _smoothed(beta * (of_policy.sort().values - of_reference.sort().values), smoothing)
    if kind in ("aot_pair", "aot_unpaired"):
        return _smoothed(beta * (chosen.sort().values - rejected.sort().values), smoothing)
    if kind == "discopop":
        x = beta * (chosen - rejected)
        log_g = F.logsigmoid(x / tau)  # added to -x, since exp(-x) may be infinite where g is 0
        return -F.logsigmoid(x) * torch.sigmoid(-x / tau) + (log_g - x).exp()
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
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor] = None,
    *,
    ref_chosen_logps: Optional[Tensor] = None,
    ref_rejected_logps: Optional[Tensor] = None,
    ref_hidden: Optional[Tensor] = None,
    ref_weight: Optional[Tensor] = None,
    ref_bias: Optional[Tensor] = None,
    reference_free: bool = False,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    bco_delta: Optional[float | Tensor] = None,
    discopop_tau: Optional[float] = None,
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
        hidden: [2 B, T, D], chosen sequences, then rejected ones; float32, bfloat16, float16, or float64 slowly.
        weight: [V, D], the dtype of hidden. bias: [V].
        target: [2 B, T], int32 or int64; prompts and padding are ``ignore_index``.
        ref_chosen_logps, ref_rejected_logps: [B], of the reference; averaged if average_log_prob is set.
        ref_hidden, ref_weight, ref_bias: instead of these, the reference's hidden states [2 B, T, D'] and head [V, D'],
            [V]: one GEMM, no gradients. Without ref_weight, the reference uses the policy's current head.
        reference_free: no reference: its log-probabilities are 0.
        beta: above 0. label_smoothing: at least 0 and below 0.5.
        bco_delta: for "bco_pair": a number or tensor of one element, without a gradient. TRL uses a running mean of the
            rewards. None: the mean of beta r_w and beta r_l of these pairs.
        discopop_tau: for "discopop", above 0; None: 0.05.
        average_log_prob: divide by the number of tokens of the sequence.
        shift: hidden and target have the same positions, and position t predicts target t + 1.
        {head}

    Returns:
        PreferenceLoss: the mean over the pairs; without gradients, the log-probabilities and the rewards beta r.

    Memory: the head's plan, within ``memory_budget``, and a few numbers per token. Cost: 1 GEMM forward, 3 backward. On
    a GPU, if exp(z) of all tokens fits, it is 2 backward. The plan's workspace and weight's gradient then exist from
    the forward on.

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one.
    """
    options = head_of(head)
    kind = choice("loss_type", loss_type, DPO_TYPES)
    beta = number("beta", beta, above=0.0)
    smoothing = _smoothing_of(kind, label_smoothing)
    delta = _of_kind("bco_delta", "bco_pair", kind, bco_delta)
    tau = _of_kind("discopop_tau", "discopop", kind, discopop_tau)
    tau = 0.05 if tau is None else number("discopop_tau", tau, above=0.0)
    pairs = _pairs(hidden, weight, target, bias, options, shift, average_log_prob)
    delta = None if delta is None else _one("bco_delta", delta, pairs.chosen)
    reference = _reference_pairs(
        pairs, weight, bias, options, Reference(ref_hidden, ref_weight, ref_bias), ref_chosen_logps, ref_rejected_logps,
        reference_free, average_log_prob,
    )
    chosen, rejected = pairs.chosen - reference[0], pairs.rejected - reference[1]
    loss = _of_batch(kind, pairs, reference, beta, smoothing, delta, tau).mean()
    return pairs.result(loss, beta * chosen, beta * rejected)


@takes({**REFERENCE, **HEAD})
def ipo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor] = None,
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
        hidden, weight, target, bias, beta=beta, average_log_prob=average_log_prob, loss_type="ipo", **more
    )


@takes(HEAD)
def simpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor] = None,
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
    pairs = _pairs(hidden, weight, target, bias, options, shift, True)
    loss = _smoothed(beta * (pairs.chosen - pairs.rejected) - gamma, smoothing).mean()
    return pairs.result(loss + alpha * pairs.nll if alpha else loss, beta * pairs.chosen, beta * pairs.rejected)


@takes(HEAD)
def cpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor] = None,
    *,
    beta: float = 0.1,
    alpha: float = 1.0,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    average_log_prob: Optional[bool] = None,
    nll_target: Optional[Tensor] = None,
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
    pairs = _pairs(hidden, weight, target, bias, options, shift, average, nll_target)
    loss = _dpo(kind, pairs.chosen, pairs.rejected, beta, smoothing).mean()
    return pairs.result(loss + alpha * pairs.nll if alpha else loss, beta * pairs.chosen, beta * pairs.rejected)


def _log_odds(logps: Tensor) -> Tensor:
    """Returns log(p / (1 - p)) given log p. p = 1 is replaced by the next smaller number."""
    below_one = logps.clamp(max=-torch.finfo(logps.dtype).eps)
    return logps - torch.log(-torch.expm1(below_one))


@takes(HEAD)
def orpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor] = None,
    *,
    beta: float = 0.1,
    nll_target: Optional[Tensor] = None,
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
    pairs = _pairs(hidden, weight, target, bias, options, shift, True, nll_target)
    ratio = _log_odds(pairs.chosen) - _log_odds(pairs.rejected)
    loss = pairs.nll - beta * torch.where(pairs.scored, F.logsigmoid(ratio), 0.0).mean()
    return pairs.result(loss, beta * pairs.chosen, beta * pairs.rejected)


def _log_ratio(
    hidden, weight, target, bias, head: Head, ref_logps, reference: Reference, average: bool, shift: bool
) -> tuple[Tensor, Tensor]:
    """Returns (log pi [B], log pi - log pi_ref [B]) of single sequences."""
    sequences(hidden, target)
    target = _target(target, shift, head)
    found: Tokens = tokens(hidden, weight, target, bias, head)
    logps = found.sums(flag("average_log_prob", average))
    if reference.check("ref_logps", ref_logps):
        return logps, logps - reference.tokens(weight, target, bias, head).sums(average)
    if ref_logps is None:
        raise ValueError("ref_logps: expected it or ref_hidden, got None")
    return logps, logps - shaped("ref_logps", ref_logps, tuple(logps.shape)).detach().to(logps.dtype)


@takes(HEAD)
def kto_kl(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Optional[Tensor] = None,
    *,
    ref_logps: Optional[Tensor] = None,
    ref_hidden: Optional[Tensor] = None,
    ref_weight: Optional[Tensor] = None,
    ref_bias: Optional[Tensor] = None,
    average_log_prob: bool = False,
    shift: bool = False,
    **head: Unpack[HeadKeywords],
) -> Tensor:
    """KTO's estimate of the divergence from the reference (Ethayarajh et al. 2024), a number without a gradient: max(0,
    mean(log pi - log pi_ref)). The sequences are prompts with completions of other prompts. Over several processes,
    average their results. Arguments: as in ``kto_loss``. Cost: one GEMM, and one more for a reference.
        {head}
    """
    with torch.no_grad():
        ratio = _log_ratio(
            hidden, weight, target, bias, head_of(head), ref_logps, Reference(ref_hidden, ref_weight, ref_bias),
            average_log_prob, shift,
        )[1]
        return (ratio.sum() / max(ratio.numel(), 1)).clamp(min=0)


@takes(HEAD)
def kto_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    preference_labels: Tensor,
    bias: Optional[Tensor] = None,
    *,
    kl: Optional[Tensor | float] = None,
    ref_logps: Optional[Tensor] = None,
    ref_hidden: Optional[Tensor] = None,
    ref_weight: Optional[Tensor] = None,
    ref_bias: Optional[Tensor] = None,
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
        hidden: [B, T, D]. target: [B, T]. weight: [V, D]. bias: [V].
        preference_labels: [B] bool: whether the sequence is desirable.
        kl: a number, or a tensor of one element: ``kto_kl`` of mismatched pairs; 0.0 omits it.
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
        wanted = "a number or a tensor of one, as of kto_kl" if kl is None else f"None with loss_type {kind!r}"
        raise ValueError(f"kl: expected {wanted}, got {kl!r}")
    logps, ratio = _log_ratio(
        hidden, weight, target, bias, options, ref_logps, Reference(ref_hidden, ref_weight, ref_bias),
        average_log_prob, shift,
    )
    good = shaped("preference_labels", preference_labels, tuple(logps.shape))
    if good.dtype != torch.bool:
        raise TypeError(f"preference_labels: expected bool, got {good.dtype}")
    divergence = _one("kl", 0.0 if kl is None else kl, ratio)
    gain = torch.sigmoid(beta * torch.where(good, ratio - divergence, divergence - ratio))
    loss = (torch.where(good, weights[0], weights[1]) * (1 - gain)).sum() / max(logps.numel(), 1)
    return KTOLoss(loss, logps.detach(), (beta * ratio).detach(), divergence)


def _one(name: str, value: Tensor | float, like: Tensor) -> Tensor:
    """Returns a number, or a tensor of one element, as a scalar without a gradient, in the dtype and on the device of
    ``like``."""
    if not isinstance(value, Tensor):
        return like.new_full((), number(name, value))
    if value.numel() != 1:
        raise ValueError(f"{name}: expected a tensor of one number, got {list(value.shape)}")
    return value.detach().reshape(()).to(like)
