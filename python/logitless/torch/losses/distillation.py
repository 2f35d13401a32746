"""Distillation from a teacher's hidden states and head: forward and reverse KL, JSD, total variation, and the
top K of the teacher or student.
``_losses/distillation.py`` has the formulas and docstrings. This module has their gradients, and runs them by autochunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
from torch import Tensor

from ..._losses import distillation as shared
from ..._losses.options import HEAD, HeadKeywords, LogitKeywords, ready
from .. import _xp as xp
from ..ranks import Sharding
from . import _sharded
from ._formulas import FORMULAS, chunked

if TYPE_CHECKING:
    from typing_extensions import Unpack

DIVERGENCE: dict[str, Any] = dict(target=None, **shared.DIVERGENCE)


class DivergenceKeywords(LogitKeywords, total=False):
    target: Optional[Tensor]
    reduction: str
    normalizer: Optional[float | Tensor]
    weight_hard_loss: float
    weight_soft_loss: float
    teacher_softcap: Optional[float]
    teacher_logit_scale: float
    teacher_ids: Optional[Tensor]
    executor: str
    sharding: Optional[Sharding]


class TopK(NamedTuple):
    """The K token ids with a teacher's largest logits at each position, largest first. Without gradients."""

    vocab_ids: Tensor  # [..., K] int64
    log_probs: Tensor  # [..., K] float32 (float64 for float64 inputs): of the full vocabulary


class _Divergence(torch.autograd.Function):
    """``shared.divergence`` with its gradient by the student."""

    @staticmethod
    def forward(ctx, student: Tensor, teacher: Tensor, beta: float, *statistics: Tensor) -> Tensor:
        """statistics: STATISTICS of a vocabulary, of which the logits are a shard."""
        loss, *saved = shared.divergence(xp, student, teacher, beta, statistics[:2])
        ctx.beta, ctx.count = beta, len(statistics)
        ctx.save_for_backward(student, teacher, *(statistics or saved))
        return loss

    @staticmethod
    def backward(ctx, cotangent: Tensor):
        made = shared.divergence_gradient(xp, cotangent, ctx.beta, *ctx.saved_tensors)
        return made, None, None, *(None,) * ctx.count


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, counts: Tensor) -> Tensor:
        return torch.where(counts, hidden, 0.0)

    @staticmethod
    def backward(ctx, cotangent: Tensor):
        return cotangent, None


def _program(given: dict[str, Tensor], form: tuple) -> Tensor:
    return shared.program(xp, _Divergence.apply, _Masked.apply, given, form)


def _best(given: dict[str, Tensor], softcap: float, scale: float, k: int) -> tuple[Tensor, Tensor]:
    return shared.best(xp, given, softcap, scale, k)


def _sums(given: dict[str, Tensor], form: tuple) -> tuple[Tensor, ...]:
    return shared.sums(xp, given, form)


def _over_ranks_or(loss: Callable[..., shared.Call], arrays: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Computes a divergence: over the ranks that share the vocabulary, or on this one."""
    of_ranks = _sharded.divergence(loss, arrays, options)
    return loss(xp, *arrays, **options).run(chunked) if of_ranks is None else of_ranks


def _normaliser(given: dict[str, Tensor], form: tuple) -> Tensor:
    return shared.normaliser(xp, given, form)


FORMULAS.update(divergence=_program, divergence_sums=_sums, normaliser=_normaliser, best=_best)


@xp.takes(DIVERGENCE, shared.jsd_loss, shared.TEXTS)
def jsd_loss(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, bias: Optional[Tensor] = None,
    teacher_bias: Optional[Tensor] = None,
    *, beta: float = 0.5, **options: Unpack[DivergenceKeywords],
) -> Tensor:
    """Generalised Jensen-Shannon divergence of the next token (Agarwal et al. 2024)."""
    arrays = hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias
    return _over_ranks_or(shared.jsd_loss, arrays, {**options, "beta": beta})


@xp.takes(DIVERGENCE, shared.forward_kl_loss, shared.TEXTS)
def forward_kl_loss(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, bias: Optional[Tensor] = None,
    teacher_bias: Optional[Tensor] = None,
    **options: Unpack[DivergenceKeywords],
) -> Tensor:
    """KL(q || p) of the next token, with the teacher's distribution q and the student's p."""
    arrays = hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias
    return _over_ranks_or(shared.forward_kl_loss, arrays, options)


@xp.takes(DIVERGENCE, shared.reverse_kl_loss, shared.TEXTS)
def reverse_kl_loss(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, bias: Optional[Tensor] = None,
    teacher_bias: Optional[Tensor] = None,
    **options: Unpack[DivergenceKeywords],
) -> Tensor:
    """KL(p || q) of the next token, with the student's distribution p and the teacher's q."""
    arrays = hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias
    return _over_ranks_or(shared.reverse_kl_loss, arrays, options)


@xp.takes(DIVERGENCE, shared.total_variation_loss, shared.TEXTS)
def total_variation_loss(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, bias: Optional[Tensor] = None,
    teacher_bias: Optional[Tensor] = None,
    **options: Unpack[DivergenceKeywords],
) -> Tensor:
    """Total variation distance of the next token's distributions p and q."""
    arrays = hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias
    return _over_ranks_or(shared.total_variation_loss, arrays, options)


@xp.takes(DIVERGENCE, None)
def explain_divergence(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, bias: Optional[Tensor] = None,
    teacher_bias: Optional[Tensor] = None,
    *, beta: float = 0.5, **options: Unpack[DivergenceKeywords],
) -> str:
    """Describes the plan of ``jsd_loss`` with the same arguments (beta 0: ``forward_kl_loss``, 1: ``reverse_kl_loss``).
    It lists what is chunked, along which dimension and how finely, and the memory beyond inputs and results before and
    after. Nothing runs. It includes the gradients of tensors that require one. Over ranks it describes what this rank
    computes of its vocabulary entries, for the tokens given to it."""
    arrays = hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias
    of_rank = _sharded.explained(shared.jsd_loss, arrays, {**options, "beta": beta})
    if of_rank is not None:
        return of_rank
    call = shared.jsd_loss(xp, *arrays, beta=beta, **options)
    return chunked("divergence", call.memory_budget, call.executor).explain(call.given, tuple(call.form))


@ready(xp, shared, shared.TEACHER, TopK, chunked=chunked)
def teacher_top_k(
    teacher_hidden: Tensor, teacher_weight: Tensor, teacher_bias: Optional[Tensor] = None,
    *, k: int, **head: Unpack[LogitKeywords],
) -> TopK:
    """Returns the k token ids with a teacher's largest logits at each position, and their log-probabilities."""


@ready(xp, shared, HEAD)
def top_k_loss(
    hidden: Tensor, weight: Tensor, top_k: TopK, bias: Optional[Tensor] = None,
    *, tail: bool = False, target: Optional[Tensor] = None, reduction: str = "mean",
    normalizer: Optional[float | Tensor] = None, **head: Unpack[HeadKeywords],
) -> Tensor:
    """KL(q || p) restricted to a teacher's top K."""


@ready(xp, shared, HEAD, chunked=chunked)
def student_top_k_loss(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, bias: Optional[Tensor] = None,
    teacher_bias: Optional[Tensor] = None,
    *, k: int, tail: bool = False, target: Optional[Tensor] = None, reduction: str = "mean",
    normalizer: Optional[float | Tensor] = None, teacher_softcap: Optional[float] = None, teacher_logit_scale: float = 1.0,
    **head: Unpack[HeadKeywords],
) -> Tensor:
    """KL(p || q) restricted to the student's own top K."""
