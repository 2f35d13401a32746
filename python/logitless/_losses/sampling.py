"""Sampling from a head and its best entries, computed a chunk of tokens at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from .._options import DEFAULT
from .distillation import logits_of
from .head import refuse_ids
from .options import Head, count, number


class Filters(NamedTuple):
    """The parts of a sampler that are constants of its program."""

    softcap: float  # 0: none
    scale: float
    top_k: int  # 0: all entries
    top_p: bool
    min_p: bool
    greedy: bool  # the temperature is 0 for every token, and there is a logit_bias


# --- Formulas of whole logits, which autochunk chunks.


def sample(xp, given: Mapping[str, Any], form: Filters):
    """Returns token ids [N] by the Gumbel-max trick: the entry with the largest z / temperature + noise, among those
    that the filters keep, is one of the softmax of z / temperature over them.

    given: hidden, weight and bias of the head; logit_bias [V]; temperature, top_p, min_p: [] or [N]; key [2] and
    counter [N] of the noise.
    """
    z = logits_of(xp, given, "", form.softcap, form.scale)
    if "logit_bias" in given:
        z = z + given["logit_bias"]
    if form.greedy:
        return xp.argmax(z)
    temperature = xp.columns(given["temperature"])
    z = (z - xp.most(z)) / xp.where(temperature > 0, temperature, 1.0)  # a low temperature makes -inf, not inf
    least = None
    if form.top_k or form.top_p:
        ordered = xp.top_k(z, form.top_k or z.shape[1])[0]
        least = ordered[:, -1:]
        if form.top_p:
            # The smallest set of the largest entries whose probabilities sum to at least top_p.
            probabilities = xp.softmax(ordered)
            top_p = xp.columns(given["top_p"])
            kept = (xp.cumsum(probabilities) - probabilities < top_p) | (top_p >= 1)
            least = xp.least(xp.where(kept, ordered, math.inf))
    if form.min_p:
        enough = xp.most(z) + xp.log(xp.columns(given["min_p"]))
        least = enough if least is None else xp.maximum(least, enough)
    noise = xp.where(temperature > 0, xp.gumbel(given["key"], given["counter"], z.shape[1]), 0.0)
    chosen = z + noise
    return xp.argmax(chosen if least is None else xp.where(z >= least, chosen, -math.inf))


def best_entries(xp, given: Mapping[str, Any], softcap: float, scale: float, k: int):
    """Returns the k token ids of the largest logits [N, k], largest first."""
    return xp.top_k(logits_of(xp, given, "", softcap, scale), k)[1]


# --- The calls.


def mixed(seed: int) -> tuple[int, int]:
    """Returns a key of two 32-bit words, so that near seeds have keys far apart (splitmix64; Steele et al. 2014)."""
    most = (1 << 64) - 1
    x = (seed + 0x9E3779B97F4A7C15) & most
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & most
    x = (x ^ x >> 27) * 0x94D049BB133111EB & most
    x = x ^ x >> 31
    return x & 0xFFFFFFFF, x >> 32


def draw(
    xp, chunked, hidden, weight, bias, seed, *, temperature, top_k, top_p, min_p, logit_bias, counter, softcap,
    logit_scale, memory_budget, sharding,
) -> tuple[Any, Any]:
    """Samples a token at each position from ``softmax(logits)``, without storing the logits of all of them.

    The logits are ``softcap(logit_scale * (hidden @ weight.T + bias))``, in float32. They become
    ``(logits + logit_bias) / temperature``, and entries are dropped by top_k, then by top_p over the rest, and by min_p.
    A token is the largest entry after Gumbel noise is added: an exact sample of the softmax over the entries left.

    Args:
        hidden: [..., D]. weight: [V, D], the dtype of hidden, or one of both float32 beside 16 bits, as in
            ``linear_logprobs``. bias: [V].
        jax: key: a key of ``jax.random``, typed or of two integers.
        temperature: a number, or {an_array} of floats, [...] or []. 0 takes the largest entry, the first of several.
        top_k: keeps the k largest entries, 1 to V; and those equal to the last.
        top_p: a number or [...], above 0 and at most 1: keeps the smallest set of the largest entries whose
            probabilities sum to at least top_p; and those equal to the last. 1 keeps all.
        min_p: a number or [...], from 0 to 1: keeps entries of at least min_p times the largest probability.
        logit_bias: [V] float; -inf forbids an entry.
        torch: seed: an int, of which the low 64 bits count. None: drawn from ``generator``, or PyTorch's default generator of the CPU. In a CUDA graph each replay draws it by the GPU's generator.
        counter: [...] integers, a number for each token; None: its index. The noise of an entry is a function of the
            {seed}, the low 32 bits of its token's counter, and its vocabulary id. So a token does not depend on the
            others of its call: give each sequence and position a counter of its own, and a new call new counters or a
            new {seed}.
        softcap, logit_scale: as in ``linear_logprobs``.
        memory_budget: bytes, or text such as "512MiB", for either pass.
        torch: sharding: a ``Sharding``: the vocabulary is sharded over ranks, and weight and bias are this rank's shard, as in ``linear_logprobs``; logit_bias is of the whole vocabulary. All ranks have the same tokens, and the seed of the group's first rank counts. A DTensor weight whose rows are sharded is not gathered if hidden is a DTensor that is replicated. The result is that of one rank with the whole vocabulary, but for near ties.
        jax: sharding: how vocabulary and tokens are sharded over a mesh, as in ``linear_logprobs``. The result is that of one device with the whole vocabulary, but for near ties.

    Returns:
        Sample(tokens, log_prob), each [...]. log_prob is what ``linear_logprobs(hidden, weight, tokens, bias)`` returns
        with the same softcap and logit_scale, bit for bit: temperature, filters and logit_bias do not enter. To train at
        a temperature T, give ``logit_scale=1 / T`` to both and leave temperature at 1. Without gradients.

    Cost: two GEMMs, one for the tokens and one for their log-probabilities; both are of the head at a temperature of 0
    without logit_bias. top_p without top_k sorts the vocabulary.
    On a GPU in 16 bits: one GEMM, with 512 MiB of logits at a time by default.
    Beside float32 hidden states the pass for the tokens copies a 16-bit weight in float32; at a temperature of 0 without
    logit_bias it does not.
    Noise has 39 random bits an entry; sums of probabilities are float32.

    Raises ValueError and TypeError that name the argument, and the errors of ``linear_logprobs``. Values of arrays are
    not checked, since that would wait for a GPU: a negative temperature takes the largest entry.
    """

    def check(given, lead, vocab, rows=None):
        return _drawing(
            xp, given, lead, vocab, rows or vocab, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            logit_bias=logit_bias, counter=counter, softcap=softcap, logit_scale=logit_scale,
        )

    def run(hidden, weight, bias):
        head = hidden, weight, bias
        options = Head(-100, softcap, logit_scale, memory_budget)
        tokens = xp.tokens_over_ranks(*head, seed, check, options, sharding)
        if tokens is not None:
            return tokens, xp.log_probs(hidden, weight, tokens, bias, options, sharding=sharding)
        given, lead = _checked(xp, *head), tuple(xp.array("hidden", hidden).shape[:-1])
        given, form = check(given, lead, given["weight"].shape[0])
        both = xp.sampled(hidden, weight, given, None if form.greedy else seed, form, memory_budget)
        if both is not None:
            return both[0].reshape(lead), both[1].reshape(lead)
        if not form.greedy:
            given = with_noise(xp, given, seed)
        if form.greedy and logit_bias is None:
            tokens = xp.largest_entries(given["hidden"], given["weight"], given.get("bias"), options)
        else:
            tokens = chunked("sample", memory_budget, "auto")(given, *form)
        tokens = tokens.reshape(lead)
        return tokens, xp.log_probs(hidden, weight, tokens, bias, options)

    return xp.without_gradients(run, hidden, weight, bias)


def _drawing(
    xp, given: dict[str, Any], lead: tuple[int, ...], vocab: int, rows: int, *, temperature, top_k, top_p, min_p,
    logit_bias, counter, softcap, logit_scale,
) -> tuple[dict[str, Any], Filters]:
    """Returns the checked arguments of a sampler beside those of its head, and its constants. lead: the leading sizes of
    hidden. vocab: the size of the whole vocabulary. rows: that of logit_bias."""
    greedy = xp.is_number(temperature) and number("temperature", temperature, 0.0) == 0
    if top_k is not None and count("top_k", top_k) > vocab:
        raise ValueError(f"top_k: expected at most {vocab}, the vocabulary of weight, got {top_k}")
    form = Filters(
        *_head_form(softcap, logit_scale), 0 if top_k in (None, vocab) else int(top_k), top_p is not None,
        min_p is not None, greedy,
    )
    if logit_bias is not None:
        given["logit_bias"] = _floats(xp, "logit_bias", logit_bias, (rows,))
    if greedy:
        return given, form

    def per_token(name, value, *bounds, **more):
        if xp.is_number(value):
            return number(name, value, *bounds, **more)
        return xp.broadcast_to(_floats(xp, name, value, lead, ()), lead).reshape(-1)

    given["temperature"] = per_token("temperature", temperature, 0.0)
    if counter is not None:
        given["counter"] = xp.indices("counter", counter, lead).reshape(-1)
    if top_p is not None:
        given["top_p"] = per_token("top_p", top_p, most=1.0, above=0.0)
    if min_p is not None:
        given["min_p"] = per_token("min_p", min_p, 0.0, 1.0)
    return given, form


def _floats(xp, name: str, value, *shapes: tuple[int, ...]):
    """Returns a checked float32 array of one of the shapes, without a gradient."""
    found = xp.array(name, value)
    if not xp.is_floating(found):
        raise TypeError(f"{name}: expected floats, got {found.dtype}")
    return xp.fixed(name, found, xp.float32, *shapes)


def with_noise(xp, given: Mapping[str, Any], seed) -> dict[str, Any]:
    """Returns the arguments with numbers as scalars, the key of the noise, and a counter for each token."""
    single = xp.astype(given["hidden"][:0, 0], xp.float32)
    numbers = (name for name in ("temperature", "top_p", "min_p") if name in given and xp.is_number(given[name]))
    made = {**given, **{name: xp.as_like(given[name], single) for name in numbers}, "key": xp.noise_key(seed, single)}
    if "counter" not in made:
        made["counter"] = xp.arange(given["hidden"].shape[0], single)
    return made


def best(
    xp, chunked, hidden, weight, target, bias, *, k, softcap, logit_scale, memory_budget, sharding
) -> tuple[Any, Any, Any]:
    """Returns the k largest log-probabilities at each position with their token ids, and that of a target.

    Serving engines report them for prompts, and distillation stores them of a teacher.

    Args:
        hidden, weight, bias: as in ``linear_sample``.
        {target}: [...] int32 or int64, or None.
        k: 1 to V.
        softcap, logit_scale, memory_budget: as in ``linear_logprobs``.
        sharding: as in ``linear_sample``.

    Returns:
        TopLogProbs(log_prob, top_log_probs, top_ids). log_prob [...] is that of the {target}, None without. The others
        are [..., K], the largest first, and equal ones in the order of their ids. Log-probabilities have the bits of
        ``linear_logprobs``, of these ids as {target} [..., K], and of the one {target} of a token; but on a GPU that the
        library's kernels serve, that of the {target} may differ by a rounding. Without gradients.

    Cost: two GEMMs, one for the ids and one for their log-probabilities; where the library's kernels do not serve, a
    third one for the {target}.
    On a GPU in 16 bits, with k up to 2048: one GEMM, with 512 MiB of logits at a time by default.
    Beside float32 hidden states the pass for the ids copies a 16-bit weight in float32.

    Raises ValueError and TypeError that name the argument, and the errors of ``linear_logprobs``.
    """

    def check(lead, vocab):
        if count("k", k) > vocab:
            raise ValueError(f"k: expected at most {vocab}, the vocabulary of weight, got {k}")
        form = _head_form(softcap, logit_scale)
        if target is None:
            return form, None
        ids = xp.indices(xp.NAMES.target, target, lead)
        refuse_ids(xp, xp.NAMES.target, ids, vocab, DEFAULT.ignore_index)
        return form, ids

    def run(hidden, weight, bias):
        head = hidden, weight, bias
        options = Head(-100, softcap, logit_scale, memory_budget)
        ids = xp.best_over_ranks(*head, k, check, options, sharding)
        if ids is not None:
            own = None if target is None else xp.log_probs(hidden, weight, target, bias, options, sharding=sharding)
            found = xp.log_probs(hidden, weight, ids, bias, options, sharding=sharding)
            order = xp.descending(-ids)  # a stable sort then orders equal ones by id
            return own, *_ordered(xp, xp.along(found, order), xp.along(ids, order))
        given, lead = _checked(xp, *head), tuple(xp.array("hidden", hidden).shape[:-1])
        form, of_target = check(lead, given["weight"].shape[0])
        rows = None if of_target is None else of_target.reshape(-1)
        found = xp.best(hidden, weight, given, rows, int(k), *form, memory_budget)
        if found is not None:
            own, values, ids = found
            return None if own is None else own.reshape(lead), values.reshape(*lead, k), ids.reshape(*lead, k)
        ids = chunked("best_entries", memory_budget, "auto")(given, *form, k)
        ids = xp.sort(ids.reshape(*lead, k))  # a stable sort then orders equal ones by id
        own, wanted = None, ids
        if of_target is not None:
            if xp.has_kernels(hidden):
                wanted = xp.concatenate([ids, xp.astype(of_target[..., None], ids.dtype)], -1)
            else:
                own = xp.log_probs(hidden, weight, of_target, bias, options)
        found = xp.log_probs(hidden, weight, wanted, bias, options)
        if wanted is not ids:
            own = found[..., k]
        return own, *_ordered(xp, found[..., :k], ids)

    return xp.without_gradients(run, hidden, weight, bias)


def _ordered(xp, log_probs, ids) -> tuple[Any, Any]:
    """Returns log-probabilities [..., K] and their ids, largest first; equal ones stay in order."""
    order = xp.descending(log_probs)
    return xp.along(log_probs, order), xp.along(ids, order)


def _checked(xp, hidden, weight, bias) -> dict[str, Any]:
    shape = list(xp.array("weight", weight).shape)
    if 0 in shape:
        raise ValueError(f"weight: expected [V, D] with at least one row and column, got {shape}")
    return xp.checked_head("", hidden, weight, bias, blocks=True)


def _head_form(softcap, logit_scale) -> tuple[float, float]:
    return 0.0 if softcap is None else number("softcap", softcap, above=0.0), number("logit_scale", logit_scale)
