"""Distillation from a teacher's hidden states and head: forward and reverse KL, JSD, total variation, and the top K of
the teacher or student.

Neither model's logits are stored. The divergences need both distributions; they are ``autochunk`` programs that the
library runs, a chunk of tokens at a time, or run so in the framework's own operations (``chunks.py``). They take one
GEMM of the teacher, and three of the student with the gradients of a mean or sum, computed with the loss. The top-K loss
computes the teacher's top K in chunks, and then the student's head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

from .._options import shape_text
from .head import divisor_of, refuse_ids, valid_targets
from .options import HEAD, LOGIT_DOCS, LOGITS, choice, count, flag, head_of, number

# Keywords of every divergence, besides the targets.
DIVERGENCE: dict[str, Any] = dict(
    reduction="mean", normalizer=None, weight_hard_loss=0.0, weight_soft_loss=1.0, teacher_softcap=None,
    teacher_logit_scale=1.0, teacher_ids=None, executor="native", sharding=None, **LOGITS,
)
TEACHER: dict[str, Any] = {name: LOGITS[name] for name in ("softcap", "logit_scale", "temperature", "memory_budget")}

TEXTS = dict(
    arguments="""torch: hidden: [..., D]. weight: [V, D], of the same dtype: float32, bfloat16, float16 or float64.
        torch:     bias: [V]. DTensors whose vocabulary is sharded as in ``linear_cross_entropy``, both models' over the same
        torch:     ranks, are not gathered. Others that are sharded are; a warning names them, except under torch.compile.
        jax: hidden: [..., D]. weight: [V, D], of the same dtype: float32, bfloat16 or float16. bias: [V].
        teacher_hidden: [..., D']. teacher_weight: [V, D'], the dtype of teacher_hidden. teacher_bias: [V]. No gradients.
        {target}: [...], int32 or int64: tokens of ``ignore_index`` are ignored; None: all tokens count.
        reduction: "none" (loss [...]), "mean" over the tokens that count, "sum".
        normalizer: "mean" divides by this positive number, or {array} of one element, instead.
        weight_hard_loss: at least 0: the weight of the cross entropy of {target}, at temperature 1, as in Liger.
        weight_soft_loss: at least 0: the weight of the divergence. At a temperature t gradients shrink by about
            1 / t^2; Hinton et al. compensate with a weight of t^2.
        teacher_softcap, teacher_logit_scale: of the teacher's logits; both models share the temperature.
        teacher_ids: [V], int32 or int64: the teacher's vocabulary is another one, and its entry teacher_ids[j] is entry j
            of weight; -1: the teacher has none. The teacher's distribution is that of its softmax over these entries:
            of a draft vocabulary, or of a vocabulary that the teacher's is a part of. teacher_weight: [V', D']. Its rows
            are copied; only they are multiplied. With -1 the reverse KL is infinite.
        torch:     Over ranks it is of the full vocabularies and the same on all ranks. Each row is sent to the ranks of its
        torch:     entries in every call.
        jax:     Over devices the teacher's shards are sent round the devices in every call.
        torch: sharding: a ``Sharding``, as in ``linear_cross_entropy``: weights and biases of both models are this rank's
        torch:     shard, by rows. With teacher_ids the teacher's rows are concatenated in rank order. torch.compile needs
        torch:     vocab and vocab_begin.
        jax: sharding: a ``Sharding``: how both models' vocabulary and tokens are sharded over a mesh. None: taken from the
        jax:     types of hidden and weight, if explicit.
        executor: of autochunk: "native", the library, on a CPU or GPU, or "python", {name}'s operations. Where
            ``backend`` says "portable", {name}'s operations run without autochunk, whatever it is.
        """
    + LOGIT_DOCS.format(ignored="and cost as much as others")
)


NONE = -1e30  # a logit or log-probability of zero probability, with finite differences
TOTAL_VARIATION = -1.0  # in the place of beta

# --- Formulas of logits and log-probabilities.


def _log_share(xp, apart, share: float):
    """Returns log(X / (share X + (1 - share) Y)), given log(Y / X). It is inexact where X < exp(-80) Y, where X is
    negligible."""
    return -xp.log(share + (1 - share) * xp.exp(xp.at_most(apart, 80.0)))


def _half_sign(xp, a, b):
    """Returns sign(a - b) / 2."""
    return xp.where(a > b, 0.5, xp.where(a < b, -0.5, 0.0))


def divergence(xp, student, teacher, beta: float, normalisers: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """Returns the divergence [N] of logits [N, V], which are scaled by the temperature, and what its gradient by the
    student reads: both normalisers and a sum, [N]. With normalisers of a larger vocabulary, the divergence and the sum
    are parts of that vocabulary's.

    Let p and q be the student's and the teacher's probabilities. The gradient is w - p sum(w), with w = (1 - beta) p
    log(p / m), or p log(p / q) for beta 1. This w is the derivative by log p, up to a constant. For beta 0 the gradient
    is p - q. Of the total variation sum_j |p_j - q_j| / 2, w is p sign(p - q) / 2. So a loop over vocabulary chunks
    needs only two numbers per row in advance, or only the normalisers.
    """
    normalisers = normalisers or (xp.logsumexp(student, -1), xp.logsumexp(teacher, -1))
    p, q = (z - n[:, None] for z, n in zip((student, teacher), normalisers))
    if beta == 0.0:
        own = loss = (xp.exp(q) * (q - p)).sum(-1)
    elif beta == 1.0:
        own = loss = (xp.exp(p) * (p - q)).sum(-1)
    elif beta == TOTAL_VARIATION:
        own = (xp.exp(p) * _half_sign(xp, p, q)).sum(-1)
        loss = ((xp.exp(p) - xp.exp(q)) * _half_sign(xp, p, q)).sum(-1)
    else:
        own = (1 - beta) * (xp.exp(p) * _log_share(xp, q - p, 1 - beta)).sum(-1)
        loss = own + beta * (xp.exp(q) * _log_share(xp, p - q, beta)).sum(-1)
    return loss, *normalisers, own


def divergence_gradient(xp, cotangent, beta: float, student, teacher, *saved):
    """Returns the gradient of ``divergence`` by the student's logits."""
    *normalisers, own = saved
    # These are -log p and -log q. Using the forward's p and q would save them, [N, V], instead of recomputing them.
    p, q = (n[:, None] - z for z, n in zip((student, teacher), normalisers))
    if beta == 0.0:
        return cotangent[:, None] * (xp.exp(-p) - xp.exp(-q))
    if beta == TOTAL_VARIATION:
        ratio = _half_sign(xp, q, p)
    else:
        ratio = q - p if beta == 1.0 else (1 - beta) * _log_share(xp, p - q, 1 - beta)
    return cotangent[:, None] * (xp.exp(-p) * (ratio - own[:, None]))


