"""Distillation from a teacher's hidden states and head: forward and reverse KL, JSD, and the teacher's top K.

Neither model's logits are stored. The divergences need both distributions; they are ``autochunk`` programs that the
library runs, a chunk of tokens at a time. They take one GEMM of the teacher, and three of the student with the
gradients of a mean or sum, computed with the loss. The top-K loss computes the teacher's top K in chunks, and then the
student's head.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._losses import HEAD, HEAD_DOCS, SLACK, Function, HeadKeywords, choice, count, flag, head_of, number
from .. import _arguments, _distributed
from ..loss import _autocast  # type: ignore[attr-defined]
from ..loss import Asked, linear_cross_entropy, token_log_probs
from ._head import shaped, takes, tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

DIVERGENCE: dict[str, Any] = dict(
    target=None, reduction="mean", normalizer=None, weight_hard_loss=0.0, weight_soft_loss=1.0, teacher_softcap=None,
    teacher_logit_scale=1.0, executor="native", **HEAD,
)

_ARGUMENTS = f"""hidden: [..., D]. weight: [V, D], of the same dtype: float32, bfloat16, float16 or float64. bias: [V].
            Every rank gathers a weight that is a sharded DTensor, also the teacher's; a warning names it.
        teacher_hidden: [..., D']. teacher_weight: [V, D'], the dtype of teacher_hidden. teacher_bias: [V]. No gradients.
        target: [...], int32 or int64: tokens of ``ignore_index`` are ignored; None: all tokens count.
        reduction: "none" (loss [...]), "mean" over the tokens that count, "sum".
        normalizer: "mean" divides by this positive number, or tensor of one element, instead.
        weight_hard_loss: at least 0: the weight of the cross entropy of target, at temperature 1, as in Liger.
        weight_soft_loss: at least 0: the weight of the divergence. At a temperature t gradients shrink by about
            1 / t^2; Hinton et al. compensate with a weight of t^2.
        teacher_softcap, teacher_logit_scale: of the teacher's logits; both models share the temperature.
        executor: of autochunk: "native", the library, on a CPU or GPU, or "python", PyTorch's operations.
        {HEAD_DOCS.replace(" and cost nothing", "")}"""


class DivergenceKeywords(HeadKeywords, total=False):
    target: Optional[Tensor]
    reduction: str
    normalizer: Optional[float | Tensor]
    weight_hard_loss: float
    weight_soft_loss: float
    teacher_softcap: Optional[float]
    teacher_logit_scale: float
    executor: str


class TopK(NamedTuple):
    """The K token ids with a teacher's largest logits at each position, largest first. Without gradients."""

    vocab_ids: Tensor  # [..., K] int64
    log_probs: Tensor  # [..., K] float32 (float64 for float64 inputs): of the full vocabulary


class _Form(NamedTuple):
    """The options of a divergence, as constants of its program."""

    beta: float
    temperature: float
    softcap: float  # 0: none
    scale: float
    teacher_softcap: float
    teacher_scale: float
    hard: float
    soft: float
    masked: bool  # some tokens may be ignored
    summed: bool


def _logits(given: dict[str, Tensor], of: str, softcap: float, scale: float) -> Tensor:
    z = F.linear(given[of + "hidden"], given[of + "weight"])
    z = z if z.dtype == torch.float64 else z.float()
    if of + "bias" in given:
        z = z + given[of + "bias"]
    z = z * scale if scale != 1.0 else z
    return softcap * torch.tanh(z / softcap) if softcap else z


def _log_share(apart: Tensor, share: float) -> Tensor:
    """Returns log(X / (share X + (1 - share) Y)), given log(Y / X). It is inexact where X < exp(-80) Y, where X is
    negligible."""
    return -torch.log(share + (1 - share) * torch.exp(apart.clamp(max=80.0)))


