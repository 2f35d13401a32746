"""Heads on a mesh: the axes that shard the vocabulary and the tokens, and the losses as shard_maps over them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .._options import PER_ENTRY, PER_TOKEN, WEIGHTS, LossWeights, weights_of
from .._token_loss import token_shares
from . import _arguments, vocab_parallel
from ._arguments import Arguments
from .head import log_probs, refuse_gradients
from .loss import accuracy_of, check_reduction, cross_entropy, divisor

Axes = tuple[str, ...]
_ARRAYS = ("hidden", "weight", "targets", "bias")
_PER_TOKEN = (
    "hidden", "targets", *PER_TOKEN, "teacher_hidden", "temperature", "top_p", "min_p", "counter",
)  # fmt: skip
_PER_VOCAB_ENTRY = ("weight", "bias", *PER_ENTRY, "logit_bias", "teacher_weight", "teacher_bias", "teacher_ids")
_REPLICATED = ("key",)


def _axes(entry: Any) -> Axes:
    """Returns the mesh axes of an entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


@dataclass(frozen=True)
class Sharding:
    """How a head is sharded over a mesh: the argument ``sharding`` of ``linear_cross_entropy`` and ``linear_logprobs``.

    Args:
        mesh: a ``jax.sharding.Mesh``; or an abstract one, for functions compiled under ``jax.set_mesh``.
        vocab: the axis or axes that shard the vocabulary: the rows of weight, bias and the classes' weights. None:
            replicated.
        tokens: the axis or axes that shard the first dimension of hidden, targets and other arrays per token, or a
            PartitionSpec of their leading dimensions. None: replicated.

    The vocabulary shards and their gradients never move. If an axis shards both (FSDP), a call exchanges its tokens
    instead.
    """

    mesh: Mesh | AbstractMesh
    vocab: str | Axes | None = None
    tokens: str | Axes | PartitionSpec | None = None

    def __post_init__(self):
        if not isinstance(self.mesh, (Mesh, AbstractMesh)):
            raise TypeError(f"sharding: mesh: expected a jax.sharding.Mesh, got {type(self.mesh).__name__}")
        if not isinstance(self.vocab, (str, tuple, type(None))):
            raise TypeError(f"sharding: vocab: expected an axis or a tuple of them, got {type(self.vocab).__name__}")
        if not isinstance(self.tokens, (str, tuple, PartitionSpec, type(None))):
            raise TypeError(f"sharding: tokens: expected an axis, a tuple of them or a PartitionSpec, got {type(self.tokens).__name__}")
        for name, axes in (("vocab", self._vocab), ("tokens", self._all_tokens)):
            for axis in axes:
                if axis not in self.mesh.axis_names:
                    raise ValueError(f"sharding: {name}: expected axes of {self.mesh.axis_names}, got {axis!r}")

    @property
    def _vocab(self) -> Axes:
        return _axes(self.vocab)

    @property
    def _tokens(self) -> PartitionSpec:
        """The PartitionSpec of the tokens, without replicated dimensions at the end."""
        entries = tuple(self.tokens) if isinstance(self.tokens, PartitionSpec) else (self.tokens,)
        while entries and not _axes(entries[-1]):
            entries = entries[:-1]
        return PartitionSpec(*entries)

    @property
    def _all_tokens(self) -> Axes:
        return tuple(a for e in self._tokens for a in _axes(e))

    def _size(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[a] for a in axes)

    def _check(self, arrays: dict[str, jax.Array | None]) -> None:
        """Checks shapes of the global arrays, which differ from those of a shard."""
        hidden, weight = arrays["hidden"], arrays["weight"]
        if hidden.ndim < 1 or weight.ndim != 2:
            return  # the loss raises for it
        lead, vocab = hidden.shape[:-1], weight.shape[0]
        if len(self._tokens) > len(lead):
            raise ValueError(f"sharding: tokens: expected axes of the leading dimensions of hidden {list(hidden.shape)}, got {self._tokens}")
        teacher_vocab, sizes = vocab, [("weight", weight, 0, self._vocab)]
        if arrays.get("teacher_ids") is not None:  # the teacher's vocabulary is another one
            teacher_vocab = arrays["teacher_weight"].shape[0] if arrays["teacher_weight"].ndim else 0
            sizes.append(("teacher_weight", arrays["teacher_weight"], 0, self._vocab))
        sizes += [("hidden", hidden, d, _axes(e)) for d, e in enumerate(self._tokens)]
        for name, array, dimension, axes in sizes:
            if axes and array.shape[dimension] % self._size(axes):
                raise ValueError(
                    f"{name}: expected a multiple of {self._size(axes)} along dimension {dimension}, which is sharded over "
                    f"{axes}, got {list(array.shape)}"
                )
        for name, array in arrays.items():
            shape = lead if name in _PER_TOKEN else (teacher_vocab if name in ("teacher_weight", "teacher_bias") else vocab,)
            if array is None or name in ("hidden", "weight", *_REPLICATED) or array.shape[: len(shape)] == shape:
                continue
            raise ValueError(f"{name}: expected {list(shape)}, got {list(array.shape)}")

    def _shared(self) -> list[tuple[int, Axes]]:
        """Returns the token dimensions with the axes that shard the vocabulary too."""
        shared = [(d, tuple(a for a in _axes(e) if a in self._vocab)) for d, e in enumerate(self._tokens)]
        return [(d, axes) for d, axes in shared if axes]

    def _gathered(self, array: jax.Array) -> jax.Array:
        """All-gathers the tokens over the axes that shard both vocabulary and tokens."""
        for d, axes in self._shared():
            array = jax.lax.all_gather(array, axes, axis=d, tiled=True)
        return array

    def _own(self, array: jax.Array) -> jax.Array:
        """Returns the shard's own tokens of gathered ones."""
        for d, axes in self._shared():
            count = array.shape[d] // self._size(axes)
            array = jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(axes) * count, count, d)
        return array

    def _map(self, function: Callable, arrays: dict[str, jax.Array | None], totals: int = 0):
        """Maps function over the shards: arrays of a shard -> (arrays summed over all token shards, arrays per token).
        """
        given = {name: array for name, array in arrays.items() if array is not None}
        vocab = PartitionSpec(self._vocab) if self._vocab else PartitionSpec()
        specs = {name: vocab if name in _PER_VOCAB_ENTRY else self._tokens for name in given}
        specs |= {name: PartitionSpec() for name in given if name in _REPLICATED}
        given = {name: placed(a, self.mesh, specs[name]) for name, a in given.items()}

        def shard(given):
            present = {n: self._gathered(a) if n in _PER_TOKEN else a for n, a in given.items()}
            summed, each = function({**dict.fromkeys(arrays), **present})
            axes = self._all_tokens
            if axes and summed:
                summed = tuple(jax.lax.psum(a, axes) for a in summed)
            return summed, tuple(self._own(a) for a in each)

        out = ((PartitionSpec(),) * totals, self._tokens)
        return jax.shard_map(shard, mesh=self.mesh, in_specs=(specs,), out_specs=out)(given)