def logits_of(xp, given: Mapping[str, Any], of: str, softcap: float, scale: float):
    """Returns the logits [N, V] of a head. of: the beginning of its names, "" or "teacher_"."""
    z = xp.product(given[of + "hidden"], given[of + "weight"])
    if of + "bias" in given:
        z = z + given[of + "bias"]
    z = z * scale if scale != 1.0 else z
    return softcap * xp.tanh(z / softcap) if softcap else z


class Form(NamedTuple):
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


# The numbers of each token that a shard of the vocabulary reads: ``divergence``'s normalisers and sum.
STATISTICS = "normaliser", "teacher_normaliser", "own"


def _logits(xp, masked, given: Mapping[str, Any], f: Form) -> tuple[Any, Any, Any]:
    """Returns the student's logits, and those of the student and the teacher over the temperature."""
    # NaN or infinity at ignored tokens must not spread. Only the student's hidden states are copied, since the gradient
    # of weight reads them.
    counts = given["rows"][:, None] != 0.0
    if f.masked:
        given = {**given, "hidden": masked(given["hidden"], counts)}
    student = logits_of(xp, given, "", f.softcap, f.scale)
    teacher = logits_of(xp, given, "teacher_", f.teacher_softcap, f.teacher_scale)
    if "teacher_mask" in given:
        teacher = teacher + given["teacher_mask"]
    teacher = xp.where(counts, teacher, 0.0) if f.masked else teacher
    return student, *(z / f.temperature if f.temperature != 1.0 else z for z in (student, teacher))


