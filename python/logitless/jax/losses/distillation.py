"""Distillation from a teacher's hidden states and head: forward and reverse KL, JSD, total variation, and the
top K of the teacher or student.
``_losses/distillation.py`` has the formulas and docstrings. This module has their gradients, and runs them by autochunk."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..._losses import distillation as shared
from ..._losses.options import HEAD, HeadKeywords, LogitKeywords, ready
from .. import _xp as xp
from . import _sharded
from ._formulas import FORMULAS, chunked

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..sharding import Sharding

DIVERGENCE: dict[str, Any] = dict(targets=None, **shared.DIVERGENCE)


class DivergenceKeywords(LogitKeywords, total=False):
    targets: ArrayLike | None
    reduction: str
    normalizer: ArrayLike | None
    weight_hard_loss: float
    weight_soft_loss: float
    teacher_softcap: float | None
    teacher_logit_scale: float
    teacher_ids: ArrayLike | None
    executor: str
    sharding: Sharding | None


class TopK(NamedTuple):
    """The K token ids with a teacher's largest logits at each position, largest first. Without gradients."""

    vocab_ids: jax.Array  # [..., K] int32
    log_probs: jax.Array  # [..., K] float32: of the full vocabulary


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _divergence(student: jax.Array, teacher: jax.Array, beta: float, statistics: tuple[jax.Array, ...]) -> jax.Array:
    """``shared.divergence`` with its gradient by the student. statistics: STATISTICS of a vocabulary of which the logits
    are a shard, or none."""
    return shared.divergence(xp, student, teacher, beta, statistics[:2])[0]


def _divergence_forward(student, teacher, beta: float, statistics):
    loss, *saved = shared.divergence(xp, student, teacher, beta, statistics[:2])
    return loss, (student, teacher, statistics or tuple(saved), statistics)


def _divergence_backward(beta: float, saved, cotangent):
    student, teacher, read, statistics = saved
    made = shared.divergence_gradient(xp, cotangent, beta, student, teacher, *read)
    return made, jnp.zeros_like(teacher), tuple(jnp.zeros_like(a) for a in statistics)


_divergence.defvjp(_divergence_forward, _divergence_backward)


@jax.custom_vjp
def _masked(hidden: jax.Array, counts: jax.Array) -> jax.Array:
    return jnp.where(counts, hidden, jnp.zeros((), hidden.dtype))


_masked.defvjp(lambda hidden, counts: (_masked(hidden, counts), None), lambda _, cotangent: (cotangent, None))


def _program(given: dict[str, jax.Array], form: tuple) -> jax.Array:
    def of_logits(student, teacher, beta: float, *statistics):
        return _divergence(student, jax.lax.stop_gradient(teacher), beta, statistics)

    return shared.program(xp, of_logits, _masked, given, form)


def _best(given: dict[str, jax.Array], softcap: float, scale: float, k: int) -> tuple[jax.Array, jax.Array]:
    return shared.best(xp, given, softcap, scale, k)


def _sums(given: dict[str, jax.Array], form: tuple) -> tuple[jax.Array, ...]:
    return shared.sums(xp, given, form)


def _normaliser(given: dict[str, jax.Array], form: tuple) -> jax.Array:
    return shared.normaliser(xp, given, form)


FORMULAS.update(divergence=_program, divergence_sums=_sums, normaliser=_normaliser, best=_best)


def _on_mesh_or(loss: Callable[..., shared.Call], arrays: tuple[Any, ...], options: dict[str, Any]) -> jax.Array:
    """Computes a divergence: on a mesh that shards the vocabulary or the tokens, or on one device."""
    found = _sharded.divergence(loss, arrays, options)
    return loss(xp, *arrays, **options).run(chunked) if found is None else found


@xp.takes(DIVERGENCE, shared.jsd_loss, shared.TEXTS)
def jsd_loss(
    hidden: ArrayLike, weight: ArrayLike, teacher_hidden: ArrayLike, teacher_weight: ArrayLike,
    bias: ArrayLike | None = None, teacher_bias: ArrayLike | None = None,
    *, beta: float = 0.5, **options: Unpack[DivergenceKeywords],
) -> jax.Array:
    """Generalised Jensen-Shannon divergence of the next token (Agarwal et al. 2024)."""
    arrays = hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias
    return _on_mesh_or(shared.jsd_loss, arrays, {**options, "beta": beta})


