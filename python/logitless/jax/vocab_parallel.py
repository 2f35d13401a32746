"""Losses of a head whose vocabulary is sharded over a mesh axis, for use inside jax.shard_map.

Each device runs the library's head on its vocabulary shard. The devices exchange a few numbers per token: the target's
logit, and the largest log-sum-exp and the sum of exponentials relative to that logit. A common offset of the logits thus
cancels before anything is rounded. A shard's softmax is scaled by exp(lse_shard - lse), which makes it the softmax over
the full vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import _token_loss
from .._library import parse_bytes
from . import _arguments, _ffi
from ._arguments import Arguments
from .._options import DEFAULT, HeadOptions, LossOptions, all_terms, check_terms, either_name, share, takes_terms
from .head import head
from .loss import accuracy_of, check_reduction, divisor

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._c_api import LossTermArguments

AxisName = str | tuple[str, ...]

_IGNORED = -(2**31)  # a shard's ignore_index, outside of any shard's range

_MASKED = -1e6  # bias of an empty shard: far below any logit, and small enough for exact sums in log2


class _Shard(NamedTuple):
    """The inputs of every loss on this shard; rows of [...] are flattened to N."""

    lead: tuple[int, ...]
    axis: AxisName
    vocab: int  # the global size
    inputs: dict[str, jax.Array | None]  # hidden [N, D], weight [V / shards, D], bias
    shape: tuple[int, ...]  # of the targets
    begin: jax.Array  # the first token id of this shard
    targets: jax.Array  # [N, K], as given
    valid: jax.Array  # [N, K]: not ignored
    active: jax.Array  # [N]: some target is not ignored
    owned: jax.Array  # [N, K]: the target is in this shard
    local: jax.Array  # [N, K]: targets for this shard's head
    options: HeadOptions


def _shard(a: Arguments, axis_name: AxisName, per_token: tuple[int, ...] = ()) -> _Shard:
    if share("expected_ignored", a.expected_ignored):
        raise ValueError(f"expected_ignored: expected 0 with a sharded vocabulary, got {a.expected_ignored}")
    x, w, b = _arguments.head(a.hidden, a.weight, a.bias)
    lead = x.shape[:-1]
    y = _arguments.targets(a.targets, lead + per_token)
    shape, y = y.shape, y.reshape(-1, *(per_token or (1,)))
    if b is not None:  # a fully masked shard still has a softmax, with no share of the total
        b = jnp.where(jnp.isneginf(b).all(), _MASKED, b)
    options = HeadOptions(
        precision=_arguments.precision(a.precision, x.dtype),
        ignore_index=_IGNORED,
        softcap=_arguments.softcap(a.softcap),
        logit_scale=_arguments.number("logit_scale", a.logit_scale),
        memory_budget=parse_bytes(a.memory_budget),
    )
    index = jax.lax.axis_index(axis_name)
    names = {axis_name} if isinstance(axis_name, str) else set(axis_name)
    # Without check_vma, types do not name the axes.
    if _ffi.axes_of(index) and not names <= _ffi.axes_of(w):
        raise ValueError(f"weight: expected its rows sharded over axis {axis_name!r}, got the same rows on each shard")
    local_vocab = w.shape[0]
    vocab = local_vocab * jax.lax.psum(1, axis_name)
    begin = index.astype(y.dtype) * local_vocab
    valid = y != _arguments.integer("ignore_index", a.ignore_index)
    owned = valid & (y >= begin) & (y < begin + local_vocab)
    # A target of another shard becomes local id 0, with no gradient. A target out of range stays out of range, so that
    # the head rejects it.
    local = jnp.where(owned, y - begin, 0)
    local = jnp.where(valid & ((y < 0) | (y >= vocab)), jnp.where(y < 0, -1, local_vocab), local)
    local = jnp.where(valid, local, _IGNORED)
    inputs = {"hidden": x.reshape(-1, x.shape[-1]), "weight": w, "bias": b}
    return _Shard(lead, axis_name, vocab, inputs, shape, begin, y, valid, valid.any(1), owned, local, options)


def _local_head(shard: _Shard, outputs: tuple[str, ...], vocab_weight: jax.Array | None = None) -> dict[str, jax.Array]:
    one = shard.local.shape[1] == 1
    fixed = {"targets": shard.local[:, 0] if one else shard.local} | ({} if vocab_weight is None else {"vocab_weight": vocab_weight})
    axes = _ffi.axes_of(*[a for a in (*shard.inputs.values(), *fixed.values()) if a is not None])
    found = head(shard.options, outputs, _ffi.varying(shard.inputs, axes), _ffi.varying(fixed, axes))
    values = dict(zip(outputs, found))
    return values | {name: values[name].reshape(shard.local.shape) for name in ("target_logit", "log_prob")}


class _Merged(NamedTuple):
    """Log-sum-exps of tokens [N], relative to a reference without gradient; ignored rows hold finite numbers."""

    reference: jax.Array  # the logit of the first target that is not ignored; 0 where that is masked
    local: jax.Array  # this shard's log-sum-exp - reference
    whole: jax.Array  # log-sum-exp over all shards - reference
    target_logit: jax.Array  # [N, K]
    infinite: jax.Array  # a logit is +inf: lse is, too, and the rest is NaN as a softmax is

    @property
    def lse(self) -> jax.Array:
        return jnp.where(self.infinite, jnp.inf, self.reference + self.whole)

    @property
    def nll(self) -> jax.Array:
        """The negative log-probabilities of the targets [N, K]."""
        return self.whole[:, None] + (self.reference[:, None] - self.target_logit)


_MERGED = ("target_logit", "log_prob", "lse")  # outputs of a shard's head that _merged() reads


def _merged(shard: _Shard, found: dict[str, jax.Array]) -> _Merged:
    target_logit = _of_target(shard, found["target_logit"])
    column = shard.valid.argmax(1)[:, None]
    first = lambda values: jnp.take_along_axis(values, column, 1)[:, 0]  # noqa: E731
    fixed = jax.lax.stop_gradient(first(target_logit))
    reference = jnp.where(jnp.isfinite(fixed), fixed, 0.0)
    rounded = jnp.where(shard.active, found["lse"], 0.0) - reference
    # The head rounds log_prob = logit - lse once; lse alone is rounded at the size of the offset.
    exact = (first(found["target_logit"]) - reference) - first(found["log_prob"])
    rest = jax.lax.stop_gradient(exact - rounded)
    local = rounded + jnp.where(shard.active & jnp.isfinite(rest), rest, 0.0)
    top = jax.lax.pmax(jax.lax.stop_gradient(local), shard.axis)
    whole = top + jnp.log(jax.lax.psum(jnp.exp(local - top), shard.axis))
    return _Merged(reference, local, whole, target_logit, top == jnp.inf)


def _of_target(shard: _Shard, value: jax.Array) -> jax.Array:
    """Returns, on every shard, a value that only the target's shard has."""
    return jax.lax.psum(jnp.where(shard.owned, value, 0.0), shard.axis)