def program(xp, of_logits, masked, given: Mapping[str, Any], form: tuple):
    """Computes the loss by the plain formula, which autochunk chunks. given: arrays by the names of the arguments; rows
    [N], factors of the tokens' losses; with a hard loss the target ids [N]; and for a shard of the vocabulary STATISTICS.

    of_logits(student, teacher, beta, *statistics) is ``divergence`` with its gradient. masked(hidden, counts) replaces
    ignored rows by zeros; the gradient of those rows is zero already, so it is not masked."""
    f = Form(*form)
    student, p, q = _logits(xp, masked, given, f)
    known = [given[name] for name in STATISTICS if name in given]
    each = f.soft * of_logits(p, q, f.beta, *known)
    if f.hard:
        each = each + f.hard * xp.cross_entropy(student, given["vocab_ids"])
    each = each * given["rows"]
    return each.sum() if f.summed else each


def sums(xp, given: Mapping[str, Any], form: tuple) -> tuple[Any, Any, Any]:
    """Returns [N] each, of a shard of the vocabulary with the normalisers of all of it: the divergence, the sum, and the
    student's probability. The last is 1 over all shards but for rounding: a head rounds log-sum-exps of large logits
    otherwise than this does. The sum divided by it is a mean, and so the gradients of a token add up to 0."""
    f = Form(*form)
    _, p, q = _logits(xp, lambda hidden, counts: xp.where(counts, hidden, 0.0), given, f)
    loss, normaliser, _, own = divergence(xp, p, q, f.beta, tuple(given[name] for name in STATISTICS[:2]))
    return loss, own, xp.exp(p - normaliser[:, None]).sum(-1)


def normaliser(xp, given: Mapping[str, Any], form: tuple):
    """Returns the teacher's log-sum-exps [N] of a shard of the vocabulary with a mask. given: the teacher's arrays."""
    f = Form(*form)
    z = logits_of(xp, given, "teacher_", f.teacher_softcap, f.teacher_scale) + given["teacher_mask"]
    return xp.logsumexp(z / f.temperature, -1)


def best(xp, given: Mapping[str, Any], softcap: float, scale: float, k: int) -> tuple[Any, Any]:
    z = logits_of(xp, given, "teacher_", softcap, scale)
    values, vocab_ids = xp.top_k(z, k)
    return vocab_ids, values - xp.logsumexp(z, -1)[:, None]


# --- Arguments.


def _teacher(xp, hidden, weight, bias, lead: tuple[int, ...], vocab: int, vocab_ids: Any) -> dict[str, Any]:
    """Returns the teacher's head without gradients, checked to have the same tokens and vocabulary. vocab_ids: its ids of
    the student's entries, or None."""
    found = xp.without_gradients(lambda *head: xp.checked_head("teacher_", *head), hidden, weight, bias)
    shape, of_vocab = tuple(xp.array("teacher_hidden", hidden).shape), found["teacher_weight"]
    if shape[:-1] != lead:
        raise ValueError(f"teacher_hidden: expected {shape_text(lead, 'D')}, got {list(shape)}")
    if vocab_ids is not None:
        ids = xp.indices("teacher_ids", vocab_ids, (vocab,))
        bad = ids >= of_vocab.shape[0]
        xp.refuse_ids("teacher_ids", ids, bad, of_vocab.shape[0])
        rows = xp.clip(ids, 0, of_vocab.shape[0] - 1)
        for part in ("teacher_weight", "teacher_bias"):
            if part in found:
                found[part] = xp.take_rows(found[part], rows)
        dtype = xp.float64 if of_vocab.dtype == xp.float64 else xp.float32
        mask = xp.where(ids < 0, NONE, xp.where(bad, math.nan, 0.0))
        return {**{part: xp.stop_gradient(a) for part, a in found.items()}, "teacher_mask": xp.astype(mask, dtype)}
    if of_vocab.shape[0] != vocab:
        raise ValueError(
            f"teacher_weight: expected [{vocab}, D], the vocabulary of weight, got {list(of_vocab.shape)}; give "
            "teacher_ids, or cut the larger one's padding off"
        )
    return {part: xp.stop_gradient(a) for part, a in found.items()}