@xp.takes(DIVERGENCE, shared.forward_kl_loss, shared.TEXTS)
def forward_kl_loss(
    hidden: ArrayLike, weight: ArrayLike, teacher_hidden: ArrayLike, teacher_weight: ArrayLike,
    bias: ArrayLike | None = None, teacher_bias: ArrayLike | None = None,
    **options: Unpack[DivergenceKeywords],
) -> jax.Array:
    """KL(q || p) of the next token, with the teacher's distribution q and the student's p."""
    arrays = hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias
    return _on_mesh_or(shared.forward_kl_loss, arrays, options)


@xp.takes(DIVERGENCE, shared.reverse_kl_loss, shared.TEXTS)
def reverse_kl_loss(
    hidden: ArrayLike, weight: ArrayLike, teacher_hidden: ArrayLike, teacher_weight: ArrayLike,
    bias: ArrayLike | None = None, teacher_bias: ArrayLike | None = None,
    **options: Unpack[DivergenceKeywords],
) -> jax.Array:
    """KL(p || q) of the next token, with the student's distribution p and the teacher's q."""
    arrays = hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias
    return _on_mesh_or(shared.reverse_kl_loss, arrays, options)


@xp.takes(DIVERGENCE, shared.total_variation_loss, shared.TEXTS)
def total_variation_loss(
    hidden: ArrayLike, weight: ArrayLike, teacher_hidden: ArrayLike, teacher_weight: ArrayLike,
    bias: ArrayLike | None = None, teacher_bias: ArrayLike | None = None,
    **options: Unpack[DivergenceKeywords],
) -> jax.Array:
    """Total variation distance of the next token's distributions p and q."""
    arrays = hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias
    return _on_mesh_or(shared.total_variation_loss, arrays, options)


@xp.takes(DIVERGENCE, None)
def explain_divergence(
    hidden: ArrayLike, weight: ArrayLike, teacher_hidden: ArrayLike, teacher_weight: ArrayLike,
    bias: ArrayLike | None = None, teacher_bias: ArrayLike | None = None,
    *, beta: float = 0.5, **options: Unpack[DivergenceKeywords],
) -> str:
    """Describes the plan of ``jsd_loss`` with the same arguments, and of its gradients by hidden and weight (beta 0:
    ``forward_kl_loss``, 1: ``reverse_kl_loss``). It lists what is chunked, along which dimension and how finely, and
    the memory beyond inputs and results before and after. Nothing runs, and ``jax.ShapeDtypeStruct`` are accepted for
    arrays. On a mesh it describes what a device computes of its vocabulary entries, after both models' log-sum-exps."""

    def total(states, weight, *others):
        return jnp.sum(jsd_loss(states, weight, *others, beta=beta, **options))

    jax.eval_shape(
        jax.value_and_grad(total, (0, 1)), hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias
    )
    return chunked("divergence", options["memory_budget"], options["executor"]).explain()


@ready(xp, shared, shared.TEACHER, TopK, chunked=chunked)
def teacher_top_k(
    teacher_hidden: ArrayLike, teacher_weight: ArrayLike, teacher_bias: ArrayLike | None = None,
    *, k: int, **head: Unpack[LogitKeywords],
) -> TopK:
    """Returns the k token ids with a teacher's largest logits at each position, and their log-probabilities."""


@ready(xp, shared, HEAD)
def top_k_loss(
    hidden: ArrayLike, weight: ArrayLike, top_k: TopK, bias: ArrayLike | None = None,
    *, tail: bool = False, targets: ArrayLike | None = None, reduction: str = "mean",
    normalizer: ArrayLike | None = None, **head: Unpack[HeadKeywords],
) -> jax.Array:
    """KL(q || p) restricted to a teacher's top K."""


@ready(xp, shared, HEAD, chunked=chunked)
def student_top_k_loss(
    hidden: ArrayLike, weight: ArrayLike, teacher_hidden: ArrayLike, teacher_weight: ArrayLike,
    bias: ArrayLike | None = None, teacher_bias: ArrayLike | None = None,
    *, k: int, tail: bool = False, targets: ArrayLike | None = None, reduction: str = "mean",
    normalizer: ArrayLike | None = None, teacher_softcap: float | None = None, teacher_logit_scale: float = 1.0,
    **head: Unpack[HeadKeywords],
) -> jax.Array:
    """KL(p || q) restricted to the student's own top K."""
