"""The loss of several heads, or of several tokens ahead, by one call of the head where they share a weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from .._options import LOSS_TERMS, shape_text, term_docs
from .head import divisor_of
from .options import HEAD, Head, choice, count, flag, head_of, number

# Keywords of the function, beside its own.
OPTIONS: dict[str, Any] = {**{name: term.default for name, term in LOSS_TERMS.items()}, **HEAD}
TEXTS = dict(terms=term_docs(8))


def _heads(xp, name: str, value, dims: int) -> tuple[Any, Optional[int]]:
    """Returns an array of ``dims`` dimensions, or of one more, or a sequence of them; and their number, None for one."""
    if isinstance(value, (list, tuple)):
        if not value:
            raise ValueError(f"{name}: expected one or more heads, got none")
        return [xp.array(name, part) for part in value], len(value)
    found = xp.array(name, value)
    if found.ndim not in (dims, dims + 1):
        raise ValueError(f"{name}: expected {dims} dimensions, or {dims + 1} with one for the heads, got {list(found.shape)}")
    return found, found.shape[0] if found.ndim > dims else None


def _shifts(shifts: Any, heads: Sequence[Optional[int]]) -> tuple[int, ...]:
    """Returns the number of positions that each head predicts ahead. heads: the numbers of hidden, weight and bias."""
    numbers = {n for n in heads if n is not None}
    if shifts is None:
        if not numbers:
            raise ValueError("shifts: expected a number for each head beside one hidden and one weight, got None")
        shifts = range(1, 1 + max(numbers))
    elif not isinstance(shifts, (list, tuple, range)):
        raise TypeError(f"shifts: expected a sequence of whole numbers or None, got {shifts!r}")
    found = tuple(count("shifts", shift, 0) for shift in shifts)
    for name, n in zip(("hidden", "weight", "bias"), heads):
        if n is not None and n != len(found):
            raise ValueError(f"{name}: expected {len(found)} heads, as many as shifts, got {n}")
    if not found:
        raise ValueError("shifts: expected one or more numbers, got none")
    return found


def _ahead(xp, target, shift: int, ignore_index: int, segment_ids):
    """Returns the targets of a head [..., T]: those ``shift`` positions ahead in the same segment."""

    def moved(x, fill):
        most = min(shift, x.shape[-1])
        return xp.concatenate([x[..., most:], xp.full_like(x[..., :most], fill)], -1)

    found = moved(target, ignore_index)
    return found if segment_ids is None else xp.where(moved(segment_ids, 0) == segment_ids, found, ignore_index)


def _target_logits(xp, hidden, weight, bias, ids, head: Head):
    """Returns the logits of token ids [...] or [..., K] by dot products of gathered rows; anything where ignored."""
    x = xp.operand(hidden, weight).reshape(-1, hidden.shape[-1])
    valid = ids.reshape(-1) != head.ignore_index
    flat = xp.clip(xp.where(valid, ids.reshape(-1), 0), 0, weight.shape[0] - 1)
    per_token = max(flat.shape[0] // max(x.shape[0], 1), 1)
    z = xp.dots(x, weight, xp.arange(flat.shape[0], flat) // per_token, flat, valid)
    if bias is not None:
        z = z + xp.take_rows(xp.astype(bias, z.dtype), flat)
    z = z * head.logit_scale
    return (z if head.softcap is None else head.softcap * xp.tanh(z / head.softcap)).reshape(ids.shape)


def multi_token_loss(
    xp, hidden, weight, target, bias, *, shifts, head_weights, segment_ids, reduction, normalizer, accuracy,
    **options,
) -> tuple[Any, Any, Any]:
    """Cross entropy of several heads that predict tokens further ahead: multi-token prediction (Gloeckle et al. 2024;
    DeepSeek-V3), Medusa, EAGLE.

    Head m predicts, at position t, token t + shifts[m] of {target}. The loss is the sum over heads of head_weights[m]
    times the mean over the tokens that count for that head. A position whose token lies after the end does not count.

    Args:
        hidden: [..., T, D], {floats}; or [M, ..., T, D], or a sequence of M: the hidden states of each head.
        weight: [V, D], of the same dtype, shared by the heads; or [M, V, D], or a sequence of M.
        {target}: [..., T], int32 or int64: token ids at the positions of hidden. ``ignore_index``: predicted by no head.
        bias: [V]; with M weights [M, V] or a sequence of M.
        shifts: M whole numbers; None: 1 to M. For {target} that is shifted by one already, as Megatron's labels are: 0 to
            M - 1.
        head_weights: M numbers from 0; None: 1 each. Megatron-Core's are mtp_loss_scaling_factor / M.
        segment_ids: [..., T] integers, of packed sequences: a token of another segment is not predicted.
        reduction: "mean" over the tokens of each head, or "sum".
        normalizer: "mean" divides by this positive number, or {array} of one element, instead.
        {terms}
            These terms do not go with one hidden and one weight.
        accuracy: also returns the fraction of tokens that each head predicts.
        {head}

    Returns:
        MultiTokenLoss(loss, head_losses, accuracies). loss is float32{exact}, with gradients by hidden, weight and bias.
        head_losses [M] are those of the heads without head_weights and the terms above, for logs, without
        gradients. accuracies [M] is None unless asked for.

    Cost, with gradients: one weight: one call over all heads, three GEMMs of M N V D multiply-adds, and one sum of the
    gradient of weight. M weights: a call for each. One hidden and one weight: three GEMMs of N V D. A sequence of hidden
    states beside one weight is copied to one array. Tokens that no head predicts are ignored.
    torch: A sharded DTensor weight is gathered.

    Raises ValueError and TypeError that name the argument, and the errors of ``linear_cross_entropy``.
    """
    found = head_of(options)
    terms = {name: number(name, options[name], term.least, term.most) for name, term in LOSS_TERMS.items()}
    target = xp.indices(xp.NAMES.target, target)
    lead = tuple(target.shape)
    if not lead:
        raise ValueError(f"{xp.NAMES.target}: expected [..., T], got a scalar")
    if segment_ids is not None:
        segment_ids = xp.indices("segment_ids", segment_ids, lead)
    states, many_states = _heads(xp, "hidden", hidden, len(lead) + 1)
    weights, many_weights = _heads(xp, "weight", weight, 2)
    biases, many_biases = (None, None) if bias is None else _heads(xp, "bias", bias, 1)
    if bias is not None and (many_biases is None) != (many_weights is None):
        raise ValueError(f"bias: expected {'[V] beside one weight' if many_weights is None else 'one for each weight'}")
    ahead = _shifts(shifts, (many_states, many_weights, many_biases))
    for part in states if many_states else [states]:
        if tuple(part.shape[:-1]) != lead:
            raise ValueError(f"hidden: expected {shape_text(lead, 'D')} of each head, got {list(part.shape)}")
    if head_weights is None:
        head_weights = (1.0,) * len(ahead)
    if not isinstance(head_weights, (list, tuple)) or len(head_weights) != len(ahead):
        raise ValueError(f"head_weights: expected a sequence of {len(ahead)} numbers, got {head_weights!r}")
    head_weights = [number("head_weights", value, 0.0) for value in head_weights]
    choice("reduction", reduction, ("mean", "sum"))

    targets = [_ahead(xp, target, shift, found.ignore_index, segment_ids) for shift in ahead]
    valid = [ids != found.ignore_index for ids in targets]
    first = states[0] if many_states else states
    dtype = xp.float64 if first.dtype == xp.float64 else xp.float32
    zeros = [xp.astype(of_head, dtype) * 0 for of_head in valid]
    divisors = [divisor_of(xp, reduction, normalizer, of_head) for of_head in valid]
    divisors = [1.0 if divisor is None else divisor for divisor in divisors]
    factors = [(zero + share) / divisor for zero, share, divisor in zip(zeros, head_weights, divisors)]

    def loss_of(x, w, b, ids, **more: Any):
        """Returns the loss, and without gradients the targets' log-probabilities and the best entries."""
        x, w, ids, b = xp.local(x, w, ids, b)
        loss, lse, best = xp.weighted_loss(x, w, ids, b, found, flag("accuracy", accuracy), **terms, **more)
        of_targets = xp.without_gradients(lambda *given: _target_logits(xp, *given, found), x, w, b, ids)
        return loss, of_targets - (lse if lse.ndim == ids.ndim else lse[..., None]), best

    if many_weights is not None:
        heads = len(ahead)  # a list of parts, since a gradient by each index would be as large as the whole
        parts = [list(x) if many else [x] * heads for x, many in ((states, many_states), (weights, True), (biases, many_biases))]
        calls = [loss_of(*of_head, token_weight=factor) for *of_head, factor in zip(*parts, targets, factors)]
        losses, logps, best = zip(*calls)
        loss = sum(losses[1:], losses[0])
    elif many_states is not None:
        together = xp.stack(states, 0) if isinstance(states, list) else states
        loss, logps, best = loss_of(together, weights, biases, xp.stack(targets, 0), token_weight=xp.stack(factors, 0))
    else:
        for name, value in terms.items():
            if value:
                raise NotImplementedError(f"{name}: expected 0 with one hidden and one weight, got {value}")
        shares = [xp.where(of_head, factor, 0.0) for of_head, factor in zip(valid, factors)]
        loss, logps, best = loss_of(states, weights, biases, xp.stack(targets, -1), target_weight=xp.stack(shares, -1))
        logps = [logps[..., m] for m in range(len(ahead))]
        best = [best] * len(ahead)
    heads = range(len(ahead))
    nll = [xp.where(valid[m], -logps[m], 0.0).sum() / divisors[m] for m in heads]
    right = None
    if accuracy:
        right = [(valid[m] & (best[m] == targets[m])).sum() / xp.at_least(valid[m].sum(), 1) for m in heads]
    return loss, xp.stack(nll, 0), None if right is None else xp.stack(right, 0)
