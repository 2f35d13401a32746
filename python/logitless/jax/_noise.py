"""Gumbel noise that is drawn from a counter, as a primitive that autochunk lowers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

_gumbel = Primitive("logitless_gumbel")


def gumbel(key: jax.Array, counter: jax.Array, vocab: int) -> jax.Array:
    """Returns Gumbel noise [N, vocab], fp32, as ``_autochunk/noise.py`` says. key: [2], integers of 32
    bits. counter: [N]."""
    return _gumbel.bind(key, counter, vocab=vocab)


def _computed(key: jax.Array, counter: jax.Array, *, vocab: int) -> jax.Array:
    return gumbel_of_ids(key, counter, jnp.arange(vocab, dtype=jnp.uint32))


def gumbel_of_ids(key: jax.Array, counter: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns the noise [N, n] of vocabulary ids [n]."""
    from ._autochunk.helpers import HELPERS

    space: dict[str, Any] = {"jnp": jnp}
    exec(HELPERS["_uniform"], space)
    key = key.astype(jnp.uint32)
    parts = (key[0] + counter.astype(jnp.uint32))[:, None]
    return -jnp.log(-jnp.log1p(-space["_uniform"](parts, key[1], ids[None])))


@_gumbel.def_abstract_eval
def _shape(key, counter, *, vocab: int):
    return jax.core.ShapedArray((counter.shape[0], vocab), jnp.float32)


_gumbel.def_impl(lambda *given, vocab: jax.jit(_computed, static_argnames="vocab")(*given, vocab=vocab))
mlir.register_lowering(_gumbel, mlir.lower_fun(_computed, multiple_results=False))