def mesh_of(array):
    return jax.typeof(array).sharding.mesh


def rows_axes(array) -> Axes:
    """Returns the explicit mesh axes that shard the rows of an array."""
    spec = _arguments.explicit_spec(array)
    return _axes(spec[0]) if spec else ()


def placed(array: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """Returns an array that a shard_map over the mesh takes with a PartitionSpec."""
    return jax.sharding.reshard(array, NamedSharding(mesh, spec)) if AxisType.Explicit in mesh.axis_types else array


def replicated(array: jax.Array) -> jax.Array:
    """Returns an array that is explicitly sharded as one that is on all devices; others unchanged."""
    if not _arguments.explicit_spec(array):
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh_of(array), PartitionSpec()))


def of_types(hidden, weight) -> Sharding | None:
    """Returns the sharding in the types of arrays on a mesh with explicit axes. Returns None without explicit axes, or
    if columns are sharded."""
    explicit = _arguments.explicit_spec
    if not any(isinstance(a, jax.Array) and explicit(a) for a in (hidden, weight)):
        return None
    hidden, weight = (_arguments.anywhere(name, a) for name, a in (("hidden", hidden), ("weight", weight)))
    x, w = jax.typeof(hidden).sharding, jax.typeof(weight).sharding
    columns = (x.spec[-1:], w.spec[1:2])
    if hidden.ndim < 1 or weight.ndim != 2 or any(_axes(e) for spec in columns for e in spec):
        return None
    return Sharding((x if explicit(hidden) else w).mesh, _axes(w.spec[0]) or None, PartitionSpec(*x.spec[:-1]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fixed(name: str, array: jax.Array) -> jax.Array:
    """Returns the array, and raises if a gradient of it is asked for."""
    return array


def _fixed_fwd(name, primal):
    refuse_gradients({name: primal})
    return primal.value, None


_fixed.defvjp(_fixed_fwd, lambda name, _, cotangent: (jnp.zeros_like(cotangent),), symbolic_zeros=True)


def _checked(sharding: Sharding, arrays: dict[str, Any]) -> dict[str, jax.Array | None]:
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding: expected logitless.jax.Sharding or None, got {type(sharding).__name__}")
    found = {name: None if a is None else _arguments.anywhere(name, a) for name, a in arrays.items()}
    sharding._check(found)
    for name in WEIGHTS:
        if found.get(name) is not None and jnp.issubdtype(found[name].dtype, jnp.floating):
            found[name] = _fixed(name, found[name])
    return found


def sharded_logprobs(a: Arguments) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes ``linear_logprobs`` on the mesh."""
    arrays, axes = _checked(a.sharding, {name: getattr(a, name) for name in _ARRAYS}), a.sharding._vocab

    def function(local):
        if axes:
            return (), vocab_parallel.log_probs(a._replace(**local), axes)
        return (), log_probs(a._replace(**local, sharding=None))

    return a.sharding._map(function, arrays)[1]


def sharded_cross_entropy(a: Arguments) -> jax.Array | tuple[jax.Array, ...]:
    """Computes ``linear_cross_entropy`` on the mesh."""
    check_reduction(a.reduction)
    sharding, (fixed, by) = a.sharding, divisor(a.normalizer, a.reduction)
    arrays = _checked(sharding, {**{name: getattr(a, name) for name in _ARRAYS}, **a.weights._asdict()})
    none, wants_argmax = a.reduction == "none", bool(a.accuracy or a.return_argmax)

    def of_shard(local):
        return a._replace(**{name: local[name] for name in _ARRAYS}, weights=weights_of(local))

    def of_shards(local):
        losses, shares, lse, best, target_logits = vocab_parallel.token_losses(of_shard(local), sharding._vocab, wants_argmax)
        own = () if none else (sharding._own(losses).sum(), sharding._own(shares).sum())
        each = (losses,) * none + (lse,) * bool(a.return_lse) + (best,) * wants_argmax
        return own, each + (target_logits,) * bool(a.return_target_logits)

    def of_all_vocab(local):
        # The gradients of a sum are computed in the forward.
        found = cross_entropy(of_shard(local)._replace(
            reduction="none" if none else "sum", normalizer=None, accuracy=False, return_argmax=wants_argmax, sharding=None
        ))
        loss, *more = found if isinstance(found, tuple) else (found,)
        return () if none else (loss, _shares(local["targets"], weights_of(local), a.ignore_index)), (loss,) * none + tuple(more)

    summed, each = sharding._map(of_shards if sharding._vocab else of_all_vocab, arrays, totals=0 if none else 2)
    each = list(each)
    if none:
        loss = each.pop(0)
    else:
        loss, count = summed
        if a.normalizer is not None:
            loss = loss / (fixed or by)
        elif a.reduction == "mean":
            loss = jnp.where(count == 0.0, 0.0, loss / jnp.where(count == 0.0, 1.0, count))
    results = [loss]
    if a.return_lse:
        results.append(each.pop(0))
    if wants_argmax:
        argmax = each.pop(0)
        if a.accuracy:
            results.append(accuracy_of(argmax, arrays["targets"], a.ignore_index))
        results += [argmax] * bool(a.return_argmax)
    results += each
    return results[0] if len(results) == 1 else tuple(results)


def _shares(y: jax.Array, weights: LossWeights, ignore_index: int) -> jax.Array:
    """Returns a shard's contribution to the divisor of a mean."""
    valid = y != ignore_index
    counted = valid if weights.target_weight is None else valid.any(-1)
    weights = LossWeights(*(None if w is None else w.astype(jnp.float32) for w in weights))
    return token_shares(jnp, weights, counted, jnp.where(valid, y, 0), jnp.float32(1.0)).sum()
