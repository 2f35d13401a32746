"""Formulas of whole logits, a chunk of tokens at a time in a framework's own operations: their arguments, and the sizes of
the chunks. ``torch/_chunks.py`` and ``jax/_chunks.py`` run them where the compiler of autochunk cannot."""

from __future__ import annotations

from typing import NamedTuple

# Arguments of formulas with an element or a row for each token. Others are of the vocabulary, or one number.
ROWS = frozenset((
    "hidden", "teacher_hidden", "rows", "vocab_ids", "temperature", "top_p", "min_p", "counter", "normaliser",
    "teacher_normaliser", "own",
))  # fmt: skip
GRADIENTS = "hidden", "weight", "bias"

_BLOCK = 16 << 20  # bytes of a block of weight, or of its gradient, in the dtype of sums
_LEAST_DEFAULT = 16 << 20  # bytes of a chunk without a budget
_FEW_TOKENS = 32  # a GEMM of fewer takes longer than a second one

# Copies of a chunk's logits that exist at a time, in numbers of the dtype of sums: measured, with and without gradients.
# Those over ranks are counted, with the int64 numbers of PyTorch's noise and order.
_TILES = {
    "sample": (12, 12), "best_entries": (4, 4), "best": (5, 5), "divergence": (11, 10), "divergence_sums": (11, 10),
    "margin": (6, 3), "sample_over_ranks": (28, 28), "best_over_ranks": (12, 12),
}  # fmt: skip


def is_sum(what: str, form: tuple) -> bool:
    """Returns whether a formula returns the sum of its tokens' losses: the last constant of a loss."""
    return what in ("divergence", "margin") and bool(form[0][-1])


def block_bytes(budget: int) -> int:
    """Returns the bytes of a block of weight under a budget, of which a call takes a few."""
    return min(_BLOCK, max(budget // 16, 1)) if budget else _BLOCK


class Sizes(NamedTuple):
    """Everything that the size of a chunk depends on, except the budget."""

    what: str  # the formula
    tokens: int
    vocab: int
    dim: int  # of all hidden states of a token together
    number: int  # bytes of a logit: 4, or 8 for float64
    gradients: bool
    fixed: int  # bytes of sums of gradients and of blocks of weight


class Plan(NamedTuple):
    tokens: int  # of a chunk
    bytes: int  # beyond inputs and results


def plan_of(s: Sizes, budget: int) -> Plan:
    """Returns the plan within a budget in bytes. Its default, 0, is a quarter of the logits in the dtype of sums, at
    least 16 MiB and a chunk of 32 tokens; beside them are the sums of gradients.

    Raises ValueError if a chunk of one token takes more, with its bytes.
    """
    of_token = s.vocab * s.number * _TILES[s.what][0 if s.gradients else 1] + 4 * s.dim * s.number
    fixed = s.fixed + 8 * s.vocab * s.number + 64 * s.tokens
    limit = budget or fixed + max(_LEAST_DEFAULT, s.tokens * s.vocab * s.number // 4, min(max(s.tokens, 1), _FEW_TOKENS) * of_token)
    if fixed + of_token > limit:
        raise ValueError(
            f"memory_budget: {budget} bytes is below the least plan of the portable implementation, which needs "
            f"{fixed + of_token} bytes"
        )
    tokens = max(1, min(s.tokens, (limit - fixed) // of_token))
    tokens = -(-s.tokens // -(-s.tokens // tokens)) if s.tokens else 1  # chunks of equal sizes
    return Plan(tokens, fixed + tokens * of_token)


def described(s: Sizes, plan: Plan, framework: str, reason: str, when: str) -> str:
    """Returns the text of an ``explain``. when: the time at which gradients are computed."""
    chunks = -(-s.tokens // plan.tokens)
    return (
        f"portable: {framework}'s own operations, because {reason}\n{s.tokens} tokens x {s.vocab} entries in {chunks} "
        f"chunk{'s' * (chunks != 1)} of {plan.tokens} tokens; {when}\nmemory: at most {plan.bytes / 2**20:.1f} MiB beyond "
        f"inputs and results, {plan.bytes} bytes"
    )
