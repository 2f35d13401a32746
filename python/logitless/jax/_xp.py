"""JAX under the names that ``logitless._losses`` uses: array operations, checks of arrays, calls of the head."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient, top_k
from jax.nn import log_sigmoid, log_softmax, logsumexp, sigmoid
from jax.numpy import (
    broadcast_to, clip, concatenate, exp, expm1, finfo, float32, float64, full_like, inf, isfinite, isneginf, log, log1p,
    maximum, minimum, nan, sort, stack, take, tanh, where, zeros_like,
)
from jax.typing import ArrayLike

from .._losses import invariance, options
from .._losses.contrastive import Spread
from .._losses.head import Tokens
from .._losses.options import Function, Head
from .._options import WEIGHTS, weights_of
from . import _arguments, _sampled, _sampled_over_ranks, vocab_parallel
from ._axes import axes_of, varying
from ._noise import gumbel as gumbel, gumbel_of_ids as gumbel_of_ids
from ._backend import backend, gpu_capability
from ._chunks import Operand
from ._entries import dots as dots, largest as largest, rows as rows, summed as summed
from .head import linear_logprobs
from .loss import linear_cross_entropy, prepare, token_losses
from .sharding import Axes, Sharding, mesh_of, of_types, placed, replicated, rows_axes

NAMES = options.Framework("jax", "JAX", "targets", "array", "an array", "float32, bfloat16 or float16", "")
boolean, class_dtype = jnp.bool_, jnp.int32

# --- Operations.


def at_least(x: jax.Array, bound: float) -> jax.Array:
    return jnp.maximum(x, bound)


def at_most(x: jax.Array, bound: float) -> jax.Array:
    return jnp.minimum(x, bound)


def relu(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0.0)


def astype(x: jax.Array, dtype: Any) -> jax.Array:
    return x.astype(dtype)


def as_like(value: float | jax.Array, like: jax.Array) -> jax.Array:
    """Returns a scalar in the dtype of ``like``."""
    return jnp.asarray(value, like.dtype)


def arange(count: int, like: jax.Array) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32)


def all_true(shape: tuple[int, ...], like: jax.Array) -> jax.Array:
    return jnp.ones(math.prod(shape), jnp.bool_)


def deviation(x: jax.Array) -> jax.Array:
    """Returns the standard deviation of each row, of n - 1."""
    return x.std(1, ddof=1)


def halves(x: jax.Array) -> tuple[jax.Array, ...]:
    return x[: len(x) // 2], x[len(x) // 2 :]


def without_gradients(function: Callable[..., Any], *arrays: Any) -> Any:
    return function(*jax.lax.stop_gradient(arrays))


def product(hidden: jax.Array, weight: jax.Array | Operand) -> jax.Array:
    """Returns hidden weight^T [N, V] in float32."""
    return weight.product(hidden) if isinstance(weight, Operand) else _product(hidden, weight)


@jax.custom_vjp
def _product(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """The matrix products of its backward round the gradients. JAX's own rule would store a float32 copy of them."""
    return jnp.matmul(hidden, weight.T, preferred_element_type=jnp.float32)


def _product_backward(saved, cotangent):
    hidden, weight = saved
    cotangent = cotangent.astype(hidden.dtype)
    return jnp.matmul(cotangent, weight), jnp.matmul(cotangent.T, hidden)


_product.defvjp(lambda hidden, weight: (_product(hidden, weight), (hidden, weight)), _product_backward)


def cross_entropy(logits: jax.Array, vocab_ids: jax.Array) -> jax.Array:
    return logsumexp(logits, -1) - jnp.take_along_axis(logits, vocab_ids[:, None], -1)[:, 0]


def columns(x: jax.Array) -> jax.Array:
    """Returns numbers of tokens [N] as [N, 1], and a scalar unchanged."""
    return x[:, None] if x.ndim else x


def as_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of float32 as int32."""
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def of_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.float32)


def mass_below(z: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Returns a function of int32 [N, n]: the sums of exp(z) of the entries whose |z| has smaller bits. z: [N, V], at most
    0."""
    distances, masses = as_bits(jnp.abs(z)), jnp.exp(z)
    return lambda bits: jax.lax.map(lambda one: jnp.where(distances < one[:, None], masses, 0.0).sum(-1), bits.T).T


def key(seed: Any, like: jax.Array | None = None, name: str = "seed") -> jax.Array:
    """Returns the key of the noise: [2] int32."""
    if seed is None:
        raise TypeError(f"{name}: expected a key of jax.random, got None")
    typed = isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    parts = jnp.asarray(jax.random.key_data(seed) if typed else seed)
    if parts.shape != (2,) or parts.dtype != jnp.uint32:
        raise ValueError(f"{name}: expected a key of two uint32, got {parts.dtype.name}{list(parts.shape)}")
    return jax.lax.bitcast_convert_type(parts, jnp.int32)  # programs have no unsigned numbers