def _argmax(shard: _Shard, local: jax.Array) -> jax.Array:
    """Returns the token id of the largest logit over all shards [N], the lowest of equal ones, from each shard's own; -1
    for ignored tokens. Extra memory: the rows of weight at the shard's own, as large as hidden."""
    x, w, b = (None if a is None else jax.lax.stop_gradient(a) for a in shard.inputs.values())
    ids = jnp.maximum(local, 0)
    products = x.astype(jnp.float32) * jnp.take(w, ids, 0).astype(jnp.float32)
    z = products.sum(1) if b is None else products.sum(1) + jnp.take(b, ids)
    z = z * shard.options.logit_scale  # a softcap keeps the order
    largest = jax.lax.pmax(z, shard.axis)
    found = jax.lax.pmin(jnp.where(z == largest, shard.begin.astype(jnp.int32) + ids, shard.vocab - 1), shard.axis)
    return jnp.where(shard.active, found, -1)


@either_name
def vocab_parallel_logprobs(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    axis_name: AxisName,
    ignore_index: int = DEFAULT.ignore_index,
    softcap: float | None = None,
    logit_scale: float = DEFAULT.logit_scale,
    precision: str | None = None,
    memory_budget: int | str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """linear_logprobs with the vocabulary sharded over ``axis_name``; call it inside jax.shard_map.

    Args:
        hidden: [..., D], the same on each shard of the axis.
        weight: [V / shards, D]: the shard's rows of the full weight, in order.
        targets: [...] or [..., K], global token ids, the same on each shard.
        bias: [V / shards].
        axis_name: the mesh axis or axes.
        Other arguments are those of linear_logprobs; memory_budget is for each shard.

    Returns:
        (logprob, entropy, lse) over the full vocabulary, [...] float32 each, logprob shaped as targets, the same on
        each shard.

    The gradient by hidden is summed over the shards, by JAX's rule for a replicated input. Those by weight and bias
    stay on their shard. Communication: four numbers per token forward, and the gradient by hidden.

    Raises: as linear_logprobs; the message about a target outside [0, V) uses the shard's local ids. ValueError if
    weight is not sharded over the axis, where shard_map checks it (check_vma).
    """
    return log_probs(_arguments.named(locals()), axis_name)


def log_probs(a: Arguments, axis_name: AxisName) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes ``vocab_parallel_logprobs``."""
    shard = _shard(a, axis_name, jnp.shape(a.targets)[-1:] if jnp.ndim(a.targets) == jnp.ndim(a.hidden) > 0 else ())
    found = _local_head(shard, (*_MERGED, "entropy"))
    merged = _merged(shard, found)
    # A shard's mean logit is lse_shard - entropy_shard, and its share of the probability is exp(lse_shard - lse).
    less = merged.whole - merged.local
    entropy = jax.lax.psum(jnp.exp(-less) * (less + found["entropy"]), axis_name)
    logprob = jnp.where(shard.valid, -merged.nll, 0.0).reshape(shard.shape)
    return logprob, *(jnp.where(shard.active, value, 0.0).reshape(shard.lead) for value in (entropy, merged.lse))


@either_name
@takes_terms
def vocab_parallel_linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    targets: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    axis_name: AxisName,
    reduction: str = DEFAULT.reduction,
    ignore_index: int = DEFAULT.ignore_index,
    class_weight: ArrayLike | None = None,
    softcap: float | None = None,
    logit_scale: float = DEFAULT.logit_scale,
    normalizer: float | ArrayLike | None = None,
    token_weight: ArrayLike | None = None,
    target_weight: ArrayLike | None = None,
    accuracy: bool = False,
    return_lse: bool = False,
    return_argmax: bool = False,
    return_target_logits: bool = False,
    precision: str | None = None,
    memory_budget: int | str | None = None,
    **terms: Unpack[LossTermArguments],
) -> jax.Array | tuple[jax.Array, ...]:
    """linear_cross_entropy with the vocabulary sharded over ``axis_name``; call it inside jax.shard_map.

    Args:
        hidden: [..., D], the same on each shard of the axis.
        weight: [V / shards, D]: the shard's rows of the full weight, in order.
        targets: [...], or [..., K] with target_weight: global token ids, the same on each shard.
        bias, class_weight: [V / shards].
        axis_name: the mesh axis or axes.
        return_lse, return_target_logits: also return the log-sum-exp and the targets' logits over the full vocabulary,
            with gradients; 0 for ignored ones. They cost nothing, since the loss is computed from them.
        accuracy, return_argmax: take as much extra memory as hidden.
        Other arguments are those of linear_cross_entropy; memory_budget is for each shard.

    Returns:
        The loss, float32, or a tuple as of linear_cross_entropy, the same on each shard. It covers
        the given tokens. Over a data axis the caller takes the mean, or passes the token count of all devices as
        normalizer and sums.

    The gradient by hidden is summed over the shards, by JAX's rule for a replicated input. Those by weight and bias
    stay on their shard and need no communication. The backward recomputes the forward: four GEMMs in all, and only the
    inputs are saved. Communication: a few numbers per token forward, and the gradient by hidden.

    Raises: as linear_cross_entropy; the message about a target outside [0, V) uses the shard's local ids. ValueError if
    weight is not sharded over the axis, where shard_map checks it (check_vma).
    """
    a = _arguments.named(locals())
    check_reduction(reduction)
    static_normalizer, normalizer_array = divisor(normalizer, reduction)
    losses, shares, lse, argmax, target_logit = token_losses(a, axis_name, argmax=accuracy or return_argmax)
    if reduction == "none":
        loss = losses
    elif reduction == "sum":
        loss = losses.sum()
    elif normalizer is not None:
        loss = losses.sum() / (static_normalizer or normalizer_array)
    else:
        count = shares.sum()
        loss = jnp.where(count == 0.0, 0.0, losses.sum() / jnp.where(count == 0.0, 1.0, count))
    results = [loss] + [lse] * bool(return_lse)
    if accuracy:
        results.append(accuracy_of(argmax, jnp.asarray(targets), ignore_index))
    results += [argmax] * bool(return_argmax) + [target_logit] * bool(return_target_logits)
    return results[0] if len(results) == 1 else tuple(results)


def token_losses(
    a: Arguments, axis_name: AxisName, argmax: bool
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array]:
    """Returns (losses, their shares of a mean's divisor, lse, argmax if asked for, target logits)."""
    given = all_terms("vocab_parallel_linear_cross_entropy", a.terms)
    several = a.weights.target_weight is not None
    per_token = jnp.shape(a.weights.target_weight)[-1:] if several else ()
    shard = _shard(a, axis_name, per_token)
    options = LossOptions(**{name: _arguments.number(name, value) for name, value in given.items()})
    check_terms(options)
    smoothing = options.label_smoothing
    weights = _arguments.loss_weights(a.weights, shard.inputs["weight"].shape[0], shard.lead, per_token)
    classes, tokens, each = _token_loss.entry_weights(weights), weights.token_weight, weights.target_weight
    tokens = jnp.ones(shard.active.shape, jnp.float32) if tokens is None else tokens.reshape(-1)
    tokens = jnp.where(shard.active, tokens, 0.0)
    each = jnp.where(shard.valid, 1.0 if each is None else each.reshape(shard.valid.shape), 0.0)

    outputs = _MERGED + (("weighted_logit_sum",) if smoothing else ()) + (("argmax",) if argmax else ())
    found = _local_head(shard, outputs, classes if smoothing else None)
    merged = _merged(shard, found)
    if classes is None:
        class_total = float(shard.vocab)
    else:
        each = each * _of_target(shard, classes[jnp.where(shard.owned, shard.local, 0)])
        class_total = jax.lax.psum(classes.sum(), axis_name)
    rest = None
    if smoothing:
        logit_sum = jax.lax.psum(jnp.where(shard.active, found["weighted_logit_sum"], 0.0), axis_name)
        rest = _token_loss.Smoothing(shard.vocab, class_total, logit_sum)
    mass = each * (smoothing < 1.0)  # avoids 0 * inf
    nll = jnp.where(mass == 0.0, 0.0, mass * jnp.where(mass == 0.0, 0.0, merged.nll)).sum(1)
    losses = _token_loss.formula(jnp, options, merged.lse, nll, None, rest)
    losses = jnp.where(tokens == 0.0, 0.0, tokens * losses)
    shares = _token_loss.mean_weights(jnp, shard.active, jnp.float32(1.0), None if several else each[:, 0], tokens)
    best = _argmax(shard, found["argmax"]).reshape(shard.lead) if argmax else None
    lse = jnp.where(shard.active, merged.lse, 0.0)
    target_logit = jnp.where(shard.valid, merged.target_logit, 0.0).reshape(shard.shape)
    return *(value.reshape(shard.lead) for value in (losses, shares, lse)), best, target_logit
