"""Losses of cosines: InfoNCE, of queries and keys, and the margin losses CosFace and ArcFace, of features and classes.

The keys of InfoNCE are the vocabulary of a head. The margin losses are ``autochunk`` programs that the library runs, a
chunk of rows at a time. Neither stores the similarities of all pairs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

from .head import divisor_of, valid_targets
from .options import HEAD, choice, count, flag, head_of, number

MARGIN: dict[str, Any] = dict(
    reduction="mean", normalizer=None, ignore_index=HEAD["ignore_index"], memory_budget=None, executor="native"
)

MARGIN_TEXTS = dict(
    arguments="""hidden: [..., D], features. weight: [V, D], of the same dtype: the classes' directions. No bias.
        {target}: [...], int32 or int64: rows of ``ignore_index`` are ignored.
        scale: above 0, the factor of the cosines.
        reduction: "none" (loss [...]), "mean" over the rows that count, "sum".
        normalizer: "mean" divides by this positive number, or {array} of one element, instead.
        memory_budget: bytes, or text such as "512MiB", that a call may take beyond inputs and gradients.
        executor: of autochunk: "native", the library, on a CPU or GPU, or "python", {name}'s operations. Where
            ``backend`` says "portable", {name}'s operations run without autochunk, whatever it is.""",
)

_LEAST_NORM = 1e-12  # as PyTorch's normalize
_LEAST_SINE = 1e-12  # below it, the gradient of the sine is 0


# --- InfoNCE.


def _vectors(xp, name: str, value, like: Any = None):
    """Returns checked [rows, D], of the dtype and D of ``like``."""
    found = xp.states(name, value)
    wanted = "[N, D]" if like is None else f"[{'M' if name == 'key' else 'K'}, {like.shape[-1]}]"
    if found.ndim != 2 or (like is not None and found.shape[-1] != like.shape[-1]):
        raise ValueError(f"{name}: expected {wanted}, got {list(found.shape)}")
    if like is not None and found.dtype != like.dtype:
        raise TypeError(f"{name}: expected {like.dtype}, the dtype of query, got {found.dtype}")
    return found


def _exact(xp, x):
    return x if x.dtype == xp.float64 else xp.astype(x, xp.float32)


def _over_norm(xp, x):
    """Returns [rows, 1]: 1 / the norms of rows."""
    exact = _exact(xp, x)
    return xp.at_least((exact * exact).sum(-1), _LEAST_NORM**2)[:, None] ** -0.5


def over_norms(xp, x):
    """Returns [rows]: 1 / the norms of rows."""
    return _over_norm(xp, x).reshape(-1)


def _scaled(xp, x, normalize: bool, factor):
    """Returns rows, divided by their norms and times a factor, rounded once to their dtype."""
    if not normalize and factor is None:
        return x
    exact = _exact(xp, x)
    if normalize:
        exact = exact * _over_norm(xp, x)
    return xp.astype(exact if factor is None else exact * xp.as_like(factor, exact), x.dtype)


class Spread(NamedTuple):
    """How ranks share queries and keys. Each rank has its own rows of all of them."""

    keys: Any  # the sharding of a head whose vocabulary is the keys of all ranks, each rank's followed by its negatives
    queries: Any  # the sharding of a head whose vocabulary is the queries
    first: int  # the position of the first query here among all
    counts: Optional[list[tuple[int, int]]]  # each rank's keys and negatives, if there are negatives

    def ids(self, xp, positions):
        """Returns positions among the keys of all ranks as vocabulary ids."""
        if self.counts is None:
            return positions
        ends, before = [0], [0]
        for keys, negatives in self.counts:
            ends.append(ends[-1] + keys)
            before.append(before[-1] + negatives)
        ends, before = (xp.as_integers(x, positions) for x in (ends[1:], before))
        moved = positions + xp.astype(xp.take(before, xp.after(ends, positions)), positions.dtype)
        return xp.where(positions < 0, positions, moved)