def noise_key(key: jax.Array, like: jax.Array) -> jax.Array:
    """Returns the key of ``key``."""
    return key


def sampled(hidden: Any, weight: Any, given: Mapping[str, Any], parts: Any, filters: Any, memory_budget: Any) -> Any:
    """Returns tokens and log-probabilities [N] by the library's sampler, or None where programs and the head serve."""
    if not _sampled.serves(hidden, weight, given):
        return None
    return _sampled.sampled(given, parts, filters, memory_budget)


def best(hidden: Any, weight: Any, given: Mapping[str, Any], targets: Any, k: int, *form: Any) -> Any:
    """Returns the target's log-probability, the k largest and their ids, or None as ``sampled`` does. form: softcap,
    scale and memory budget."""
    if not _sampled.serves(hidden, weight, given):
        return None
    return _sampled.best(given, targets, k, *form)


def tokens_over_ranks(hidden: Any, weight: Any, bias: Any, key: Any, check: Any, head: Head, sharding: Any) -> Any:
    """Returns token ids [...] of arrays that axes of a mesh shard, or None of others."""
    return _sampled_over_ranks.tokens(hidden, weight, bias, key, check, head, sharding)


def best_over_ranks(hidden: Any, weight: Any, bias: Any, k: Any, check: Any, head: Head, sharding: Any) -> Any:
    """Returns the ids of the best entries [..., k], or None, as ``tokens_over_ranks`` does."""
    return _sampled_over_ranks.best(hidden, weight, bias, k, check, head, sharding)


def argmax(x: jax.Array) -> jax.Array:
    return x.argmax(-1)


def descending(x: jax.Array) -> jax.Array:
    """Returns the indices that sort rows, largest first; equal ones stay in order."""
    return jnp.argsort(-x, -1, stable=True)


def along(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, index, -1)


def softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x, -1)


def cumsum(x: jax.Array) -> jax.Array:
    return x.cumsum(-1)


def least(x: jax.Array) -> jax.Array:
    return x.min(-1, keepdims=True)


def most(x: jax.Array) -> jax.Array:
    return x.max(-1, keepdims=True)


