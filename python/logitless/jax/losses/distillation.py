"""Distillation from a teacher's hidden states and head: forward and reverse KL, JSD, and the teacher's top K.

Neither model's logits are stored. The divergences need both distributions; they are ``autochunk`` programs that the
library runs, a chunk of tokens at a time. They take one GEMM of the teacher, and three of the student with the
gradients of a mean or sum, computed with the loss. The top-K loss computes the teacher's top K in chunks, and then the
student's head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..._losses import HEAD, HEAD_DOCS, SLACK, Function, HeadKeywords, choice, count, flag, head_of, number, takes
from .. import _arguments
from .._autochunk import autochunk
from ..head import linear_logprobs
from ..loss import linear_cross_entropy
from ._head import fixed, shaped

if TYPE_CHECKING:
    from typing_extensions import Unpack

DIVERGENCE: dict[str, Any] = dict(
    targets=None, reduction="mean", normalizer=None, weight_hard_loss=0.0, weight_soft_loss=1.0, teacher_softcap=None,
    teacher_logit_scale=1.0, executor="native", **HEAD,
)

_ARGUMENTS = f"""hidden: [..., D]. weight: [V, D], of the same dtype: float32, bfloat16 or float16. bias: [V].
        teacher_hidden: [..., D']. teacher_weight: [V, D'], the dtype of teacher_hidden. teacher_bias: [V]. No gradients.
        targets: [...], int32 or int64: tokens of ``ignore_index`` are ignored; None: all tokens count.
        reduction: "none" (loss [...]), "mean" over the tokens that count, "sum".
        normalizer: "mean" divides by this positive number, or array of one element, instead.
        weight_hard_loss: at least 0: the weight of the cross entropy of targets, at temperature 1, as in Liger.
        weight_soft_loss: at least 0: the weight of the divergence. At a temperature t gradients shrink by about
            1 / t^2; Hinton et al. compensate with a weight of t^2.
        teacher_softcap, teacher_logit_scale: of the teacher's logits; both models share the temperature.
        executor: of autochunk: "native", the library, on a CPU or GPU, or "python", JAX's operations.
        {HEAD_DOCS.replace(" and cost nothing", "")}"""


class DivergenceKeywords(HeadKeywords, total=False):
    targets: ArrayLike | None
    reduction: str
    normalizer: ArrayLike | None
    weight_hard_loss: float
    weight_soft_loss: float
    teacher_softcap: float | None
    teacher_logit_scale: float
    executor: str


class TopK(NamedTuple):
    """The K token ids with a teacher's largest logits at each position, largest first. Without gradients."""

    vocab_ids: jax.Array  # [..., K] int32
    log_probs: jax.Array  # [..., K] float32: of the full vocabulary


class _Form(NamedTuple):
    """The options of a divergence, as constants of its program."""

    beta: float
    temperature: float
    softcap: float | None
    scale: float
    teacher_softcap: float | None
    teacher_scale: float
    hard: float
    soft: float
    masked: bool  # some tokens may be ignored
    summed: bool