class Call(NamedTuple):
    """A divergence in the form of its program."""

    given: dict[str, Any]
    form: Form
    lead: tuple[int, ...]
    memory_budget: Optional[int | str]
    executor: str

    def run(self, chunked):
        """chunked(what, memory_budget, executor) is ``program`` or ``best``, chunked by autochunk."""
        loss = chunked("divergence", self.memory_budget, self.executor)(self.given, tuple(self.form))
        return loss if self.form.summed else loss.reshape(self.lead)


def call(xp, hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, beta: float, a: Mapping[str, Any]) -> Call:
    """Returns a checked divergence. beta: from 0 to 1, or the total variation. a: the keywords of DIVERGENCE and the
    targets; and for weights that are a shard all_vocab, the size of the vocabulary, and teacher_mask, as of teacher_ids."""
    target = a[xp.NAMES.target]
    head = head_of({**a, "temperature": 1.0})
    temperature = number("temperature", a["temperature"], above=0.0)
    cap = a["teacher_softcap"]
    form = Form(
        beta, temperature, head.softcap or 0.0, head.logit_scale,
        0.0 if cap is None else number("teacher_softcap", cap, above=0.0),
        number("teacher_logit_scale", a["teacher_logit_scale"]), number("weight_hard_loss", a["weight_hard_loss"], 0.0),
        number("weight_soft_loss", a["weight_soft_loss"], 0.0), target is not None, a["reduction"] != "none",
    )
    if form.hard and target is None:
        raise ValueError(f"{xp.NAMES.target}: expected it with weight_hard_loss={form.hard}, got None")
    student = xp.checked_head("", hidden, weight, bias)
    lead, vocab = tuple(xp.array("hidden", hidden).shape[:-1]), student["weight"].shape[0]
    teacher = _teacher(xp, teacher_hidden, teacher_weight, teacher_bias, lead, vocab, a["teacher_ids"])
    if a.get("teacher_mask") is not None:
        teacher["teacher_mask"] = a["teacher_mask"]
    states = student["hidden"]
    valid, vocab_ids, bad = valid_targets(xp, target, lead, head.ignore_index, a.get("all_vocab") or vocab, states)
    rows = xp.astype(valid, xp.float64 if states.dtype == xp.float64 else xp.float32)
    divisor = divisor_of(xp, a["reduction"], a["normalizer"], valid)
    if divisor is not None:
        rows = rows / divisor
    if bad is not None:
        rows = xp.where(bad, math.nan, rows)  # on a GPU the host does not wait for an error
    executor = choice("executor", a["executor"], ("native", "python"))
    labels = {"vocab_ids": vocab_ids} if form.hard else {}
    return Call({**student, **teacher, "rows": rows, **labels}, form, lead, head.memory_budget, executor)


# --- Public losses. The frameworks run the divergences: ``call`` and then ``program``.


