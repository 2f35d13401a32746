"""Log-probabilities of tokens and sequences, and checks of arrays that the losses share."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..._losses import Head
from .. import _arguments
from ..head import linear_logprobs


class Tokens(NamedTuple):
    """Outputs of the head for the tokens [B, T] of some sequences; 0 for ignored tokens."""

    logps: jax.Array
    entropy: jax.Array
    valid: jax.Array  # bool

    def sums(self, average: bool = False) -> jax.Array:
        """Returns [B]: the log-probability of each sequence, or its mean over the sequence's tokens (0 without tokens).
        """
        total = self.logps.sum(-1)
        return total / jnp.maximum(self.valid.sum(-1), 1) if average else total


def shaped(name: str, value: Any, *shapes: tuple[int, ...]) -> jax.Array:
    """Returns a checked array of one of the shapes."""
    if value is None:
        raise TypeError(f"{name}: expected an array, got NoneType")
    found = _arguments.array(name, value)
    if found.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name}: expected {wanted}, got {list(found.shape)}")
    return found


def fixed(name: str, value: Any, *shapes: tuple[int, ...]) -> jax.Array:
    """Returns a checked array of floats of one of the shapes, as float32 without a gradient."""
    found = shaped(name, value, *shapes)
    if not jnp.issubdtype(found.dtype, jnp.floating):
        raise TypeError(f"{name}: expected floats, got {found.dtype.name}")
    return jax.lax.stop_gradient(found).astype(jnp.float32)


def sequences(hidden: ArrayLike, targets: ArrayLike, even: bool = False) -> tuple[jax.Array, jax.Array]:
    """Returns checked hidden [B, T, D] and targets [B, T]. ``even``: B must be even."""
    states = _arguments.floats("hidden", hidden)
    if states.ndim != 3:
        raise ValueError(f"hidden: expected [B, T, D], got {list(states.shape)}")
    vocab_ids = shaped("targets", _arguments.indices("targets", targets), states.shape[:2])
    if even and (states.shape[0] % 2 or states.shape[0] == 0):
        raise ValueError(
            f"hidden: expected [2 B, T, D], the chosen sequences and then the rejected ones, got {list(states.shape)}"
        )
    return states, vocab_ids


def shifted(targets: jax.Array, ignore_index: int) -> jax.Array:
    """Shifts targets by one: each position's target is that of the next position, and the last has none. hidden is not
    copied."""
    return jnp.concatenate([targets[:, 1:], jnp.full_like(targets[:, :1], ignore_index)], 1)


def tokens(hidden: ArrayLike, weight: ArrayLike, targets: jax.Array, bias: ArrayLike | None, head: Head) -> Tokens:
    logps, entropy, _ = linear_logprobs(hidden, weight, targets, bias, **head._asdict())
    return Tokens(logps, entropy, targets != head.ignore_index)


class Reference(NamedTuple):
    """The hidden states and head of a reference model. A head that is not given is the policy's, as with adapters that
    are disabled for the reference."""

    hidden: ArrayLike | None
    weight: ArrayLike | None
    bias: ArrayLike | None

    def tokens(self, weight: ArrayLike, targets: jax.Array, bias: ArrayLike | None, head: Head) -> Tokens:
        """Returns the reference's log-probabilities, without a gradient: one GEMM."""
        states = _arguments.floats("ref_hidden", self.hidden)
        if states.shape[:-1] != targets.shape:
            raise ValueError(f"ref_hidden: expected {list(targets.shape) + ['D']}, got {list(states.shape)}")
        own, vocab = self.weight, jnp.shape(weight)[0]
        if own is not None and jnp.shape(own)[:1] != (vocab,):
            raise ValueError(f"ref_weight: expected [{vocab}, D], got {list(jnp.shape(own))}")
        vocab_ids = weight if own is None else own
        shift = bias if own is None and self.bias is None else self.bias
        stopped = (None if a is None else jax.lax.stop_gradient(jnp.asarray(a)) for a in (states, vocab_ids, shift))
        states, vocab_ids, shift = stopped
        return tokens(states, vocab_ids, targets, shift, head)

    def check(self, given: str, given_value: Any) -> bool:
        """Returns whether there is a reference. Raises if parts of it are missing, or if log-probabilities are given
        too."""
        for name, value in (("ref_weight", self.weight), ("ref_bias", self.bias)):
            if value is not None and self.hidden is None:
                raise ValueError(f"ref_hidden: expected it beside {name}, got None")
        if self.hidden is not None and given_value is not None:
            raise ValueError(f"{given}: expected None beside ref_hidden, got an array; give one of the two")
        return self.hidden is not None
