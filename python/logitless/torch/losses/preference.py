"""Preference losses: DPO, IPO, SimPO, ORPO and CPO on pairs, KTO on single sequences. ``_losses/preference.py`` has
their formulas and docstrings."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Optional

from torch import Tensor

from ..._losses import preference as shared
from ..._losses.options import HEAD, HeadKeywords, ready
from .. import _xp as xp

if TYPE_CHECKING:
    from typing_extensions import Unpack


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


_of_pairs = ready(xp, shared, HEAD, PreferenceLoss)


@_of_pairs
def dpo_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None,
    *, ref_chosen_logps: Optional[Tensor] = None, ref_rejected_logps: Optional[Tensor] = None,
    ref_hidden: Optional[Tensor] = None, ref_weight: Optional[Tensor] = None, ref_bias: Optional[Tensor] = None,
    reference_free: bool = False, beta: float = 0.1, loss_type: str = "sigmoid", label_smoothing: float = 0.0,
    bco_delta: Optional[float | Tensor] = None, discopop_tau: Optional[float] = None, average_log_prob: bool = False,
    shift: bool = False, **head: Unpack[HeadKeywords],
) -> PreferenceLoss:
    """Direct preference optimization (Rafailov et al. 2023) and its variants."""


@ready(xp, shared, {**shared.REFERENCE, **HEAD}, PreferenceLoss)
def ipo_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None,
    *, beta: float = 0.1, average_log_prob: bool = True, **more: Unpack[ReferenceKeywords],
) -> PreferenceLoss:
    """Identity preference optimization (Azar et al. 2023)."""


@_of_pairs
def simpo_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None,
    *, beta: float = 0.1, gamma: float = 0.5, alpha: float = 0.0, label_smoothing: float = 0.0, shift: bool = False,
    **head: Unpack[HeadKeywords],
) -> PreferenceLoss:
    """Simple preference optimization (Meng et al. 2024)."""


@_of_pairs
def cpo_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None,
    *, beta: float = 0.1, alpha: float = 1.0, loss_type: str = "sigmoid", label_smoothing: float = 0.0,
    average_log_prob: Optional[bool] = None, nll_target: Optional[Tensor] = None, shift: bool = False,
    **head: Unpack[HeadKeywords],
) -> PreferenceLoss:
    """Contrastive preference optimization (Xu et al. 2024)."""


@_of_pairs
def orpo_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None,
    *, beta: float = 0.1, nll_target: Optional[Tensor] = None, shift: bool = False, **head: Unpack[HeadKeywords],
) -> PreferenceLoss:
    """Odds ratio preference optimization (Hong et al. 2024)."""


@ready(xp, shared, HEAD)
def kto_kl(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None,
    *, ref_logps: Optional[Tensor] = None, ref_hidden: Optional[Tensor] = None, ref_weight: Optional[Tensor] = None,
    ref_bias: Optional[Tensor] = None, average_log_prob: bool = False, shift: bool = False,
    **head: Unpack[HeadKeywords],
) -> Tensor:
    """KTO's estimate of the divergence from the reference, a number without a gradient."""


@ready(xp, shared, HEAD, KTOLoss)
def kto_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, preference_labels: Tensor, bias: Optional[Tensor] = None,
    *, kl: Optional[Tensor | float] = None, ref_logps: Optional[Tensor] = None, ref_hidden: Optional[Tensor] = None,
    ref_weight: Optional[Tensor] = None, ref_bias: Optional[Tensor] = None, beta: float = 0.1,
    desirable_weight: float = 1.0, undesirable_weight: float = 1.0, loss_type: str = "kto",
    average_log_prob: bool = False, shift: bool = False, **head: Unpack[HeadKeywords],
) -> KTOLoss:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024)."""