class _Divergence(torch.autograd.Function):
    """The divergence [N] of logits [N, V], which are scaled by the temperature. It has a gradient by the student.

    Let p and q be the student's and the teacher's probabilities. The gradient is w - p sum(w), with w = (1 - beta) p
    log(p / m), or p log(p / q) for beta 1. This w is the derivative by log p, up to a constant. For beta 0 the gradient
    is p - q. So a loop over vocabulary chunks needs only two numbers per row in advance, or only the normalisers.
    """

    @staticmethod
    def forward(ctx, student: Tensor, teacher: Tensor, beta: float) -> Tensor:
        normalisers = student.logsumexp(-1), teacher.logsumexp(-1)
        p, q = (z - n[:, None] for z, n in zip((student, teacher), normalisers))
        if beta == 0.0:
            own = loss = (q.exp() * (q - p)).sum(-1)
        elif beta == 1.0:
            own = loss = (p.exp() * (p - q)).sum(-1)
        else:
            own = (1 - beta) * (p.exp() * _log_share(q - p, 1 - beta)).sum(-1)
            loss = own + beta * (q.exp() * _log_share(p - q, beta)).sum(-1)
        ctx.beta = beta
        ctx.save_for_backward(student, teacher, *normalisers, own)
        return loss

    @staticmethod
    def backward(ctx, cotangent: Tensor):
        student, teacher, *normalisers, own = ctx.saved_tensors
        # These are -log p and -log q. Using the forward's p and q would save them, [N, V], instead of recomputing them.
        p, q = (n[:, None] - z for z, n in zip((student, teacher), normalisers))
        if ctx.beta == 0.0:
            return cotangent[:, None] * ((-p).exp() - (-q).exp()), None, None
        ratio = q - p if ctx.beta == 1.0 else (1 - ctx.beta) * _log_share(p - q, 1 - ctx.beta)
        return cotangent[:, None] * ((-p).exp() * (ratio - own[:, None])), None, None


class _Masked(torch.autograd.Function):
    """Replaces ignored rows of hidden [N, D] by zeros. The gradient of those rows is zero already, so it is not masked.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, counts: Tensor) -> Tensor:
        return torch.where(counts, hidden, 0.0)

    @staticmethod
    def backward(ctx, cotangent: Tensor):
        return cotangent, None


def _program(given: dict[str, Tensor], form: tuple) -> Tensor:
    """Computes the loss by the plain formula, which autochunk chunks. given: tensors by the names of the arguments;
    rows [N], factors of the tokens' losses; and with a hard loss the target ids [N]."""
    f = _Form(*form)
    # NaN or infinity at ignored tokens must not spread. Only the student's hidden states are copied, since the gradient
    # of weight reads them.
    counts = given["rows"][:, None] != 0.0
    if f.masked:
        given = {**given, "hidden": _Masked.apply(given["hidden"], counts)}
    student = _logits(given, "", f.softcap, f.scale)
    teacher = _logits(given, "teacher_", f.teacher_softcap, f.teacher_scale)
    teacher = torch.where(counts, teacher, 0.0) if f.masked else teacher
    p, q = (z / f.temperature if f.temperature != 1.0 else z for z in (student, teacher))
    each = f.soft * _Divergence.apply(p, q, f.beta)
    if f.hard:
        each = each + f.hard * F.cross_entropy(student, given["vocab_ids"], reduction="none")
    each = each * given["rows"]
    return each.sum() if f.summed else each


def _best(given: dict[str, Tensor], softcap: float, scale: float, k: int) -> tuple[Tensor, Tensor]:
    z = _logits(given, "teacher_", softcap, scale)
    values, vocab_ids = z.topk(k, dim=-1)
    return vocab_ids, values - z.logsumexp(-1, keepdim=True)


_MADE: dict[str, Any] = {}  # chunked formulas, by budget and executor


# torch.compile treats a string as a constant, and finds the function through a global.
@torch.compiler.assume_constant_result
def _key(what: str, memory_budget: int | str | None, executor: str) -> str:
    """Returns the key of the formula in _MADE. A budget that cannot be met raises at the call."""
    from .._autochunk import autochunk  # it imports PyTorch's compiler

    key = f"{what} {memory_budget!r} {executor}"
    if key not in _MADE:
        function = _program if what == "divergence" else _best
        strict = memory_budget is not None
        made = autochunk(function, memory_budget=memory_budget, executor=executor, strict=strict)
        made.limits = replace(made.limits, slack=SLACK)
        _MADE.setdefault(key, made)
    return key