def info_nce_loss(
    xp, query, key, *, negatives, target, temperature, normalize, symmetric, reduction, memory_budget: Optional[Any],
    sharding,
):
    """InfoNCE (van den Oord et al. 2018): the cross entropy of each query's own key among all keys, with the logits
    query . key / temperature. SimCLR, CLIP (``symmetric``), MoCo (``negatives``) and dense retrieval use it.

    Args:
        query: [N, D], {floats}. key: [M, D], the same dtype. Both have gradients.
        negatives: [K, D], more keys that are nobody's own, such as hard negatives or a queue.
        {target}: [N], int32 or int64: the position in key of each query's own; -100: the query is ignored. None: 0, 1, ...,
            with M = N.
        temperature: above 0; or {array} of one element, with a gradient. CLIP's logit_scale is 1 / temperature.
        normalize: rows are divided by their norms, so that logits are cosines / temperature.
        symmetric: the mean of this loss and that of each key among all queries, without negatives (Radford et al. 2021).
            Without {target}.
        reduction: "none" (loss [N]), "mean" over the queries that count, "sum".
        memory_budget: bytes, or text such as "512MiB", that a call of the head may take beyond inputs and gradients.
        torch: sharding: ``Sharding(group, tokens=True)``: query, key and negatives are this rank's own rows, of any number.
        torch:     The keys of all ranks are those of each query, and {target} counts them in rank order. The loss is that of
        torch:     the ranks' concatenated rows in one process: a mean or sum is over all queries and the same on all ranks.
        torch:     A rank's gradients by its rows are complete, and that by the temperature is its part of a sum over ranks.
        torch:     So the sum over ranks of a parameter's gradients is its gradient; DDP and FSDP take the mean, so multiply
        torch:     the loss by the number of ranks. Neither keys nor similarities are gathered. torch.compile needs the
        torch:     sharding's vocab and vocab_begin, those of key, and no negatives.
        jax: sharding: ``Sharding(mesh, tokens=axis)``: rows of query, key and negatives are sharded over the axis or axes.
        jax:     The loss and its gradients are those without it. Neither keys nor similarities are gathered; queries are.
        jax:     None: taken from the types of query, key and negatives, if explicit.

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
    extra = None if negatives is None else _vectors(xp, "negatives", negatives, query)
    spread = xp.spread(sharding, query, key, extra)
    rows = xp.arange(query.shape[0], query) + spread.first
    target = rows if target is None else xp.indices(xp.NAMES.target, target, tuple(query.shape[:1]))
    if xp.is_number(temperature):
        scale, factor = 1 / number("temperature", temperature, above=0.0), None
    else:
        found = xp.array("temperature", temperature)
        if math.prod(found.shape) != 1:
            raise ValueError(f"temperature: expected {xp.NAMES.an_array} of one number, got {list(found.shape)}")
        scale, factor = 1.0, 1 / found.reshape(())
    flag("normalize", normalize)

    def among(one, others, target, ranks):
        return xp.linear_cross_entropy(
            one, others, target, logit_scale=scale, reduction=reduction, memory_budget=memory_budget, sharding=ranks
        )

    unit = _scaled(xp, query, normalize, None)
    keys = own = _scaled(xp, key, normalize, None)
    if extra is not None:
        keys = xp.joined([own, _scaled(xp, extra, normalize, None)], sharding)
    queries = unit if factor is None else _scaled(xp, query, normalize, factor)
    loss = among(queries, keys, spread.ids(xp, target), spread.keys)
    if not symmetric:
        return loss
    others = own if factor is None else _scaled(xp, key, normalize, factor)
    return 0.5 * (loss + xp.placed_like(among(others, unit, rows, spread.queries), loss))


def grad_cache(xp, encode, *inputs, micro_batch):
    """Encodes a batch a micro batch at a time, and again in the backward (GradCache, Gao et al. 2021). Only embeddings are
    held of the whole batch, so a contrastive loss has more negatives than an encoder's activations allow.

    Args:
        encode: called as encode(*inputs) on ``micro_batch`` rows of the inputs, and on the rest in the last call. It returns
            {array}s [rows, ...], in tuples or dictionaries if there are several. A row's results must not depend on the other
            rows, so not on statistics of a batch.
        inputs: {array}s [N, ...], or tuples, lists and dictionaries of them, such as a tokenizer's.
        torch:     Values that are no tensors are given to every call.
        jax:     Random numbers need a key for each row, among the inputs. The micro batch i of n has rows i, i + n, ..., so
        jax:     that each device of a mesh has rows of it.

    Returns the results of all rows, in their order, with gradients by the inputs and by what encode reads.
    torch: The backward calls encode again on each micro batch, with the random state of its first call, so that dropout
    torch: repeats.
    jax: The backward computes encode again on each micro batch.

    The cost is one forward of the encoder more. Gradients are those of the whole batch.

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one.
    """
    size = count("micro_batch", micro_batch)
    if not callable(encode):
        raise TypeError(f"encode: expected a function, got {type(encode).__name__}")
    shapes = {tuple(x.shape[:1]) for x in xp.leaves(inputs)}
    if len(shapes) != 1 or shapes == {()}:
        found = [list(shape) for shape in sorted(shapes)]
        raise ValueError(f"inputs: expected {xp.NAMES.array}s of one number of rows, got {found}")
    return xp.in_micro_batches(encode, inputs, shapes.pop()[0], size)


# --- Margins.


class Form(NamedTuple):
    """The options of a margin loss, as constants of its program."""

    scale: float
    angle: float  # added to the angle of a row and its class
    drop: float  # subtracted from their cosine
    summed: bool


def cosines(xp, hidden, weight) -> tuple[Any, Any, Any]:
    """Returns the cosines [N, V], and 1 / the norms of both matrices' rows, [N, 1] and [1, V]."""
    by_row, by_class = _over_norm(xp, hidden), _over_norm(xp, weight).reshape(1, -1)
    return xp.product(hidden, weight) * by_row * by_class, by_row, by_class


