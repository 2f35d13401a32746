"""Log-probabilities over a set of token ids for each token, such as those that a sampler's filters kept.

Only the logits of the set are computed: dot products of gathered rows, in float32. Entries of all sets form one list,
sorted by token.
"""

from __future__ import annotations

from typing import Any

from .._options import shape_text
from .head import valid_targets
from .options import HEAD, bad_id, bad_offsets, head_of, number

_LEAST = -1e30  # a log-probability of zero probability, whose products are finite


def _entries(xp, kept_ids, kept_offsets, lead: tuple[int, ...], tokens: int) -> tuple[Any, Any, Any, Any]:
    """Returns the token of each entry, its id, and whether it is one and not padding: arrays [M]. The last result is
    whether the offsets are wrong, None without them."""
    if kept_offsets is None:
        ids = xp.indices("kept_ids", kept_ids)
        shape = tuple(ids.shape)
        if len(shape) != len(lead) + 1 or shape[:-1] != lead:
            raise ValueError(f"kept_ids: expected {shape_text(lead, 'K')} without kept_offsets, got {list(shape)}")
        ids = ids.reshape(-1)
        return xp.arange(tokens * shape[-1], ids) // max(shape[-1], 1), ids, ids >= 0, None
    ids, offsets = xp.indices("kept_ids", kept_ids), xp.indices("kept_offsets", kept_offsets, (tokens + 1,))
    if len(ids.shape) != 1:
        raise ValueError(f"kept_ids: expected [M] beside kept_offsets, got {list(ids.shape)}")
    count = ids.shape[0]
    wrong = (offsets[0] != 0) | (offsets[-1] > count) | (offsets[1:] < offsets[:-1]).any()
    if xp.may_read(wrong) and bool(wrong):
        raise ValueError(bad_offsets(count, int(offsets[0]), int(offsets[-1])))
    entry = xp.arange(count, ids)
    of_token = xp.clip(xp.after(offsets, entry) - 1, 0, max(tokens - 1, 0))
    return of_token, ids, (ids >= 0) & (entry < offsets[-1]), wrong


def _refuse(xp, name: str, ids, bad, vocab: int, ignore_index: int | None = None) -> None:
    """Raises ValueError for the first bad id, where values may be read."""
    if xp.may_read(bad) and bool(bad.any()):
        at = int(xp.argmax(xp.astype(bad, xp.float32)))
        raise ValueError(bad_id(name, vocab, ignore_index, int(ids[at]), at))


def temperatures(xp, value, lead: tuple[int, ...], like):
    """Returns a checked temperature: a number as a float, or an array [...] or [] as [N] of the dtype of ``like``."""
    if xp.is_number(value):
        return number("temperature", value, above=0.0)
    found = xp.shaped("temperature", value, lead, ())
    if not xp.is_floating(found):
        raise TypeError(f"temperature: expected floats, got {found.dtype}")
    return xp.astype(xp.broadcast_to(found, lead).reshape(-1), like)


