"""Samples and best entries of a vocabulary that is sharded over axes of a mesh (``_losses/sampling_over_ranks.py``): the
calls, and the exchanges of their devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._library import parse_bytes
from .._losses import sampling_over_ranks as formulas
from .._losses.chunks import ROWS, Sizes, plan_of
from .._losses.options import Head
from .._losses.sampling import Filters, with_noise
from . import _xp as xp
from ._axes import axes_of
from .sharding import Axes, Sharding, _checked, of_types

_PER_TOKEN = "temperature", "top_p", "min_p", "counter"


class Axis(NamedTuple):
    """The axes of a shard_map that shard the vocabulary, in place of a ``Sharding``: arrays are those of a shard."""

    axes: Axes


def axis_of(axis_name: str | Axes) -> Axis:
    return Axis((axis_name,) if isinstance(axis_name, str) else tuple(axis_name))


class Ranks(NamedTuple):
    """The shards of a vocabulary, as the formulas take them."""

    axes: Axes  # of a shard_map; none: the vocabulary is whole
    begin: Any  # this shard's first vocabulary entry
    width: int  # the entries of each shard

    def own(self, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        return z, self.begin + jnp.arange(z.shape[1], dtype=jnp.int32)

    def largest(self, x: jax.Array) -> jax.Array:
        return jax.lax.pmax(x, self.axes) if self.axes else x

    def summed(self, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, self.axes) if self.axes else x

    def joined(self, x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, self.axes, axis=1, tiled=True) if self.axes else x

    def first_largest(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        at = x.argmax(-1)  # the first of equal ones, whose id is the least
        value = jnp.take_along_axis(x, at[:, None], -1)[:, 0]
        value = jnp.where(jnp.isnan(value), jnp.inf, value)
        found = jnp.where(value == self.largest(value), ids[at], jnp.iinfo(jnp.int32).max)
        return jax.lax.pmin(found, self.axes) if self.axes else found

    def best(self, x: jax.Array, ids: jax.Array, k: int) -> jax.Array:
        values, at = jax.lax.top_k(x, min(k, self.width))  # equal ones in the order of their ids, here and below
        every = self.joined(ids[at])
        found = jnp.take_along_axis(every, jax.lax.top_k(self.joined(values), k)[1], -1)
        return self.largest(found)  # the same on all shards, which their type then says


class _Call(NamedTuple):
    """A call with everything but its arrays, as constants of its program."""

    axes: Axes
    form: Filters | None  # of a sampler; None: the best entries are wanted
    softcap: float
    scale: float
    k: int
    budget: int


# It is jitted since a shard_map that runs eagerly does not accept a custom_vjp itself.
@functools.partial(jax.jit, static_argnums=0)
def _ids(call: _Call, given: dict[str, jax.Array]) -> jax.Array:
    """Returns token ids [N], or those of the best entries [N, k]. given: a shard's arrays, [N, ...] those of each token."""
    (tokens, dim), rows = given["hidden"].shape, given["weight"].shape[0]
    begin = jax.lax.axis_index(call.axes).astype(jnp.int32) * rows if call.axes else 0
    ranks = Ranks(call.axes, begin, rows)

    def of_chunk(part: Mapping[str, jax.Array]) -> jax.Array:
        if call.form is not None:
            return formulas.tokens(xp, ranks, part, call.form)
        return formulas.best_entries(xp, ranks, part, call.softcap, call.scale, call.k)

    if tokens == 0:
        return jnp.zeros((0,) if call.form is not None else (0, call.k), jnp.int32)
    what = "best_over_ranks" if call.form is None else "sample_over_ranks"
    size = plan_of(Sizes(what, tokens, rows, dim, 4, False, 0), call.budget).tokens
    count = -(-tokens // size)
    if count == 1:
        return of_chunk(given)
    each = {name: a for name, a in given.items() if name in ROWS and a.ndim}
    others = {name: a for name, a in given.items() if name not in each}

    def chunks(a: jax.Array) -> jax.Array:
        padded = jnp.pad(a, ((0, count * size - tokens), *((0, 0),) * (a.ndim - 1)))
        return padded.reshape(count, size, *a.shape[1:])

    made = jax.lax.map(lambda part: of_chunk({**others, **part}), {name: chunks(a) for name, a in each.items()})
    return made.reshape(count * size, *made.shape[2:])[:tokens]


def _sharding_of(hidden: Any, weight: Any, sharding: Any) -> Sharding | Axis | None:
    """Returns the checked sharding of a call; None given: that of the arrays' types, if any."""
    if sharding is None:
        return of_types(hidden, weight)
    if not isinstance(sharding, (Sharding, Axis)):
        raise TypeError(f"sharding: expected logitless.jax.Sharding or None, got {type(sharding).__name__}")
    return sharding


def _axis(axis: Axis, weight: Any) -> int:
    """Returns the number of a vocabulary's shards. Raises ValueError if weight is the same on each."""
    index = jax.lax.axis_index(axis.axes)
    if axes_of(index) and not set(axis.axes) <= axes_of(jnp.asarray(weight)):
        raise ValueError(f"weight: expected its rows sharded over axes {axis.axes}, got the same rows on each shard")
    return jax.lax.psum(1, axis.axes)


def _run(
    sharding: Sharding | Axis, hidden: Any, weight: Any, bias: Any, function: Callable[[dict[str, jax.Array]], jax.Array],
    more: Mapping[str, Any],
) -> jax.Array:
    """Returns ``function`` of each shard's checked head and arrays, [...] for each token. more: arrays by name."""

    def local(arrays: Mapping[str, jax.Array | None]) -> jax.Array:
        given = xp.checked_head("", arrays["hidden"], arrays["weight"], arrays["bias"])
        others = {n: a for n, a in arrays.items() if n not in ("hidden", "weight", "bias") and a is not None}
        found = function({**given, **{n: a.reshape(-1) if n in _PER_TOKEN else a for n, a in others.items()}})
        return found.reshape(*arrays["hidden"].shape[:-1], *found.shape[1:])

    if isinstance(sharding, Axis):
        return local(dict(hidden=hidden, weight=weight, bias=bias, **more))
    arrays = _checked(sharding, dict(hidden=hidden, weight=weight, bias=bias, **more))
    return sharding._map(lambda given: ((), (local(given),)), arrays)[1][0]


def _sizes(hidden: Any, weight: Any, sharding: Sharding | Axis) -> tuple[tuple[int, ...], int, int]:
    """Returns the leading sizes of hidden, the size of the vocabulary, and the rows of weight."""
    x, w = xp.array("hidden", hidden), xp.array("weight", weight)
    if w.ndim != 2 or 0 in w.shape or x.ndim < 1:
        raise ValueError(f"weight: expected [V, D] with at least one row and column, got {list(w.shape)}")
    return x.shape[:-1], w.shape[0] * (_axis(sharding, w) if isinstance(sharding, Axis) else 1), w.shape[0]


def _vocab_axes(sharding: Sharding | Axis) -> Axes:
    return sharding.axes if isinstance(sharding, Axis) else sharding._vocab


def tokens(
    hidden: Any, weight: Any, bias: Any, key: jax.Array | None, check: Callable[..., Any], head: Head,
    sharding: Sharding | Axis | None,
) -> jax.Array | None:
    """Returns the sampled token ids [...], or None of arrays that no axes shard. check: returns the other arguments and
    their filters."""
    sharding = _sharding_of(hidden, weight, sharding)
    if sharding is None:
        return None
    lead, vocab, rows = _sizes(hidden, weight, sharding)
    more, form = check({}, lead, vocab, rows)
    numbers = {name: value for name, value in more.items() if xp.is_number(value)}
    more = {n: a.reshape(lead) if n in _PER_TOKEN else a for n, a in more.items() if n not in numbers}
    if not form.greedy:
        more.setdefault("counter", jnp.arange(math.prod(lead), dtype=jnp.int32).reshape(lead))
        more["key"] = key
    call = _Call(_vocab_axes(sharding), form, form.softcap, form.scale, form.top_k, parse_bytes(head.memory_budget))

    def run(given: dict[str, jax.Array]) -> jax.Array:
        drawn = given if form.greedy else with_noise(xp, {**given, **numbers}, given["key"])
        return _ids(call, drawn)

    return _run(sharding, hidden, weight, bias, run, more)


def best(
    hidden: Any, weight: Any, bias: Any, k: int, check: Callable[..., Any], head: Head, sharding: Sharding | Axis | None
) -> jax.Array | None:
    """Returns the ids [..., k] of the best entries, or None of arrays that no axes shard. check: returns softcap and scale,
    and checks the other arguments."""
    sharding = _sharding_of(hidden, weight, sharding)
    if sharding is None:
        return None
    lead, vocab, _ = _sizes(hidden, weight, sharding)
    (softcap, scale), _ = check(lead, vocab)
    call = _Call(_vocab_axes(sharding), None, softcap, scale, int(k), parse_bytes(head.memory_budget))
    return _run(sharding, hidden, weight, bias, functools.partial(_ids, call), {})
