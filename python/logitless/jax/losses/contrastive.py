"""InfoNCE and the margin losses. ``_losses/contrastive.py`` has their formulas and docstrings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

import jax
from jax.typing import ArrayLike

from ..._losses import contrastive as shared
from ..._losses.options import ready
from .. import _xp as xp
from .._chunks import FORMULAS, OF_VOCAB
from ._formulas import chunked

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..sharding import Sharding


class MarginKeywords(TypedDict, total=False):
    reduction: str
    normalizer: ArrayLike | None
    ignore_index: int
    memory_budget: int | str | None
    executor: str


@jax.custom_vjp
def _cosines(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """``shared.cosines`` with its gradients."""
    return shared.cosines(xp, hidden, weight)[0]


def _cosines_forward(hidden, weight):
    found, *norms = shared.cosines(xp, hidden, weight)
    return found, (hidden, weight, found, *norms)


_cosines.defvjp(_cosines_forward, lambda saved, cotangent: shared.cosines_gradients(xp, cotangent, *saved))


def _margin(given: dict[str, jax.Array], form: tuple) -> jax.Array:
    return shared.program(xp, _cosines, given, form)


FORMULAS.update(margin=_margin)
OF_VOCAB.update(margin=("over_norms", lambda rows: shared.over_norms(xp, rows)))


@ready(xp, shared, {})
def info_nce_loss(
    query: ArrayLike, key: ArrayLike,
    *, negatives: ArrayLike | None = None, targets: ArrayLike | None = None, temperature: float | ArrayLike = 0.07,
    normalize: bool = True, symmetric: bool = False, reduction: str = "mean", memory_budget: int | str | None = None,
    sharding: Sharding | None = None,
) -> jax.Array:
    """InfoNCE (van den Oord et al. 2018), without the similarities of all pairs."""


@xp.takes({}, shared.grad_cache)
def grad_cache(encode: Callable[..., Any], *inputs: Any, micro_batch: int) -> Any:
    """Encodes a batch, one micro batch in memory at a time (GradCache, Gao et al. 2021)."""
    return shared.grad_cache(xp, encode, *inputs, micro_batch=micro_batch)


_of_classes = ready(xp, shared, shared.MARGIN, texts=shared.MARGIN_TEXTS, chunked=chunked)


@_of_classes
def arcface_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike,
    *, scale: float = 64.0, margin: float = 0.5, **options: Unpack[MarginKeywords],
) -> jax.Array:
    """ArcFace (Deng et al. 2019)."""


@_of_classes
def cosface_loss(
    hidden: ArrayLike, weight: ArrayLike, targets: ArrayLike,
    *, scale: float = 64.0, margin: float = 0.35, **options: Unpack[MarginKeywords],
) -> jax.Array:
    """CosFace (Wang et al. 2018)."""