def kept_logprobs(
    xp, hidden, weight, target, bias, *, kept_ids, kept_offsets, temperature, softcap, logit_scale, ignore_index
) -> tuple[Any, Any, Any]:
    """Returns the log-probability of each target among a set of token ids of its own, and the set's entropy and
    log-sum-exp, all with gradients.

    A sampler with top_k, top_p or min_p draws from the softmax over the entries that it kept. A trainer that replays
    these sets computes the probabilities that the sampler drew with. The logits are ``softcap(logit_scale * (hidden @
    weight.T + bias)) / temperature``, of the set alone.

    Args:
        hidden: [..., D]. weight: [V, D], the dtype of hidden, or float32 beside 16 bits. bias: [V].
        {target}: [...], int32 or int64; tokens of ``ignore_index`` give 0.
        kept_ids: [..., K], int32 or int64: the ids of each token's set, padded with -1. With kept_offsets: [M], the ids of
            all sets, one after another; -1 is padding. An id occurs once in a set.
        kept_offsets: [N + 1], int32 or int64, for N tokens: the set of token i is kept_ids[kept_offsets[i] :
            kept_offsets[i + 1]].
        temperature: a number above 0, or {an_array} of floats: [...], a number for each token, or [], one for all, with a
            gradient.
        softcap, logit_scale: as in ``linear_logprobs``.

    Returns:
        (log_prob, entropy, lse), each [...], float32{exact}, in nats. A target that is not in its set has a log_prob of
        -inf, without a gradient.

    Cost: M D multiply-adds for M kept entries, and twice that for each gradient; nothing depends on V but the gradient
    of weight. Extra memory: some 60 bytes an entry, 16 MiB of gathered rows, and the fp32 sums of 16-bit gradients.
    Products and sums are float32{exact}, whatever the dtype of hidden.

    The sets' memory is a fixed number of bytes an entry, so there is no memory_budget: split the tokens.
    torch: Second derivatives are right, by torch.autograd and torch.func; forward mode is refused.
    jax: Second derivatives are right; forward mode is refused by JAX.

    Raises ValueError and TypeError that name the argument. On a CPU a target or id outside [0, V) is a ValueError. So are
    offsets that do not rise from 0 to at most M.
    torch: On a GPU, under torch.compile and torch.func, a bad id or target gives NaN, and bad offsets give NaN everywhere.
    jax: On a GPU and where values are traced, as in jax.jit, a bad id or target gives NaN, and bad offsets give NaN everywhere.
    """
    states = xp.array("hidden", hidden)
    lead = tuple(states.shape[:-1])
    given = xp.checked_head("", hidden, weight, bias, wide=True)
    x, w = given["hidden"], given["weight"]
    tokens, vocab = x.shape[0], w.shape[0]
    head = head_of({**HEAD, "ignore_index": ignore_index, "softcap": softcap, "logit_scale": logit_scale})
    if target is None:
        raise TypeError(f"{xp.NAMES.target}: expected {xp.NAMES.an_array}, got NoneType")
    counts, own, bad = valid_targets(xp, target, lead, head.ignore_index, vocab, x)
    _refuse(xp, xp.NAMES.target, xp.array(xp.NAMES.target, target).reshape(-1), bad, vocab, head.ignore_index)
    rows, ids, valid, wrong_offsets = _entries(xp, kept_ids, kept_offsets, lead, tokens)
    rows, ids = xp.astype(rows, own.dtype), xp.astype(ids, own.dtype)
    wrong = valid & (ids >= vocab)
    _refuse(xp, "kept_ids", ids, wrong, vocab)
    valid = valid & xp.take_rows(counts, rows)
    ids = xp.where(valid & ~wrong, ids, 0)

    # The targets are more entries, whose gradient by weight is summed with the others.
    all_rows = xp.concatenate([rows, xp.astype(xp.arange(tokens, own), own.dtype)], 0)
    all_ids = xp.concatenate([ids, own], 0)
    z = xp.dots(x, w, all_rows, all_ids, xp.concatenate([valid, counts], 0))
    if "bias" in given:
        z = z + xp.gathered(xp.astype(given["bias"], z.dtype), all_ids)
    z = z * head.logit_scale
    if head.softcap is not None:
        z = head.softcap * xp.tanh(z / head.softcap)
    t = temperatures(xp, temperature, lead, z.dtype)
    z = z / (t if xp.is_number(temperature) else xp.gathered(t, all_rows))
    others, of_target = z[: rows.shape[0]], z[rows.shape[0] :]

    # Differences to the target's logit, so that a confident token keeps the digits of its log-probability.
    is_target = valid & (ids == xp.take_rows(own, rows))
    other = valid & ~is_target
    gap = xp.where(other, others - xp.gathered(of_target, rows), 0.0)
    shift = xp.largest(xp.where(other, xp.stop_gradient(gap), -xp.inf), rows, tokens)
    shift = xp.where(xp.isneginf(shift), 0.0, shift)
    total = xp.summed(xp.where(other, xp.exp(gap - xp.take_rows(shift, rows)), 0.0), rows, tokens)
    alone = total == 0
    rest = xp.where(alone, -xp.inf, shift + xp.log(xp.where(alone, 1.0, total)))
    found = xp.largest(xp.where(is_target, 1.0, xp.where(valid, 0.0, -1.0)), rows, tokens) > 0
    norm = xp.where(found, -xp.log_sigmoid(-rest), rest)  # lse - the target's logit
    log_p = xp.at_least(xp.where(other, gap - xp.gathered(xp.where(alone, 0.0, norm), rows), 0.0), _LEAST)
    spread = xp.summed(xp.where(other, xp.exp(log_p) * log_p, 0.0), rows, tokens)
    of_set = xp.where(found, norm, 0.0)
    entropy = xp.where(found, xp.exp(-of_set) * of_set, 0.0) - spread

    wrong = bad | (xp.largest(xp.where(wrong, 1.0, 0.0), rows, tokens) > 0)
    wrong = wrong if wrong_offsets is None else wrong | wrong_offsets
    results = xp.where(found, -norm, -xp.inf), entropy, of_target + norm
    return tuple(xp.where(counts, xp.where(wrong, xp.nan, result), 0.0).reshape(lead) for result in results)