def cosines_gradients(xp, cotangent, hidden, weight, found, by_row, by_class) -> tuple[Any, Any]:
    """Returns the gradients of ``cosines``. A row's gradient is a product less its part along the row. Both are fp32 until
    they are added, since they may cancel."""
    of_product, along = xp.astype(cotangent * by_row * by_class, hidden.dtype), cotangent * found
    d_hidden = xp.product(of_product, weight.T) - along.sum(-1)[:, None] * (by_row * by_row) * _exact(xp, hidden)
    of_class = along.sum(0)[:, None] * (by_class * by_class).reshape(-1, 1)
    d_weight = xp.product(of_product.T, hidden.T) - of_class * _exact(xp, weight)
    return xp.astype(d_hidden, hidden.dtype), xp.astype(d_weight, weight.dtype)


def program(xp, of_heads, given: Mapping[str, Any], form: tuple):
    """Computes the loss by the plain formula, which autochunk chunks. given: hidden [N, D], weight [V, D], rows [N], the
    factors of the rows' losses, and vocab_ids [N]; and over_norms [V], ``over_norms`` of weight, if it is known.
    of_heads(hidden, weight) is the first result of ``cosines``, with its gradients."""
    f = Form(*form)
    hidden, weight, rows, vocab_ids = (given[name] for name in ("hidden", "weight", "rows", "vocab_ids"))
    hidden = xp.where(rows[:, None] != 0.0, hidden, 0.0)  # NaN at ignored rows must not spread
    if "over_norms" in given:
        every = xp.product(hidden, weight) * _over_norm(xp, hidden) * given["over_norms"].reshape(1, -1)
    else:
        every = of_heads(hidden, weight)
    own = vocab_ids[:, None] == xp.arange(every.shape[1], vocab_ids)[None]
    cosine = xp.where(own, every, 0.0).sum(-1)
    if f.angle:
        sine = xp.at_least(1 - cosine * cosine, _LEAST_SINE**2) ** 0.5
        turned = cosine * math.cos(f.angle) - sine * math.sin(f.angle)
        # The cosine of an angle above pi would rise again.
        cosine = xp.where(cosine > -math.cos(f.angle), turned, cosine - f.angle * math.sin(f.angle))
    target = f.scale * (cosine - f.drop)
    logits = xp.where(own, target[:, None], f.scale * every)
    each = (xp.logsumexp(logits, -1) - target) * rows
    return each.sum() if f.summed else each


def _margin_loss(xp, chunked, hidden, weight, target, scale, angle: float, drop: float, a: Mapping[str, Any]):
    ignore_index = head_of({**HEAD, "ignore_index": a["ignore_index"]}).ignore_index
    scale = number("scale", scale, above=0.0)
    lead = tuple(xp.array("hidden", hidden).shape[:-1])
    head = xp.checked_head("", hidden, weight, None)
    states, vocab = head["hidden"], head["weight"].shape[0]
    valid, vocab_ids, bad = valid_targets(xp, xp.array(xp.NAMES.target, target), lead, ignore_index, vocab, states)
    divisor = divisor_of(xp, a["reduction"], a["normalizer"], valid)
    rows = xp.astype(valid, xp.float64 if states.dtype == xp.float64 else xp.float32)
    rows = xp.where(bad, math.nan, rows if divisor is None else rows / divisor)  # a GPU's host waits for no error
    form = Form(scale, angle, drop, a["reduction"] != "none")
    run = chunked("margin", a["memory_budget"], choice("executor", a["executor"], ("native", "python")))
    loss = run({**head, "rows": rows, "vocab_ids": vocab_ids}, tuple(form))
    return loss if form.summed else loss.reshape(lead)


def arcface_loss(xp, chunked, hidden, weight, target, *, scale, margin, **options):
    """ArcFace (Deng et al. 2019): the cross entropy of scale cos(theta_j), with the angle theta_j between a row and class
    j. ``margin`` is added to the angle of the row's own class.

    Args:
        {arguments}
        margin: radians, from 0 to pi. Where the angle would exceed pi, margin sin(margin) is subtracted from the cosine
            instead, as in the authors' code.

    Returns the loss, float32{exact}, with gradients by hidden and weight, through their norms.

    The cost is one GEMM forward and two backward. Gradients of a mean or sum are computed with the loss. Memory: the
    program's, within ``memory_budget``, as of ``jsd_loss``. Planning takes about a second for each new number of rows.

    Raises:
        ValueError, TypeError: the message names the argument, the expected value and the given one. ValueError for a
            budget that cannot be met.
    """
    angle = number("margin", margin, 0.0, math.pi)
    return _margin_loss(xp, chunked, hidden, weight, target, scale, angle, 0.0, options)


def cosface_loss(xp, chunked, hidden, weight, target, *, scale, margin, **options):
    """CosFace (Wang et al. 2018): the cross entropy of scale cos(theta_j), with ``margin`` subtracted from the cosine of
    the row's own class. margin: at least 0. Other arguments, result, cost, memory and errors: as in ``arcface_loss``.
    """
    drop = number("margin", margin, 0.0)
    return _margin_loss(xp, chunked, hidden, weight, target, scale, 0.0, drop, options)
