"""The contrastive loss InfoNCE: keys are the vocabulary of a head, and similarities of all pairs are not stored."""

from __future__ import annotations

import math
from typing import Any, Optional

from .options import choice, flag, number

_LEAST_NORM = 1e-12  # as PyTorch's normalize


def _vectors(xp, name: str, value, like: Any = None):
    """Returns checked [rows, D], of the dtype and D of ``like``."""
    found = xp.states(name, value)
    wanted = "[N, D]" if like is None else f"[{'M' if name == 'key' else 'K'}, {like.shape[-1]}]"
    if found.ndim != 2 or (like is not None and found.shape[-1] != like.shape[-1]):
        raise ValueError(f"{name}: expected {wanted}, got {list(found.shape)}")
    if like is not None and found.dtype != like.dtype:
        raise TypeError(f"{name}: expected {like.dtype}, the dtype of query, got {found.dtype}")
    return found


def _scaled(xp, x, normalize: bool, factor):
    """Returns rows, divided by their norms and times a factor, rounded once to their dtype."""
    if not normalize and factor is None:
        return x
    exact = x if x.dtype == xp.float64 else xp.astype(x, xp.float32)
    if normalize:
        exact = exact * xp.at_least((exact * exact).sum(-1), _LEAST_NORM**2)[:, None] ** -0.5
    return xp.astype(exact if factor is None else exact * xp.as_like(factor, exact), x.dtype)


def info_nce_loss(
    xp, query, key, *, negatives, target, temperature, normalize, symmetric, reduction, memory_budget: Optional[Any]
):
    """InfoNCE (van den Oord et al. 2018): the cross entropy of each query's own key among all keys, with the logits
    query . key / temperature. SimCLR, CLIP (``symmetric``), MoCo (``negatives``) and dense retrieval use it.

    Args:
        query: [N, D], {floats}. key: [M, D], the same dtype. Both have gradients.
        negatives: [K, D], more keys that are nobody's own, such as hard negatives or a queue.
        {target}: [N], int32 or int64: the position in key of each query's own; -100: the query is ignored. None: 0, 1, ...,
            with M = N. With keys gathered from several ranks, add the rank's offset.
        temperature: above 0; or {array} of one element, with a gradient. CLIP's logit_scale is 1 / temperature.
        normalize: rows are divided by their norms, so that logits are cosines / temperature.
        symmetric: the mean of this loss and that of each key among all queries, without negatives (Radford et al. 2021).
            Without {target}.
        reduction: "none" (loss [N]), "mean" over the queries that count, "sum".
        memory_budget: bytes, or text such as "512MiB", that a call of the head may take beyond inputs and gradients.

    Returns the loss, float32{exact}.

    The cost is that of a head with the keys as its vocabulary: one GEMM forward and two backward, twice if symmetric.
    Normalised rows are a copy of the inputs, in their dtype; so are negatives and keys together. A temperature with a
    gradient is multiplied into the copy of the queries. The [N, M] similarities are not stored.

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one.
    """
    choice("reduction", reduction, ("none", "mean", "sum"))
    query = _vectors(xp, "query", query)
    key = _vectors(xp, "key", key, query)
    if flag("symmetric", symmetric) and target is not None:
        raise ValueError(f"{xp.NAMES.target}: expected None with symmetric=True, got {xp.NAMES.an_array}")
    if target is None and key.shape[0] != query.shape[0]:
        raise ValueError(
            f"key: expected {list(query.shape)} without {xp.NAMES.target}, one for each query, got {list(key.shape)}"
        )
    rows = xp.arange(query.shape[0], query)
    target = rows if target is None else xp.indices(xp.NAMES.target, target, tuple(query.shape[:1]))
    if xp.is_number(temperature):
        scale, factor = 1 / number("temperature", temperature, above=0.0), None
    else:
        found = xp.array("temperature", temperature)
        if math.prod(found.shape) != 1:
            raise ValueError(f"temperature: expected {xp.NAMES.an_array} of one number, got {list(found.shape)}")
        scale, factor = 1.0, 1 / found.reshape(())
    flag("normalize", normalize)

    def among(one, others, target):
        return xp.linear_cross_entropy(
            one, others, target, logit_scale=scale, reduction=reduction, memory_budget=memory_budget
        )

    unit = _scaled(xp, query, normalize, None)
    keys = own = _scaled(xp, key, normalize, None)
    if negatives is not None:
        keys = xp.concatenate([own, _scaled(xp, _vectors(xp, "negatives", negatives, query), normalize, None)], 0)
    loss = among(unit if factor is None else _scaled(xp, query, normalize, factor), keys, target)
    if not symmetric:
        return loss
    return 0.5 * (loss + among(own if factor is None else _scaled(xp, key, normalize, factor), unit, rows))
