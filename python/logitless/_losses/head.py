"""Log-probabilities of tokens and sequences, and checks of arguments that the losses share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .._options import shape_text
from .options import Head, choice, number


class Tokens(NamedTuple):
    """Outputs of the head for the tokens [B, T] of some sequences; 0 for ignored tokens. An entropy that is not wanted
    may be empty."""

    logps: Any
    entropy: Any
    valid: Any  # bool

    def sums(self, xp, average: bool = False):
        """Returns [B]: the log-probability of each sequence, or its mean over the sequence's tokens (0 without tokens).
        """
        total = self.logps.sum(-1)
        return total / xp.at_least(self.valid.sum(-1), 1) if average else total


def sequences(xp, hidden, target, even: bool = False) -> tuple[Any, Any]:
    """Returns checked hidden [B, T, D] and target [B, T]. ``even``: B must be even."""
    states = xp.states("hidden", hidden)
    if states.ndim != 3:
        raise ValueError(f"hidden: expected [B, T, D], got {list(states.shape)}")
    vocab_ids = xp.indices(xp.NAMES.target, target, tuple(states.shape[:2]))
    if even and (states.shape[0] % 2 or states.shape[0] == 0):
        raise ValueError(
            f"hidden: expected [2 B, T, D], the chosen sequences and then the rejected ones, got {list(states.shape)}"
        )
    return states, vocab_ids


def shifted(xp, target, ignore_index: int):
    """Shifts targets by one: each position's target is that of the next position, and the last has none. hidden is not
    copied."""
    return xp.concatenate([target[:, 1:], xp.full_like(target[:, :1], ignore_index)], 1)


def scalar(xp, name: str, value, **bounds: float):
    """Returns a checked number, or an array of one element as a scalar without a gradient."""
    if xp.is_number(value):
        return number(name, value, **bounds)
    found = xp.array(name, value)
    if math.prod(found.shape) != 1:
        raise ValueError(f"{name}: expected {xp.NAMES.an_array} of one number, got {list(found.shape)}")
    return xp.stop_gradient(found.reshape(()))


def valid_targets(xp, target, lead: tuple[int, ...], ignore_index: int, vocab: int, like):
    """Returns three arrays [N] for target [...]: whether each token counts, its token id or 0, and whether its target
    is out of range."""
    if target is None:
        return xp.all_true(lead, like), None, None
    flat = xp.indices(xp.NAMES.target, target, lead).reshape(-1)
    valid = flat != ignore_index
    bad = valid & ((flat < 0) | (flat >= vocab))
    xp.refuse_ids(xp.NAMES.target, flat, bad, vocab, ignore_index)
    return valid, xp.astype(xp.where(valid & ~bad, flat, 0), xp.class_dtype), bad


def refuse_ids(xp, name: str, ids, vocab: int, ignore_index: int) -> None:
    """Raises ValueError, where the framework reads values, for an id [...] outside [0, V) that is not ignored."""
    flat = ids.reshape(-1)
    xp.refuse_ids(name, flat, (flat != ignore_index) & ((flat < 0) | (flat >= vocab)), vocab, ignore_index)


def divisor_of(xp, reduction: str, normalizer, valid):
    """Returns the divisor of a mean; None for other reductions."""
    if choice("reduction", reduction, ("none", "mean", "sum")) != "mean":
        if normalizer is not None:
            raise ValueError(f"normalizer: expected None with reduction {reduction!r}, got {normalizer!r}")
        return None
    if normalizer is None:
        return xp.at_least(valid.sum(), 1)
    if xp.is_number(normalizer):
        return number("normalizer", normalizer, above=0.0)
    return xp.stop_gradient(xp.shaped("normalizer", xp.array("normalizer", normalizer).reshape(-1), (1,)))[0]


class Reference(NamedTuple):
    """The hidden states and head of a reference model. A head that is not given is the policy's, as with adapters that
    are disabled for the reference."""

    hidden: Any
    weight: Any
    bias: Any

    def tokens(self, xp, weight, target, bias, head: Head) -> Tokens:
        """Returns the reference's log-probabilities, without a gradient: one GEMM."""
        if head.temperature is not None:
            head = head._replace(temperature=xp.stop_gradient(xp.array("temperature", head.temperature)))
        states = xp.states("ref_hidden", self.hidden)
        if tuple(states.shape[:-1]) != tuple(target.shape):
            raise ValueError(f"ref_hidden: expected {shape_text(target.shape, 'D')}, got {list(states.shape)}")
        if self.weight is None:
            of_vocab, shift = weight, bias if self.bias is None else self.bias
        else:
            of_vocab, shift = xp.array("ref_weight", self.weight), self.bias
            vocab = tuple(xp.array("weight", weight).shape[:1])
            if tuple(of_vocab.shape[:1]) != vocab:
                raise ValueError(f"ref_weight: expected [{vocab[0]}, D], got {list(of_vocab.shape)}")
        return xp.without_gradients(lambda h, w, b: xp.tokens(h, w, target, b, head), states, of_vocab, shift)

    def check(self, xp, given: str, given_value) -> bool:
        """Returns whether there is a reference. Raises if parts of it are missing, or if log-probabilities are given
        too."""
        for name, value in (("ref_weight", self.weight), ("ref_bias", self.bias)):
            if value is not None and self.hidden is None:
                raise ValueError(f"ref_hidden: expected it beside {name}, got None")
        if self.hidden is not None and given_value is not None:
            raise ValueError(
                f"{given}: expected None beside ref_hidden, got {xp.NAMES.an_array}; give one of the two"
            )
        return self.hidden is not None
