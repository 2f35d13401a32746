"""Sampled softmax: the cross entropy of each target among some sampled negatives of the batch.

The gathered rows of the negatives are the weight of a head, whose bias corrects for how often each is sampled.
"""

from __future__ import annotations

import math

from .head import divisor_of, valid_targets
from .options import HEAD, choice, count, flag, head_of, number

_PARTS, _REST = 1 << 20, 1 << 11  # together 31 random bits
SAMPLERS = ("log_uniform", "uniform")


def _drawn(xp, key, sampler: str, samples: int, vocab: int, like):
    """Returns samples token ids, with replacement."""
    noise = xp.gumbel(key, xp.arange(2, like), samples)
    first, second = -xp.expm1(-xp.exp(-noise))  # uniform in [0, 1]
    if sampler == "uniform":
        high, low = (
            xp.astype(xp.at_most(u * parts, parts - 1), xp.class_dtype)
            for u, parts in ((first, float(_PARTS)), (second, float(_REST)))
        )
        return (high * _REST + low) % vocab
    # The first number chooses the id to 24 bits of its logarithm, and the second one an id between two of these.
    x = xp.exp(first * math.log1p(vocab))
    whole = xp.astype(x, xp.class_dtype)
    rest = x - xp.astype(whole, x.dtype) + (second - 0.5) * x * (math.log1p(vocab) * 2**-24)
    return xp.clip(whole + xp.where(rest >= 1, 1, xp.where(rest < 0, -1, 0)) - 1, 0, vocab - 1)


def _log_counts(xp, sampler: str, ids, samples: int, vocab: int, dtype):
    """Returns the logarithm of how often ids are expected among the samples."""
    if sampler == "uniform":
        return xp.astype(ids * 0, dtype) + math.log(samples / vocab)
    return xp.log(xp.log1p(1 / (xp.astype(ids, dtype) + 1))) + math.log(samples / math.log1p(vocab))


def _given_counts(xp, sampled_log_counts, target_log_counts, samples: int, lead: tuple[int, ...], dtype):
    both = [
        (name, value, shape) for name, value, shape in (
            ("sampled_log_counts", sampled_log_counts, (samples,)), ("target_log_counts", target_log_counts, lead)
        )
    ]
    missing = [name for name, value, _ in both if value is None]
    if len(missing) == 1:
        raise ValueError(f"{missing[0]}: expected it beside the other log_counts, got None")
    if missing:
        return None, None
    return tuple(xp.fixed(name, value, dtype, shape).reshape(-1) for name, value, shape in both)