def _chunked(what: str, memory_budget: int | str | None, executor: str):
    return _MADE[_key(what, memory_budget, executor)]


def _warn_of_gathering(name: str, weight: Tensor) -> None:
    """Warns that a sharded weight is gathered on every rank: divergences do not support a sharded vocabulary."""
    placements = getattr(weight, "placements", ())
    if torch.compiler.is_compiling() or not any(p.is_shard() for p in placements) or weight.device_mesh.size() == 1:
        return
    whole = weight.numel() * weight.element_size() / 2**20
    warnings.warn(
        f"{name}: a DTensor sharded as {tuple(placements)} over {weight.device_mesh.size()} ranks is gathered on each of them "
        f"in every call, {whole:.0f} MiB",
        stacklevel=5,
    )


def _checked_head(name: str, hidden: Any, weight: Any, bias: Any) -> dict[str, Tensor]:
    """Returns the checked head in the program's form: [N, D] and [V, D] of one dtype, on one device, and a bias if
    given. name: "" or "teacher_"."""
    for part, value in (("hidden", hidden), ("weight", weight)):
        tensor(name + part, value)
    if bias is not None:
        tensor(name + "bias", bias)
    _warn_of_gathering(name + "weight", weight)
    hidden, weight, _, bias = _distributed.local(hidden, weight, None, bias)
    try:
        _arguments.check_head(hidden, weight, bias)
        compute = _autocast(hidden, weight)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(name + str(error)) from None
    if compute is not None:
        hidden, weight = hidden.to(compute), weight.to(compute)
    found = {name + "hidden": hidden.reshape(-1, hidden.shape[-1]), name + "weight": weight}
    return found if bias is None else {**found, name + "bias": bias}


def _teacher(hidden: Any, weight: Any, bias: Any, lead: tuple[int, ...], vocab: int):
    """Returns the teacher's head without gradients, checked to have the same tokens and vocabulary."""
    if tuple(tensor("teacher_hidden", hidden).shape[:-1]) != lead:
        raise ValueError(f"teacher_hidden: expected {list(lead) + ['D']}, got {list(hidden.shape)}")
    if tensor("teacher_weight", weight).dim() == 2 and weight.shape[0] != vocab:
        raise ValueError(
            f"teacher_weight: expected [{vocab}, D], the vocabulary of weight, got {list(weight.shape)}; cut the larger "
            "one's padding off"
        )
    with torch.no_grad():
        found = _checked_head("teacher_", hidden, weight, bias)
    return {part: t.detach() for part, t in found.items()}


def _valid(target: Optional[Tensor], lead: tuple[int, ...], ignore_index: int, vocab: int, like: Tensor):
    """Returns three tensors [N] for target [...]: whether each token counts, its token id or 0, and whether its target
    is out of range."""
    if target is None:
        every = torch.ones(lead, dtype=torch.bool, device=like.device).flatten()
        return every, None, None
    flat = shaped("target", target, lead).flatten()
    if flat.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"target: expected int32 or int64, got {flat.dtype}")
    valid = flat != ignore_index
    bad = valid & ((flat < 0) | (flat >= vocab))
    if flat.device.type == "cpu" and not torch.compiler.is_compiling() and bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise ValueError(
            f"target: expected a class below {vocab} or ignore_index {ignore_index}, got {int(flat[at])} at "
            f"position {at}"
        )
    return valid, torch.where(valid & ~bad, flat, 0).long(), bad


