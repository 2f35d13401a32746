"""Heads on a mesh: which axes the words and the tokens lie along, and shard_maps of the losses over them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from . import _arguments
from .head import linear_logprobs
from .loss import check_reduction, divisor, linear_cross_entropy
from .vocab_parallel import vocab_parallel_linear_cross_entropy, vocab_parallel_logprobs

Axes = tuple[str, ...]
_PER_TOKEN = ("hidden", "targets", "token_weight", "target_weight")
_PER_WORD = ("weight", "bias", "class_weight")


def _axes(entry: Any) -> Axes:
    """Mesh axes of an entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


@dataclass(frozen=True)
class Sharding:
    """Where a head lies on a mesh: the argument ``sharding`` of ``linear_cross_entropy`` and ``linear_logprobs``.

    Args:
        mesh: a ``jax.sharding.Mesh``, or an abstract one.
        words: the axis or axes that the rows of weight, bias and class_weight are sharded over; None: every device has
            them all.
        tokens: the axis that the first dimension of hidden, targets and what else there is per token is sharded over, or a
            PartitionSpec of their leading dimensions; None: every device has them all.

    Words stay where they are, with their gradients. Where an axis is both (FSDP), a call sends its tokens instead.
    """

    mesh: Mesh | AbstractMesh
    words: str | Axes | None = None
    tokens: str | PartitionSpec | None = None

    def __post_init__(self):
        if not isinstance(self.mesh, (Mesh, AbstractMesh)):
            raise TypeError(f"sharding: mesh: expected a jax.sharding.Mesh, got {type(self.mesh).__name__}")
        if not isinstance(self.tokens, (str, PartitionSpec, type(None))):
            raise TypeError(f"sharding: tokens: expected an axis or a PartitionSpec, got {type(self.tokens).__name__}")
        for name, axes in (("words", self._words), ("tokens", tuple(a for e in self._tokens for a in _axes(e)))):
            for axis in axes:
                if axis not in self.mesh.axis_names:
                    raise ValueError(f"sharding: {name}: expected axes of {self.mesh.axis_names}, got {axis!r}")

    @property
    def _words(self) -> Axes:
        return _axes(self.words)

    @property
    def _tokens(self) -> PartitionSpec:
        return self.tokens if isinstance(self.tokens, PartitionSpec) else PartitionSpec(self.tokens)

    def _size(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[a] for a in axes)

    def _check(self, hidden: jax.Array, weight: jax.Array) -> None:
        if len(self._tokens) >= hidden.ndim and any(_axes(e) for e in self._tokens[hidden.ndim - 1 :]):
            raise ValueError(f"sharding: tokens: expected axes of the leading dimensions of hidden {hidden.shape}, got {self._tokens}")
        sizes = [("weight", weight, 0, self._words)]
        sizes += [("hidden", hidden, d, _axes(e)) for d, e in enumerate(self._tokens)]
        for name, array, dimension, axes in sizes:
            if axes and array.shape[dimension] % self._size(axes):
                raise ValueError(
                    f"{name}: expected a multiple of {self._size(axes)} along dimension {dimension}, which is sharded over "
                    f"{axes}, got {list(array.shape)}"
                )

    def _shared(self) -> list[tuple[int, Axes]]:
        """Dimensions of tokens, with their axes that words have too."""
        shared = [(d, tuple(a for a in _axes(e) if a in self._words)) for d, e in enumerate(self._tokens)]
        return [(d, axes) for d, axes in shared if axes]

    def _gathered(self, array: jax.Array) -> jax.Array:
        """Of a shard's tokens those of all shards with other words."""
        for d, axes in self._shared():
            array = jax.lax.all_gather(array, axes, axis=d, tiled=True)
        return array

    def _own(self, array: jax.Array) -> jax.Array:
        """The shard's own tokens again."""
        for d, axes in self._shared():
            count = array.shape[d] // self._size(axes)
            array = jax.lax.dynamic_slice_in_dim(array, jax.lax.axis_index(axes) * count, count, d)
        return array

    def _map(self, function: Callable, arrays: dict[str, jax.Array | None], results: int, total: bool = False):
        """function(arrays of a shard) -> a tuple of `results` arrays per token; total: the first is one of all tokens."""
        given = {name: array for name, array in arrays.items() if array is not None}
        words = PartitionSpec(self._words or None)
        specs = {name: words if name in _PER_WORD else self._tokens for name in given}
        if any(_explicit(a) for a in given.values()):
            given = {name: jax.sharding.reshard(a, specs[name]) for name, a in given.items()}

        def shard(given):
            present = {n: self._gathered(a) if n in _PER_TOKEN else a for n, a in given.items()}
            found = function({**dict.fromkeys(arrays), **present})
            if not total:
                return tuple(self._own(a) for a in found)
            axes = tuple(a for e in self._tokens for a in _axes(e))
            return (jax.lax.psum(found[0], axes) if axes else found[0], *found[1:])

        out = (PartitionSpec() if total else self._tokens, *(self._tokens,) * (results - 1))
        return jax.shard_map(shard, mesh=self.mesh, in_specs=(specs,), out_specs=out)(given)


