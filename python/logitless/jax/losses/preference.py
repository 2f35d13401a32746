"""Preference losses: DPO, IPO, SimPO, ORPO and CPO on pairs, KTO on single sequences. ``_losses/preference.py`` has
their formulas and docstrings."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
from jax.typing import ArrayLike

from ..._losses import preference as shared
from ..._losses.options import HEAD, HeadKeywords, ready
from .. import _xp as xp

if TYPE_CHECKING:
    from typing_extensions import Unpack


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


_of_pairs = ready(xp, shared, HEAD, PreferenceLoss)


@_of_pairs
def dpo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, bias: ArrayLike | None = None,
    *, ref_chosen_logps: ArrayLike | None = None, ref_rejected_logps: ArrayLike | None = None,
    ref_hidden: ArrayLike | None = None, ref_weight: ArrayLike | None = None, ref_bias: ArrayLike | None = None,
    reference_free: bool = False, beta: float = 0.1, loss_type: str = "sigmoid", label_smoothing: float = 0.0,
    bco_delta: float | ArrayLike | None = None, discopop_tau: float | None = None, average_log_prob: bool = False,
    shift: bool = False, **head: Unpack[HeadKeywords],
) -> PreferenceLoss:
    """Direct preference optimization (Rafailov et al. 2023) and its variants."""


@ready(xp, shared, {**shared.REFERENCE, **HEAD}, PreferenceLoss)
def ipo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, bias: ArrayLike | None = None,
    *, beta: float = 0.1, average_log_prob: bool = True, **more: Unpack[ReferenceKeywords],
) -> PreferenceLoss:
    """Identity preference optimization (Azar et al. 2023)."""


@_of_pairs
def simpo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, bias: ArrayLike | None = None,
    *, beta: float = 0.1, gamma: float = 0.5, alpha: float = 0.0, label_smoothing: float = 0.0, shift: bool = False,
    **head: Unpack[HeadKeywords],
) -> PreferenceLoss:
    """Simple preference optimization (Meng et al. 2024)."""


@_of_pairs
def cpo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, bias: ArrayLike | None = None,
    *, beta: float = 0.1, alpha: float = 1.0, loss_type: str = "sigmoid", label_smoothing: float = 0.0,
    average_log_prob: bool | None = None, nll_target: ArrayLike | None = None, shift: bool = False,
    **head: Unpack[HeadKeywords],
) -> PreferenceLoss:
    """Contrastive preference optimization (Xu et al. 2024)."""


@_of_pairs
def orpo_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, bias: ArrayLike | None = None,
    *, beta: float = 0.1, nll_target: ArrayLike | None = None, shift: bool = False, **head: Unpack[HeadKeywords],
) -> PreferenceLoss:
    """Odds ratio preference optimization (Hong et al. 2024)."""


@ready(xp, shared, HEAD)
def kto_kl(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, bias: ArrayLike | None = None,
    *, ref_logps: ArrayLike | None = None, ref_hidden: ArrayLike | None = None, ref_weight: ArrayLike | None = None,
    ref_bias: ArrayLike | None = None, average_log_prob: bool = False, shift: bool = False,
    **head: Unpack[HeadKeywords],
) -> jax.Array:
    """KTO's estimate of the divergence from the reference, a number without a gradient."""


@ready(xp, shared, HEAD, KTOLoss)
def kto_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike, preference_labels: ArrayLike,
    bias: ArrayLike | None = None,
    *, kl: ArrayLike | None = None, ref_logps: ArrayLike | None = None, ref_hidden: ArrayLike | None = None,
    ref_weight: ArrayLike | None = None, ref_bias: ArrayLike | None = None, beta: float = 0.1,
    desirable_weight: float = 1.0, undesirable_weight: float = 1.0, loss_type: str = "kto",
    average_log_prob: bool = False, shift: bool = False, **head: Unpack[HeadKeywords],
) -> KTOLoss:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024)."""
