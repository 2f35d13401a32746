"""Sizes of the chunks and vocabulary blocks of ``_portable``, from the memory that they take."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple

import jax
import jax.numpy as jnp

from ._arguments import sum_dtype

Outputs = Mapping[str, tuple[tuple[int, ...], str]]  # shapes and dtypes by name

GRADIENTS = ("d_hidden", "d_weight", "d_bias")

_LEAST_DEFAULT = 16 << 20  # bytes of a chunk without a budget
_LEAST_DENSE = 64  # tokens of a chunk with all of the vocabulary
HOST_BLOCK = 4096  # rows of d_weight that are multiplied, then added, on the CPU
_ALIGNED = 128  # windows larger than this are a multiple of it


class Plan(NamedTuple):
    """Sizes of the loops. One block is the whole vocabulary in three GEMMs, several are recomputed in the backward."""

    chunk: int  # tokens
    block: int  # vocabulary entries
    bytes: int  # temporaries


def _rounded(size: int, most: int) -> int:
    """Returns the window size, at most ``size``, that covers ``most`` elements in windows of about equal size."""
    size = min(size, most)
    if size > _ALIGNED:
        size -= size % _ALIGNED
    count = -(-most // size)
    even = -(-most // count)
    return min(size, even + -even % _ALIGNED) if size >= _ALIGNED and count > 1 else even


def on_host() -> bool:
    return jax.default_backend() == "cpu"


def limit_of(tokens: int, vocab: int, budget: int) -> int:
    """Returns the bytes that a call may take beside the sums of d_weight. budget: as in ``plan``."""
    return abs(budget) or max(tokens * vocab, _LEAST_DEFAULT)


def plan(
    tokens: int, dim: int, vocab: int, dtype: Any, outputs: Outputs, budget: int, host: bool, casts: bool = False
) -> Plan:
    """Returns the plan of a call. Raises ValueError if the budget is below the least plan, whose size it names.

    budget: bytes; 0: a quarter of the fp32 logits, at least 16 MiB, and beside them the float32 sums of d_weight. Below
    0 it is a hint that the least plan may exceed. host: XLA's CPU compiler stores operands of reductions, which others
    fuse, and products before they are added. Its float32 copies of 16-bit weights are not counted. casts: a block of
    weight is cast to the dtype of hidden.
    """
    dtype = jnp.dtype(dtype)
    gradients = any(name in outputs for name in GRADIENTS)
    of_logit = sum_dtype(dtype).itemsize * (4 if host else 1) + (1 if host else dtype.itemsize if gradients else 0)
    of_token = dim * (dtype.itemsize + 4 * gradients)
    per_token = 64 * tokens
    whole = vocab * dim * dtype.itemsize if casts else 0

    def sums(name: str, rows: int) -> int:  # float32 sums of a gradient with another dtype
        return rows * dim * 4 if name in outputs and jnp.dtype(outputs[name][1]).itemsize < 4 else 0

    def dense(chunk: int) -> int:
        held = (sums("d_weight", vocab) if chunk < tokens or host else 0) + whole
        held += host * min(vocab, HOST_BLOCK) * (dim + chunk) * 4 * ("d_weight" in outputs)
        return chunk * (vocab * of_logit + of_token) + held + per_token

    def recompute(chunk: int, block: int) -> int:
        of_block = block * dim * (dtype.itemsize * (1 + casts) + 4 * ("d_weight" in outputs))
        return chunk * (block * of_logit + of_token) + of_block + sums("d_hidden", tokens) + per_token

    most_tokens = max(tokens, 1)
    limit = limit_of(tokens, vocab, budget) + (0 if budget else dense(0) - whole)
    if dense(tokens) <= limit:
        return Plan(most_tokens, vocab, dense(tokens))
    most = (limit - dense(0)) // (dense(1) - dense(0))
    if most >= min(_LEAST_DENSE, tokens):
        chunk = _rounded(most, tokens)
        return Plan(chunk, vocab, dense(chunk))
    sizes = [(min(1 << n, most_tokens), min(1 << m, vocab)) for n in range(3, 13) for m in range(3, 16)]
    fitting = [size for size in sizes if recompute(*size) <= limit]
    if not fitting:
        if budget > 0:
            needed = recompute(*sizes[0])
            raise ValueError(f"memory_budget: {budget} bytes are less than the smallest plan needs, {needed} bytes")
        fitting = sizes[:1]
    # The fewest steps of the loops; among equals, windows of similar sizes.
    chunk, block = max(fitting, key=lambda size: (size[0] * size[1], min(size)))
    return Plan(chunk, block, recompute(chunk, block))