@jax.custom_vjp
def _product(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns hidden weight^T [N, V] in float32. The matrix products of the backward round the gradients. JAX's own
    rule would store a float32 copy of them."""
    return jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32)


def _product_backward(saved, cotangent):
    hidden, weight = saved
    cotangent = cotangent.astype(hidden.dtype)
    return jnp.matmul(cotangent, weight), jnp.matmul(cotangent.T, hidden)


_product.defvjp(lambda hidden, weight: (_product(hidden, weight), (hidden, weight)), _product_backward)


def _logits(hidden, weight, bias, softcap: float | None, scale: float) -> jax.Array:
    z = _product(hidden, weight)
    if bias is not None:
        z = z + bias
    z = z * scale if scale != 1.0 else z
    return softcap * jnp.tanh(z / softcap) if softcap is not None else z


def _log_share(apart: jax.Array, share: float) -> jax.Array:
    """Returns log(X / (share X + (1 - share) Y)), given log(Y / X). It is inexact where X < exp(-80) Y, where X is
    negligible."""
    return -jnp.log(share + (1 - share) * jnp.exp(jnp.minimum(apart, 80.0)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _divergence(student: jax.Array, teacher: jax.Array, beta: float) -> jax.Array:
    """Returns the divergence [N] of logits [N, V], which are scaled by the temperature. It has a gradient by the
    student.

    Let p and q be the student's and the teacher's probabilities. The gradient is w - p sum(w), with w = (1 - beta) p
    log(p / m), or p log(p / q) for beta 1. This w is the derivative by log p, up to a constant. For beta 0 the gradient
    is p - q. So a loop over vocabulary chunks needs only two numbers per row in advance, or only the normalisers.
    """
    return _divergence_forward(student, teacher, beta)[0]


def _divergence_forward(student, teacher, beta: float):
    normalisers = jax.nn.logsumexp(student, -1), jax.nn.logsumexp(teacher, -1)
    p, q = (z - n[:, None] for z, n in zip((student, teacher), normalisers))
    if beta == 0.0:
        own = loss = (jnp.exp(q) * (q - p)).sum(-1)
    elif beta == 1.0:
        own = loss = (jnp.exp(p) * (p - q)).sum(-1)
    else:
        own = (1 - beta) * (jnp.exp(p) * _log_share(q - p, 1 - beta)).sum(-1)
        loss = own + beta * (jnp.exp(q) * _log_share(p - q, beta)).sum(-1)
    return loss, (student, teacher, *normalisers, own)


def _divergence_backward(beta: float, saved, cotangent):
    student, teacher, *normalisers, own = saved
    # These are -log p and -log q. Using the forward's p and q would save them, [N, V], instead of recomputing them.
    p, q = (n[:, None] - z for z, n in zip((student, teacher), normalisers))
    if beta == 0.0:
        return cotangent[:, None] * (jnp.exp(-p) - jnp.exp(-q)), jnp.zeros_like(teacher)
    ratio = q - p if beta == 1.0 else (1 - beta) * _log_share(p - q, 1 - beta)
    return cotangent[:, None] * (jnp.exp(-p) * (ratio - own[:, None])), jnp.zeros_like(teacher)


_divergence.defvjp(_divergence_forward, _divergence_backward)


@jax.custom_vjp
def _masked(hidden: jax.Array, counts: jax.Array) -> jax.Array:
    """Replaces ignored rows of hidden [N, D] by zeros. The gradient of those rows is zero already, so it is not masked.
    """
    return jnp.where(counts, hidden, jnp.zeros((), hidden.dtype))


_masked.defvjp(lambda hidden, counts: (_masked(hidden, counts), None), lambda _, cotangent: (cotangent, None))


def _program(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, rows, vocab_ids, form: tuple):
    """Computes the loss by the plain formula, which autochunk chunks. rows [N]: factors of the tokens' losses."""
    f = _Form(*form)
    # NaN or infinity at ignored tokens must not spread. Only the student's hidden states are copied, since the gradient
    # of weight reads them.
    counts = rows[:, None] != 0.0
    hidden = _masked(hidden, counts) if f.masked else hidden
    student = _logits(hidden, weight, bias, f.softcap, f.scale)
    teacher = _logits(teacher_hidden, teacher_weight, teacher_bias, f.teacher_softcap, f.teacher_scale)
    teacher = jnp.where(counts, teacher, 0.0) if f.masked else teacher
    p, q = (z / f.temperature if f.temperature != 1.0 else z for z in (student, jax.lax.stop_gradient(teacher)))
    each = f.soft * _divergence(p, q, f.beta)
    if f.hard:
        of_vocab = jnp.take_along_axis(student, vocab_ids[:, None], -1)[:, 0]
        each = each + f.hard * (jax.nn.logsumexp(student, -1) - of_vocab)
    each = each * rows
    return each.sum() if f.summed else each


def _best(hidden, weight, bias, softcap, scale, k: int):
    z = _logits(hidden, weight, bias, softcap, scale)
    values, vocab_ids = jax.lax.top_k(z, k)
    return vocab_ids, values - jax.nn.logsumexp(z, -1, keepdims=True)


@functools.lru_cache(maxsize=64)
def _chunked(what: str, memory_budget: int | str | None, executor: str):
    """Returns the chunked formula; a budget that cannot be met is an error."""
    function = _program if what == "divergence" else _best
    made = autochunk(function, memory_budget=memory_budget, executor=executor, strict=memory_budget is not None)
    made.limits = replace(made.limits, slack=SLACK)
    return made


def _checked_head(name: str, hidden: Any, weight: Any, bias: Any):
    """Returns the checked head in the program's form: [N, D] and [V, D] of one dtype. name: "" or "teacher_"."""
    for part, value in (("hidden", hidden), ("weight", weight)):
        if value is None:
            raise TypeError(f"{name}{part}: expected an array, got NoneType")
    try:
        states, vocab_ids, shift = _arguments.head(hidden, weight, bias)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(name + str(error)) from None
    return states.reshape(-1, states.shape[-1]), vocab_ids, shift


def _teacher(hidden: Any, weight: Any, bias: Any, lead: tuple[int, ...], vocab: int):
    """Returns the teacher's head without gradients, checked to have the same tokens and vocabulary."""
    found = _checked_head("teacher_", hidden, weight, bias)
    if jnp.shape(hidden)[:-1] != lead:
        raise ValueError(f"teacher_hidden: expected {list(lead) + ['D']}, got {list(jnp.shape(hidden))}")
    if found[1].shape[0] != vocab:
        raise ValueError(
            f"teacher_weight: expected [{vocab}, D], the vocabulary of weight, got {list(found[1].shape)}; cut the larger "
            "one's padding off"
        )
    return tuple(None if a is None else jax.lax.stop_gradient(a) for a in found)


def _valid(targets: ArrayLike | None, lead: tuple[int, ...], ignore_index: int, vocab: int):
    """Returns three arrays [N] for targets [...]: whether each token counts, its token id or 0, and whether its target
    is out of range."""
    if targets is None:
        return jnp.ones(math.prod(lead), jnp.bool_), None, None
    flat = shaped("targets", _arguments.indices("targets", targets), lead).reshape(-1)
    valid = flat != ignore_index
    bad = valid & ((flat < 0) | (flat >= vocab))
    return valid, jnp.where(valid & ~bad, flat, 0), bad


def _divisor(reduction: str, normalizer: Any, valid: jax.Array):
    """Returns the divisor of a mean; None for other reductions."""
    if choice("reduction", reduction, ("none", "mean", "sum")) != "mean":
        if normalizer is not None:
            raise ValueError(f"normalizer: expected None with reduction {reduction!r}, got {normalizer!r}")
        return None
    if normalizer is None:
        return jnp.maximum(valid.sum(), 1)
    if isinstance(normalizer, (bool, int, float)):
        return number("normalizer", normalizer, above=0.0)
    return fixed("normalizer", jnp.reshape(normalizer, (-1,)), (1,))[0]


def _loss(hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, beta: float, a: Mapping[str, Any]):
    head = head_of({**a, "temperature": 1.0})
    temperature = number("temperature", a["temperature"], above=0.0)
    cap = a["teacher_softcap"]
    form = _Form(
        beta, temperature, head.softcap, head.logit_scale,
        None if cap is None else number("teacher_softcap", cap, above=0.0),
        number("teacher_logit_scale", a["teacher_logit_scale"]), number("weight_hard_loss", a["weight_hard_loss"], 0.0),
        number("weight_soft_loss", a["weight_soft_loss"], 0.0), a["targets"] is not None, a["reduction"] != "none",
    )
    if form.hard and a["targets"] is None:
        raise ValueError(f"targets: expected it with weight_hard_loss={form.hard}, got None")
    student = _checked_head("", hidden, weight, bias)
    lead, vocab = jnp.shape(hidden)[:-1], student[1].shape[0]
    teacher = _teacher(teacher_hidden, teacher_weight, teacher_bias, lead, vocab)
    valid, vocab_ids, bad = _valid(a["targets"], lead, head.ignore_index, vocab)
    rows = valid.astype(jnp.float32)
    divisor = _divisor(a["reduction"], a["normalizer"], valid)
    if divisor is not None:
        rows = rows / divisor
    if bad is not None:
        rows = jnp.where(bad, math.nan, rows)
    chunked = _chunked("divergence", head.memory_budget, choice("executor", a["executor"], ("native", "python")))
    loss = chunked(*student, *teacher, rows, vocab_ids if form.hard else None, tuple(form))
    return loss if form.summed else loss.reshape(lead)


def _documented(function: Function) -> Function:
    if function.__doc__:
        function.__doc__ = function.__doc__.replace("{arguments}", _ARGUMENTS)
    return takes(DIVERGENCE)(function)


@_documented
def jsd_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    teacher_hidden: ArrayLike,
    teacher_weight: ArrayLike,
    bias: ArrayLike | None = None,
    teacher_bias: ArrayLike | None = None,
    *,
    beta: float = 0.5,
    **options: Unpack[DivergenceKeywords],
) -> jax.Array:
    """Generalised Jensen-Shannon divergence of the next token (Agarwal et al. 2024, GKD, equation 2).

    Let q be the teacher's distribution, p the student's, and m = beta q + (1 - beta) p. The divergence is beta KL(q ||
    m) + (1 - beta) KL(p || m). beta 0 is KL(q || p) and beta 1 is KL(p || q): the limits divided by beta and 1 - beta,
    as in TRL and Liger.

    Args:
        {arguments}
        beta: from 0 to 1.

    Biases must be finite. Returns the loss, float32, with gradients by hidden, weight and bias.

    The cost is one GEMM of the teacher, and three of the student with the gradients of a mean or sum. Those gradients
    are computed with the loss and saved until the backward. The gradients of "none" and of float16 are computed in the
    backward, which recomputes both models' logits: two GEMMs of the teacher and four of the student. A frozen hidden or
    weight saves one.

    Memory: the program's, within ``memory_budget``. None chooses the plan of least memory among those that recompute
    nothing. Its predicted time is at most a fifth above that of the fastest plan, which stores all logits. A smaller
    budget recomputes both models' logits. So does one below the fp32 sums of a 16-bit weight's gradient, 4 V D bytes
    (``explain_divergence``). Planning takes about a second for each new number of tokens: pad to a few sizes with
    ``ignore_index``; padding costs as much as other tokens. On a GPU the native executor needs NVRTC (docs/gpu.md).

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one. ValueError for a
            budget that cannot be met. If a target is neither in [0, V) nor ignore_index, the loss is NaN.
    """
    beta = number("beta", beta, 0.0, 1.0)
    return _loss(hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, beta, options)