def _divisor(reduction: str, normalizer: Any, valid: Tensor):
    """Returns the divisor of a mean; None for other reductions."""
    if choice("reduction", reduction, ("none", "mean", "sum")) != "mean":
        if normalizer is not None:
            raise ValueError(f"normalizer: expected None with reduction {reduction!r}, got {normalizer!r}")
        return None
    if normalizer is None:
        return valid.sum().clamp(min=1)
    if isinstance(normalizer, Tensor):
        return shaped("normalizer", normalizer.reshape(-1), (1,)).detach()[0]
    return number("normalizer", normalizer, above=0.0)


class _Call(NamedTuple):
    """A divergence in the form of its program."""

    chunked: Any
    given: dict[str, Tensor]
    form: _Form
    lead: tuple[int, ...]

    def run(self) -> Tensor:
        loss = self.chunked(self.given, tuple(self.form))
        return loss if self.form.summed else loss.reshape(self.lead)


def _call(
    hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, beta: float, a: Mapping[str, Any]
) -> _Call:
    head = head_of({**a, "temperature": 1.0})
    temperature = number("temperature", a["temperature"], above=0.0)
    cap = a["teacher_softcap"]
    form = _Form(
        beta, temperature, head.softcap or 0.0, head.logit_scale,
        0.0 if cap is None else number("teacher_softcap", cap, above=0.0),
        number("teacher_logit_scale", a["teacher_logit_scale"]), number("weight_hard_loss", a["weight_hard_loss"], 0.0),
        number("weight_soft_loss", a["weight_soft_loss"], 0.0), a["target"] is not None, a["reduction"] != "none",
    )
    if form.hard and a["target"] is None:
        raise ValueError(f"target: expected it with weight_hard_loss={form.hard}, got None")
    student = _checked_head("", hidden, weight, bias)
    lead, vocab = tuple(hidden.shape[:-1]), weight.shape[0]
    teacher = _teacher(teacher_hidden, teacher_weight, teacher_bias, lead, vocab)
    valid, vocab_ids, bad = _valid(a["target"], lead, head.ignore_index, vocab, student["hidden"])
    rows = valid.to(torch.float64 if student["hidden"].dtype == torch.float64 else torch.float32)
    divisor = _divisor(a["reduction"], a["normalizer"], valid)
    if divisor is not None:
        rows = rows / divisor
    if bad is not None:
        rows = torch.where(bad, math.nan, rows)  # on a GPU the host does not wait for an error
    chunked = _chunked("divergence", head.memory_budget, choice("executor", a["executor"], ("native", "python")))
    of_vocab = {"vocab_ids": vocab_ids} if form.hard else {}
    return _Call(chunked, {**student, **teacher, "rows": rows, **of_vocab}, form, lead)


def _documented(function: Function) -> Function:
    if function.__doc__:
        function.__doc__ = function.__doc__.replace("{arguments}", _ARGUMENTS)
    return takes(DIVERGENCE)(function)


@_documented
def jsd_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    bias: Optional[Tensor] = None,
    teacher_bias: Optional[Tensor] = None,
    *,
    beta: float = 0.5,
    **options: Unpack[DivergenceKeywords],
) -> Tensor:
    """Generalised Jensen-Shannon divergence of the next token (Agarwal et al. 2024, GKD, equation 2).

    Let q be the teacher's distribution, p the student's, and m = beta q + (1 - beta) p. The divergence is beta KL(q ||
    m) + (1 - beta) KL(p || m). beta 0 is KL(q || p) and beta 1 is KL(p || q): the limits divided by beta and 1 - beta,
    as in TRL and Liger.

    Args:
        {arguments}
        beta: from 0 to 1.

    Biases must be finite. Returns the loss, float32 (float64 for float64 inputs), with gradients by hidden, weight and
    bias.

    The cost is one GEMM of the teacher, and three of the student with the gradients of a mean or sum. Those gradients
    are computed with the loss and saved until the backward. The gradients of "none" and of float16 are computed in the
    backward, which recomputes both models' logits: two GEMMs of the teacher and four of the student. A frozen hidden or
    weight saves one.

    Memory: the program's, within ``memory_budget``. None chooses the plan of least memory among those that recompute
    nothing. Its predicted time is at most a fifth above that of the fastest plan, which stores all logits. A smaller
    budget recomputes both models' logits. So does one below the fp32 sums of a 16-bit weight's gradient, 4 V D bytes
    (``explain_divergence``). The backward scales the gradients in place. Planning takes about a second for each new
    number of tokens: pad to a few sizes with ``ignore_index``; padding costs as much as other tokens. On a GPU the
    native executor needs NVRTC (docs/gpu.md).

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one. ValueError for a
            budget that cannot be met. A target that is neither in [0, V) nor ignore_index is a ValueError on the CPU,
            and gives NaN on a GPU.
    """
    beta = number("beta", beta, 0.0, 1.0)
    return _call(hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, beta, options).run()