def jsd_loss(xp, hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, *, beta, **options) -> Call:
    """Generalised Jensen-Shannon divergence of the next token (Agarwal et al. 2024, GKD, equation 2).

    Let q be the teacher's distribution, p the student's, and m = beta q + (1 - beta) p. The divergence is beta KL(q ||
    m) + (1 - beta) KL(p || m). beta 0 is KL(q || p) and beta 1 is KL(p || q): the limits divided by beta and 1 - beta,
    as in TRL and Liger.

    Args:
        {arguments}
        beta: from 0 to 1.

    Biases must be finite. Returns the loss, float32{exact}, with gradients by hidden, weight and bias.

    The cost is one GEMM of the teacher, and three of the student with the gradients of a mean or sum. Those gradients
    are computed with the loss and saved until the backward. The gradients of "none" and of float16 are computed in the
    backward, which recomputes both models' logits: two GEMMs of the teacher and four of the student. A frozen hidden or
    weight saves one.

    Memory: the program's, within ``memory_budget``. None chooses the plan of least memory among those that recompute
    nothing. Its predicted time is at most a fifth above that of the fastest plan, which stores all logits. A smaller
    budget recomputes both models' logits. So does one below the fp32 sums of a 16-bit weight's gradient, 4 V D bytes
    (``explain_divergence``). Where ``backend`` says "portable", a budget must hold these sums and a chunk of one token.
    None is there a quarter of the fp32 logits, at least 16 MiB and 32 tokens, beside the sums.
    torch: The backward scales the gradients in place.
    A sharded vocabulary takes five GEMMs of a shard of the student and three of the teacher. Ranks exchange four numbers
    for each token and the gradient of hidden; and hidden states where each rank has its own tokens.
    Planning takes about a second for each new number of tokens: pad to a few sizes with ``ignore_index``; padding costs
    as much as other tokens. On a GPU the native executor needs NVRTC (docs/use/gpu.md).

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one. ValueError for a
            budget that cannot be met.
            torch: A target that is neither in [0, V) nor ignore_index is a ValueError on the CPU, and gives NaN on a GPU.
            jax: If a target is neither in [0, V) nor ignore_index, the loss is NaN.
    """
    beta = number("beta", beta, 0.0, 1.0)
    return call(xp, hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, beta, options)


def forward_kl_loss(xp, hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, **options) -> Call:
    """KL(q || p) of the next token, with the teacher's distribution q and the student's p (Hinton et al. 2015): the
    mean of sum_j q_j (log q_j - log p_j). Arguments, result, cost, memory and errors: as in ``jsd_loss``."""
    return call(xp, hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, 0.0, options)


def reverse_kl_loss(xp, hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, **options) -> Call:
    """KL(p || q) of the next token, with the student's distribution p and the teacher's q (Gu et al. 2024, MiniLLM, per
    token): the mean of sum_j p_j (log p_j - log q_j). Arguments, result, cost, memory and errors: as in ``jsd_loss``.
    """
    return call(xp, hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, 1.0, options)


def total_variation_loss(xp, hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, **options) -> Call:
    """Total variation distance of the next token's distributions p and q (Wen et al. 2023): the mean of sum_j |p_j - q_j|
    / 2, which is 1 less the rate at which speculative decoding accepts a token of p (Zhou et al. 2024, DistillSpec).
    Arguments, result, cost, memory and errors: as in ``jsd_loss``."""
    return call(
        xp, hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, TOTAL_VARIATION, options
    )


def teacher_top_k(xp, chunked, teacher_hidden, teacher_weight, teacher_bias, *, k, **head) -> tuple[Any, Any]:
    """Returns the k token ids with a teacher's largest logits at each position, and their log-probabilities, to store
    or for ``top_k_loss``.

    teacher_hidden: [..., D']. teacher_weight: [V, D']. teacher_bias: [V]. k: from 1 to V.

    It takes one GEMM, without gradients, a chunk of tokens at a time within ``memory_budget`` (bytes, or text such as
    "512MiB"). softcap, logit_scale, temperature: as in ``jsd_loss``; the log-probabilities include the temperature.
    """
    found = head_of({**LOGITS, **head})

    def run(*teacher):
        given = xp.checked_head("teacher_", *teacher)
        vocab = given["teacher_weight"].shape[0]
        if count("k", k) > vocab:
            raise ValueError(f"k: expected at most {vocab}, the vocabulary of teacher_weight, got {k}")
        chosen = chunked("best", found.memory_budget, "auto")
        return chosen(given, found.softcap or 0.0, found.logit_scale, k)

    vocab_ids, log_probs = xp.without_gradients(run, teacher_hidden, teacher_weight, teacher_bias)
    shape = (*xp.array("teacher_hidden", teacher_hidden).shape[:-1], k)
    return vocab_ids.reshape(shape), log_probs.reshape(shape)