@_documented
def forward_kl_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    teacher_hidden: ArrayLike,
    teacher_weight: ArrayLike,
    bias: ArrayLike | None = None,
    teacher_bias: ArrayLike | None = None,
    **options: Unpack[DivergenceKeywords],
) -> jax.Array:
    """KL(q || p) of the next token, with the teacher's distribution q and the student's p (Hinton et al. 2015): the
    mean of sum_j q_j (log q_j - log p_j). Arguments, result, cost, memory and errors: as in ``jsd_loss``."""
    return _loss(hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, 0.0, options)


@_documented
def reverse_kl_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    teacher_hidden: ArrayLike,
    teacher_weight: ArrayLike,
    bias: ArrayLike | None = None,
    teacher_bias: ArrayLike | None = None,
    **options: Unpack[DivergenceKeywords],
) -> jax.Array:
    """KL(p || q) of the next token, with the student's distribution p and the teacher's q (Gu et al. 2024, MiniLLM, per
    token): the mean of sum_j p_j (log p_j - log q_j). Arguments, result, cost, memory and errors: as in ``jsd_loss``.
    """
    return _loss(hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, 1.0, options)


@takes(DIVERGENCE)
def explain_divergence(
    hidden: ArrayLike,
    weight: ArrayLike,
    teacher_hidden: ArrayLike,
    teacher_weight: ArrayLike,
    bias: ArrayLike | None = None,
    teacher_bias: ArrayLike | None = None,
    *,
    beta: float = 0.5,
    **options: Unpack[DivergenceKeywords],
) -> str:
    """Describes the plan of ``jsd_loss`` with the same arguments, and of its gradients by hidden and weight (beta 0:
    ``forward_kl_loss``, 1: ``reverse_kl_loss``). It lists what is chunked, along which dimension and how finely, and
    the memory beyond inputs and results before and after. Nothing runs, and ``jax.ShapeDtypeStruct`` are accepted for
    arrays."""

    def total(states, vocab_ids, *others):
        return jnp.sum(jsd_loss(states, vocab_ids, *others, beta=beta, **options))

    jax.eval_shape(
        jax.value_and_grad(total, (0, 1)), hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias
    )
    return _chunked("divergence", options["memory_budget"], options["executor"]).explain()