def gathered(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(x, index, axis=0)


def take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns x[index], without a gradient."""
    return jnp.take(stop_gradient(x), index, axis=0)


def as_integers(values: list[int], like: jax.Array) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def after(offsets: jax.Array, values: jax.Array) -> jax.Array:
    """Returns how many offsets are at most each value."""
    return jnp.searchsorted(offsets, values, side="right")


# --- Checks.


def takes(
    defaults: Mapping[str, Any], shared: Callable[..., Any] | None, texts: Mapping[str, str] = {}
) -> Callable[[Function], Function]:
    return options.takes(defaults, shared, NAMES, texts)


def is_floating(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


_OF_HEADS = "hidden", "weight", "bias", "query", "key", "negatives"  # arguments that a head takes as they are sharded


def array(name: str, value: Any) -> jax.Array:
    """Returns an array. Numbers of tokens that are explicitly sharded become those of all devices."""
    if value is None:
        raise TypeError(f"{name}: expected an array, got NoneType")
    found = _arguments.anywhere(name, value)
    return found if name.removeprefix("ref_").removeprefix("teacher_") in _OF_HEADS else replicated(found)


def states(name: str, value: ArrayLike) -> jax.Array:
    return _arguments.checked_floats(name, array(name, value))


def shaped(name: str, value: Any, *shapes: tuple[int, ...]) -> jax.Array:
    """Returns a checked array of one of the shapes, if there are any."""
    found = array(name, value)
    if found.shape not in shapes and shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name}: expected {wanted}, got {list(found.shape)}")
    return found


def fixed(name: str, value: Any, dtype: Any, *shapes: tuple[int, ...]) -> jax.Array:
    """Returns a checked array of floats without a gradient."""
    found = shaped(name, value, *shapes)
    if not is_floating(found):
        raise TypeError(f"{name}: expected floats, got {found.dtype.name}")
    return stop_gradient(found).astype(dtype)


def indices(name: str, value: Any, *shapes: tuple[int, ...]) -> jax.Array:
    return shaped(name, _arguments.checked_indices(name, array(name, value)), *shapes)


def may_read(x: jax.Array) -> bool:
    """Returns whether checks read the values of x: on a CPU, unless they are traced."""
    return jax.default_backend() == "cpu" and not isinstance(x, jax.core.Tracer)


def refuse_ids(name: str, ids: jax.Array, bad: jax.Array, vocab: int, ignore_index: int | None = None) -> None:
    """Does nothing: the results of a bad token id are NaN."""


def computation(hidden: Any, weight: Any, bias: Any, head: Head) -> invariance.Computation:
    """Returns how ``log_probs`` of these arguments computes them."""
    from . import tempered  # imported here, since that module imports this one

    x, w, sharding = array("hidden", hidden), array("weight", weight), of_types(hidden, weight)
    if x.ndim < 1 or w.ndim != 2 or w.shape[1] != x.shape[-1]:
        raise ValueError(f"weight: expected [V, D] for hidden {list(x.shape)}, got {list(w.shape)}")
    chosen, dtype = backend(x.dtype), jnp.promote_types(x.dtype, w.dtype)
    if dtype == jnp.float64:
        return invariance.Computation("the library has no kernels for float64")
    if chosen.name == "portable":
        return invariance.Computation(chosen.reason)
    a = _arguments.Arguments(x, w, None, bias, sharding=sharding, **head._asdict())
    if head.temperature is not None and tempered.divided_dtype(a, x, w) is None:
        return invariance.Computation(invariance.DIVIDED_LOGITS)
    sharded = sharding is not None and bool(sharding._vocab)
    reason = "whose shards JAX's own operations put together" if sharded else ""
    if jax.default_backend() == "cpu":
        return invariance.Computation(sharded=reason)
    kernel = invariance.gpu_kernel(w.shape[1], w.shape[0], dtype.name, round(10 * gpu_capability()))
    return invariance.Computation("", kernel, reason)


# --- The head.


def tokens(
    hidden: ArrayLike, weight: ArrayLike, targets: jax.Array, bias: ArrayLike | None, head: Head,
    entropy: bool | None = None,
) -> Tokens:
    logps, found, _ = linear_logprobs(hidden, weight, targets, bias, **head._asdict())
    return Tokens(replicated(logps), replicated(found), targets != head.ignore_index)


def has_kernels(hidden: Any) -> bool:
    """Returns whether the library's kernels compute the head."""
    return backend(array("hidden", hidden).dtype).name == "native"


def log_probs(
    hidden: Any, weight: Any, targets: Any, bias: Any, head: Head, save: bool = False, sharding: Any = None
) -> jax.Array:
    if isinstance(sharding, _sampled_over_ranks.Axis):
        given = _arguments.Arguments(hidden, weight, targets, bias, **head._asdict())
        return vocab_parallel.log_probs(given, sharding.axes)[0]
    found = linear_logprobs(hidden, weight, targets, bias, **head._asdict(), sharding=sharding)[0]
    return replicated(found) if save else found  # a loss joins them with other numbers of tokens


def largest_entries(hidden: jax.Array, weight: jax.Array, bias: jax.Array | None, head: Head) -> jax.Array:
    """Returns the token ids of the largest logits, the first of several. hidden: [N, D]."""
    targets = jnp.zeros(hidden.shape[0], jnp.int32)
    return linear_cross_entropy(hidden, weight, targets, bias, reduction="none", return_argmax=True, **head._asdict())[1]


def log_probs_and_lse(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, bias: jax.Array | None, head: Head
) -> tuple[jax.Array, jax.Array]:
    log_prob, _, lse = linear_logprobs(hidden, weight, targets, bias, **head._asdict())
    return log_prob, lse


def spread(sharding: Sharding | None, query: jax.Array, key: jax.Array, negatives: jax.Array | None) -> Spread:
    """Returns how the devices of a mesh share queries and keys."""
    if sharding is None:
        return _spread_of_types(query, key, negatives)
    axes, ranks = _rows_axes(sharding)
    given = (("query", query), ("key", key), ("negatives", negatives))
    for name, rows in given:
        if rows is not None and rows.shape[0] % ranks:
            raise ValueError(f"{name}: expected a multiple of {ranks} rows, which are sharded over {axes}, got {list(rows.shape)}")
    both = dataclasses.replace(sharding, vocab=axes)
    return Spread(both, both, 0, None if negatives is None else _counts(key, negatives, ranks))


def _counts(key: jax.Array, negatives: jax.Array, ranks: int) -> list[tuple[int, int]]:
    return [(key.shape[0] // ranks, negatives.shape[0] // ranks)] * ranks


def _spread_of_types(query: jax.Array, key: jax.Array, negatives: jax.Array | None) -> Spread:
    """Returns how explicitly sharded queries and keys are shared: the heads take their axes from the arrays."""
    for name, x in (("query", query), ("key", key), ("negatives", negatives)):
        spec = () if x is None else _arguments.explicit_spec(x)
        if len(spec) > 1 and spec[1] is not None:
            raise NotImplementedError(f"{name}: expected explicit axes of the rows alone, got {spec}")
    if negatives is None:
        return Spread(None, None, 0, None)
    mesh, axes, other = mesh_of(key), rows_axes(key), rows_axes(negatives)
    if axes != other:
        raise ValueError(f"negatives: expected rows sharded over {axes}, the axes of key, got {other}")
    return Spread(None, None, 0, _counts(key, negatives, math.prod(mesh.shape[axis] for axis in axes)) if axes else None)


def _rows_axes(sharding: Sharding) -> tuple[Axes, int]:
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding: expected logitless.jax.Sharding or None, got {type(sharding).__name__}")
    axes = sharding._all_tokens
    if not axes or len(sharding._tokens) > 1 or sharding._vocab not in ((), axes):
        raise ValueError(f"sharding: expected tokens=axes of the rows alone, got tokens={sharding.tokens!r}, vocab={sharding.vocab!r}")
    return axes, sharding._size(axes)


def joined(rows: list[jax.Array], sharding: Sharding | None) -> jax.Array:
    """Returns keys and negatives as one vocabulary, in which each device's negatives follow its keys."""
    axes = rows_axes(rows[0]) if sharding is None else _rows_axes(sharding)[0]
    if not axes:
        return jnp.concatenate(rows)
    mesh, spec = mesh_of(rows[0]) if sharding is None else sharding.mesh, jax.sharding.PartitionSpec(axes)
    join = jax.shard_map(lambda *own: jnp.concatenate(own), mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    return join(*(placed(x, mesh, spec) for x in rows))


def placed_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Returns x with the explicit axes of ``like``."""
    return jax.sharding.reshard(x, jax.typeof(like).sharding) if _arguments.explicit_spec(x) else x


def leaves(inputs: Any) -> list[jax.Array]:
    return [x if hasattr(x, "shape") else jnp.asarray(x) for x in jax.tree.leaves(inputs)]


def in_micro_batches(encode: Callable[..., Any], inputs: Any, count: int, size: int) -> Any:
    parts, kept = count // size, jax.checkpoint(lambda part: encode(*part))
    found = []
    if parts:
        mixed = jax.tree.map(lambda x: x[: parts * size].reshape(size, parts, *x.shape[1:]).swapaxes(0, 1), inputs)
        made = jax.lax.map(kept, mixed)
        found.append(jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(parts * size, *x.shape[2:]), made))
    if parts * size < count or not parts:
        found.append(kept(jax.tree.map(lambda x: x[parts * size :], inputs)))
    return jax.tree.map(lambda *rows: jnp.concatenate(rows, 0), *found)


def weighted_loss(
    hidden: jax.Array, weight: jax.Array, targets: jax.Array, bias: jax.Array | None, head: Head, argmax: bool,
    **more: Any,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the sum of the tokens' losses; and without gradients the log-sum-exp of each token and, if wanted, its
    largest entry. more: weights and terms of the loss."""
    given = prepare("multi_token_loss", _arguments.Arguments(
        hidden, weight, targets, bias, reduction="sum", ignore_index=head.ignore_index, softcap=head.softcap,
        logit_scale=head.logit_scale, weights=weights_of(more), memory_budget=head.memory_budget,
        expected_ignored=head.expected_ignored,
        terms={name: value for name, value in more.items() if name not in WEIGHTS},
    ))
    axes = axes_of(*[a for a in (*given.inputs.values(), *given.fixed.values()) if a is not None])
    more = ("lse", "argmax") if argmax else ("lse",)
    found = token_losses(given.options, more, varying(given.inputs, axes), varying(given.fixed, axes))
    lse, best = (stop_gradient(found[name]).reshape(given.lead) if name in more else None for name in ("lse", "argmax"))
    return found["loss"], lse, best


def operand(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns hidden in the dtype in which a head multiplies it."""
    return hidden.astype(weight.dtype)


def local(*head: Any) -> tuple[Any, ...]:
    return head


def checked_head(
    name: str, hidden: Any, weight: Any, bias: Any, blocks: bool = False, wide: bool = False
) -> dict[str, jax.Array]:
    """Returns the checked head of a divergence: [N, D] and [V, D] of one dtype, and a bias if given. name: "" or
    "teacher_". blocks: a 16-bit weight beside float32 hidden states is taken, for programs as it is. wide: float64
    serves, too."""
    for part, value in (("hidden", hidden), ("weight", weight)):
        array(name + part, value)
    try:
        hidden, weight, bias = _arguments.head(hidden, weight, bias, wide, blocks=blocks)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(name + str(error)) from None
    if weight.dtype != hidden.dtype and backend(hidden.dtype).name == "portable":
        weight = weight.astype(hidden.dtype)
    found = {name + "hidden": hidden.reshape(-1, hidden.shape[-1]), name + "weight": weight}
    return found if bias is None else {**found, name + "bias": bias}
