"""InfoNCE and the margin losses. ``_losses/contrastive.py`` has their formulas and docstrings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional, TypedDict

import torch
from torch import Tensor

from ..._losses import contrastive as shared
from ..._losses.options import ready
from .. import _xp as xp
from .._chunks import FORMULAS, OF_VOCAB
from ..groups import raise_on_all_ranks
from ..ranks import Sharding
from ._formulas import chunked

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MarginKeywords(TypedDict, total=False):
    reduction: str
    normalizer: Optional[float | Tensor]
    ignore_index: int
    memory_budget: Optional[int | str]
    executor: str


class _Cosines(torch.autograd.Function):
    """``shared.cosines`` with its gradients."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor) -> Tensor:
        found, *norms = shared.cosines(xp, hidden, weight)
        ctx.save_for_backward(hidden, weight, found, *norms)
        return found

    @staticmethod
    def backward(ctx, cotangent: Tensor):
        return shared.cosines_gradients(xp, cotangent, *ctx.saved_tensors)


def _margin(given: dict[str, Tensor], form: tuple) -> Tensor:
    return shared.program(xp, _Cosines.apply, given, form)


FORMULAS.update(margin=_margin)
OF_VOCAB.update(margin=("over_norms", lambda rows: shared.over_norms(xp, rows)))


@xp.takes({}, shared.info_nce_loss)
def info_nce_loss(
    query: Tensor, key: Tensor,
    *, negatives: Optional[Tensor] = None, target: Optional[Tensor] = None, temperature: float | Tensor = 0.07,
    normalize: bool = True, symmetric: bool = False, reduction: str = "mean", memory_budget: Optional[int | str] = None,
    sharding: Optional[Sharding] = None,
) -> Tensor:
    """InfoNCE (van den Oord et al. 2018), without the similarities of all pairs."""
    call = functools.partial(
        shared.info_nce_loss, xp, query, key, negatives=negatives, target=target, temperature=temperature, normalize=normalize,
        symmetric=symmetric, reduction=reduction, memory_budget=memory_budget, sharding=sharding,
    )
    return raise_on_all_ranks(getattr(getattr(sharding, "group", None), "group_name", ""), call)


@xp.takes({}, shared.grad_cache)
def grad_cache(encode: Callable[..., Any], *inputs: Any, micro_batch: int) -> Any:
    """Encodes a batch, one micro batch in memory at a time (GradCache, Gao et al. 2021)."""
    return shared.grad_cache(xp, encode, *inputs, micro_batch=micro_batch)


_of_classes = ready(xp, shared, shared.MARGIN, texts=shared.MARGIN_TEXTS, chunked=chunked)


@_of_classes
def arcface_loss(
    hidden: Tensor, weight: Tensor, target: Tensor,
    *, scale: float = 64.0, margin: float = 0.5, **options: Unpack[MarginKeywords],
) -> Tensor:
    """ArcFace (Deng et al. 2019)."""


@_of_classes
def cosface_loss(
    hidden: Tensor, weight: Tensor, target: Tensor,
    *, scale: float = 64.0, margin: float = 0.35, **options: Unpack[MarginKeywords],
) -> Tensor:
    """CosFace (Wang et al. 2018)."""