@takes({name: HEAD[name] for name in ("softcap", "logit_scale", "temperature", "memory_budget")})
def teacher_top_k(
    teacher_hidden: ArrayLike,
    teacher_weight: ArrayLike,
    teacher_bias: ArrayLike | None = None,
    *,
    k: int,
    **head: Unpack[HeadKeywords],
) -> TopK:
    """Returns the k token ids with a teacher's largest logits at each position, and their log-probabilities, to store
    or for ``top_k_loss``.

    teacher_hidden: [..., D']. teacher_weight: [V, D']. teacher_bias: [V]. k: from 1 to V.

    It takes one GEMM, without gradients, a chunk of tokens at a time within ``memory_budget`` (bytes, or text such as
    "512MiB"). softcap, logit_scale, temperature: as in ``jsd_loss``; the log-probabilities include the temperature.
    """
    found = head_of({**HEAD, **head})
    checked = _checked_head("teacher_", teacher_hidden, teacher_weight, teacher_bias)
    vocab = checked[1].shape[0]
    if count("k", k) > vocab:
        raise ValueError(f"k: expected at most {vocab}, the vocabulary of teacher_weight, got {k}")
    states, weight, bias = (None if a is None else jax.lax.stop_gradient(a) for a in checked)
    # The library has no kernel that sorts on a GPU.
    executor = "native" if jax.default_backend() == "cpu" else "python"
    vocab_ids, log_probs = _chunked("best", found.memory_budget, executor)(
        states, weight, bias, found.softcap, found.logit_scale, k
    )
    shape = (*jnp.shape(teacher_hidden)[:-1], k)
    return TopK(vocab_ids.reshape(shape), log_probs.reshape(shape))