def _explicit(array) -> bool:
    spec = getattr(getattr(jax.typeof(array), "sharding", None), "spec", ())
    return any(e is not None and e is not PartitionSpec.UNCONSTRAINED for e in spec)


def of_types(hidden, weight) -> Sharding | None:
    """What the types of arrays on a mesh with explicit axes say; None where they say nothing, or that columns are
    sharded."""
    if not (isinstance(hidden, jax.Array) and isinstance(weight, jax.Array)) or not (_explicit(hidden) or _explicit(weight)):
        return None
    x, w = jax.typeof(hidden).sharding, jax.typeof(weight).sharding
    if hidden.ndim < 1 or weight.ndim != 2 or x.spec[-1] is not None or w.spec[-1] is not None:
        return None
    return Sharding(x.mesh, _axes(w.spec[0]) or None, PartitionSpec(*x.spec[:-1]))


def _checked(sharding: Sharding, arrays: dict[str, Any]) -> dict[str, jax.Array | None]:
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding: expected logitless.jax.Sharding or None, got {type(sharding).__name__}")
    found = {name: None if a is None else _arguments.anywhere(name, a) for name, a in arrays.items()}
    if found["weight"].ndim == 2 and found["hidden"].ndim > 0:
        sharding._check(found["hidden"], found["weight"])
    return found


def sharded_logprobs(sharding: Sharding, hidden, weight, targets, bias, **options) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``linear_logprobs`` on the mesh."""
    arrays = _checked(sharding, {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias})

    def function(a):
        if sharding._words:
            return vocab_parallel_logprobs(**a, axis_name=sharding._words, **options)
        return linear_logprobs(**a, **options)

    return sharding._map(function, arrays, 3)


def sharded_cross_entropy(
    sharding: Sharding, hidden, weight, targets, bias, *, reduction, normalizer, accuracy, return_argmax, class_weight,
    token_weight, target_weight, **options,
) -> jax.Array | tuple[jax.Array, ...]:
    """``linear_cross_entropy`` on the mesh: tokens' losses of each shard, and their sum over all."""
    check_reduction(reduction)
    fixed, by = divisor(normalizer, reduction)
    arrays = _checked(
        sharding,
        {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias, "class_weight": class_weight,
         "token_weight": token_weight, "target_weight": target_weight},
    )
    if accuracy and target_weight is not None:
        raise NotImplementedError("accuracy: needs one target a token, got target_weight")
    argmax = accuracy or return_argmax
    names = ("lse",) * bool(options["return_lse"]) + ("argmax",) * bool(argmax)
    names += ("target_logits",) * bool(options["return_target_logits"])
    total = not sharding._words and reduction != "none"  # gradients are then made in the forward

    def function(a):
        if sharding._words:
            if a.pop("target_weight") is not None:
                raise NotImplementedError("target_weight: not of a vocabulary in shards")
            found = vocab_parallel_linear_cross_entropy(
                **a, axis_name=sharding._words, reduction="none", accuracy=accuracy, return_argmax=return_argmax, **options
            )
        else:
            found = linear_cross_entropy(**a, reduction="sum" if total else "none", return_argmax=argmax, **options)
        return found if names else (found,)

    loss, *others = sharding._map(function, arrays, 1 + len(names), total)
    more = dict(zip(names, others))
    y = arrays["targets"]
    if reduction != "none":
        loss = loss if total else loss.sum()
    if reduction == "mean":
        count = by if by is not None else fixed or _count(arrays, options["ignore_index"])
        loss = loss / count if normalizer is not None else jnp.where(count == 0.0, 0.0, loss / jnp.where(count == 0.0, 1.0, count))
    results = [loss]
    if options["return_lse"]:
        results.append(more["lse"])
    if accuracy:
        valid = y != options["ignore_index"]
        correct = (more["argmax"] == y) & valid
        results.append(correct.sum(dtype=jnp.float32) / jnp.maximum(valid.sum(dtype=jnp.float32), 1.0))
    if return_argmax:
        results.append(more["argmax"])
    if options["return_target_logits"]:
        results.append(more["target_logits"])
    return results[0] if len(results) == 1 else tuple(results)


def _count(arrays: dict[str, jax.Array | None], ignore_index: int) -> jax.Array:
    """What a mean divides by: the weights of all tokens that count."""
    y, classes, tokens = arrays["targets"], arrays["class_weight"], arrays["token_weight"]
    valid = y != ignore_index
    if arrays["target_weight"] is not None:
        of_token = valid.any(-1).astype(jnp.float32)
    elif classes is None:
        of_token = valid.astype(jnp.float32)
    else:
        of_token = jnp.where(valid, jnp.take(classes, jnp.where(valid, y, 0)).astype(jnp.float32), 0.0)
    return (of_token if tokens is None else of_token * tokens).sum()