# --- The loss of a teacher's top K.


def _stored(xp, top_k, lead: tuple[int, ...]) -> tuple[Any, Any]:
    if not isinstance(top_k, tuple) or len(top_k) != 2:
        raise TypeError(f"top_k: expected TopK(vocab_ids, log_probs), got {type(top_k).__name__}")
    vocab_ids = xp.indices("top_k.vocab_ids", top_k[0])
    shape = tuple(vocab_ids.shape)
    if len(shape) != len(lead) + 1 or shape[:-1] != lead or shape[-1] == 0:
        raise ValueError(f"top_k.vocab_ids: expected {shape_text(lead, 'K')}, got {list(shape)}")
    log_probs = xp.stop_gradient(xp.shaped("top_k.log_probs", top_k[1], shape))
    if not xp.is_floating(log_probs):
        raise TypeError(f"top_k.log_probs: expected floats, got {log_probs.dtype}")
    return vocab_ids, xp.astype(log_probs, xp.float64 if log_probs.dtype == xp.float64 else xp.float32)


def _log_rest(xp, log_probs):
    """Returns [...]: the log-probability of all other entries. It is bounded from below by the rounding unit of the
    sums."""
    known = xp.at_most(xp.logsumexp(log_probs, -1), -xp.finfo(log_probs.dtype).eps)
    return xp.log(-xp.expm1(known))


def _with_tail(xp, logps, log_q, valid, absent):
    """Returns the divergence with a tail, [...], from log-probabilities [..., K]."""
    # Ignored tokens and entries have log-probabilities of 0.
    logps = xp.where(valid[..., None] & ~absent, logps, log_q)
    rest_p, rest_q = _log_rest(xp, logps), _log_rest(xp, log_q)
    each = (xp.exp(log_q) * (log_q - logps)).sum(-1) + xp.exp(rest_q) * (rest_q - rest_p)
    return xp.where(valid, each, 0.0)