@takes(HEAD)
def top_k_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    top_k: TopK,
    bias: ArrayLike | None = None,
    *,
    tail: bool = False,
    targets: ArrayLike | None = None,
    reduction: str = "mean",
    normalizer: ArrayLike | None = None,
    **head: Unpack[HeadKeywords],
) -> jax.Array:
    """KL(q || p) restricted to a teacher's top K, with the student's distribution p over the vocabulary and the
    teacher's q.

    - Without ``tail``: over the K entries alone, with q renormalised to 1: sum_k q_k (log q_k - log p_k).
    - With ``tail``: one more outcome stands for all other entries, with probabilities 1 - sum_k q_k and 1 - sum_k p_k.
    This is a lower bound of KL(q || p) over the vocabulary, and is 0 where p = q, unlike the first (Anshumann et al.
    2025).

    Args:
        hidden: [..., D]. weight: [V, D], of the same dtype. bias: [V].
        top_k: of ``teacher_top_k`` at the same temperature, live or stored; vocab_ids [..., K], log_probs [..., K]. Entries
            with token id ``ignore_index`` or log-probability -inf are padding, for tokens with fewer than K.
        targets: [...]: tokens of ``ignore_index`` are ignored; None: all tokens count.
        reduction, normalizer: as in ``jsd_loss``.
        {head}

    Returns the loss, float32, with gradients by hidden, weight and bias.

    Only the student's head is computed: three GEMMs with the gradients of a mean or sum, or four with ``tail`` or
    "none".

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one.
    """
    found = head_of(head)
    lead = _arguments.floats("hidden", hidden).shape[:-1]
    vocab_ids, log_probs = _stored(top_k, lead)
    valid = _valid(targets, lead, found.ignore_index, jnp.shape(weight)[0])[0].reshape(lead)
    divisor = _divisor(reduction, normalizer, valid)
    if found.ignore_index >= 0:  # it may be one of the teacher's token ids
        raise ValueError(f"ignore_index: expected a number below 0 beside a teacher's vocabulary, got {found.ignore_index}")
    absent = (vocab_ids == found.ignore_index) | jnp.isneginf(log_probs)
    vocab_ids = jnp.where(valid[..., None] & ~absent, vocab_ids, found.ignore_index)
    log_probs = jnp.where(absent, _NONE, log_probs)
    options: dict[str, Any] = found._asdict()
    if flag("tail", tail):
        logps = linear_logprobs(hidden, weight, vocab_ids, bias, **options)[0]
        return _reduced(_with_tail(logps, log_probs.astype(logps.dtype), valid, absent), divisor, reduction)
    log_q = jax.nn.log_softmax(log_probs.astype(jnp.float32), -1)
    q = jnp.where(absent, 0.0, jnp.exp(log_q))
    entropy = jnp.where(valid, -(q * log_q).sum(-1), 0.0)
    each: Any = "none" if reduction == "none" else "sum"
    cross = linear_cross_entropy(hidden, weight, vocab_ids, bias, target_weight=q, reduction=each, **options)
    if reduction == "none":
        return cross - entropy
    total = cross - entropy.sum()
    return total if divisor is None else total / divisor