@_documented
def forward_kl_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    bias: Optional[Tensor] = None,
    teacher_bias: Optional[Tensor] = None,
    **options: Unpack[DivergenceKeywords],
) -> Tensor:
    """KL(q || p) of the next token, with the teacher's distribution q and the student's p (Hinton et al. 2015): the
    mean of sum_j q_j (log q_j - log p_j). Arguments, result, cost, memory and errors: as in ``jsd_loss``."""
    return _call(hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, 0.0, options).run()


@_documented
def reverse_kl_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    bias: Optional[Tensor] = None,
    teacher_bias: Optional[Tensor] = None,
    **options: Unpack[DivergenceKeywords],
) -> Tensor:
    """KL(p || q) of the next token, with the student's distribution p and the teacher's q (Gu et al. 2024, MiniLLM, per
    token): the mean of sum_j p_j (log p_j - log q_j). Arguments, result, cost, memory and errors: as in ``jsd_loss``.
    """
    return _call(hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, 1.0, options).run()


@takes(DIVERGENCE)
def explain_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    bias: Optional[Tensor] = None,
    teacher_bias: Optional[Tensor] = None,
    *,
    beta: float = 0.5,
    **options: Unpack[DivergenceKeywords],
) -> str:
    """Describes the plan of ``jsd_loss`` with the same arguments (beta 0: ``forward_kl_loss``, 1: ``reverse_kl_loss``).
    It lists what is chunked, along which dimension and how finely, and the memory beyond inputs and results before and
    after. Nothing runs. It includes the gradients of tensors that require one."""
    beta = number("beta", beta, 0.0, 1.0)
    call = _call(hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, beta, options)
    return call.chunked.explain(call.given, tuple(call.form))