def sampled_softmax_loss(
    xp, hidden, weight, target, bias, *, num_sampled, sampler, seed, sampled_ids, sampled_log_counts, target_log_counts,
    remove_accidental_hits, token_weight, reduction, normalizer, ignore_index, logit_scale, memory_budget,
    expected_ignored,
):
    """Sampled softmax (Jean et al. 2015; TensorFlow's ``sampled_softmax_loss``): the cross entropy of each target among
    itself and negatives that the batch shares. From each logit the logarithm of its expected count is subtracted, so that
    the loss estimates that of the whole vocabulary. For training alone: it is an underestimate.

    Args:
        hidden: [..., D], {floats}. weight: [V, D], of the same dtype. bias: [V]. All have gradients.
        {target}: [...], int32 or int64: tokens of ``ignore_index`` are ignored.
        num_sampled: K negatives are drawn with replacement; an id that is drawn twice counts twice. Expected counts are
            K P(id).
        sampler: "log_uniform": P(id) = log((id + 2) / (id + 1)) / log(V + 1), for ids from frequent to rare; "uniform".
        torch: seed: an int, of which the low 64 bits count. None: drawn from PyTorch's default generator of the CPU.
        jax: seed: a key of ``jax.random``, typed or of two integers.
        sampled_ids: [K], int32 or int64: the negatives, instead of num_sampled. An id may occur several times.
        sampled_log_counts, target_log_counts: [K] and [...]: logarithms of the expected counts of sampled_ids and of the
            {target}, without gradients; equal ids have equal ones. None: nothing is subtracted.
        remove_accidental_hits: a negative that is the token's {target} does not count for this token.
        token_weight: [...] float: factors of the tokens' losses.
        reduction: "none" (loss [...]), "mean" over the tokens that count, by their token_weight, "sum".
        normalizer: "mean" divides by this positive number, or {array} of one element, instead.
        logit_scale: above 0, the factor of ``hidden @ weight.T + bias``.
        memory_budget: bytes, or text such as "512MiB", that a call of the head may take beyond inputs and gradients.
        expected_ignored: as in ``linear_cross_entropy``.

    Returns the loss, float32{exact}.

    The cost is that of ``linear_logprobs`` with K vocabulary entries. The [N, K] logits are not stored. Memory: gathered
    rows of K negatives and N targets in float32{exact}, and the fp32 sums of a 16-bit weight's gradient, which is
    rounded once.

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one.
    """
    options = dict(ignore_index=ignore_index, memory_budget=memory_budget, expected_ignored=expected_ignored)
    head = head_of({**HEAD, **options})
    scale = number("logit_scale", logit_scale, above=0.0)
    choice("sampler", sampler, SAMPLERS)
    lead = tuple(xp.array("hidden", hidden).shape[:-1])
    given = xp.checked_head("", hidden, weight, bias)
    states, matrix = given["hidden"], given["weight"]
    dtype = xp.float64 if states.dtype == xp.float64 else xp.float32
    tokens, vocab = states.shape[0], matrix.shape[0]
    valid, own, bad = valid_targets(xp, xp.array(xp.NAMES.target, target), lead, head.ignore_index, vocab, states)
    divisor = divisor_of(xp, reduction, normalizer, valid)

    # The negatives, in the order of their ids.
    if sampled_ids is None:
        if sampled_log_counts is not None or target_log_counts is not None:
            raise ValueError("sampled_ids: expected them beside their log_counts, got None")
        samples = count("num_sampled", num_sampled)
        ids = xp.sort(_drawn(xp, xp.key(seed, states), sampler, samples, vocab, states))
        log_counts, own_counts = (_log_counts(xp, sampler, x, samples, vocab, dtype) for x in (ids, own))
        wrong = None
    else:
        if num_sampled is not None:
            raise ValueError(f"num_sampled: expected None beside sampled_ids, got {num_sampled!r}")
        ids = xp.indices("sampled_ids", sampled_ids)
        if len(ids.shape) != 1 or ids.shape[0] == 0:
            raise ValueError(f"sampled_ids: expected [K], got {list(ids.shape)}")
        samples = ids.shape[0]
        outside = (ids < 0) | (ids >= vocab)
        xp.refuse_ids("sampled_ids", ids, outside, vocab)
        wrong = outside.any()
        log_counts, own_counts = _given_counts(xp, sampled_log_counts, target_log_counts, samples, lead, dtype)
        ids = xp.astype(xp.where(outside, 0, ids), xp.class_dtype)
        order = xp.descending(-ids)
        ids = xp.along(ids, order)
        log_counts = None if log_counts is None else xp.along(log_counts, order)

    # The first of equal ids stands for all of them, so a target among them occurs once in its sum.
    before = xp.after(ids, ids - 1)
    copies = xp.log(xp.astype(xp.after(ids, ids) - before, dtype))
    masks = xp.where(before == xp.arange(samples, ids), copies if log_counts is None else copies - log_counts, -xp.inf)
    found = xp.after(ids, own - 1)
    position = xp.at_most(found, samples - 1)
    hit = (found < samples) & (xp.take_rows(ids, position) == own)

    rows = xp.rows(matrix, xp.concatenate([ids, own], 0), dtype)
    shift, of_target = masks / scale, 0.0
    if "bias" in given:
        biases = xp.rows(given["bias"], xp.concatenate([ids, own], 0), dtype)
        shift, of_target = shift + biases[:samples], biases[samples:]
    head = head._replace(logit_scale=scale)
    place = xp.where(valid, xp.where(hit, position, 0) if flag("remove_accidental_hits", remove_accidental_hits) else 0,
                     head.ignore_index)  # fmt: skip
    log_p, lse = xp.log_probs_and_lse(states, rows[:samples], place, shift, head)
    index = xp.arange(tokens, ids)
    of_target = scale * (xp.dots(states, rows, index, samples + index, valid) + of_target)
    if own_counts is not None:
        of_target = of_target - own_counts
    each = -xp.log_sigmoid(of_target - lse)
    if remove_accidental_hits:
        # The log-probability x of all copies of the target becomes that of one: -log(1 + factor (exp(-x) - 1)).
        factor = xp.take_rows(copies, position)
        if log_counts is not None:
            factor = factor + own_counts - xp.take_rows(log_counts, position)
        among = -log_p + xp.log1p(-xp.expm1(factor) * xp.expm1(log_p))
        each = xp.where(hit, among, each)
    each = xp.where(bad, xp.nan, each)
    each = each if wrong is None else xp.where(wrong, xp.nan, each)
    share = xp.astype(valid, dtype)
    if token_weight is not None:
        share = xp.where(valid, xp.fixed("token_weight", token_weight, dtype, lead).reshape(-1), 0.0)
        if divisor is not None and normalizer is None:
            divisor = xp.where(share.sum() != 0, share.sum(), 1.0)
    each = xp.where(share != 0, share * each, 0.0)
    if reduction == "none":
        return each.reshape(lead)
    return each.sum() if divisor is None else each.sum() / divisor