_NONE = -1e30  # a log-probability of zero probability, with finite differences


def _stored(top_k: Any, lead: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    if not isinstance(top_k, tuple) or len(top_k) != 2:
        raise TypeError(f"top_k: expected TopK(vocab_ids, log_probs), got {type(top_k).__name__}")
    vocab_ids = _arguments.indices("top_k.vocab_ids", top_k[0])
    if vocab_ids.ndim != len(lead) + 1 or vocab_ids.shape[:-1] != lead or vocab_ids.shape[-1] == 0:
        raise ValueError(f"top_k.vocab_ids: expected {list(lead) + ['K']}, got {list(vocab_ids.shape)}")
    return vocab_ids, fixed("top_k.log_probs", top_k[1], vocab_ids.shape)


def _log_rest(log_probs: jax.Array) -> jax.Array:
    """Returns [...]: the log-probability of all other entries. It is bounded from below by the rounding unit of the
    sums."""
    known = jnp.minimum(jax.nn.logsumexp(log_probs, -1), -jnp.finfo(log_probs.dtype).eps)
    return jnp.log(-jnp.expm1(known))


def _with_tail(logps: jax.Array, log_q: jax.Array, valid: jax.Array, absent: jax.Array) -> jax.Array:
    """Returns the divergence with a tail, [...], from log-probabilities [..., K]."""
    # Ignored tokens and entries have log-probabilities of 0.
    logps = jnp.where(valid[..., None] & ~absent, logps, log_q)
    rest_p, rest_q = _log_rest(logps), _log_rest(log_q)
    each = (jnp.exp(log_q) * (log_q - logps)).sum(-1) + jnp.exp(rest_q) * (rest_q - rest_p)
    return jnp.where(valid, each, 0.0)


def _reduced(each: jax.Array, divisor: Any, reduction: str) -> jax.Array:
    if reduction == "none":
        return each
    return each.sum() if divisor is None else each.sum() / divisor