def top_k_loss(xp, hidden, weight, top_k, bias, *, tail, target, reduction, normalizer, **head):
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
        {target}: [...]: tokens of ``ignore_index`` are ignored; None: all tokens count.
        reduction, normalizer: as in ``jsd_loss``.
        {head}

    Returns the loss, float32{exact}, with gradients by hidden, weight and bias.

    Only the student's head is computed: three GEMMs with the gradients of a mean or sum, or four with ``tail`` or
    "none".

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one.
    """
    found = head_of(head)
    states = xp.states("hidden", hidden)
    lead = tuple(states.shape[:-1])
    vocab_ids, log_probs = _stored(xp, top_k, lead)
    vocab = xp.array("weight", weight).shape[0]
    valid = valid_targets(xp, target, lead, found.ignore_index, vocab, vocab_ids)[0].reshape(lead)
    divisor = divisor_of(xp, reduction, normalizer, valid)
    if found.ignore_index >= 0:  # it may be one of the teacher's token ids
        raise ValueError(f"ignore_index: expected a number below 0 beside a teacher's vocabulary, got {found.ignore_index}")
    absent = (vocab_ids == found.ignore_index) | xp.isneginf(log_probs)
    vocab_ids = xp.where(valid[..., None] & ~absent, vocab_ids, found.ignore_index)
    refuse_ids(xp, "top_k.vocab_ids", vocab_ids, vocab, found.ignore_index)
    log_probs = xp.where(absent, NONE, log_probs)
    if flag("tail", tail):
        logps = xp.log_probs(hidden, weight, vocab_ids, bias, found, save=True)
        each = _with_tail(xp, logps, xp.astype(log_probs, logps.dtype), valid, absent)
        total = each if reduction == "none" else each.sum()
    else:
        log_q = xp.log_softmax(log_probs, -1)
        log_q = log_q if states.dtype == xp.float64 else xp.astype(log_q, xp.float32)
        q = xp.where(absent, 0.0, xp.exp(log_q))
        entropy = xp.where(valid, -(q * log_q).sum(-1), 0.0)
        each = "none" if reduction == "none" else "sum"
        cross = xp.linear_cross_entropy(
            hidden, weight, vocab_ids, bias, target_weight=q, reduction=each, **found._asdict()
        )
        total = cross - (entropy if reduction == "none" else entropy.sum())
    return total if divisor is None else total / divisor


def student_top_k_loss(
    xp, chunked, hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias, *, k, tail, target, reduction,
    normalizer, teacher_softcap, teacher_logit_scale, **head,
):
    """KL(p || q) restricted to the student's own top K, with the student's distribution p and the teacher's q: the reverse
    KL of on-policy distillation, without both models' logits of the whole vocabulary between them.

    - Without ``tail``: over the K entries alone, with p renormalised to 1: sum_k p_k (log p_k - log q_k).
    - With ``tail``: one more outcome stands for all other entries: a lower bound of KL(p || q), 0 where p = q.

    Args:
        hidden: [..., D]. weight: [V, D], of the same dtype. bias: [V].
        teacher_hidden: [..., D']. teacher_weight: [V, D']. teacher_bias: [V]. No gradients.
        k: 1 to V.
        {target}: [...]: tokens of ``ignore_index`` are ignored; None: all tokens count.
        reduction, normalizer, teacher_softcap, teacher_logit_scale: as in ``jsd_loss``.
        {head}

    Returns the loss, float32{exact}, with gradients by hidden, weight and bias; the choice of entries has none.

    Cost: of the student one GEMM for the choice, one for its log-probabilities, and three backward (two where a GPU saves
    exponentials); one GEMM of the teacher.

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one.
    """
    found = head_of(head)
    if found.ignore_index >= 0:  # it may be one of the student's token ids
        raise ValueError(f"ignore_index: expected a number below 0 beside a vocabulary's best, got {found.ignore_index}")
    given = xp.without_gradients(lambda *own: xp.checked_head("", *own), hidden, weight, bias)
    lead, vocab = tuple(xp.array("hidden", hidden).shape[:-1]), given["weight"].shape[0]
    if count("k", k) > vocab:
        raise ValueError(f"k: expected at most {vocab}, the vocabulary of weight, got {k}")
    of_teacher = head_of({
        **head, "ignore_index": found.ignore_index, "softcap": teacher_softcap, "logit_scale": teacher_logit_scale,
    })  # fmt: skip
    _teacher(xp, teacher_hidden, teacher_weight, teacher_bias, lead, vocab, None)
    valid = valid_targets(xp, target, lead, found.ignore_index, vocab, given["hidden"])[0].reshape(lead)
    divisor = divisor_of(xp, reduction, normalizer, valid)
    given = {"teacher_" + part: xp.stop_gradient(a) for part, a in given.items()}  # the names of the program's arguments
    ids, _ = chunked("best", found.memory_budget, "auto")(given, found.softcap or 0.0, found.logit_scale, k)
    ids = xp.where(valid[..., None], ids.reshape(*lead, k), found.ignore_index)
    logps = xp.log_probs(hidden, weight, ids, bias, found, save=True)
    log_q = xp.without_gradients(
        lambda *of: xp.log_probs(*of[:2], ids, of[2], of_teacher), teacher_hidden, teacher_weight, teacher_bias
    )
    log_q = xp.astype(log_q, logps.dtype)
    if flag("tail", tail):
        even = math.log(1 / (k + 1))  # of ignored tokens, whose log-probabilities are 0
        p, q = (xp.where(valid[..., None], a, even) for a in (logps, log_q))
        rest_p, rest_q = _log_rest(xp, p), _log_rest(xp, q)
        each = (xp.exp(p) * (p - q)).sum(-1) + xp.exp(rest_p) * (rest_p - rest_q)
    else:
        p = xp.log_softmax(logps, -1)
        each = (xp.exp(p) * (p - log_q)).sum(-1)
    each = xp.where(valid, each, 0.0)
    total = each if reduction == "none" else each.sum()
    return total if divisor is None else total / divisor