@takes({name: HEAD[name] for name in ("softcap", "logit_scale", "temperature", "memory_budget")})
def teacher_top_k(
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Optional[Tensor] = None,
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
    with torch.no_grad():
        given = _checked_head("teacher_", teacher_hidden, teacher_weight, teacher_bias)
        if count("k", k) > teacher_weight.shape[0]:
            raise ValueError(f"k: expected at most {teacher_weight.shape[0]}, the vocabulary of teacher_weight, got {k}")
        # The library has no kernel that sorts on a GPU.
        executor = "native" if given["teacher_hidden"].device.type == "cpu" else "python"
        best = _chunked("best", found.memory_budget, executor)
        vocab_ids, log_probs = best(given, found.softcap or 0.0, found.logit_scale, k)
    shape = (*teacher_hidden.shape[:-1], k)
    return TopK(vocab_ids.reshape(shape), log_probs.reshape(shape))


@takes(HEAD)
def top_k_loss(
    hidden: Tensor,
    weight: Tensor,
    top_k: TopK,
    bias: Optional[Tensor] = None,
    *,
    tail: bool = False,
    target: Optional[Tensor] = None,
    reduction: str = "mean",
    normalizer: Optional[float | Tensor] = None,
    **head: Unpack[HeadKeywords],
) -> Tensor:
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
        target: [...]: tokens of ``ignore_index`` are ignored; None: all tokens count.
        reduction, normalizer: as in ``jsd_loss``.
        {head}

    Returns the loss, float32 (float64 for float64 inputs), with gradients by hidden, weight and bias.

    Only the student's head is computed: three GEMMs with the gradients of a mean or sum, or four with ``tail`` or
    "none".

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one.
    """
    found = head_of(head)
    lead = tuple(tensor("hidden", hidden).shape[:-1])
    vocab_ids, log_probs = _stored(top_k, lead)
    vocab = tensor("weight", weight).shape[0]
    valid = _valid(target, lead, found.ignore_index, vocab, vocab_ids)[0].reshape(lead)
    divisor = _divisor(reduction, normalizer, valid)
    if found.ignore_index >= 0:  # it may be one of the teacher's token ids
        raise ValueError(f"ignore_index: expected a number below 0 beside a teacher's vocabulary, got {found.ignore_index}")
    absent = (vocab_ids == found.ignore_index) | torch.isneginf(log_probs)
    vocab_ids = torch.where(valid[..., None] & ~absent, vocab_ids, found.ignore_index)
    log_probs = torch.where(absent, _NONE, log_probs)
    options: dict[str, Any] = found._asdict()
    if flag("tail", tail):
        logps = token_log_probs(hidden, weight, vocab_ids, bias, Asked(entropy=False, keep=None), **options)[0]
        return _reduced(_with_tail(logps, log_probs.to(logps.dtype), valid, absent), divisor, reduction)
    log_q = log_probs.log_softmax(-1)
    log_q = log_q if hidden.dtype == torch.float64 else log_q.float()
    q = torch.where(absent, 0.0, log_q.exp())
    entropy = torch.where(valid, -(q * log_q).sum(-1), 0.0)
    each: Any = "none" if reduction == "none" else "sum"
    cross = linear_cross_entropy(hidden, weight, vocab_ids, bias, target_weight=q, reduction=each, **options)
    if reduction == "none":
        return cross - entropy
    total = cross - entropy.sum()
    return total if divisor is None else total / divisor


_NONE = -1e30  # a log-probability of zero probability, with finite differences


def _stored(top_k: Any, lead: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    if not isinstance(top_k, tuple) or len(top_k) != 2:
        raise TypeError(f"top_k: expected TopK(vocab_ids, log_probs), got {type(top_k).__name__}")
    vocab_ids, log_probs = tensor("top_k.vocab_ids", top_k[0]), tensor("top_k.log_probs", top_k[1]).detach()
    if vocab_ids.dim() != len(lead) + 1 or tuple(vocab_ids.shape[:-1]) != lead or vocab_ids.shape[-1] == 0:
        raise ValueError(f"top_k.vocab_ids: expected {list(lead) + ['K']}, got {list(vocab_ids.shape)}")
    if vocab_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"top_k.vocab_ids: expected int32 or int64, got {vocab_ids.dtype}")
    if not log_probs.dtype.is_floating_point:
        raise TypeError(f"top_k.log_probs: expected floats, got {log_probs.dtype}")
    return vocab_ids, shaped("top_k.log_probs", log_probs.float() if log_probs.itemsize < 4 else log_probs, tuple(vocab_ids.shape))


def _log_rest(log_probs: Tensor) -> Tensor:
    """Returns [...]: the log-probability of all other entries. It is bounded from below by the rounding unit of the
    sums."""
    known = log_probs.logsumexp(-1).clamp(max=-torch.finfo(log_probs.dtype).eps)
    return torch.log(-torch.expm1(known))


def _with_tail(logps: Tensor, log_q: Tensor, valid: Tensor, absent: Tensor) -> Tensor:
    """Returns the divergence with a tail, [...], from log-probabilities [..., K]."""
    # Ignored tokens and entries have log-probabilities of 0.
    logps = torch.where(valid[..., None] & ~absent, logps, log_q)
    rest_p, rest_q = _log_rest(logps), _log_rest(log_q)
    each = (log_q.exp() * (log_q - logps)).sum(-1) + rest_q.exp() * (rest_q - rest_p)
    return torch.where(valid, each, 0.0)


def _reduced(each: Tensor, divisor: Any, reduction: str) -> Tensor:
    if reduction == "none":
        return each
    return each.sum() if divisor is None else each.sum() / divisor
